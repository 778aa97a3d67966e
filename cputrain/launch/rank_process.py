"""What `train` and `eval` share: which rank this process is, and the worker it is bound as."""

import os
import sys
from collections.abc import Callable

from affinity.errors import InputError
from affinity.kernel.bound_plan import bound_worker, plan_in_memory
from affinity.kernel.exec_bound import exec_bound
from affinity.kernel.observe import Observed, observe, verify
from affinity.kernel.rank_plan import plan_for_rank
from affinity.planner.plan import WorkerPlan
from affinity.ranks.rank import Rank, discover
from cputrain.cli import tell
from cputrain.launch.planning import request_of
from cputrain.recipe.schema import Recipe


def this_rank() -> Rank | None:
    """This process's place in a job; None when the user has started it."""
    return discover(os.environ)


def bound_here(recipe: Recipe, rank: Rank, *, check: bool) -> tuple[WorkerPlan, Observed]:
    """The worker this rank is bound as, checked against the kernel before any library can move a thread.

    A rank that no plan has bound (started by mpirun, srun or torchrun directly) plans for itself and starts again.
    """
    worker = bound_worker(os.environ)
    if worker is None:
        _bind_and_restart(recipe, rank, check=check)
    assert worker is not None
    if check:
        verify(worker)
    return worker, observe()


def run_rank(rank: Rank, act: Callable[[], None]) -> None:
    """Do a rank's work. One that fails leaves at once, as its libraries' threads may be stuck in a collective for good,
    and as others, who lose their connections to it, would be blamed if they ended before it."""
    from cputrain.comm.group import convert_lost_peer_errors  # torch: after the binding is read back

    try:
        with convert_lost_peer_errors(rank.rank):
            act()
    except Exception as error:  # noqa: BLE001  all are told, and the rank ends
        status = tell(error)
        if status is None:
            sys.excepthook(type(error), error, error.__traceback__)
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _bind_and_restart(recipe: Recipe, rank: Rank, *, check: bool) -> None:
    """Plan this host for its ranks and become the same command, bound."""
    if recipe.plan.share:
        raise InputError(
            "plan.share=true, but a launcher has started this rank, which cannot tell its job from others: start "
            "cputrain train by itself or with cputrain launch --share"
        )
    plan, index = plan_for_rank(request_of(recipe), rank, (), os.environ)
    command = (sys.executable, "-m", "cputrain", *sys.argv[1:])
    exec_bound(plan.workers[index], plan_in_memory(plan), command, os.environ, rank=rank, check=check)
