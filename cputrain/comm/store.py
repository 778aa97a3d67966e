"""The job's c10d store, served by rank 0 on a single address, and its keys, signed with the job's token."""

import ctypes
import errno
import hmac
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from cputrain.affinity.errors import RunError
from cputrain.affinity.rank import Rank
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE

BY_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"  # "True": torchrun serves the store
ANY_ADDRESS = ""
READ_S, POLL_S = 10.0, 0.02
JOB = "job"  # signed key by which ranks recognize their job's store
RECONNECT_S = 0.5
SERVERS = "rank 0's, or torchrun's"


def connect_store(rank: Rank, env: Mapping[str, str], timeout: timedelta = default_pg_timeout) -> Store:
    """Serve (rank 0) or connect to the store at MASTER_ADDR:MASTER_PORT, on the loopback interface if all ranks are on
    one host. Raises RunError if rank 0 cannot listen, or another job still serves the port at the timeout.

    torch's env:// is not used because it listens on every address of the host.
    """
    token = env.get(TOKEN_VARIABLE, "")
    if env.get(BY_TORCHRUN) == "True":
        served: Store = next(rendezvous("env://"))[0]
        return served
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    if rank.rank > 0 and token:
        return _connect_to_own(address, port, token, timeout)
    if rank.rank > 0:
        return TCPStore(address, port, rank.world_size, is_master=False, timeout=default_pg_timeout)
    listening = _listen(address, port, one_host=rank.one_host)
    store = TCPStore(
        address,
        port,
        rank.world_size,
        is_master=True,
        timeout=default_pg_timeout,
        wait_for_workers=not token,  # with a token, workers wait for the key below
        master_listen_fd=listening.detach(),
    )
    if token:
        SignedKeys(store, token).set(JOB, str(rank.world_size))
    return store


def _connect_to_own(address: str, port: int, token: str, timeout: timedelta) -> Store:
    """Connect to the store of the rank 0 with the job's token; retry, as another job may still serve the port."""
    deadline = time.monotonic() + timeout.total_seconds()
    foreign = False
    while True:
        remaining = timedelta(seconds=max(deadline - time.monotonic(), RECONNECT_S))
        try:
            store = TCPStore(address, port, is_master=False, timeout=remaining, wait_for_workers=False)
            if _is_own(store, token, deadline):
                store.set_timeout(default_pg_timeout)
                return store
            foreign = True
        except RuntimeError:  # c10d's only error: no store yet, or another job's store that ended
            if time.monotonic() >= deadline and not foreign:
                raise
        if time.monotonic() >= deadline:
            raise RunError(f"{address}:{port} serves another job's store: set MASTER_PORT to a free port")
        time.sleep(RECONNECT_S)


def _is_own(store: Store, token: str, deadline: float) -> bool:
    keys = SignedKeys(store, token)
    while not keys.has(JOB) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return keys.get(JOB) is not None


def _listen(address: str, port: int, *, one_host: bool) -> socket.socket:
    """Listen on this address only; on all addresses if it is not an address of this host (but a proxy's), or if this
    host resolves it to loopback although other hosts must connect."""
    family, _, _, _, endpoint = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    loopback = endpoint[0] == "::1" or str(endpoint[0]).startswith("127.")
    try:
        if one_host or not loopback:
            return socket.create_server(endpoint[:2], family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise RunError(
                f"cannot listen on {address}:{port} ({error.strerror}): set MASTER_PORT to a free port"
            ) from None
    both = socket.has_dualstack_ipv6()
    every = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server((ANY_ADDRESS, port), family=every, backlog=socket.SOMAXCONN, dualstack_ipv6=both)


def openssl_hmac() -> tuple[int, int] | None:
    """Return the addresses of OpenSSL's HMAC and EVP_sha256, for a native thread that signs without the GIL.

    None if this Python's OpenSSL is linked statically, without visible symbols.
    """
    try:
        import _hashlib

        library = ctypes.CDLL(_hashlib.__file__)  # also finds symbols of the libraries it is linked with
        hmac_, sha256 = (ctypes.cast(library[name], ctypes.c_void_p).value for name in ("HMAC", "EVP_sha256"))
    except (AttributeError, ImportError, OSError):
        return None
    return (hmac_, sha256) if hmac_ and sha256 else None


def describe_gone(error: RuntimeError) -> str:
    """Return a line for the error of a store that no longer answers, with the first of c10d's up to 50 lines."""
    cause = str(error).splitlines()[0][:150]
    return f"the job's store is gone, as the process that served it ({SERVERS}) or its host has ended ({cause})"


class SignedKeys:
    """Keys of a store whose values are signed with the job's token; values without a valid signature read as absent.

    Without a token (if ranks were not started by cputrain launch or a job script), anyone who can connect to the store
    can sign. The signature includes the `prefix`, so values that were signed under another prefix read as absent.
    """

    def __init__(self, store: Store, token: str, prefix: str = "") -> None:
        self._store = PrefixStore(prefix, store) if prefix else store
        self._prefix = f"{prefix}/" if prefix else ""
        self._token = token.encode()

    def set(self, key: str, value: str) -> None:
        """Set a signed key."""
        self._store.set(key, f"{self._signature(key, value)} {value}")

    def get(self, key: str) -> str | None:
        """Return a key's value, None if no rank of this job has set it."""
        return self._verified(key, self._store.get(key)) if self.has(key) else None

    def has(self, key: str) -> bool:
        """Return whether any process has set a key."""
        return bool(self._store.check([key]))

    def claim(self, key: str) -> bool:
        """Return whether this is the first call with this key among all ranks."""
        return bool(self._store.add(key, 1) == 1)

    def wait(self, key: str) -> None:
        """Wait until a process has set a key."""
        self._store.wait([key])

    def read(self, key: str) -> str:
        """Wait for a key and return its value. Raises RunError if it was not set by this job."""
        self.wait(key)
        value = self.get(key)
        if value is None:
            raise RunError(f"the key {key} in the job's store is another job's: set MASTER_PORT to a free port")
        return value

    def problem_of_any(self, name: str, problem: str, rank: Rank) -> str:
        """Return one rank's problem, the same on all ranks, or "" if no rank has one. `problem` is this rank's problem.

        Waits until every rank has called this with `name`.
        """
        if problem:
            self.set(f"{name}/problem", problem)
        if self._store.add(f"{name}/tried", 1) == rank.world_size:
            self._store.set(f"{name}/all", "tried")
        self.wait(f"{name}/all")
        reported = self.read(f"{name}/problem") if self.has(f"{name}/problem") else ""
        if reported:
            self._await_readers(f"{name}/read", rank)
        return reported

    def _await_readers(self, key: str, rank: Rank) -> None:
        """Wait on rank 0, whose exit ends the store, until the other ranks have read the problem that ends the job."""
        readers = self._store.add(key, 1)
        deadline = time.monotonic() + READ_S
        while rank.rank == 0 and readers < rank.world_size and time.monotonic() < deadline:
            time.sleep(POLL_S)
            readers = self._store.add(key, 0)

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return the values of keys that are set, as `get` does, in one request to the store."""
        values = self._store.multi_get(list(keys)) if keys else []
        return [self._verified(key, signed) for key, signed in zip(keys, values, strict=True)]

    def _verified(self, key: str, signed: bytes) -> str | None:
        signature, _, value = signed.decode(errors="replace").partition(" ")
        return value if hmac.compare_digest(signature.encode(), self._signature(key, value).encode()) else None

    def _signature(self, key: str, value: str) -> str:
        return hmac.digest(self._token, os.fsencode(f"cputrain store {self._prefix}{key} {value}"), "sha256").hex()
