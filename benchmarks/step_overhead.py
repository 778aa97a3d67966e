"""Fixed cost of a step: a training of one weight on 2 ranks with cputrain, and with bare DDP under the same plan.

    python -m benchmarks.step_overhead [--rounds 3] [--windows 20] [--backends gloo ccl] [--profile]

The network is y = w x + b and its batch 16 points, so that a step only consists of what the trainer adds to arithmetic:
Python, all-reduce and norm of the gradients, reads of the store, events, the progress bar's text. Rounds are
interleaved; a figure is the median over windows of 200 steps in all rounds, without each round's first window. With
--profile, prints the most expensive functions of rank 0's steps from cProfile, which itself doubles Python's cost. The
exit status is 1 if a difference is above 500 us. Needs two cores.
"""

import argparse
import os
import pstats
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

from cputrain.runs.events import read_events

BATCH, RANKS, WINDOW = 16, 2, 200
LIMIT_US = 500.0
HERE = Path(__file__).parent
PROFILED = """
import cProfile, os, sys
from cputrain.training.trainer import Trainer
run_steps = Trainer._run_steps
profile = cProfile.Profile()
def profiled(self, *arguments):
    if os.environ["RANK"] != "0":
        return run_steps(self, *arguments)
    return profile.runcall(run_steps, self, *arguments)
Trainer._run_steps = profiled
sys.argv[0] = "cputrain"
from cputrain.cli import main
try:
    main()
finally:
    if os.environ["RANK"] == "0":
        profile.dump_stats(os.environ["STEP_PROFILE"])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--backends", nargs="+", default=["gloo", "ccl"])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.profile:
            show_profile(Path(scratch), options.backends[0], options.windows)
            return
        taken: dict[tuple[str, str], list[float]] = {}
        for i in range(options.rounds):
            for backend in options.backends:
                folder = Path(scratch) / f"{backend}{i}"
                taken.setdefault((backend, "bare"), []).extend(bare(folder / "bare", backend, options.windows))
                taken.setdefault((backend, "ours"), []).extend(ours(folder / "ours", backend, options.windows))
    print("| us a step, network of one weight, 2 ranks | bare DDP | cputrain | difference | at most |")
    print("|---|---|---|---|---|")
    above = False
    for backend in options.backends:
        own, peer = (median(taken[backend, who]) for who in ("ours", "bare"))
        print(f"| {backend} | {peer:.0f} | {own:.0f} | {own - peer:.0f} | {LIMIT_US:.0f} |")
        above |= own - peer > LIMIT_US
    sys.exit(above)


def bare(folder: Path, backend: str, windows: int) -> list[float]:
    """Return microseconds per step of bare DDP, in ranks bound as cputrain's."""
    script = [sys.executable, str(HERE / "bare_ddp.py"), "--backend", backend, "--batch", str(BATCH)]
    sizes = ["--window", str(WINDOW), "--windows", str(windows)]
    start(["-m", "cputrain", "launch", "--ppn", str(RANKS), "--output", str(folder), "--", *script, *sizes])
    lines = (folder / "logs/rank-0.log").read_text(encoding="utf-8").split()
    return [float(line) for line in lines[-windows:]][1:]


def training(folder: Path, backend: str, windows: int) -> list[str]:
    steps = (windows + 1) * WINDOW
    return [
        *("train", "linear-regression", f"output={folder}", f"comm.backend={backend}", f"plan.ppn={RANKS}", "--quiet"),
        *(f"batch.global={BATCH * RANKS}", f"batch.local={BATCH}", f"data.train_images={BATCH * RANKS * steps}"),
        *("optim.name=momentum", "schedule.peak_rate=1e-4", "epochs=1", f"max_steps={steps - 1}"),
    ]


def ours(folder: Path, backend: str, windows: int) -> list[float]:
    """Return microseconds per step of a training, from the times of the events of every 200th step."""
    start(["-m", "cputrain", *training(folder, backend, windows)])
    events = [event for event in read_events(folder) if event["event"] == "step" and event["step"] % WINDOW == 0]
    return [1e6 * (after["time"] - before["time"]) / WINDOW for before, after in pairwise(events)][1:]


def show_profile(scratch: Path, backend: str, windows: int) -> None:
    """Print where Python spends its time in rank 0's steps."""
    report, folder = scratch / "profile", scratch / "run"
    script = ["-c", PROFILED, *training(folder, backend, windows)]
    launch = ["-m", "cputrain", "launch", "--ppn", str(RANKS), "--output", str(scratch / "logs"), "--", sys.executable]
    start([*launch, *script], {"STEP_PROFILE": str(report)})
    pstats.Stats(str(report)).sort_stats("tottime").print_stats(45)


def start(arguments: list[str], env: dict[str, str] | None = None) -> None:
    """Run this Python on some arguments; a failure ends the benchmark."""
    argv = [sys.executable, *arguments]
    result = subprocess.run(argv, check=False, capture_output=True, encoding="utf-8", env={**os.environ, **(env or {})})
    if result.returncode:
        sys.exit(f"{argv} failed:\n{result.stdout[-2000:]}\n{result.stderr}")


if __name__ == "__main__":
    main()
