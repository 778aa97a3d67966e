"""What a rank does before and after its work: bind, verify the binding, end the process where the work fails."""

import os
import signal
import sys
from collections.abc import Callable, Mapping

from affinity.errors import InputError
from affinity.exit_status import ExitStatus, exit_status, one_line
from affinity.kernel.bound_plan import bound_worker, plan_in_memory
from affinity.kernel.exec_bound import exec_bound
from affinity.kernel.observe import Observed, observe, verify
from affinity.kernel.rank_plan import plan_for_rank
from affinity.planner.plan import WorkerPlan
from affinity.ranks.rank import Rank
from affinity.start import own_program
from cputrain.launch.recipe_request import request_of
from cputrain.recipe.schema import Recipe


def bind_rank(recipe: Recipe, rank: Rank, env: Mapping[str, str], *, check: bool) -> tuple[WorkerPlan, Observed]:
    """The worker that this rank is bound as, and the binding as read back from the kernel.

    To be called before any library can move a thread. A rank that no plan has bound (one that mpirun, srun or torchrun
    has started directly) plans this host and starts again, bound. Raises RunError where `check` finds a difference.
    """
    worker = bound_worker(env)
    if worker is None:
        _bind_and_restart(recipe, rank, env, check=check)
    assert worker is not None
    if check:
        verify(worker)
    # Where a connection is lost, torch warns with stacks of its C++, several for each rank; the error is reported, too.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
    return worker, observe()


def run_rank(rank: Rank, work: Callable[[], object]) -> None:
    """Do a rank's work; end the process at once where that fails.

    Without any cleanup: threads of its libraries may hang in a collective for good. And other ranks, which lose their
    connections to this one, would be blamed for the failure if they ended first.
    """
    from cputrain.comm.group import convert_lost_peer_errors  # torch: after the binding is read back

    try:
        with convert_lost_peer_errors(rank.rank):
            work()
    except KeyboardInterrupt:  # a rank of its own session: somebody has sent it to this one
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except Exception as error:  # noqa: BLE001  every error is printed and ends the rank
        if one_line(error) is None:
            sys.excepthook(type(error), error, error.__traceback__)
            status: int = ExitStatus.FAILED
        else:
            status = exit_status(error, "cputrain")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _bind_and_restart(recipe: Recipe, rank: Rank, env: Mapping[str, str], *, check: bool) -> None:
    """Plan this host for its ranks and become the same command, bound."""
    if recipe.plan.share:
        raise InputError(
            "plan.share=true, but a launcher has started this rank, which cannot tell its own job from others: start "
            "cputrain train by itself or with cputrain launch --share"
        )
    plan, index = plan_for_rank(request_of(recipe), rank, (), env)
    command = (*own_program("cputrain"), *sys.argv[1:])
    exec_bound(plan.workers[index], plan_in_memory(plan), command, env, rank=rank, check=check)
