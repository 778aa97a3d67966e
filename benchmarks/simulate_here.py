"""Predicted beside measured steps of ResNet-50 on two ranks of one thread: one host, and two hosts on slow links.

    python -m benchmarks.simulate_here [--steps 3] [--rates 1gbit 100mbit] [--backends gloo ccl]

Hosts are network namespaces of this machine, their links shaped by tbf. Measured first, and used: the step without
communication, from the same processes in turns with the one predicted; an all-reduce of 24 MiB without a slow link, for
what a rank moves; a copy, for the memory. Needs root, iproute2, openssh-server and two cores that nothing else uses.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np

from affinity.ranks.rank import Rank, rendezvous
from affinity.text_table import align_columns
from benchmarks.comm_hosts import BATCH, BITS_PER_S, CROP, SETTINGS
from cputrain.recipe.schema import DataSection, ModelSection, Recipe
from cputrain.simulate.assumptions import CONSTANTS
from cputrain.simulate.layers import layers_of
from cputrain.simulate.links import link_of
from cputrain.simulate.predict import Reference, core_flops_of, speed_at
from cputrain.simulate.setup import DEFAULT_BUCKETS, Setup
from cputrain.simulate.timeline import seconds_at
from tests.support.fake_hosts import FakeHosts, fake_hosts

SIZE, COPIED, ROUNDS = 24 << 20, 1 << 28, 5
PORTS = count(29800)
HEAD = ("ranks", "backend", "gradients", "alone, s", "measured, s", "predicted, s", "error")
# Both ranks run on this machine's cores at the same speed: nothing is known of stragglers among two.
HERE = replace(CONSTANTS, step_variation=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rates", nargs="*", default=["1gbit", "100mbit"])
    parser.add_argument("--backends", nargs="+", default=["gloo", "ccl"])
    options = parser.parse_args()
    memory, rows = memory_bytes_per_s(), [HEAD]
    for rate in (None, *options.rates):
        with tempfile.TemporaryDirectory() as folder, fake_hosts(Path(folder), 2) as hosts:
            places = (0, 0) if rate is None else (0, 1)
            moved = {backend: move_bytes_per_s(hosts, backend, places) for backend in options.backends}
            for name in hosts.names if rate is not None else ():
                hosts.slow_down(name, rate)
            for backend, speed in moved.items():
                rows += [case(hosts, backend, rate, name, speed, memory, options.steps) for name in ("none", "bf16")]
    print(align_columns(rows, numbers=True))


def case(
    hosts: FakeHosts, backend: str, rate: str | None, compression: str, moved: float, memory: float, steps: int
) -> tuple[str, ...]:
    """A row: ranks on one host, or on two with links of this rate."""
    places, more = (0, 0) if rate is None else (0, 1), ("bf16",) if compression == "bf16" else ()
    (told,) = told_by_rank_0(hosts, places, (backend, "ddp", str(steps), str(BATCH), str(CROP), *more))
    setup = Setup(
        layers=layers_of(Recipe(model=ModelSection(name="resnet50"), data=DataSection(crop=CROP))),
        hosts=1 if rate is None else 2,
        workers=2 if rate is None else 1,
        threads=1,
        comm_cores=0,
        loader_cores=0,
        local_batch=BATCH,
        compression=compression,
        optimizer_passes=0,
        bucket_mib=DEFAULT_BUCKETS,
        backend=backend,
        link=None if rate is None else link_of("ethernet", gbit=float(rate[:-4]) * BITS_PER_S[rate[-4:]] / 1e9),
        move_bytes_per_s=moved,
    )
    alone = Reference(
        setup=replace(setup, hosts=1, workers=1, link=None, compression="none"),
        images_per_s=BATCH / told["no_sync"],
        packages=1,
        cores=1,
        memory_bytes_per_s=memory,
        source="measured",
    )
    speed = speed_at(core_flops_of(alone, HERE), machine=alone)
    speed = replace(speed, host_bytes_per_s=memory * setup.workers)  # measured while both ranks compute
    predicted = seconds_at(setup, HERE)(speed)
    print(f"{backend} {rate} {compression}: {told['step']:.3f} s, predicted {predicted:.3f} s", file=sys.stderr)
    return (
        "2 on one host" if rate is None else f"1 + 1, {rate}",
        backend,
        "float32" if compression == "none" else "bfloat16",
        f"{told['no_sync']:.3f}",
        f"{told['step']:.3f}",
        f"{predicted:.3f}",
        f"{100 * (predicted / told['step'] - 1):+.0f} %",
    )


def move_bytes_per_s(hosts: FakeHosts, backend: str, places: tuple[int, ...]) -> float:
    """bytes/s that each of two ranks moves in an all-reduce: a ring sends as many as it sums."""
    (told,) = told_by_rank_0(hosts, places, (backend, "allreduce", str(ROUNDS), str(SIZE)))
    return SIZE / told["seconds"]


def memory_bytes_per_s() -> float:
    """bytes/s that one core reads and writes in a copy."""
    source, target, seconds = np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8), []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return 2 * COPIED / median(seconds)


def told_by_rank_0(hosts: FakeHosts, places: tuple[int, ...], program: tuple[str, ...]) -> list[dict[str, float]]:
    """The lines of benchmarks.comm_rank, with a rank on the host of each place."""
    first = hosts.inside(hosts.names[0], "hostname", "-I")
    address = subprocess.run(first, capture_output=True, text=True, check=True).stdout.split()[0]
    port, ranks = next(PORTS), []
    for number, place in enumerate(places):
        rank = Rank(
            rank=number,
            world_size=len(places),
            local_rank=places[:number].count(place),
            local_world_size=places.count(place),
            convention="env",
        )
        told = {**SETTINGS, **rendezvous(rank, address, port)}
        words = (*(f"{name}={value}" for name, value in told.items()), sys.executable)
        argv = hosts.inside(hosts.names[place], "env", *words, "-m", "benchmarks.comm_rank", *program)
        ranks.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{program} failed")
    return [json.loads(line) for line in said[0].splitlines() if line.startswith("{")]


if __name__ == "__main__":
    main()
