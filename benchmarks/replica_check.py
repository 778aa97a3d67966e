"""Cost of comparing the ranks' weights: ResNet-50 with momentum, as a share of its steps.

    python -m benchmarks.replica_check [--rounds 9] [--batch 16]
    cputrain launch --ppn 2 -- python -m benchmarks.replica_check

CPU seconds are of one thread alone; wall seconds are of all threads of the process, with the exchange between ranks.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn import functional

from cputrain.checksums import bit_sum
from cputrain.models.networks import build_model
from cputrain.optim import build_optimizer, set_lr_and_decay
from cputrain.recipe.schema import Recipe
from cputrain.training.engine import choose_engine, prepare_model
from cputrain.training.watchers.replicas import ReplicaCheck, replica_tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=16, help="images per step")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    measure(options.rounds, options.batch)
    dist.barrier()
    dist.destroy_process_group()


def measure(rounds: int, batch: int) -> None:
    """Alternate steps and comparisons; print their medians."""
    recipe, world = Recipe(), dist.get_world_size()
    torch.manual_seed(1)
    network = build_model(recipe.model, 1000, 224)
    prepare_model(network, choose_engine("auto", "float32", os.environ), "float32")
    optimizer = build_optimizer(network, recipe.optim)
    set_lr_and_decay(optimizer, 0.0, 0.0)  # keeps the weights equal on all ranks without an all-reduce
    images = torch.randn(batch, 3, 224, 224).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,))
    check = ReplicaCheck(
        network=network,
        optimizer=optimizer,
        every=1,
        warn=lambda _step, _message: None,
        wait=lambda: None,
        same_after=0,
    )
    check.hosts = ("",) * max(world, 2)  # a single rank would skip the comparison
    steps, comparisons, cpu = [], [], []
    for number in range(1, rounds + 1):
        begun = time.perf_counter()
        functional.cross_entropy(network(images), labels).backward()
        for weight in network.parameters():
            weight.grad.zero_()
        optimizer.step()
        steps.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        check.before_save(number)
        comparisons.append(time.perf_counter() - begun)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(rounds):
        begun = time.thread_time()
        bit_sum(replica_tensors(network, optimizer).values())
        cpu.append(time.thread_time() - begun)
    if dist.get_rank() == 0:
        step, one, every = statistics.median(steps), statistics.median(comparisons), recipe.compare_weights_every_steps
        assert every is not None
        megabytes = sum(tensor.nbytes for tensor in replica_tensors(network, optimizer).values()) / 1e6
        print(f"{world} x {threads} threads, {megabytes:.0f} MB of weights and momentum, {batch} images a step")
        print(
            f"a step {step:.3f} s, a comparison {one * 1e3:.1f} ms ({min(cpu) * 1e3:.1f} ms of CPU time on one thread)"
        )
        print(f"every {every} steps: {one / every * 1e3:.3f} ms a step, {100 * one / every / step:.4f} % of it")


if __name__ == "__main__":
    main()
