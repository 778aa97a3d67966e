"""python -m cputrain.cli.trial RECIPE BYTES: one rank of a training that ends itself after a few steps, with at most so
many bytes of data (0: no limit). It keeps the peak of its memory in a file, which is there also after it was killed."""

import json
import os
import resource
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from cputrain.launch.rank_process import bound_here, run_rank, this_rank
from cputrain.recipe.loading import load_recipe
from cputrain.runs.events import FILE
from cputrain.sweep.trial import STEPS, peak_file
from mpi.supervise.signals import PREEMPTION_SIGNAL

EVERY_S = 0.1


def peak_bytes() -> int:
    """The most memory that this process has had resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def keep_peak(path: Path) -> None:
    """Write the peak so that a reader finds a whole file; never synced, as only a crash of the host would lose it."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(peak_bytes()))
    beside.replace(path)


def watch(folder: Path, rank: int) -> None:
    """Keep the peak as it grows; rank 0 gives itself the notice that ends a job once enough steps are done."""
    while True:
        time.sleep(EVERY_S)
        keep_peak(peak_file(folder, rank))
        events = folder / FILE
        if rank == 0 and events.is_file() and events.read_text().count('"event": "step"') >= STEPS:
            os.kill(os.getpid(), PREEMPTION_SIGNAL)
            return


def main() -> None:
    """Be one rank of a trial."""
    recipe, limit, rank = load_recipe(sys.argv[1]), int(sys.argv[2]), this_rank()
    assert rank is not None, "a trial is started by `cputrain sweep --find-batch`"
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with suppress(OSError):  # some containers' /proc is read-only
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory ends, the kernel kills this process first
    worker, observed = bound_here(recipe, rank, check=True)
    threading.Thread(target=watch, args=(recipe.folder, rank.rank), daemon=True).start()

    from cputrain.training.entry import train_rank  # torch: after the binding is read back

    how = {"resume": False, "overwrite": False, "prepared": True, "check": True}
    run_rank(rank, lambda: train_rank(recipe, rank, worker, observed, **how))
    keep_peak(peak_file(recipe.folder, rank.rank))


if __name__ == "__main__":
    main()
