"""python -m cputrain.cli.trial RECIPE BYTES: a rank that trains a few steps under a limit of its memory, and says how
much of it it has used."""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from affinity.observe import Observed
from affinity.plan import WorkerPlan
from cputrain.cli.ranks import bound_here, run_rank, this_rank
from cputrain.events import Events
from cputrain.recipe import load_recipe
from cputrain.schema import Recipe
from cputrain.sweep.trial import PEAK, STEPS
from mpi.rank import Rank
from mpi.signals import NOTICE


class FewSteps(Events):
    """Events of a training that rank 0 gives notice to after STEPS steps, as a job's end does."""

    def write(self, event: str, **fields: Any) -> None:
        """Append, and give the notice."""
        super().write(event, **fields)
        if event == "step" and fields["step"] >= STEPS:
            signal.raise_signal(NOTICE)


def peak_bytes() -> int:
    """The most memory that this process has had resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def try_rank(recipe: Recipe, rank: Rank, worker: WorkerPlan, observed: Observed) -> None:
    """Train until the notice; rank 0 writes every rank's peak to the events."""
    from cputrain.comm.group import end_group, gather  # torch: after the binding is read back
    from cputrain.session import start_session
    from cputrain.train import train

    session = start_session(recipe, rank, worker, observed, check=True)
    if session.leads:
        with FewSteps(recipe.folder) as events:
            train(session, events, resume=False)
            events.write(PEAK, resident_bytes=gather(peak_bytes()))
    else:
        train(session, None, resume=False)
        gather(peak_bytes())
    end_group(session.group)


def main() -> None:
    """Be one rank of a trial."""
    path, limit = sys.argv[1], int(sys.argv[2])
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory ends, this process goes and no other
    recipe, rank = load_recipe(path), this_rank()
    assert rank is not None, f"{os.fspath(path)}: a trial is started as a rank"
    worker, observed = bound_here(recipe, rank, check=True)
    run_rank(rank, lambda: try_rank(recipe, rank, worker, observed))


if __name__ == "__main__":
    main()
