"""Four hosts on 1 Gbit/s links (network namespaces of this host): ResNet-50 steps and all-reduces, ccl against gloo.

    python -m benchmarks.comm_hosts [--rounds 2] [--rate 1gbit]

Exposed: what a step takes more than one without communication. Two levels: the all-reduce made by hand of one inside
each host and one over the hosts, with two ranks a host. The limit: what the links carry in a ring of hosts. The hosts
share this machine's cores: times are this table's own, ratios count. Needs root, iproute2 and openssh-server.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from affinity.ranks.rank import Rank, rendezvous
from tests.support.fake_hosts import FakeHosts, fake_hosts

HOSTS, BATCH, CROP, STEPS = 4, 4, 64, 3
CONTENDERS = {"gloo": ("gloo",), "gloo, bf16": ("gloo", "bf16"), "ccl": ("ccl",), "ccl, bf16": ("ccl", "bf16")}
LEVELS = {
    "ccl": ("ccl", {}),
    "ccl, ring": ("ccl", {"CCL_ALLREDUCE": "ring"}),
    "ccl, 2d": ("ccl", {"CCL_ALLREDUCE": "2d"}),
    "gloo": ("gloo", {}),
    "gloo, two contexts": ("gloo", {"GLOO_SOCKET_IFNAME": "eth0,eth0"}),
}
SIZES = (1 << 16, 1 << 20, 24 << 20)
BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# As the planner sets them: the allocator keeps memory; the fabric of plain Ethernet.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "FI_PROVIDER": "tcp",
    "GLOO_SOCKET_IFNAME": "eth0",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, fake_hosts(Path(folder), HOSTS) as hosts:
        for name in hosts.names:
            hosts.slow_down(name, options.rate)
        print_steps(hosts, options.rounds, options.rate)
        print_levels(hosts, options.rounds, options.rate)


def print_steps(hosts: FakeHosts, rounds: int, rate: str) -> None:
    """A rank a host trains; steps with and without communication."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for name, (backend, *more) in CONTENDERS.items():
            print(f"round {number + 1}/{rounds}  {name}", file=sys.stderr)
            program = (backend, "ddp", str(STEPS), str(BATCH), str(CROP), *more)
            measured[name] += told_by_rank_0(hosts, program, {}, per_host=1, port=29600 + number)
    what = f"{HOSTS} hosts, {rate}, {BATCH} x {CROP} x {CROP} a rank"
    print(f"| {what} | step, s | alone, s | exposed, s | of gloo's |\n|---|---|---|---|---|")
    exposed = {name: median(row["step"] - row["no_sync"] for row in rows) for name, rows in measured.items()}
    for name, rows in measured.items():
        step, alone = (median(row[key] for row in rows) for key in ("step", "no_sync"))
        print(f"| {name} | {step:.2f} | {alone:.2f} | {exposed[name]:.2f} | {exposed[name] / exposed['gloo']:.2f} |")


def print_levels(hosts: FakeHosts, rounds: int, rate: str) -> None:
    """Two ranks a host; the backends' own all-reduce beside one of two levels."""
    columns = " | ".join(f"{size >> 10:,} KiB: own, ms | two levels, ms" for size in SIZES)
    print(f"\n| {HOSTS} x 2 ranks, {rate} | {columns} |\n|---|{'---|' * 2 * len(SIZES)}")
    bits_per_s = float(rate[:-4]) * BITS_PER_S[rate[-4:]]
    limits = (2 * (HOSTS - 1) / HOSTS * size * 8 / bits_per_s for size in SIZES)
    print("| limit | " + " | ".join(f"{limit * 1000:.1f} | " for limit in limits) + "|")
    for number, (name, (backend, settings)) in enumerate(LEVELS.items()):
        print(f"all-reduce  {name}", file=sys.stderr)
        program = (backend, "levels", str(4 * rounds), *map(str, SIZES))
        rows = told_by_rank_0(hosts, program, settings, per_host=2, port=29700 + number)
        cells = (f"{1000 * row['flat']:.1f} | {1000 * row['levels']:.1f}" for row in rows)
        print(f"| {name} | {' | '.join(cells)} |")


def told_by_rank_0(
    hosts: FakeHosts, program: tuple[str, ...], settings: dict[str, str], *, per_host: int, port: int
) -> list[dict[str, float]]:
    """The lines of benchmarks.comm_rank, with so many ranks on each host."""
    asked = subprocess.run(hosts.inside(hosts.names[0], "hostname", "-I"), capture_output=True, text=True, check=True)
    ranks = []
    for number in range(HOSTS * per_host):
        place = Rank(
            rank=number,
            world_size=HOSTS * per_host,
            local_rank=number % per_host,
            local_world_size=per_host,
            convention="env",
        )
        told = {**SETTINGS, **settings, **rendezvous(place, asked.stdout.split()[0], port)}
        words = ("env", *(f"{name}={value}" for name, value in told.items()))
        argv = hosts.inside(
            hosts.names[number // per_host], *words, sys.executable, "-m", "benchmarks.comm_rank", *program
        )
        ranks.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{program} failed")
    return [json.loads(line) for line in said[0].splitlines() if line.startswith("{")]


if __name__ == "__main__":
    main()
