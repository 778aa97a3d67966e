"""`cputrain launch` on many hosts: network namespaces of this one, two ranks each, of a program without torch.

    python -m benchmarks.launch_scale [--hosts 16 64] [--launchers intelmpi openmpi mpich]

For each launcher and number of hosts: the duration of the preflight and of the start of all ranks; the resources of the
launching process and of the launcher's helper processes; the time that Ctrl-C takes; and on the largest number of hosts
the time until a disconnected host is reported. Then a linear extrapolation to 2,048 hosts. The hosts share this
machine's cores, on which real hosts would start in parallel. Needs root, iproute2, openssh-server and `make mpi`.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hosts import benchmark_hosts
from benchmarks.launch_overhead import MPI, environment
from cputrain.affinity.terminal import markdown_table
from cputrain.mpi.supervise.activity import process_tree
from tests.support.fake_hosts import FakeHosts

PPN, MANY_HOSTS = 2, 2048
SLEEP = "31415"
PROGRAM = ("sh", "-c", f"echo up; exec sleep {SLEEP}")
END_S = 400.0  # for a job that was interrupted or lost a host
MIB = 1 << 20
HEAD = (
    *("launcher", "hosts", "ranks", "pre-flight, s", "start, s", "launch: CPU s", "MiB", "threads", "files"),
    *("launcher: MiB", "processes", "files", "Ctrl-C, s", "left", "host cut off"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of processes: CPU seconds so far, resident bytes, threads, open files, and number of processes."""

    cpu_s: float = 0.0
    rss: int = 0
    threads: int = 0
    files: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job of a launcher on a number of hosts. `launch` is the launching process, `beside` the launcher's others."""

    launcher: str
    hosts: int
    preflight_s: float
    start_s: float
    launch: Resources
    beside: Resources
    interrupt_s: float
    left: int
    cut: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A job whose ranks are all up: its outer process, the launching process inside, and the file of its errors."""

    process: subprocess.Popen[str]
    launch: int
    errors: Path
    preflight_s: float
    start_s: float

    def seconds_to_end(self) -> float:
        """Wait for the end of the job; return the seconds."""
        started = time.monotonic()
        self.process.wait(timeout=END_S)
        return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--launchers", nargs="+", default=["intelmpi", "openmpi", "mpich"])
    options = parser.parse_args()
    cases: list[Case] = []
    for launcher in options.launchers:
        for count in sorted(options.hosts):
            with benchmark_hosts(count) as hosts:
                cases.append(measured(hosts, launcher, cut=count == max(options.hosts)))
            print(cases[-1], file=sys.stderr)
    print(markdown_table([HEAD, *map(row, cases)]))
    print(markdown_table(growth(cases)))


def measured(hosts: FakeHosts, launcher: str, *, cut: bool) -> Case:
    """Start a job and interrupt it; with `cut`, start another one and disconnect its last host."""
    with running(hosts, launcher, hosts.folder / "a") as job:
        below = [pid for pid in process_tree(job.launch)[1:] if not is_agent(pid)]
        launch, beside = resources_of([job.launch]), resources_of(below)
        os.kill(job.launch, signal.SIGINT)
        interrupt_s = job.seconds_to_end()
    left = sum(map(len, hosts.processes(SLEEP).values()))
    named = ""
    if cut:
        last = hosts.names[-1]
        with running(hosts, launcher, hosts.folder / "b") as other:
            hosts.cut(last)
            seconds = other.seconds_to_end()
            lines = other.errors.read_text(encoding="utf-8").splitlines()
        line = next((line for line in lines if f"on {last} " in line or f"host {last} " in line), "not named")
        named = f"{seconds:.0f} s: {line.strip()}"
    return Case(
        launcher=launcher,
        hosts=len(hosts.names),
        preflight_s=job.preflight_s,
        start_s=job.start_s,
        launch=launch,
        beside=beside,
        interrupt_s=interrupt_s,
        left=left,
        cut=named,
    )


@contextmanager
def running(hosts: FakeHosts, launcher: str, output: Path) -> Iterator[Running]:
    """Start a job on all hosts and yield it once every rank has printed a line; end it if it still runs."""
    env = {**environment(MPI / launcher), **hosts.env, "PYTHONPATH": str(Path.cwd())}
    changed = [f"{name}={value}" for name, value in env.items() if os.environ.get(name) != value]
    launch = (sys.executable, "-m", "cputrain", "launch", "--launcher", launcher, "--output", str(output))
    listed = ("--hosts", ",".join(hosts.names), "--ppn", str(PPN))
    argv = hosts.inside("h1", "env", *changed, *launch, *listed, "--", *PROGRAM)
    errors, started = output.with_suffix(".errors"), time.monotonic()
    with errors.open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
        )
    assert process.stdout is not None
    try:
        up = 0
        while up < PPN * len(hosts.names):
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(
                    f"{launcher} on {len(hosts.names)} hosts: {up} ranks, then {errors.read_text(encoding='utf-8')}"
                )
            up += line.rstrip().endswith("up")
        took = time.monotonic() - started
        checked = re.search(r"hosts? checked in ([\d.]+) s", errors.read_text(encoding="utf-8"))
        preflight_s = float(checked[1]) if checked else 0.0
        inner = process_tree(process.pid)[1]  # the process inside the namespace, for which nsenter waits
        yield Running(process=process, launch=inner, errors=errors, preflight_s=preflight_s, start_s=took - preflight_s)
    finally:
        process.kill()
        process.wait()


def is_agent(pid: int) -> bool:
    """Return whether a process is one of the first host's ranks, or supervises them."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"cputrain.mpi.supervise.agent" in words or SLEEP.encode() in words


def resources_of(pids: Sequence[int]) -> Resources:
    """Return the resources of these processes together."""
    total = [0.0, 0, 0, 0]
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total[0] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        total[1] += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        total[2] += int(fields[17])
        total[3] += len(list((folder / "fd").iterdir()))
    cpu_s, rss, threads, files = total
    return Resources(cpu_s=cpu_s, rss=int(rss), threads=int(threads), files=int(files), processes=len(pids))


def row(case: Case) -> tuple[str, ...]:
    """Format a case as cells of the table."""
    launch, beside = case.launch, case.beside
    return (
        *(case.launcher, str(case.hosts), str(PPN * case.hosts), f"{case.preflight_s:.1f}", f"{case.start_s:.1f}"),
        *(f"{launch.cpu_s:.1f}", f"{launch.rss / MIB:.0f}", str(launch.threads), str(launch.files)),
        *(f"{beside.rss / MIB:.0f}", str(beside.processes), str(beside.files)),
        *(f"{case.interrupt_s:.1f}", str(case.left), case.cut),
    )


def growth(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """Extrapolate each launcher's figures to MANY_HOSTS by a line through the fewest and the most hosts. The line never
    falls, as more hosts cannot take less than fewer, apart from noise."""
    grows = {
        "launch: CPU s": lambda case: case.launch.cpu_s,
        "MiB": lambda case: case.launch.rss / MIB,
        "threads": lambda case: case.launch.threads,
        "files": lambda case: case.launch.files,
        "launcher: MiB": lambda case: case.beside.rss / MIB,
        "processes": lambda case: case.beside.processes,
        "open files": lambda case: case.beside.files,
    }
    rows = [(f"on {MANY_HOSTS:,} hosts, {PPN * MANY_HOSTS:,} ranks", *grows)]
    for launcher in dict.fromkeys(case.launcher for case in cases):
        found = [case for case in cases if case.launcher == launcher]
        few, many = found[0], found[-1]
        if few.hosts == many.hosts:
            continue
        share = (MANY_HOSTS - few.hosts) / (many.hosts - few.hosts)
        values = (figure(few) + share * max(0.0, figure(many) - figure(few)) for figure in grows.values())
        rows.append((launcher, *(f"{value:,.0f}" for value in values)))
    return rows


if __name__ == "__main__":
    main()
