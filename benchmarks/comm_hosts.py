"""Four hosts on 1 Gbit/s links (network namespaces of this host): ResNet-50 steps and all-reduces, ccl against gloo.

    python -m benchmarks.comm_hosts [--rounds 2] [--rate 1gbit]

Exposed: extra time of a step compared to one without communication. Two levels: a manual all-reduce, first inside each
host and then over the hosts, with two ranks per host. Limit: the links' bandwidth in a ring of hosts. The hosts share
this machine's cores, so ratios count rather than absolute times. Needs root, iproute2 and openssh-server.
"""

import argparse
import sys
from statistics import median

from benchmarks.hosts import benchmark_hosts, bits_per_s, lines_of_rank_0
from tests.support.fake_hosts import FakeHosts

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    options = parser.parse_args()
    with benchmark_hosts(HOSTS) as hosts:
        for name in hosts.names:
            hosts.slow_down(name, options.rate)
        print_steps(hosts, options.rounds, options.rate)
        print_levels(hosts, options.rounds, options.rate)


def print_steps(hosts: FakeHosts, rounds: int, rate: str) -> None:
    """Train with one rank per host; print steps with and without communication."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for name, (backend, *more) in CONTENDERS.items():
            print(f"round {number + 1}/{rounds}  {name}", file=sys.stderr)
            program = (backend, "ddp", str(STEPS), "resnet50", str(BATCH), str(CROP), *more)
            measured[name] += lines_of_rank_0(hosts, program, range(HOSTS))
    what = f"{HOSTS} hosts, {rate}, {BATCH} x {CROP} x {CROP} a rank"
    print(f"| {what} | step, s | alone, s | exposed, s | of gloo's |\n|---|---|---|---|---|")
    exposed = {name: median(row["step"] - row["no_sync"] for row in rows) for name, rows in measured.items()}
    for name, rows in measured.items():
        step, alone = (median(row[key] for row in rows) for key in ("step", "no_sync"))
        print(f"| {name} | {step:.2f} | {alone:.2f} | {exposed[name]:.2f} | {exposed[name] / exposed['gloo']:.2f} |")


def print_levels(hosts: FakeHosts, rounds: int, rate: str) -> None:
    """Compare the backends' all-reduce with one of two levels, with two ranks per host."""
    columns = " | ".join(f"{size >> 10:,} KiB: own, ms | two levels, ms" for size in SIZES)
    print(f"\n| {HOSTS} x 2 ranks, {rate} | {columns} |\n|---|{'---|' * 2 * len(SIZES)}")
    limits = (2 * (HOSTS - 1) / HOSTS * size * 8 / bits_per_s(rate) for size in SIZES)
    print("| limit | " + " | ".join(f"{limit * 1000:.1f} | " for limit in limits) + "|")
    places = [number // 2 for number in range(2 * HOSTS)]
    for name, (backend, settings) in LEVELS.items():
        print(f"all-reduce  {name}", file=sys.stderr)
        program = (backend, "levels", str(4 * rounds), *map(str, SIZES))
        rows = lines_of_rank_0(hosts, program, places, settings)
        cells = (f"{1000 * row['flat']:.1f} | {1000 * row['levels']:.1f}" for row in rows)
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
