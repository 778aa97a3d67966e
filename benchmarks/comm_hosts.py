"""ResNet-50 steps over four hosts on 1 Gbit/s links (network namespaces of this host, one rank each): ccl against gloo.

    python -m benchmarks.comm_hosts [--rounds 2] [--rate 1gbit]

Exposed: what a step takes more than one without communication. The hosts share this machine's cores: times are this
table's own, ratios count. Needs root, iproute2 and openssh-server.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from mpi.rank import Rank, rendezvous
from tests.fake_hosts import FakeHosts, fake_hosts

HOSTS, BATCH, CROP, STEPS = 4, 4, 64, 3
CONTENDERS = {"gloo": ("gloo",), "gloo, bf16": ("gloo", "bf16"), "ccl": ("ccl",), "ccl, bf16": ("ccl", "bf16")}
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
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder, fake_hosts(Path(folder), HOSTS) as hosts:
        for name in hosts.names:
            hosts.slow_down(name, options.rate)
        for number in range(options.rounds):
            for name, (backend, *more) in CONTENDERS.items():
                print(f"round {number + 1}/{options.rounds}  {name}", file=sys.stderr)
                measured[name].append(steps(hosts, backend, more, port=29600 + number))
    what = f"{HOSTS} hosts, {options.rate}, {BATCH} x {CROP} x {CROP} a rank"
    print(f"| {what} | step, s | alone, s | exposed, s | of gloo's |\n|---|---|---|---|---|")
    exposed = {name: median(row["step"] - row["no_sync"] for row in rows) for name, rows in measured.items()}
    for name, rows in measured.items():
        step, alone = (median(row[key] for row in rows) for key in ("step", "no_sync"))
        print(f"| {name} | {step:.2f} | {alone:.2f} | {exposed[name]:.2f} | {exposed[name] / exposed['gloo']:.2f} |")


def steps(hosts: FakeHosts, backend: str, more: list[str], port: int) -> dict[str, float]:
    """Median seconds of steps with and without communication, as rank 0 has them."""
    asked = subprocess.run(hosts.inside(hosts.names[0], "hostname", "-I"), capture_output=True, text=True, check=True)
    ranks = []
    for number, host in enumerate(hosts.names):
        place = Rank(rank=number, world_size=HOSTS, local_rank=0, local_world_size=1, launcher="env")
        told = {**SETTINGS, **rendezvous(place, asked.stdout.split()[0], port)}
        arguments = ("ddp", str(STEPS), str(BATCH), str(CROP), *more)
        program = (sys.executable, "-m", "benchmarks.comm_rank", backend, *arguments)
        argv = hosts.inside(host, "env", *(f"{name}={value}" for name, value in told.items()), *program)
        ranks.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{backend} failed")
    found: dict[str, float] = json.loads(next(line for line in said[0].splitlines() if line.startswith("{")))
    return found


if __name__ == "__main__":
    main()
