"""The choice of the communication backend: oneCCL where every rank can use it, else gloo."""

from torch._C._distributed_c10d import Store

from affinity.errors import InputError, RunError
from affinity.ranks.rank import Rank
from cputrain.comm import ccl


def choose_backend(requested: str, rank: Rank, store: Store) -> tuple[str, str]:
    """The backend of all ranks and the reason for it; loads oneCCL if that is chosen. Waits for every rank's attempt.

    With "auto", all ranks use gloo if one cannot use oneCCL. With "ccl", raises InputError or RunError on every rank if
    one cannot use oneCCL.
    """
    if requested == "gloo":
        return "gloo", "comm.backend=gloo"
    problem: InputError | RunError | None = None
    try:
        ccl.extension(rank)
    except (InputError, RunError) as error:
        problem = error
    first = _first_problem(problem, rank, store)
    if not first:
        return "ccl", "every rank can use oneCCL"
    if requested == "ccl":
        raise problem or RunError(f"comm.backend=ccl: {first}")
    return "gloo", first


def _first_problem(problem: InputError | RunError | None, rank: Rank, store: Store) -> str:
    """The message of the first rank that cannot use oneCCL, "" if all can; a few store operations per rank."""
    if problem:
        message = str(problem).removeprefix("comm.backend=ccl: ")
        store.compare_set("ccl/problem", "", f"rank {rank.rank}: {message}")
    if store.add("ccl/tried", 1) == rank.world_size:
        store.set("ccl/all", "tried")
    store.wait(["ccl/all"])
    return store.get("ccl/problem").decode() if store.check(["ccl/problem"]) else ""
