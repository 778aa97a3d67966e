"""The store at which a job's ranks meet, served on one address of rank 0's host; keys that the job's token signs."""

import errno
import hmac
import os
import socket
from collections.abc import Mapping, Sequence

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from affinity.errors import RunError
from affinity.ranks.rank import Rank

BY_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"  # "True": torchrun serves the store
ANY_ADDRESS = ""


def connect_store(rank: Rank, env: Mapping[str, str]) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT, which rank 0 serves: on one host's loopback interface, or on its address by
    that name. Raises RunError where it cannot.

    torch's own env:// listens on every address of the host.
    """
    if env.get(BY_TORCHRUN) == "True":
        served: Store = next(rendezvous("env://"))[0]
        return served
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    if rank.rank > 0:
        return TCPStore(address, port, rank.world_size, is_master=False, timeout=default_pg_timeout)
    listening = _listen(address, port, one_host=rank.one_host)
    return TCPStore(
        address,
        port,
        rank.world_size,
        is_master=True,
        timeout=default_pg_timeout,
        master_listen_fd=listening.detach(),
    )


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


class SignedKeys:
    """Keys of a store whose values are signed by the job's token: what another process has set reads as absent.

    Without a token (ranks that no cputrain launch or job script has started) anyone who reaches the store can sign.
    """

    def __init__(self, store: Store, token: str) -> None:
        self._store = store
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

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """The values of keys that are set, as `get` returns them, in one exchange with the store."""
        found = self._store.multi_get(list(keys)) if keys else []
        return [self._verified(key, signed) for key, signed in zip(keys, found, strict=True)]

    def _verified(self, key: str, signed: bytes) -> str | None:
        signature, _, value = signed.decode(errors="replace").partition(" ")
        return value if hmac.compare_digest(signature.encode(), self._signature(key, value).encode()) else None

    def _signature(self, key: str, value: str) -> str:
        return hmac.digest(self._token, os.fsencode(f"cputrain store {key} {value}"), "sha256").hex()
