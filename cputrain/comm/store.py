"""The store at which a job's ranks meet, served on one address of rank 0's host; keys that the job's token signs."""

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
from cputrain.affinity.ranks.rank import Rank
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE

BY_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"  # "True": torchrun serves the store
ANY_ADDRESS = ""
READ_S, POLL_S = 10.0, 0.02
JOB = "job"  # the key by which a job's ranks know their own store
RECONNECT_S = 0.5
SERVERS = "rank 0's, or torchrun's"


def connect_store(rank: Rank, env: Mapping[str, str], timeout: timedelta = default_pg_timeout) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT, which rank 0 serves: on one host's loopback interface, or on its address by
    that name. Raises RunError where it cannot, or where another job still serves that port at the timeout.

    torch's own env:// listens on every address of the host.
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
        wait_for_workers=not token,  # with a token, they wait for the key below
        master_listen_fd=listening.detach(),
    )
    if token:
        SignedKeys(store, token).set(JOB, str(rank.world_size))
    return store


def _connect_to_own(address: str, port: int, token: str, timeout: timedelta) -> Store:
    """The store of the rank 0 that has the job's token. Another job may serve the port, and end before the timeout."""
    deadline = time.monotonic() + timeout.total_seconds()
    foreign = False
    while True:
        left = timedelta(seconds=max(deadline - time.monotonic(), RECONNECT_S))
        try:
            store = TCPStore(address, port, is_master=False, timeout=left, wait_for_workers=False)
            if _is_own(store, token, deadline):
                store.set_timeout(default_pg_timeout)
                return store
            foreign = True
        except RuntimeError:  # c10d's only error: a foreign store that ends, or none
            if time.monotonic() >= deadline and not foreign:
                raise
        if time.monotonic() >= deadline:
            raise RunError(f"{address}:{port} serves another job's store: set MASTER_PORT to a free one")
        time.sleep(RECONNECT_S)


def _is_own(store: Store, token: str, deadline: float) -> bool:
    keys = SignedKeys(store, token)
    while not keys.has(JOB) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return keys.get(JOB) is not None


def _listen(address: str, port: int, *, one_host: bool) -> socket.socket:
    """A socket that listens on the address alone. On all, where that is none of this host's (a proxy's), or where this
    host knows its name by loopback only, at which the others do not reach it."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    loopback = place[0] == "::1" or str(place[0]).startswith("127.")
    try:
        if one_host or not loopback:
            return socket.create_server(place[:2], family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise RunError(
                f"cannot listen on {address}:{port}: {error.strerror}: set MASTER_PORT to a free one"
            ) from None
    both = socket.has_dualstack_ipv6()
    every = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server((ANY_ADDRESS, port), family=every, backlog=socket.SOMAXCONN, dualstack_ipv6=both)


def openssl_hmac() -> tuple[int, int] | None:
    """The addresses of OpenSSL's HMAC and EVP_sha256, which hmac calls, for a thread that signs without Python.

    None where this Python's OpenSSL is linked into it so that nothing else can call it.
    """
    try:
        import _hashlib

        library = ctypes.CDLL(_hashlib.__file__)  # and the libraries that it is linked with
        hmac_, sha256 = (ctypes.cast(library[name], ctypes.c_void_p).value for name in ("HMAC", "EVP_sha256"))
    except (AttributeError, ImportError, OSError):
        return None
    return (hmac_, sha256) if hmac_ and sha256 else None


def describe_gone(error: RuntimeError) -> str:
    """What the error of a store that no longer answers means. c10d's own text begins with it and may have 50 lines."""
    cause = str(error).splitlines()[0][:150]
    return f"the job's store is gone, and with it the process that served it ({SERVERS}) or its host ({cause})"


class SignedKeys:
    """Keys of a store whose values are signed by the job's token: what another process has set reads as absent.

    Without a token (ranks that no cputrain launch or job script has started) anyone who reaches the store can sign.
    The signatures cover the `prefix` of the keys too: what was signed under another one reads as absent.
    """

    def __init__(self, store: Store, token: str, prefix: str = "") -> None:
        self._store = PrefixStore(prefix, store) if prefix else store
        self._prefix = f"{prefix}/" if prefix else ""
        self._token = token.encode()

    def set(self, key: str, value: str) -> None:
        """Set a key for all ranks."""
        self._store.set(key, f"{self._signature(key, value)} {value}")

    def get(self, key: str) -> str | None:
        """A key's value; None where no rank of this job has set it."""
        return self._verified(key, self._store.get(key)) if self.has(key) else None

    def has(self, key: str) -> bool:
        """Whether any process has set a key."""
        return bool(self._store.check([key]))

    def claim(self, key: str) -> bool:
        """Whether this call is the first one of all ranks' with this key."""
        return bool(self._store.add(key, 1) == 1)

    def wait(self, key: str) -> None:
        """Wait until a process has set a key."""
        self._store.wait([key])

    def read(self, key: str) -> str:
        """A key's value, once a process has set it. Raises RunError where that was none of this job."""
        self.wait(key)
        value = self.get(key)
        if value is None:
            raise RunError(f"the job's store has another job's {key}: set MASTER_PORT to a free one")
        return value

    def problem_of_any(self, name: str, own: str, rank: Rank) -> str:
        """A problem that a rank of the job has, "" where none has one: for all ranks the same. `own` is this rank's.

        Waits until every rank has called this with the name.
        """
        if own:
            self.set(f"{name}/problem", own)
        if self._store.add(f"{name}/tried", 1) == rank.world_size:
            self._store.set(f"{name}/all", "tried")
        self.wait(f"{name}/all")
        found = self.read(f"{name}/problem") if self.has(f"{name}/problem") else ""
        if found:
            self._await_readers(f"{name}/read", rank)
        return found

    def _await_readers(self, key: str, rank: Rank) -> None:
        """Keep the store, which ends with rank 0, until the others have read what may end all of them."""
        readers = self._store.add(key, 1)
        deadline = time.monotonic() + READ_S
        while rank.rank == 0 and readers < rank.world_size and time.monotonic() < deadline:
            time.sleep(POLL_S)
            readers = self._store.add(key, 0)

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """The values of keys that are set, as `get` returns them, in one exchange with the store."""
        found = self._store.multi_get(list(keys)) if keys else []
        return [self._verified(key, signed) for key, signed in zip(keys, found, strict=True)]

    def _verified(self, key: str, signed: bytes) -> str | None:
        signature, _, value = signed.decode(errors="replace").partition(" ")
        return value if hmac.compare_digest(signature.encode(), self._signature(key, value).encode()) else None

    def _signature(self, key: str, value: str) -> str:
        return hmac.digest(self._token, os.fsencode(f"cputrain store {self._prefix}{key} {value}"), "sha256").hex()
