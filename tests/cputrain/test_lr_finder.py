"""cputrain find-lr: the arithmetic on curves with a known answer, and a test of a recipe."""

import json
import math
from pathlib import Path

import pytest

from cputrain.cli import main
from cputrain.studies.lr_finder import SMOOTHING, RangeTest, lr_of_step, range_test_svg, suggest
from tests.support.forked import in_fork
from tests.support.images import write_images

LRS = tuple(lr_of_step(step, 101, 1e-5, 10) for step in range(101))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def curve(rate: float) -> float:
    """A loss that falls around 0.01 and grows from 1 on."""
    return 2.0 - 1.5 * sigmoid(2 * math.log(rate / 0.01)) + 3 * max(0.0, math.log10(rate)) ** 2


def test_rates_grow_by_equal_factors() -> None:
    assert LRS[0] == 1e-5 and LRS[-1] == pytest.approx(10)
    assert LRS[51] / LRS[50] == pytest.approx(LRS[1] / LRS[0])


def test_the_smoothed_loss_is_the_weighted_mean_of_the_losses_so_far() -> None:
    losses = (3.0, 1.0, 2.0)
    smoothed = RangeTest(lrs=LRS[:3], losses=losses).smoothed
    weights = [SMOOTHING**2, SMOOTHING, 1.0]
    assert smoothed[0] == pytest.approx(3.0)
    assert smoothed[2] == pytest.approx(sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights))
    assert RangeTest(lrs=LRS[:5], losses=(2.0,) * 5).smoothed == pytest.approx((2.0,) * 5)


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    test = RangeTest(lrs=LRS, losses=tuple(map(curve, LRS)))
    found = suggest(test)
    assert found.lr is not None and 0.01 <= found.lr <= 0.05, "the average lags by some steps"
    assert "falls fastest here; its minimum is at" in found.why
    assert "suggested: " in (svg := range_test_svg("t", test, found)) and svg.startswith("<svg")


def test_a_loss_that_only_grows_or_hardly_falls_gives_no_rate() -> None:
    growing = RangeTest(lrs=LRS, losses=tuple(1 + 10 * lr for lr in LRS))
    assert suggest(growing).lr is None and "start with a lower rate" in suggest(growing).why and growing.diverged
    flat = RangeTest(lrs=LRS, losses=tuple(2 - 1e-4 * step for step in range(101)))
    assert suggest(flat).lr is None and "raise --to" in suggest(flat).why
    broken = RangeTest(lrs=LRS[:41], losses=(*map(curve, LRS[:40]), math.nan))
    assert broken.diverged and suggest(broken).lr is None
    broken = RangeTest(lrs=LRS[:61], losses=(*map(curve, LRS[:60]), math.nan))
    assert broken.diverged and suggest(broken).lr is not None


def test_bad_ranges_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-lr", "demo-digits", "--from", "1", "--to", "0.1"]) == 2
    assert "--from 1 --to 0.1: the first rate must be lower" in capsys.readouterr().err
    assert main(["find-lr", "demo-digits", "--picture", "x.png"]) == 2


@pytest.mark.long
def test_a_recipe_s_rate_is_found_and_its_run_left_alone(tmp_path: Path) -> None:
    write_images(tmp_path / "images", train=24)
    settings = ("data.path=images", "model.name=lenet", "model.zero_gamma=none", "data.crop=16", "batch.local=8")
    options = ("--steps", "40", "--to", "100", "--picture", "lr.svg", "--format", "json")
    done = in_fork("find-lr", "imagefolder", *settings, "plan.ppn=1", "output=run", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["global_batch"] == 8 and found["steps"][0]["rate"] == 1e-5 and len(found["steps"]) <= 40
    assert found["steps"][0]["loss"] == pytest.approx(math.log(3), abs=0.3)
    assert found["rate"] is None or 1e-5 < found["rate"] < 100
    assert (tmp_path / "lr.svg").read_text().startswith("<svg") and not (tmp_path / "run").exists()
