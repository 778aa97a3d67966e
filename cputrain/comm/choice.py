"""Which backend carries a job's collectives: oneCCL where every rank can use it, else gloo."""

from torch._C._distributed_c10d import Store

from affinity.errors import InputError, RunError
from affinity.ranks.rank import Rank
from cputrain.comm import ccl


def choose(asked: str, rank: Rank, store: Store) -> tuple[str, str]:
    """The backend of all ranks, and why; oneCCL is loaded then. Returns when all ranks have tried.

    Asked for "auto", all ranks take gloo where one cannot use oneCCL. Raises InputError or RunError where "ccl" is
    asked for and a rank cannot use it.
    """
    if asked == "gloo":
        return "gloo", "comm.backend=gloo"
    refused: InputError | RunError | None = None
    try:
        ccl.extension(rank)
    except (InputError, RunError) as error:
        refused = error
    first = _first_problem(refused, rank, store)
    if not first:
        return "ccl", "every rank can use oneCCL"
    if asked == "ccl":
        raise refused or RunError(f"comm.backend=ccl: {first}")
    return "gloo", first


def _first_problem(refused: InputError | RunError | None, rank: Rank, store: Store) -> str:
    """What the first rank that cannot use oneCCL has said. Each rank asks the store a few times, however many join."""
    if refused:
        said = str(refused).removeprefix("comm.backend=ccl: ")
        store.compare_set("ccl/problem", "", f"rank {rank.rank}: {said}")
    if store.add("ccl/tried", 1) == rank.world_size:
        store.set("ccl/all", "tried")
    store.wait(["ccl/all"])
    return store.get("ccl/problem").decode() if store.check(["ccl/problem"]) else ""
