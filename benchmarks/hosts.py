"""Hosts for benchmarks (network namespaces of this host), and ranks of benchmarks.comm_rank on them."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType

from cputrain.affinity.rank import Rank, rendezvous
from tests.support.fake_hosts import FakeHosts, fake_hosts


@contextmanager
def benchmark_hosts(count: int) -> Iterator[FakeHosts]:
    """Yield `count` hosts, h1 to hN, in a temporary folder. SIGTERM (`timeout`) ends the benchmark like an error, so
    that the hosts and the bridge between them are removed."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with tempfile.TemporaryDirectory() as folder, fake_hosts(Path(folder), count) as hosts:
            yield hosts
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the cleanup
    sys.exit(128 + number)


BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
PORTS = count(29600)
# As the planner sets them: an allocator that keeps its memory, and the fabric of plain Ethernet.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "FI_PROVIDER": "tcp",
    "GLOO_SOCKET_IFNAME": "eth0",
}


def bits_per_s(rate: str) -> float:
    """Parse a rate in the units of tc, such as 100mbit, to bits/s."""
    return float(rate[:-4]) * BITS_PER_S[rate[-4:]]


def lines_of_rank_0(
    hosts: FakeHosts, program: Sequence[str], places: Sequence[int], settings: Mapping[str, str] | None = None
) -> list[dict[str, float]]:
    """Run benchmarks.comm_rank and return its lines; each place is the host of a rank, with additional settings."""
    asked = subprocess.run(
        hosts.inside(hosts.names[0], "hostname", "-I"), capture_output=True, encoding="utf-8", check=True
    )
    address, port, ranks = asked.stdout.split()[0], next(PORTS), []
    for number, place in enumerate(places):
        rank = Rank(
            rank=number,
            world_size=len(places),
            local_rank=places[:number].count(place),
            local_world_size=places.count(place),
            convention="env",
        )
        variables = {**SETTINGS, **(settings or {}), **rendezvous(rank, address, port)}
        words = ("env", *(f"{name}={value}" for name, value in variables.items()), sys.executable)
        argv = hosts.inside(hosts.names[place], *words, "-m", "benchmarks.comm_rank", *program)
        ranks.append(
            subprocess.Popen(
                argv,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
        )
    said = [rank.communicate(timeout=900)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{' '.join(program)} failed")
    return [json.loads(line) for line in said[0].splitlines() if line.startswith("{")]
