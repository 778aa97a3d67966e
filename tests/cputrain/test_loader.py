"""The public image pipeline, used as in a stranger's script, beside the batches that the trainer gets."""

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cputrain.data
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.rank import Rank
from cputrain.data import loader
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.shards import images_per_block
from cputrain.data.loader import ImageLoader, choose_normalize
from cputrain.data.pixels import Transform, choose_decoder
from cputrain.data.prepare import Options, pack_dataset
from cputrain.data.settings import Augmentation
from cputrain.recipe.derivation import derive
from cputrain.recipe.loading import load_recipe
from cputrain.training.batches import evaluation_batches, training_batches
from tests.support.ccl_jobs import started
from tests.support.forked import ended, forked, in_fork
from tests.support.images import write_images

SIDE, BATCH, SEED, EPOCHS = 24, 5, 7, 2
SCRIPT = f"""
import os, sys
import torch
from cputrain.data import ImageLoader

path, out, block_mib = sys.argv[1:]
sizes = {{"batch_size": {BATCH}, "image_size": {SIDE}}}
train = ImageLoader.open(path, **sizes, seed={SEED}, block_mib=float(block_mib), threads=2)
val = ImageLoader.open(path, split="val", **sizes)
assert len(train.classes) == 3
epochs = []
for epoch in range({EPOCHS}):
    train.set_epoch(epoch)
    epochs.append([(images, labels) for images, labels in train])
    assert len(epochs[-1]) == len(train)
rank = os.environ.get("RANK", "0")
torch.save({{"train": epochs, "val": list(val)}}, f"{{out}}-{{rank}}.pt")
assert not torch.distributed.is_initialized()
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")


def shards_of(images: Path) -> Path:
    out = images.parent / "shards"
    pack_dataset(open_dataset(str(images)), out, Options(kind="imagefolder", source="x", shards=3))
    return out


def plain_environment(home: Path) -> dict[str, str]:
    """What a login shell has, and where the decoder is compiled."""
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", str(home))}


def session_like(path: Path, rank: int, world_size: int, block_mib: float) -> Any:
    """What of the trainer's session decides its batches, for a recipe with the script's settings."""
    recipe = load_recipe(
        "imagefolder",
        [f"data.path={path}", f"data.crop={SIDE}", f"batch.local={BATCH}", f"seed={SEED}"],
    )
    dataset = open_dataset(str(path))
    sizes = derive(recipe, ppn=world_size, nodes=1, images=len(dataset.train))
    this = Rank(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, convention="env")
    return SimpleNamespace(
        recipe=recipe,
        sizes=sizes,
        rank=this,
        local_batches=(BATCH,) * world_size,
        dataset=dataset,
        decode=choose_decoder("auto", os.environ)[0],
        normalize=choose_normalize(recipe.data.mean, recipe.data.std, "auto", os.environ),
        block_length=images_per_block(dataset.train, block_mib, sizes.steps_per_epoch),
        context=SimpleNamespace(loader_pus=(), loader_threads=1),
    )


def trainer_batches(session: Any) -> dict[str, list]:
    normalize, steps = session.normalize, session.sizes.steps_per_epoch
    return {
        "train": [
            [(normalize(b.images), b.labels) for b in training_batches(session, e, e * steps, (e + 1) * steps)]
            for e in range(EPOCHS)
        ],
        "val": [(normalize(b.images), b.labels) for b in evaluation_batches(session, "val")],
    }


def assert_same(found: dict[str, list], expected: dict[str, list]) -> None:
    for a, b in zip([*found["train"], found["val"]], [*expected["train"], expected["val"]], strict=True):
        assert len(a) > 0
        for (images, labels), (their_images, their_labels) in zip(a, b, strict=True):
            assert images.dtype == torch.float32 and images.shape[1:] == (3, SIDE, SIDE)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(images, their_images) and torch.equal(labels, their_labels)


def test_a_script_in_another_folder_gets_the_batches_of_the_trainer(images: Path, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "script.py").write_text(SCRIPT)
    argv = [sys.executable, "script.py", str(images), "batches", "0.0"]
    done = subprocess.run(argv, cwd=place, env=plain_environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = trainer_batches(session_like(images, 0, 1, 0.0))
    assert [len(epoch) for epoch in expected["train"]] == [7, 7], "36 images make 7 batches of 5"
    assert_same(torch.load(place / "batches-0.pt"), expected)


@pytest.mark.parametrize("block_mib", [0.0, 0.01])
def test_a_script_gets_the_batches_of_the_trainer_from_shards(images: Path, tmp_path: Path, block_mib: float) -> None:
    path = shards_of(images)
    with forked("-c", SCRIPT, str(path), "batches", str(block_mib), cwd=tmp_path) as process:
        done = ended(process)
    assert done.status == 0, done.err
    assert_same(torch.load(tmp_path / "batches-0.pt"), trainer_batches(session_like(path, 0, 1, block_mib)))


def test_the_documented_example_runs(tmp_path: Path) -> None:
    write_images(tmp_path / "data/photos")
    assert loader.__doc__ is not None
    example = "\n".join(line for line in loader.__doc__.splitlines() if line.startswith("    ") or not line)
    code = textwrap.dedent(example) + "print(0 <= correct <= 15)\n"
    with forked("-c", code, cwd=tmp_path) as process:
        done = ended(process)
    assert done.status == 0 and done.out == "True\n", done.err
    page = Path(__file__).parents[2] / "docs/guides/image-loader.md"
    assert textwrap.dedent(example).strip() in page.read_text(), "the guide shows the same example"


def test_ranks_with_torchrun_s_variables_share_each_batch_as_in_the_trainer(images: Path, tmp_path: Path) -> None:
    with started("-c", SCRIPT, str(images), str(tmp_path / "batches"), "0") as ranks:
        for done in map(ended, ranks):
            assert done.status == 0, done.err
    check_ranks(images, tmp_path)


@pytest.mark.long
def test_ranks_of_torchrun_share_each_batch_as_in_the_trainer(images: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py")
    argv = [sys.executable, *ranks, str(images), "batches", "0"]
    done = subprocess.run(argv, cwd=tmp_path, env=plain_environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_ranks(images, tmp_path)


def check_ranks(images: Path, place: Path) -> None:
    """Fail unless the two ranks of a script have got the batches of the trainer's."""
    found = [torch.load(place / f"batches-{rank}.pt") for rank in range(2)]
    for rank in range(2):
        assert_same(found[rank], trainer_batches(session_like(images, rank, 2, 0.0)))
    assert sum(len(labels) for each in found for _, labels in each["val"]) == 15, "each validation image exactly once"


def test_a_script_under_a_plan_decodes_on_the_cpus_of_its_worker(images: Path, tmp_path: Path) -> None:
    code = f"from cputrain.data import ImageLoader; x = ImageLoader.open({str(images)!r}, batch_size=4)\n"
    (tmp_path / "script.py").write_text(code + "print('loader', x.threads, *sorted(x.cpus))\n")
    one_core = ("--ppn", "1", "--threads", "1")
    made = in_fork("launch", *one_core, "--", sys.executable, "-m", "script", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    words = made.stdout.partition("loader ")[2].split()
    assert words[0] == "1" and {int(cpu) for cpu in words[1:]} <= os.sched_getaffinity(0) and len(words) > 1


def batches_of(path: Path, **options: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(ImageLoader.open(path, **{"batch_size": 4, "image_size": 16, **options}))


def test_an_epoch_repeats_until_another_is_set(images: Path) -> None:
    loader = ImageLoader.open(images, batch_size=4, image_size=16)
    first, again = [labels for _, labels in loader], [labels for _, labels in loader]
    assert all(map(torch.equal, first, again))
    loader.set_epoch(1)
    assert not all(map(torch.equal, first, [labels for _, labels in loader]))
    next(iter(loader))  # nothing of an unfinished epoch is left
    assert all(map(torch.equal, [labels for _, labels in loader], [labels for _, labels in loader]))


def test_the_last_batch_is_dropped_or_its_images_are_spread(images: Path) -> None:
    assert [len(labels) for _, labels in batches_of(images, batch_size=8)] == [8, 8, 8, 8]
    assert [len(labels) for _, labels in batches_of(images, batch_size=8, drop_last=False)] == [7, 7, 7, 7, 8]
    assert [len(labels) for _, labels in batches_of(images, batch_size=8, shuffle=False)] == [8, 8, 8, 8, 4]


def test_augmentation_is_chosen_apart_from_the_order(images: Path) -> None:
    plain = Transform(image_size=16, short_side=16)
    still, moving = batches_of(images, shuffle=False), batches_of(images, shuffle=False, augment=True)
    assert all(torch.equal(a[1], b[1]) and not torch.equal(a[0], b[0]) for a, b in zip(still, moving, strict=True))
    dark = Transform(image_size=16, short_side=16, augmentation=Augmentation(brightness=0.5))
    a, b = (batches_of(images, transform=transform)[0][0] for transform in (plain, dark))
    assert a.shape == b.shape == (4, 3, 16, 16) and not torch.equal(a, b)
    (unit, _), *_ = batches_of(images, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    assert unit.min() >= 0 and unit.max() <= 1


def test_damaged_images_are_left_out_with_a_warning_or_stop_the_loop(
    images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (images / "val/class0/000.jpg").write_bytes(b"junk")
    with caplog.at_level(logging.WARNING):
        sizes = [len(labels) for _, labels in batches_of(images, split="val")]
    assert sizes == [3, 4, 4, 3] and "1 damaged image skipped: " in caplog.text
    assert "val/class0/000.jpg" in caplog.text
    with pytest.raises(RunError, match=r"1 damaged image in a batch: .*class0/000.jpg"):
        batches_of(images, split="val", on_error="raise")
    with pytest.raises(RunError, match=r"1 damaged image in a batch: "):
        batches_of(images, split="val", batch_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, "val_fraction=1: it must be at least 0 and less than 1"),
        ({"split": "test"}, "has no split 'test': use one of train, val"),
        ({"batch_size": 0}, "batch_size=0, image_size=16: both must be at least 1"),
        ({"batch_size": 40}, "batch_size=40 on 1 rank.* needs 40 images, but there are 36: use a smaller batch_size"),
        ({"rank": 1}, "rank and world_size belong together"),
        ({"rank": 2, "world_size": 2}, "rank=2 is not between 0 and world_size-1=1"),
        ({"block_mib": 4.0}, "block_mib=4 is for shards, but the images are not in shards"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(images: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        batches_of(images, **options)


def test_the_public_names_stay() -> None:
    assert cputrain.data.ImageLoader is cputrain.ImageLoader and cputrain.data.Transform is cputrain.Transform
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        _ = cputrain.data.Loader
    code = "import sys, cputrain.data, cputrain.data.from_settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
