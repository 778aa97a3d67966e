"""Memory of ranks over many collectives of sizes that never repeat, under four launchers, each in a plain environment.

    python -m benchmarks.comm_soak [--count 10000] [--starters torchrun,mpirun,spawn,launch] [--cache]

Prints each rank's growth of resident memory in MiB, from a fifth of the collectives to the end, and the seconds.
`--cache` lets oneCCL keep its buffers (CCL_BUFFER_CACHE=1), to measure their cost and benefit. mpirun is the first one
on PATH.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from cputrain.mpi.supervise.run import free_port

PROGRAM = "tests.support.ccl_stranger"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # Open MPI refuses root otherwise


def commands(count: int, output: str) -> dict[str, tuple[str, ...]]:
    """Return the command that starts two ranks, by launcher."""
    python = sys.executable
    soak = ("-m", PROGRAM, "ccl", "soak", str(count))
    return {
        "torchrun": (python, "-m", "torch.distributed.run", "--nproc-per-node=2", *soak),
        "mpirun": ("mpirun", "-np", "2", python, *soak),
        "spawn": (python, "-m", PROGRAM, "spawn", "soak", str(count)),
        "launch": (python, "-m", "cputrain", "launch", "--ppn", "2", "--output", output, "--", python, *soak),
    }


def measured(argv: tuple[str, ...], env: dict[str, str]) -> str:
    """Return a row of the table: each rank's growth, and the seconds. Exits if the ranks fail."""
    started = time.perf_counter()
    done = subprocess.run(argv, env=env, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)} ended with status {done.returncode}: {done.stderr[-2000:]}")
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '"grown_mib"' in line]
    grown = " ".join(f"{json.loads(line)['grown_mib']:.1f}" for line in lines)
    return f"{grown} | {time.perf_counter() - started:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--starters", default="torchrun,mpirun,spawn,launch")
    parser.add_argument("--cache", action="store_true")
    options = parser.parse_args()
    print("| starter | grown, MiB | s |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as output:
        for name in options.starters.split(","):
            ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PORT": str(free_port())}
            env = {**AS_ROOT, **os.environ, **ports, **({"CCL_BUFFER_CACHE": "1"} if options.cache else {})}
            print(f"| {name} | {measured(commands(options.count, f'{output}/{name}')[name], env)} |", flush=True)


if __name__ == "__main__":
    main()
