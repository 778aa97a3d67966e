"""A training that is stopped and resumed is, bit for bit, the one that was left alone: for every shipped network."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cputrain.files import recipe_names
from cputrain.kernels.convolution import supports_winograd
from cputrain.manifest import read_manifest
from cputrain.models.networks import build_model
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import ModelSection
from cputrain.runs.events import read_events
from tests.cputrain.test_training import CROPS
from tests.support.checkpoints import content, differing, newest
from tests.support.trainings import PPN, trained

SMALL = (
    *(
        "data.images_per_epoch=null",
        "data.last_batch=drop",
        "epochs=2",
        "schedule.warmup_epochs=1",
        "phases=[]",
        "evaluate.every_epochs=1",
    ),
    *("comm.backend=gloo", "comm.bucket_mib=0.5", "checkpoint.every_epochs=1"),
)
LARS = "optim.name=lars optim.trust_coefficient=0.01 schedule.name=poly schedule.peak_rate=2.0"
MIXED = "data.augment.mixup=0.3 data.augment.cutmix=1.0 data.augment.randaugment=2"
SMALL_RESNET = "model.name=resnet18 model.winograd=auto engine=native data.crop=64 data.resize=64"
GROWING = "phases=[{from_epoch:\u00a01,crop:\u00a040,weight_decay:\u00a00.01}]"
# Recipe -> the step after whose log the signal comes (1: an epoch's last step follows), and further settings.
CASES: dict[str, tuple[int, str]] = {
    "alexnet-bn-32k": (2, ""),
    "caltech256-finetune-frozen": (1, ""),
    "gist-sweep": (1, f"{LARS} ema_decay=0.5 model.bn_stats=sync {GROWING}"),
    "large-batch-mnist": (
        2,
        "comm.compression=bf16 ema_decay=0.5 optim.name=lamb optim.nesterov=false schedule.peak_rate=0.01",
    ),
    "linear-regression": (2, "batch.global=50"),
    "mnist-adam": (1, "precision=bf16"),
    "mnist-workers": (2, f"batch.local=3 batch.accumulation=2 label_smoothing=0.1 {MIXED}"),
    "resnet50-spr-16node-bf16": (2, "comm.compression=bf16 schedule.peak_rate=0.5"),
}

FEW = ("large-batch-mnist", "mnist-workers")  # trained by the same processes
OTHERS = ("linear-regression", "mnist-adam")
LIGHT = (*FEW, *OTHERS)


def reduced(name: str, further: str, *more: str) -> tuple[str, ...]:
    recipe = load_recipe(name)
    if recipe.data.generated:
        own: tuple[str, ...] = ()
    else:
        crop = CROPS.get(recipe.model.name, 32)
        own = ("data.path=images", f"data.crop={crop}", f"data.resize={crop}", "batch.local=6")
    weights = ("model.weights=weights.pt",) if recipe.model.weights else ()
    return (name, *own, *SMALL, *weights, *(word.replace("\u00a0", " ") for word in further.split(" ") if word), *more)


def events(run: Path, kind: str, *fields: str) -> list[tuple[Any, ...]]:
    """Fields of a run's last events of this kind at each step."""
    last = {event["step"]: event for event in read_events(run) if event["event"] == kind}
    return [(step, *(last[step][field] for field in fields)) for step in sorted(last)]


def check_consistency(whole: Path, parts: Path) -> None:
    assert read_events(parts)[-1]["status"] == "done" and read_events(parts)[-1]["starts"] == 2, parts
    steps = events(whole, "step", "loss", "rate")
    assert events(parts, "step", "loss", "rate") == steps and len(steps) == 4, parts
    fields = ("train_loss", "train_top1", "val_loss", "val_top1", "val_top5")
    assert events(parts, "epoch", *fields) == events(whole, "epoch", *fields), parts
    assert events(parts, "checkpoint", "best")[-1] == events(whole, "checkpoint", "best")[-1], parts
    assert differing(newest(whole), newest(parts)) == [], parts


def thrice(name: str, signal: int, further: str, *more: str) -> list[tuple[str, ...]]:
    """A training left alone, and one stopped and resumed."""
    settings = reduced(name, further, *more)
    return [
        (*settings, f"output={name}/whole"),
        (*settings, f"output={name}/parts", f"--signal={signal}"),
        (*settings, f"output={name}/parts", "--resume"),
    ]


def test_the_networks_are_those_of_the_recipes() -> None:
    def networks(names: Any) -> set[str]:
        return {load_recipe(name).model.name for name in names}

    assert networks(CASES) == networks(recipe_names())


ALONE = [(name,) for name in CASES if name not in LIGHT]
OFTEN = (("caltech256-finetune-frozen",),)  # frozen weights
RUNS = [
    pytest.param(names, backend, marks=marks, id=f"{'+'.join(names)}-{backend}")
    for names, backend, marks in (
        (FEW, "gloo", []),
        (OTHERS, "gloo", [pytest.mark.long, pytest.mark.nightly]),  # Adam: also resumed by one worker, below
        (LIGHT, "ccl", [pytest.mark.long]),
        *((names, "ccl", [pytest.mark.long, *([] if names in OFTEN else [pytest.mark.nightly])]) for names in ALONE),
    )
]


@pytest.mark.parametrize(("names", "backend"), RUNS)
def test_a_resumed_training_is_the_unbroken_one_bit_for_bit(place: Path, names: tuple[str, ...], backend: str) -> None:
    """Losses, accuracies, weights, optimizer, moving average, and each rank's statistics and random numbers."""
    torch.save(build_model(ModelSection(), 3, 32).state_dict(), place / "weights.pt")
    (place / "out").mkdir()
    over = f"comm.backend={backend}"
    result = trained(place, PPN, *(each for name in names for each in thrice(name, *CASES[name], over)))
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout.count("stopped by a signal") == len(names)
    for name in names:
        check_consistency(place / name / "whole", place / name / "parts")
        starts = [event for event in read_events(place / name / "parts") if event["event"] == "start"]
        assert [start["backend"] for start in starts] == [backend] * 2


@pytest.mark.long
def test_layers_by_winograd_are_those_of_the_first_start(place: Path) -> None:
    """Which are faster is measured once; a checkpoint names them."""
    whole, first, second = thrice("imagefolder", 2, SMALL_RESNET)
    result = trained(place, PPN, whole, first, second)
    assert result.returncode == 0, result.stderr + result.stdout
    check_consistency(place / "imagefolder/whole", place / "imagefolder/parts")
    layers = read_manifest(newest(place / "imagefolder/parts")).training.winograd
    network = build_model(ModelSection(name="resnet18"), 3, 64)
    assert layers and set(layers) <= {name for name, layer in network.named_modules() if supports_winograd(layer)}
    environment = json.loads((place / "imagefolder/whole/environment.json").read_text(encoding="utf-8"))
    assert environment["winograd"] == list(layers)
    assert f"convolutions by Winograd's algorithm: {len(layers)} layers" in result.stderr + result.stdout


@pytest.mark.long
def test_three_ranks_resume_with_the_same_buckets(place: Path) -> None:
    """Sums of three terms depend on their order, which depends on DDP's buckets. With dropout."""
    further = "batch.local=4 comm.bucket_mib=0.05 plan.oversubscribe=true"
    result = trained(place, 3, *thrice("mnist-workers", 2, further))
    assert result.returncode == 0, result.stderr + result.stdout
    check_consistency(place / "mnist-workers/whole", place / "mnist-workers/parts")


def test_a_training_resumed_by_one_worker_is_that_of_two_but_for_rounding(place: Path) -> None:
    """2 x 6 images a step, then 1 x 12: the same images and rates at each step, and sums in another order."""
    settings = reduced("mnist-adam", "")
    whole, parts = (f"output=mnist-adam/{name}" for name in ("whole", "parts"))
    begun = trained(place, 2, (*settings, whole), (*settings, parts, "--signal=1"))
    assert begun.returncode == 0, begun.stderr + begun.stdout
    ended = trained(place, 1, (*settings, parts, "batch.local=12", "plan.ppn=1", "--resume"))
    assert ended.returncode == 0, ended.stderr + ended.stdout
    runs = place / "mnist-adam/whole", place / "mnist-adam/parts"
    steps = [events(run, "step", "rate", "epoch") for run in runs]
    assert steps[0] == steps[1] and len(steps[0]) == 4
    weights = [content(newest(run))["model"] for run in runs]
    differences = [float((value - weights[1][name]).abs().max()) for name, value in weights[0].items()]
    assert 0 < max(differences) < 1e-5
