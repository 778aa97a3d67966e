"""Whatever the number of ranks: the same weights, the same accuracy."""

import re
from pathlib import Path

import pytest
import torch

from affinity.sysfs import this_machine
from tests.by_hand import plan_of, ranks_by_hand
from tests.conftest import cputrain, write_images, write_mnist

TWO = pytest.mark.skipif(len(this_machine().allowed_cores) < 2, reason="needs two cores")
IMAGES = 10_007  # a prime: no number of ranks divides it


def weights_of(place: Path, *settings: str) -> dict[str, torch.Tensor]:
    name = "-".join(settings).replace("/", "_")
    common = (
        "data.path=images",
        "model.name=resnet18",
        "model.bn_stats=running",
        "data.crop=32",
        "comm.backend=gloo",
        "plan.threads=1",  # a convolution's sums are cut by threads too
        "epochs=2",
        "schedule.warmup_epochs=0",
        "schedule.peak_rate=0.01",
        f"output={name}",
    )
    result = cputrain("train", "imagefolder", *common, *settings, cwd=place)
    assert result.returncode == 0, result.stderr
    path = sorted((place / name / "checkpoints").glob("step-*.pt"))[-1]
    assert path.name == "step-0000004.pt"
    return torch.load(path, weights_only=True)["model"]


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@TWO
def test_one_rank_and_two_come_to_the_same_weights(tmp_path: Path) -> None:
    """Batch 64 as one pass of 64, as two passes of 32, and as a pass of 32 on each of two ranks."""
    write_images(tmp_path / "images", train=44, val=2)
    two_ranks, two_passes = ("plan.ppn=2", "batch.local=32"), ("plan.ppn=1", "batch.local=32", "batch.accumulation=2")
    wide = "precision=float64"
    ranks, passes = weights_of(tmp_path, *two_ranks, wide), weights_of(tmp_path, *two_passes, wide)
    assert all(torch.equal(ranks[name], passes[name]) for name in ranks), "the sums have the same terms in both"
    whole = weights_of(tmp_path, "plan.ppn=1", "batch.local=64", wide)
    assert 0 < furthest(ranks, whole) < 1e-12, "one pass adds in another order"
    assert all(torch.equal(ranks[name].float(), whole[name].float()) for name in ranks)
    narrow = weights_of(tmp_path, *two_ranks), weights_of(tmp_path, "plan.ppn=1", "batch.local=64")
    assert furthest(*narrow) < 1e-5


def test_every_image_is_evaluated_once_by_any_number_of_ranks(tmp_path: Path) -> None:
    write_mnist(tmp_path / "raw", train=600, val=IMAGES, zipped=False)
    assert cputrain("prepare", "mnist", "raw", "mnist", cwd=tmp_path).returncode == 0
    recipe = ("mnist-sgd", "data.path=mnist")
    trained = cputrain("train", *recipe, "epochs=1", "plan.ppn=1", "output=run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    plan = plan_of(tmp_path, *recipe)
    (worker,) = plan["workers"]
    told = set()
    for count in (1, 2, 3, 5):
        plan["workers"] = [{**worker, "local_rank": i} for i in range(count)]
        ranks = ranks_by_hand(tmp_path, plan, "eval", *recipe, "--checkpoint", "run/checkpoints/best.pt")
        assert [rank.returncode for rank in ranks] == [0] * count, ranks[0].stderr
        assert "10,007 images, each once" in ranks[0].stdout
        told.add(re.search(r"top-1 .*", ranks[0].stdout)[0])
    assert len(told) == 1 and "top-1 0.00" not in told.pop()
