"""The peer: an ordinary PyTorch training of ResNet-50, as people write it; prints the median seconds of a step.

torchvision's network in its default layout, PIL images through torchvision's transforms, one DataLoader worker, DDP
over gloo when torchrun starts it.
"""

import argparse
import os
import statistics
import time
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group: see cputrain/comm/group.py
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from cputrain.models.vision import import_torchvision


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    models = import_torchvision("models")
    from torchvision import datasets, transforms  # importable once the models are

    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    dataset = datasets.ImageFolder(
        f"{options.data}/train",
        transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        ),
    )
    sampler = DistributedSampler(dataset) if distributed else None
    loader = DataLoader(dataset, options.batch, shuffle=sampler is None, sampler=sampler, num_workers=1, drop_last=True)
    model: nn.Module = models.resnet50(num_classes=len(dataset.classes))
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5)
    loss_function = nn.CrossEntropyLoss()
    seconds = []
    started = time.perf_counter()
    for images, labels in islice(loader, options.steps):
        optimizer.zero_grad()
        loss_function(model(images), labels).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
    if not distributed or dist.get_rank() == 0:
        print(statistics.median(seconds[1:]))  # the first step allocates
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
