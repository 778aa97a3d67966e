"""The optimizer after the backward pass, or overlapped with it by updating each bucket once its all-reduce is done.

    python -m benchmarks.optimizer_beside_backward [--side 96] [--batch 8] [--rounds 15] [--backends gloo ccl]

ResNet-50 with native kernels on 2 ranks with one core each; momentum in torch's fused kernel, either once over all
weights or per bucket in the future of its all-reduce, on the backend's thread. Both networks take turns in the same
ranks. Undoing an update whose step has NaN or Inf on some rank, which overlapping would also need, is not timed, so the
ratio is an upper bound of the gain. Needs two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

AFTER, BESIDE = "after", "beside"
MOMENTUM = {
    **{"weight_decay": 5e-5, "momentum": 0.9, "lr": 0.01, "dampening": 0.0},
    **{"nesterov": False, "maximize": False, "is_first_step": False},
}
WARM_UP, BUCKET_MIB = 3, 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backends", nargs="+", default=["gloo", "ccl"])
    parser.add_argument("--rank-of", metavar="BACKEND", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        be_rank(options.rank_of, options)
        return
    print(f"| {options.batch} images of {options.side} x {options.side} | after, ms | beside, ms | gain (quartiles) |")
    print("|---|---|---|---|")
    for backend in options.backends:
        taken = measured(backend, options)
        gains = sorted(a / b for a, b in zip(taken[AFTER], taken[BESIDE], strict=True))
        low, high = gains[len(gains) // 4], gains[-1 - len(gains) // 4]
        after, beside = (1e3 * median(taken[name]) for name in (AFTER, BESIDE))
        print(f"| {backend} | {after:.1f} | {beside:.1f} | {median(gains):.3f} ({low:.3f}-{high:.3f}) |")
        print(f"| {backend}, the optimizer alone | {1e3 * median(taken['optimizer']):.1f} | | |")


def measured(backend: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each step on rank 0, by name."""
    sizes = ("--side", str(options.side), "--batch", str(options.batch), "--rounds", str(options.rounds))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "launch"
        rank = (sys.executable, "-m", "benchmarks.optimizer_beside_backward", "--rank-of", backend, *sizes)
        argv = [sys.executable, "-m", "cputrain", "launch", "--ppn", "2", "--output", str(folder), "--", *rank]
        result = subprocess.run(
            argv,
            check=False,
            capture_output=True,
            encoding="utf-8",
        )
        if result.returncode:
            sys.exit(f"{argv} failed:\n{result.stderr}")
        found: dict[str, list[float]] = json.loads(
            (folder / "logs/rank-0.log").read_text(encoding="utf-8").splitlines()[-1]
        )
    return found


def be_rank(backend: str, options: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 prints its times."""
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional  # before the group: see cputrain/comm/group.py
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group(backend)
    images = torch.randn(options.batch, 3, options.side, options.side).to(memory_format=torch.channels_last)
    labels = torch.zeros(options.batch, dtype=torch.long)
    networks = {name: ddp_of(options.side, beside=name == BESIDE) for name in (AFTER, BESIDE)}
    taken: dict[str, list[float]] = {AFTER: [], BESIDE: [], "optimizer": []}
    for _ in range(options.rounds + WARM_UP):
        for name, (ddp, update) in networks.items():
            dist.barrier()
            started = time.perf_counter()
            cross_entropy(ddp(images), labels).backward()
            parameters = list(ddp.parameters())
            gradients = [p.grad for p in parameters]
            float(torch.stack(torch._foreach_norm(gradients)).double().norm())
            if name == AFTER:
                before = time.perf_counter()
                update(parameters, gradients)
                taken["optimizer"].append(time.perf_counter() - before)
            for p in parameters:
                p.grad = None
            taken[name].append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        print(json.dumps({name: seconds[WARM_UP:] for name, seconds in taken.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def ddp_of(side: int, *, beside: bool) -> tuple[Any, Callable[[list[Any], list[Any]], None]]:
    """Build ResNet-50 in DDP, whose hook updates a bucket's weights if `beside`, and the function that updates all."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

    from cputrain.models.networks import build_model
    from cputrain.models.settings import ModelSettings
    from cputrain.training.engine import choose_engine, prepare_model

    engine = choose_engine("native", "float32", os.environ)
    network = prepare_model(build_model(ModelSettings(name="resnet50"), 1000, side), engine, "float32")
    ddp = DistributedDataParallel(network, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB)
    velocities = {p: torch.zeros_like(p) for p in network.parameters()}

    @torch.no_grad()
    def update(parameters: list[Any], gradients: list[Any]) -> None:
        torch._fused_sgd_(parameters, gradients, [velocities[p] for p in parameters], **MOMENTUM)

    def hook(_group: object, bucket: GradBucket):  # type: ignore[no-untyped-def]  # DDP checks a hook's annotations
        parameters, gradients = bucket.parameters(), bucket.gradients()

        def done(summed: Any) -> Any:
            if beside:
                update(parameters, gradients)
            return summed.value()[0]

        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(done)

    ddp.register_comm_hook(None, hook)
    return ddp, update


if __name__ == "__main__":
    main()
