"""Data of which too much cannot be read: refused before the first step, or ends the training or evaluation."""

import re
from pathlib import Path

import numpy as np
import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.rank import Rank
from cputrain.data.formats.dataset import ImageFiles, allowed_damage, summarize_corrupt, too_many_corrupt_error
from cputrain.data.formats.folder import image_files
from cputrain.data.formats.open import open_dataset
from cputrain.data.pixels import center_crop, decode_by_pillow
from cputrain.data.prepare import ImageError, inspect
from cputrain.runs.events import read_events
from cputrain.training import corrupt_images
from cputrain.training.corrupt_images import SAMPLE_IMAGES, CorruptImageCheck, check_sample
from cputrain.training.step import Accuracy, EpochMetrics
from tests.support.commands import cputrain, optional
from tests.support.forked import in_fork
from tests.support.images import jpeg, write_files, write_images
from tests.support.trainings import SMALL

pyarrow = optional("pyarrow", "parquet")
parquet = optional("pyarrow.parquet", "parquet")
TRAIN = ("train", "imagefolder", *SMALL, "engine=eager", "comm.backend=gloo")  # what starts soonest
ONE = ("plan.ppn=1", "plan.threads=1")
ALONE = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="torchrun")


def spoil(images: list[str], keep: int = 0) -> None:
    """Make files of no image, but of the first `keep`."""
    for path in images[keep:]:
        Path(path).write_bytes(b"no image, " + Path(path).name.encode())


def untried(folder: Path, count: int) -> list[str]:
    """Images of a split that are not among those tried before the first step."""
    images = image_files([folder])
    tried = set(np.linspace(0, len(images) - 1, SAMPLE_IMAGES).astype(int).tolist())
    return [path for i, path in enumerate(images) if i not in tried][:count]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoints/step-*"))


def test_a_share_allows_one_image_unless_it_is_0() -> None:
    assert [allowed_damage(n, 0.01) for n in (1, 99, 100, 199, 200, 1_281_167)] == [1, 1, 1, 1, 2, 12_811]
    assert allowed_damage(1000, 0.0) == 0 and allowed_damage(10, 1.0) == 10


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "the file is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n",
            "a git-LFS pointer, .* git lfs pull",
        ),
        (b"\n<!DOCTYPE html>\n<html>", "a web page, .*: download it again"),
        (b"no image", "cannot identify image file"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "the file is HEIC, which is not supported; convert it to JPEG or PNG"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "the file is JPEG XL"),
        (b"\xff\x0a\x7f", "the file is JPEG XL"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "the file is SVG"),
        (bytes(128) + b"DICM", "the file is DICOM"),
    ],
)
def test_what_stands_in_the_place_of_an_image_is_said(data: bytes, told: str) -> None:
    (problem,) = decode_by_pillow([data], center_crop(8, 8), np.empty((1, 8, 8, 3), np.uint8))
    assert problem and re.match(told, problem)
    with pytest.raises(ImageError, match=f"^{told}"):
        inspect(data)


def test_damaged_images_are_counted_by_cause() -> None:
    lines = [f"a/{i}.jpg: image file is truncated ({i} bytes not processed)" for i in range(1000, 1005)]
    lines += ["b.jpg: cannot identify image file", "c.jpg: No such file or directory"]
    assert summarize_corrupt(lines) == (
        "image file is truncated (1000 bytes not processed) (5, first a/1000.jpg), cannot identify image file (b.jpg), "
        "No such file or directory (c.jpg)"
    )
    assert summarize_corrupt([*lines, "d.jpg: x", "e.jpg: y"]).endswith(", 2 other causes")
    told = str(too_many_corrupt_error("val", lines, 32, 50_000, 0.01))
    assert told.startswith("val split has 7 damaged images among 32 of 50,000: image file is truncated")
    assert told.endswith("data.max_damaged=0.01 allows 500; repair or remove them, or raise it")


@pytest.mark.parametrize(
    ("damaged", "images", "share", "refused"),
    [
        (16, 16, 0.01, True),
        (1, 16, 0.01, False),
        (2, 16, 0.01, True),
        (2, 16, 0.2, False),
        (16, 16, 1.0, True),
        (2, 300, 0.01, False),
        (4, 300, 0.01, True),
        (8, 300, 0.2, False),
        (32, 300, 1.0, True),
        (1, 300, 0.0, True),
    ],
)
def test_a_sample_refuses_what_cannot_be_by_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: int, images: int, share: float, refused: bool
) -> None:
    """`damaged` of the images that are tried, of a split of so many; four of 32 at 1 % are one case in 3,000."""
    folder = write_images(tmp_path / "images", classes=1, train=min(images, SAMPLE_IMAGES), val=0, size=16)
    good = image_files([folder])
    tried = np.linspace(0, images - 1, SAMPLE_IMAGES).astype(int) if images > SAMPLE_IMAGES else np.arange(images)
    names = [good[0]] * images
    for number, path in zip(tried, good, strict=True):
        names[number] = path
    spoil(good[-damaged:])
    monkeypatch.setattr(corrupt_images, "all_gather", lambda value: [value])
    split = {"train": ImageFiles(names, [0] * images)}
    if not refused:
        check_sample(split, decode_by_pillow, 16, share, ALONE)
        return
    told = rf"train split has {damaged} damaged image.* among {len(tried)} of {images}: "
    with pytest.raises(InputError, match=told):
        check_sample(split, decode_by_pillow, 16, share, ALONE)


def test_a_step_may_see_nothing_but_damage_and_an_epoch_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrupt_images, "all_gather", lambda value: [value])
    waited: list[bool] = []
    splits = {name: ImageFiles(["x"] * 300, [0] * 300) for name in ("train", "val")}
    check = CorruptImageCheck(splits=splits, share=0.01, wait=lambda: waited.append(True))
    own = EpochMetrics(damaged=["a.jpg: x", "b.jpg: x"])
    check.epoch(own, damaged=2, readable=0, ended=False)
    check.epoch(own, damaged=3, readable=1, ended=True)
    assert not waited
    for damaged, readable, ended in ((2, 0, True), (4, 100, False)):
        with pytest.raises(InputError, match="train split has 2 damaged images among "):
            check.epoch(own, damaged=damaged, readable=readable, ended=ended)
    assert len(waited) == 2, "until the last checkpoint is complete"
    for readable, refused in ((297, False), (296, True), (0, True)):
        accuracy = Accuracy(loss=1.0, top1=1.0, top5=1.0, images=readable, damaged=("c.jpg: x",))
        if not refused:
            check.evaluation("val", accuracy)
            continue
        with pytest.raises(InputError, match="val split has 1 damaged image among 300 of 300: x"):
            check.evaluation("val", accuracy)


def test_a_folder_of_garbage_is_refused_before_the_first_step_whatever_is_allowed(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", train=9, val=7)
    spoil(image_files([folder]))
    result = in_fork(*TRAIN, *ONE, "data.max_damaged=1", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "train split has 27 damaged images among 27 of 27: cannot identify image file (27, first " in result.stderr
    assert "Traceback" not in result.stderr and not checkpoints(tmp_path / "run")
    assert not [event for event in read_events(tmp_path / "run") if event["event"] == "step"]


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("../{}.jpg", "the image is a file outside "),
        ("{}.jpg", r"No such file or directory \(1[89], first "),
        ("https://example.org/{}.jpg", r"the image is a URL; .* \(1[89], first "),
    ],
)
def test_a_table_of_paths_that_are_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, cause: str
) -> None:
    folder = write_files(tmp_path / "table", {"7.jpg": jpeg(7), "../7.jpg": jpeg(7)})
    rows = pyarrow.table({"image": [path.format(i) for i in range(24)], "label": [i % 3 for i in range(24)]})
    parquet.write_table(rows, folder / "train.parquet")
    monkeypatch.setattr(corrupt_images, "all_gather", lambda value: [value])
    splits = open_dataset(str(folder)).splits
    with pytest.raises(InputError, match=f"1[89] damaged images among 19 of 19: {cause}"):
        check_sample(splits, decode_by_pillow, 16, 0.01, ALONE)


def ended(place: Path, *settings: str, checkpoints_left: int) -> str:
    """Train until damage ends it; return the error."""
    result = in_fork(*TRAIN, *settings, cwd=place)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and len(checkpoints(place / "run")) == checkpoints_left
    return result.stderr


def test_damage_that_shows_in_training_ends_all_ranks_without_a_checkpoint(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", train=40, val=7)
    spoil(untried(folder / "train", 4))  # 1 of 120 is allowed
    err = ended(tmp_path, "batch.local=20", checkpoints_left=0)
    assert err.count("train split has ") == 1 and "of 120: cannot identify image file (" in err
    assert "data.max_damaged=0.01 allows 1; repair or remove them, or raise it" in err


@pytest.mark.long
@pytest.mark.nightly
def test_what_the_recipe_allows_is_skipped_and_counted_once(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", train=40, val=20)
    spoil(untried(folder / "train", 6))
    spoil(untried(folder / "val", 3))
    allowed = (*TRAIN, "batch.local=60", "epochs=1", "schedule.warmup_epochs=0", "plan.ppn=1")
    result = cputrain(*allowed, "batch.local=40", "data.max_damaged=0.05", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "warning: 9 damaged images skipped: cannot identify image file (9, first " in result.stdout
    assert "(57 images, each once)" in result.stdout
    told = "val split has 3 damaged images among 60 of 60: cannot identify image file (3, first "
    strict = in_fork("eval", "run", "data.max_damaged=0.01", cwd=tmp_path)
    assert strict.returncode == 2 and told in strict.stderr, strict.stderr
    again = in_fork("eval", "run", cwd=tmp_path)
    assert again.returncode == 0 and "warning: 3 damaged images skipped: cannot identify image file (3" in again.stdout
    spoil(image_files([folder / "val"]))
    nothing = in_fork("eval", "run", "data.max_damaged=1", cwd=tmp_path)
    assert nothing.returncode == 2 and "val split has 32 damaged images among 32 of 60: " in nothing.stderr
    predicted = in_fork("predict", "run", "images/val", cwd=tmp_path)
    assert (
        predicted.returncode == 2
        and "none of 60 images can be read: cannot identify image file (60" in predicted.stderr
    )


def test_damaged_images_are_named_in_the_first_epoch_only(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", train=9, val=7)
    spoiled = [*image_files([folder / "train"])[:6], *image_files([folder / "val"])[:2]]
    spoil(spoiled)
    result = in_fork(*TRAIN, *ONE, "epochs=3", "max_steps=null", "data.max_damaged=0.5", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    warnings = [event for event in read_events(tmp_path / "run") if event["event"] == "warning"]
    named = [line.partition(":")[0] for event in warnings for line in event["images"]]
    assert len(named) == len(set(named)) > 2 and set(named) <= {str(path) for path in spoiled}
    assert len(warnings) == result.stdout.count(" skipped: ")


def test_validation_images_that_cannot_be_read_end_the_first_evaluation(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", train=9, val=30)
    spoil(untried(folder / "val", 3))
    err = ended(tmp_path, *ONE, checkpoints_left=1)  # of its last step
    assert "val split has 3 damaged images among 90 of 90: cannot identify image file (3, first " in err
