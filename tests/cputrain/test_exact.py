"""Whatever the number of ranks: the same weights, the same accuracy."""

import re
from pathlib import Path

import pytest
import torch

from cputrain.runs.events import read_events
from tests.support.by_hand import plan_of, ranks_by_hand
from tests.support.checkpoints import content, newest
from tests.support.commands import PPN, here, needs_two_cores
from tests.support.forked import in_fork
from tests.support.images import write_images, write_mnist
from tests.support.trainings import trained

IMAGES = 10_007  # a prime: no number of ranks divides it


COMMON = (
    "imagefolder",
    "data.path=images",
    "model.name=resnet18",
    "model.bn_stats=running",
    "data.crop=16",
    "comm.backend=gloo",
    "epochs=2",
    "schedule.warmup_epochs=0",
    "schedule.peak_rate=0.01",
)


def weights_of(place: Path, ppn: int, **runs: tuple[str, ...]) -> list[dict[str, torch.Tensor]]:
    """The final weights of trainings of four steps by so many ranks, each with settings of its own."""
    made = trained(place, ppn, *((*COMMON, *settings, f"output={name}") for name, settings in runs.items()))
    assert made.returncode == 0, made.stderr
    return [content(newest(place / name))["model"] for name in runs]


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.mark.long
@pytest.mark.nightly
@needs_two_cores
def test_one_rank_and_two_train_the_same_weights(tmp_path: Path) -> None:
    """Batch 64 as one pass of 64, as two passes of 32, and as a pass of 32 on each of two ranks."""
    write_images(tmp_path / "images", train=44, val=2)
    wide, half, all_ = "precision=float64", "batch.local=32", "batch.local=64"
    ranks, ranks_32 = weights_of(tmp_path, 2, a=(half, wide), b=(half,))
    runs = {"c": (half, "batch.accumulation=2", wide), "d": (all_, wide), "e": (all_,)}
    passes, whole, whole_32 = weights_of(tmp_path, 1, **runs)
    assert all(torch.equal(ranks[name], passes[name]) for name in ranks), "the sums have the same terms in both"
    assert 0 < furthest(ranks, whole) < 1e-12, "one pass adds in another order"
    assert all(torch.equal(ranks[name].float(), whole[name].float()) for name in ranks)
    assert furthest(ranks_32, whole_32) < 1e-5


@pytest.mark.long
@pytest.mark.nightly
def test_a_fixed_global_batch_is_the_same_training_on_any_number_of_ranks(tmp_path: Path) -> None:
    """64 images a step in passes of at most 16: 4 passes on one rank, 2 on two, 2 of 10 or 11 images on three."""
    write_images(tmp_path / "images", train=44, val=2)
    settings = (*COMMON, "batch.global=64", "batch.local=16", "precision=float64", "plan.ppn=1", "plan.threads=1")
    plan = plan_of(tmp_path, *settings)
    worker = plan["workers"][0]
    losses, weights = [], []
    for count in (1, 2, 3):
        plan["workers"] = [{**worker, "local_rank": i} for i in range(count)]
        ranks = ranks_by_hand(tmp_path, plan, "train", *settings, f"output=run{count}")
        assert [rank.returncode for rank in ranks] == [0] * count, ranks[0].stderr
        epochs = [event for event in read_events(tmp_path / f"run{count}") if event["event"] == "epoch"]
        losses.append([event[name] for event in epochs for name in ("train_loss", "val_loss")])
        weights.append(content(newest(tmp_path / f"run{count}"))["model"])
    assert len(losses[0]) == 4
    for other in (1, 2):
        assert losses[other] == pytest.approx(losses[0], rel=1e-5)  # evaluated in float32
        assert furthest(weights[0], weights[other]) < 1e-12


@pytest.mark.long
@pytest.mark.nightly
def test_every_image_is_evaluated_once_by_any_number_of_ranks(tmp_path: Path) -> None:
    write_mnist(tmp_path / "raw", train=600, val=IMAGES, zipped=False)
    assert here("prepare", "mnist", "raw", "mnist", cwd=tmp_path).returncode == 0
    recipe = ("mnist-sgd", "data.path=mnist")
    trained = in_fork("train", *recipe, "epochs=1", "plan.ppn=1", "output=run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    plan = plan_of(tmp_path, *recipe, f"plan.ppn={PPN}")
    workers = plan["workers"]
    expected = set()
    for count in (1, 3, 5):
        plan["workers"] = [{**workers[i % len(workers)], "local_rank": i} for i in range(count)]
        ranks = ranks_by_hand(tmp_path, plan, "eval", *recipe, "--checkpoint", "run/checkpoints/best")
        assert [rank.returncode for rank in ranks] == [0] * count, ranks[0].stderr
        assert "10,007 images, each once" in ranks[0].stdout
        expected.add(re.search(r"top-1 .*", ranks[0].stdout)[0])
    assert len(expected) == 1 and "top-1 0.00" not in expected.pop()
