"""Reproducibility of a tuning: repeated tunings of a small training, each with another order of trials.

    python -m benchmarks.tune_repeats [--times 5] [--recipe imagefolder] [--axes workers] [KEY=VALUE ...]

Prints each winner, its speedup, the number of trials and the seconds; the exit status is 1 if winners differ. Results
are not stored, and the defaults need no compiler.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from cputrain.affinity.terminal import align_columns

SETTINGS = (
    *("model.name=resnet18", "data.crop=64", "batch.local=8"),
    *("comm.backend=gloo", "engine=eager", "data.decoder=pillow"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--recipe", default="imagefolder")
    parser.add_argument("--axes", default="workers")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("settings", nargs="*", default=SETTINGS)
    options = parser.parse_args()
    rows = [("seed", "winner", "result", "trials", "a trial varies by", "seconds")]
    for seed in range(1, options.times + 1):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as cache:
            how = ("--axes", options.axes, "--steps", str(options.steps), "--seed", str(seed))
            found = tuned((options.recipe, *options.settings, *how), cache)
        (winner,) = [row["name"] for row in found["plans"] if row["won"]]
        cells = (winner, found["why"], str(found["trials"]), f"{100 * found['noise']:.1f} %")
        rows.append((str(seed), *cells, f"{time.monotonic() - started:.0f}"))
        print(rows[-1], file=sys.stderr)
    print(align_columns(rows))
    return int(len({row[1] for row in rows[1:]}) > 1)


def tuned(arguments: Sequence[str], cache: str) -> dict[str, Any]:
    """Return the output of `cputrain tune --format json`."""
    argv = [sys.executable, "-m", "cputrain", "tune", *arguments, "--format", "json"]
    env = {**os.environ, "CPUTRAIN_CACHE": cache}
    found: dict[str, Any] = json.loads(subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=True).stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
