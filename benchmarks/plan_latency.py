"""Time from a command's start to its end: planning with cputrain, and other launchers starting a command without work.

    python -m benchmarks.plan_latency [--rounds 11] [--ipexrun PATH]

Rounds are interleaved; the table shows medians and the largest peak of resident memory. torch.backends.xeon.run_cpu is
part of torch; ipexrun is part of Intel's extension for PyTorch up to 2.8, in a separate environment: pass its path.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CPUTRAIN = (sys.executable, "-m", "cputrain")
KINDS = ("n[00001-04000]=skx-8160-2s", "k[00001-03000]=knl-7250-snc4-flat", "g[00001-03000]=genoa-9654-2s-nps4")
KIB_PER_MIB = 1 << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--ipexrun", default=shutil.which("ipexrun"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch) / "plan.json"
        plan.write_bytes(
            subprocess.run([*CPUTRAIN, "plan", "--format", "json"], capture_output=True, check=True).stdout
        )
        kinds = [word for kind in KINDS for word in ("--host-group", kind)]
        contenders: dict[str, tuple[str, ...]] = {
            "cputrain plan": (*CPUTRAIN, "plan"),
            "cputrain plan, recipe for 256 hosts": (
                *CPUTRAIN,
                *("plan", "resnet50-skx-256node", "--machine", "skx-8160-2s", "--nodes", "256"),
            ),
            "cputrain plan, 10,000 hosts of 3 kinds": (*CPUTRAIN, "plan", *kinds),
            "cputrain.affinity.bind, one rank to `true`": (
                *(
                    sys.executable,
                    "-m",
                    "cputrain.affinity.bind",
                    "--plan",
                    str(plan),
                    "--local-rank",
                    "0",
                    "--",
                    "true",
                ),
            ),
            "torch.backends.xeon.run_cpu, to `true`": (
                *(sys.executable, "-m", "torch.backends.xeon.run_cpu", "--ninstances", "1", "--no-python", "true"),
            ),
        }
        if options.ipexrun:
            contenders["ipexrun, to `true`"] = (options.ipexrun, "--no-python", "true")
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        peaks: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, argv in contenders.items():
                took, peak = timed(argv)
                seconds[name].append(took)
                peaks[name].append(peak)
    peer = statistics.median(seconds["torch.backends.xeon.run_cpu, to `true`"])
    print("| command | median s (range) | of run_cpu's | peak MiB |\n|---|---|---|---|")
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = f"{min(values):.3f}-{max(values):.3f}"
        print(f"| {name} | {median:.3f} ({spread}) | {median / peer:.2f} | {max(peaks[name]):.0f} |")


def timed(argv: tuple[str, ...]) -> tuple[float, float]:
    """Return the seconds from start to end, and the peak resident memory in MiB. Raises if the command fails."""
    started = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}")
    return took, usage.ru_maxrss / KIB_PER_MIB


if __name__ == "__main__":
    main()
