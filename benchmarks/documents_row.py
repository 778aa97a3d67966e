"""A row of docs/documents.md: an experiment and its commands; settings that several rows share."""

from dataclasses import dataclass

INTEL = "SURFsara and Intel: ResNet-50 on 256 hosts of 2 x 24-core Xeon"
YOU = "You et al.: LARS, ImageNet in minutes"
GIST = "GIST: conversion, batch size, weight decay, optimizers"
WORKERS = "Multi-worker lab: fruits and Caltech-256"
LAB3 = "Lab 3: optimizers on a line and on MNIST"

PHOTOS = "data.path=data/photos data.crop=32"
SMALL_8K = f"cputrain train resnet50-8k {PHOTOS} batch.local=8 schedule.warmup_epochs=1 schedule.start_rate=0.0"
NO_WEIGHTS = f"{PHOTOS} model.weights=null data.resize=32"
TOP1 = r"^(top-1) +([\d.]+ %)"
TRAINED = (r"total steps +(\S+):", TOP1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An experiment: `full` are its command lines at full size, `small` those for two cores, run in their order in one
    folder with data/photos, data/mnist and data/mnist-3-splits; `shows` are patterns of the small ones' output, whose
    groups are what is shown; `status` is the exit status of each small one."""

    document: str
    experiment: str
    full: tuple[str, ...]
    small: tuple[str, ...]
    shows: tuple[str, ...]
    status: int = 0


def same(document: str, experiment: str, command: str, *shows: str) -> Row:
    """A row whose command is as quick here as anywhere."""
    return Row(document=document, experiment=experiment, full=(command,), small=(command,), shows=shows)
