"""Where a rank of a group is: its number, and its number on its host, from the launcher or found with the others."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from affinity.errors import InputError
from affinity.ranks.rank import Rank, discover
from cputrain.comm.store import describe_gone

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def place_of(rank: int, size: int, store: Store, timeout: timedelta, env: Mapping[str, str], *, whole: bool) -> Rank:
    """The place of a group's rank; `whole`: the group has all ranks of the job.

    Where the launcher's variables do not tell the local rank (scripts that start their ranks with mp.spawn set RANK
    and WORLD_SIZE, or nothing), or are about another job, the group's ranks find who shares a host through its store.
    Raises RuntimeError where one of them does not come in time, or the store is gone.
    """
    with suppress(InputError):
        found = discover(env)
        if found is not None and (not whole or (found.rank, found.world_size) == (rank, size)):
            return found
    hosts = _hosts(rank, size, PrefixStore("place", store), timeout)
    here = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return Rank(
        rank=rank, world_size=size, local_rank=here.index(rank), local_world_size=len(here), convention="script"
    )


def _hosts(rank: int, size: int, store: Store, timeout: timedelta) -> list[str]:
    """What tells the host of each rank from other hosts."""
    boot = BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.is_file() else ""
    keys = [str(number) for number in range(size)]
    try:
        store.set(keys[rank], f"{socket.gethostname()} {boot} {Path('/proc/self/ns/ipc').stat().st_ino}")
        with suppress(RuntimeError):  # the timeout, or a store that is gone: then the next call fails, too
            store.wait(keys, timeout)
        missing = [key for key in keys if not store.check([key])]
        if not missing:
            return [value.decode() for value in store.multi_get(keys)]
    except RuntimeError as error:
        raise RuntimeError(f"ccl: a group cannot be created: {describe_gone(error)}") from None
    raise RuntimeError(
        f"ccl: Timed out after {timeout.total_seconds():g} s while a group was created: not all of its ranks joined "
        f"(missing: {', '.join(missing)})"
    )
