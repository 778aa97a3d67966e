"""Peers of train_throughput.py: ordinary PyTorch trainings of ResNet-50; prints the median seconds of a step.

torchvision's network, PIL images through torchvision's transforms, one DataLoader worker, and DDP over gloo when
started by torchrun. `--expert` adds what an expert would: channels-last, gradients as views of DDP's buckets, one
thread per core of the process, and tcmalloc, which the caller preloads. `--ipex` adds the same and passes network and
optimizer through Intel's extension, `--optimize` adds the line of cputrain.optimize, `--bf16` computes under autocast.
"""

import argparse
import importlib
import os
import statistics
import time
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group: see cputrain/comm/group.py
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import cputrain
from cputrain.models.vision import import_torchvision


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    for option in ("--expert", "--ipex", "--optimize", "--bf16"):
        parser.add_argument(option, action="store_true")
    options = parser.parse_args()
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    knows = options.expert or options.ipex
    if knows:
        processes = dist.get_world_size() if distributed else 1
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    loader = images_of(options.data, options.batch, distributed=distributed)
    model, optimizer = network_of(len(loader.dataset.classes), options, distributed=distributed)  # type: ignore[attr-defined]
    loss_function = nn.CrossEntropyLoss()
    seconds = []
    started = time.perf_counter()
    memory_format = torch.channels_last if knows else torch.contiguous_format
    for batch, labels in islice(loader, options.steps):
        images = batch.contiguous(memory_format=memory_format)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            loss = loss_function(model(images), labels)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
    if not distributed or dist.get_rank() == 0:
        print(statistics.median(seconds[1:]))  # the first step allocates
    if distributed:
        dist.destroy_process_group()


def images_of(data: str, batch: int, *, distributed: bool) -> "DataLoader[Any]":
    import_torchvision("models")
    from torchvision import datasets, transforms  # importable once the models are

    dataset = datasets.ImageFolder(
        f"{data}/train",
        transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        ),
    )
    sampler: Any = DistributedSampler(dataset) if distributed else None
    return DataLoader(dataset, batch, shuffle=sampler is None, sampler=sampler, num_workers=1, drop_last=True)


def network_of(classes: int, options: argparse.Namespace, *, distributed: bool) -> tuple[nn.Module, Any]:
    model: nn.Module = import_torchvision("models").resnet50(num_classes=classes)
    knows = options.expert or options.ipex
    if knows:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5)
    if options.ipex:
        ipex: Any = importlib.import_module("intel_extension_for_pytorch")
        dtype = torch.bfloat16 if options.bf16 else torch.float32
        model, optimizer = ipex.optimize(model.train(), optimizer=optimizer, dtype=dtype)
    if options.optimize:
        dtype = torch.bfloat16 if options.bf16 else torch.float32
        images = torch.zeros(options.batch, 3, 224, 224)
        model, optimizer = cputrain.optimize(model, optimizer, dtype=dtype, sample_input=images)
    if distributed:
        model = DistributedDataParallel(model, gradient_as_bucket_view=knows)
    return model, optimizer


if __name__ == "__main__":
    main()
