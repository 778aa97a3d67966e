"""Which backend carries a job's collectives: oneCCL where every rank can use it, else gloo."""

from torch._C._distributed_c10d import Store

from affinity.errors import InputError, RunError
from cputrain.comm import ccl
from mpi.rank import Rank


def choose(asked: str, rank: Rank, store: Store) -> tuple[str, str]:
    """The backend of all ranks, and why; oneCCL is loaded then.

    Asked for "auto", all ranks take gloo where one cannot use oneCCL. Raises InputError or RunError where "ccl" is
    asked for and this rank cannot use it.
    """
    if asked == "gloo":
        return "gloo", "comm.backend=gloo"
    problem = ""
    try:
        ccl.extension(rank)
    except (InputError, RunError) as error:
        if asked == "ccl":
            raise
        problem = str(error).removeprefix("comm.backend=ccl: ")
    store.set(f"ccl/{rank.rank}", problem)
    problems = [store.get(f"ccl/{number}").decode() for number in range(rank.world_size)]
    without = next((number for number, said in enumerate(problems) if said), None)
    if without is None:
        return "ccl", "every rank can use oneCCL"
    return "gloo", f"rank {without}: {problems[without]}"
