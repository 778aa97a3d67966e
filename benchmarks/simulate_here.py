"""Predicted and measured steps on this machine: one and two workers, and hosts on slow links.

    python -m benchmarks.simulate_here [--hosts 2 4] [--rates 1gbit 100mbit] [--network resnet18] [--steps 5]

Hosts are network namespaces with links shaped by tbf; each has one rank with one thread. A prediction uses: the step
without communication, measured in the same processes in turns with the predicted step (for one worker: the step with
half of the images); a rank's bytes/s in an all-reduce of float32 without a slow link; and, for the memory, a copy by
all ranks at once. Prints the errors unchanged. Needs root, iproute2 and openssh-server.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.comm_rank import REDUCED
from benchmarks.hosts import benchmark_hosts, bits_per_s, lines_of_rank_0
from cputrain.affinity.terminal import markdown_table
from cputrain.predict.assumptions import CONSTANTS, link_of
from cputrain.predict.step_time import DEFAULT_BUCKETS, Setup, seconds_at
from cputrain.recipe.schema import DataSection, ModelSection, Recipe
from cputrain.studies.simulate.predict import Reference, core_flops_of, layers_of, speed_at
from tests.support.fake_hosts import FakeHosts

REPEATS = 5  # per all-reduce
HEAD = ("ranks", "backend", "gradients", "without communication, s", "measured, s", "predicted, s", "error")
# The ranks share this machine's cores, so there is no data on stragglers among them.
HERE = replace(CONSTANTS, step_variation=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The training of the ranks, with the number of steps of each kind."""

    network: str
    batch: int
    crop: int
    steps: int

    def setup(self, *, hosts: int, workers: int, backend: str, **more: object) -> Setup:
        """Return the setup of ranks with one thread each, which also moves their messages."""
        recipe = Recipe(model=ModelSection(name=self.network), data=DataSection(crop=self.crop))
        plain = Setup(
            layers=layers_of(recipe.model, recipe.data),
            hosts=hosts,
            workers=workers,
            threads=1,
            comm_cores=0,
            loader_cores=0,
            local_batch=self.batch,
            optimizer_passes=0,
            bucket_mib=DEFAULT_BUCKETS,
            backend=backend,
        )
        return replace(plain, **more)  # type: ignore[arg-type]

    def predicted(self, setup: Setup, alone_s: float, images: int, copy_s: float) -> float:
        """Return the seconds of a setup's step, given that a rank without communication takes `alone_s` for its images
        and `copy_s` to copy REDUCED bytes."""
        memory = 2 * REDUCED / copy_s
        single = replace(setup, hosts=1, workers=1, link=None, compression="none", local_batch=images)
        reference = Reference(
            setup=single, images_per_s=images / alone_s, cores=1, host_bytes_per_s=memory, source="measured"
        )
        speed = speed_at(core_flops_of(reference, HERE), machine=reference)
        return seconds_at(setup, HERE)(replace(speed, host_bytes_per_s=memory * setup.workers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rates", nargs="*", default=["1gbit", "100mbit"])
    parser.add_argument("--backends", nargs="+", default=["gloo", "ccl"])
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--crop", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    work = Work(
        network=options.network,
        batch=options.batch,
        crop=options.crop,
        steps=options.steps,
    )
    rows = []
    with benchmark_hosts(1) as hosts:
        rows.append(one_worker(hosts, work))
        rows += cases(hosts, work, (0, 0), None, options.backends, {})
    for rate in options.rates:
        for count in options.hosts:
            with benchmark_hosts(count) as hosts:
                moved = {backend: move_bytes_per_s(hosts, backend, range(count)) for backend in options.backends}
                for name in hosts.names:
                    hosts.slow_down(name, rate)
                rows += cases(hosts, work, range(count), rate, options.backends, moved)
    print(f"{work.network}, {work.batch} images of {work.crop} x {work.crop} a rank, medians of {work.steps} steps\n")
    print(markdown_table([HEAD, *rows]))


def one_worker(hosts: FakeHosts, work: Work) -> tuple[str, ...]:
    """Return the row of a single rank: a step, predicted from one with half of the images."""
    half = work.batch // 2
    program = ("gloo", "alone", str(work.steps), work.network, str(work.crop), str(half), str(work.batch))
    small, whole, copied = (timed["seconds"] for timed in lines_of_rank_0(hosts, program, (0,)))
    setup = work.setup(hosts=1, workers=1, backend="gloo")
    return row("1", "", "", small, whole, work.predicted(setup, small, half, copied))


def cases(
    hosts: FakeHosts,
    work: Work,
    places: Sequence[int],
    rate: str | None,
    backends: Sequence[str],
    moved: dict[str, float],
) -> list[tuple[str, ...]]:
    """Return the rows of ranks on these hosts, by backend and compression. `moved` is a rank's bytes/s in an
    all-reduce; it is measured between the steps if missing, which a slow link does not allow."""
    count, rows = len(places), []
    used = len(set(places))
    link = None if rate is None else link_of("ethernet", gbit=bits_per_s(rate) / 1e9)
    for backend in backends:
        for compression in ("none", "bf16"):
            program = (backend, "ddp", str(work.steps), work.network, str(work.batch), str(work.crop), compression)
            (timed,) = lines_of_rank_0(hosts, program, places)
            setup = work.setup(
                hosts=used,
                workers=count // used,
                backend=backend,
                compression=compression,
                link=link,
                move_bytes_per_s=moved.get(backend) or ring_bytes(count) / timed["all_reduce"],
            )
            where = f"{count} on one host" if rate is None else f"{count} hosts, {rate}"
            gradients = "bfloat16" if compression == "bf16" else "float32"
            predicted = work.predicted(setup, timed["no_sync"], work.batch, timed["copy"])
            rows.append(row(where, backend, gradients, timed["no_sync"], timed["step"], predicted))
    return rows


def row(where: str, backend: str, gradients: str, alone: float, measured: float, predicted: float) -> tuple[str, ...]:
    error = f"{100 * (predicted / measured - 1):+.0f} %"
    cells = (where, backend, gradients, f"{alone:.3f}", f"{measured:.3f}", f"{predicted:.3f}", error)
    print(*cells, file=sys.stderr)
    return cells


def ring_bytes(ranks: int) -> float:
    """Return the bytes that a rank sends, and receives and adds, in a ring all-reduce of REDUCED bytes."""
    return 2 * (ranks - 1) / ranks * REDUCED


def move_bytes_per_s(hosts: FakeHosts, backend: str, places: Sequence[int]) -> float:
    """Return the bytes/s that each of these ranks moves in an all-reduce."""
    (timed,) = lines_of_rank_0(hosts, (backend, "allreduce", str(REPEATS), str(REDUCED)), places)
    return ring_bytes(len(places)) / timed["seconds"]


if __name__ == "__main__":
    main()
