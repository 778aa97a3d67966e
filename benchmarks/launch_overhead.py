"""Overhead of `cputrain launch` over a bare launcher: 2 ranks of a command that does nothing, from start to end.

    python -m benchmarks.launch_overhead [--rounds 7]

Rounds are interleaved; medians. Uses the launchers of `make mpi`, and the system's mpirun if it is a different one.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cputrain.studies.bench.figures import seconds_of

MPI = Path(__file__).parents[1] / ".mpi"
COMMANDS = {"true": ("true",), "python -c pass": (sys.executable, "-c", "pass")}
BARE = {
    "intelmpi": ("mpirun", "-np", "2"),
    "openmpi": ("mpirun", "--allow-run-as-root", "-np", "2"),
    "mpich": ("mpirun", "-np", "2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print("| command | launcher | bare, s | cputrain launch, s | ratio |\n|---|---|---|---|---|")
    for shown, command in COMMANDS.items():
        for kind in BARE:
            folder = MPI / kind
            if not (folder / "bin/mpirun").exists():
                continue
            bare, ours = [], []
            for _ in range(options.rounds):
                bare.append(seconds((*BARE[kind], *command), environment(folder)))
                with tempfile.TemporaryDirectory() as scratch:
                    launch = (sys.executable, "-m", "cputrain", "launch", "--launcher", kind, "--ppn", "2")
                    ours.append(seconds((*launch, "--output", f"{scratch}/run", "--", *command), environment(folder)))
            a, b = statistics.median(bare), statistics.median(ours)
            print(f"| {shown} | {kind} | {a:.2f} | {b:.2f} | {b / a:.2f} |")
    with tempfile.TemporaryDirectory() as scratch:
        launch = (sys.executable, "-m", "cputrain", "launch", "--output")
        own = [seconds((*launch, f"{scratch}/{i}", "--", "true"), os.environ) for i in range(options.rounds)]
    print(f"| true | cputrain's own, this host | | {statistics.median(own):.2f} | |")


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that a launcher from PyPI needs to find its files."""
    lib = str(folder / "lib")
    intel = {"I_MPI_ROOT": str(folder), "FI_PROVIDER_PATH": lib, "LD_LIBRARY_PATH": lib}
    own = intel if "intel" in folder.name else {}
    return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", **own}


def seconds(argv: tuple[str, ...], env: "os._Environ[str] | dict[str, str]") -> float:
    """Return the seconds from a command's start to its end. Raises if it fails."""
    return seconds_of(lambda: subprocess.run(argv, env=env, check=True, capture_output=True, timeout=60))


if __name__ == "__main__":
    main()
