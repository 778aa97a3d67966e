"""Cost of sampling the ranks of a host: CPU time of the sampling process as a share of a core.

    python -m benchmarks.sampling_cost [--seconds 60]

Ranks are real processes with 24 threads and 2 children each; `others` is the number of idle processes that the host has
in addition. The whole process is measured with its loop, as run by `cputrain train` (one for all ranks) and by the
agent (one per rank), and then without a sampler.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cputrain.mpi.usage import EVERY_S, FOLDER, MAX_CORE_FRACTION, HostUse, Sampler, read_usage_records

RANK = """
import subprocess, threading, time
for _ in range(24):
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
for _ in range(2):
    subprocess.Popen(["sleep", "3600"])
time.sleep(3600)
"""
POLL_S = 0.05  # mpi/supervise/run.py's loop
SETTLE_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    print(f"a sample every {EVERY_S:g} s, fewer if they took more than {100 * MAX_CORE_FRACTION:g} % of a core")
    print("| ranks | processes on the host | samples | ms a sample | % of a core | without | sampler alone |")
    print("|---|---|---|---|---|---|---|")
    for ranks, others in ((1, 0), (8, 0), (8, 1000)):
        with started(("sleep", "3600"), others), started((sys.executable, "-c", RANK), ranks) as pids:
            time.sleep(SETTLE_S)
            processes = sum(path.name.isdigit() for path in Path("/proc").iterdir())
            bare = watched(options.seconds, None)
            with tempfile.TemporaryDirectory() as scratch:
                sampler = Sampler(Path(scratch) / FOLDER, dict(enumerate(pids)), whole_host=True)
                spent = watched(options.seconds, sampler)
                sampler.close()
                (path,) = (Path(scratch) / FOLDER).glob("host-*")
                samples = len(read_usage_records(path, HostUse))
            share, without = 100 * spent / options.seconds, 100 * bare / options.seconds
            each = 1e3 * (spent - bare) / samples
            cells = (f"{each:.1f}", f"{share:.2f}", f"{without:.2f}", f"{share - without:.2f}")
            print(f"| {ranks} | {processes} | {samples} | {' | '.join(cells)} |", flush=True)


def watched(seconds: float, sampler: Sampler | None) -> float:
    """Return the CPU seconds that this process takes to watch for some time."""
    spent, started_at = time.process_time(), time.monotonic()
    while time.monotonic() - started_at < seconds:
        time.sleep(POLL_S)
        if sampler is not None:
            sampler.tick()
    return time.process_time() - spent


@contextmanager
def started(command: tuple[str, ...], count: int) -> Iterator[list[int]]:
    """Start processes, each in its own session, and end them after the block; yield their pids."""
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            os.killpg(process.pid, 9)
            process.wait()


if __name__ == "__main__":
    main()
