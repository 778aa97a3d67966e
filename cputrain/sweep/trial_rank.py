"""python -m cputrain.sweep.trial_rank RECIPE BYTES: one rank of a trial, a training that stops after a few steps.

BYTES limits the process's data (RLIMIT_DATA; 0: no limit). The peak of its memory is recorded in a file, which is there
also after the process was killed.
"""

import json
import os
import resource
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cputrain.affinity.ranks.rank import discover
from cputrain.affinity.terminal import use_utf8
from cputrain.launch.rank_process import Startup, bind_rank, run_rank
from cputrain.mpi.supervise.signals import PREEMPTION_SIGNAL
from cputrain.recipe.loading import load_recipe
from cputrain.runs.events import FILE
from cputrain.sweep.find_batch import STEPS, peak_file

EVERY_S = 0.1


def peak_bytes() -> int:
    """Peak of this process's resident memory."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def write_peak(path: Path) -> None:
    """Write the peak so that a reader finds a whole file; never synced, as only a crash of the host would lose it."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(peak_bytes()), encoding="utf-8")
    beside.replace(path)


def watch(folder: Path, rank: int) -> None:
    """Record the peak as it grows; rank 0 sends itself the preemption signal once enough steps are done."""
    while True:
        time.sleep(EVERY_S)
        write_peak(peak_file(folder, rank))
        events = folder / FILE
        if rank == 0 and events.is_file() and events.read_text(encoding="utf-8").count('"event": "step"') >= STEPS:
            os.kill(os.getpid(), PREEMPTION_SIGNAL)
            return


def main() -> None:
    """Run one rank of a trial."""
    env = os.environ
    recipe, limit, rank = load_recipe(sys.argv[1]), int(sys.argv[2]), discover(env)
    assert rank is not None, "a trial is started by `cputrain sweep --find-batch`"
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with suppress(OSError):  # some containers' /proc is read-only
        Path("/proc/self/oom_score_adj").write_text(
            "1000", encoding="utf-8"
        )  # short of memory, the kernel kills this process first
    worker, observed = bind_rank(recipe, rank, env, check=True)
    threading.Thread(target=watch, args=(recipe.folder, rank.rank), daemon=True).start()

    from cputrain.training.entry import train_rank  # torch: after the binding is read back

    how: dict[str, Any] = {"resume": False, "overwrite": False, "prepared": True, "check": True, "quiet": False}
    run_rank(rank, lambda: train_rank(recipe, rank, worker, observed, env, **how, startup=Startup(shown=False)))
    write_peak(peak_file(recipe.folder, rank.rank))


if __name__ == "__main__":
    use_utf8()
    main()
