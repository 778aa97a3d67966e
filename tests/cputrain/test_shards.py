"""Shards on disk: read in blocks of neighbors whose batches are well mixed, copied to a host's own disk."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.rank import Rank
from cputrain.data.formats import shards
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.shards import BlockReader, Shards, copies_folder_name, copy, staged_shards
from cputrain.data.order import (
    WINDOW,
    block_length,
    block_order,
    expected_classes_in_window,
    mean_classes_in_window,
    rank_share,
)
from cputrain.data.prepare import Options, pack_dataset
from tests.cputrain.test_training import PPN
from tests.support.forked import in_fork
from tests.support.images import write_images

ALONE = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="env")
HERE = tuple(sorted(os.sched_getaffinity(0)))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = write_images(tmp_path / "images", train=40)
    pack_dataset(open_dataset(str(folder)), tmp_path / "data", Options(kind="imagefolder", source="x", shards=3))
    return tmp_path / "data"


@given(
    images=st.integers(1, 400),
    length=st.integers(1, 60),
    steps=st.integers(1, 30),
    drop=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_each_image_once_and_the_same_for_the_same_seed(
    images: int, length: int, steps: int, drop: int, seed: int
) -> None:
    used = max(1, images - drop)
    steps = min(steps, used)
    order = block_order(images, seed, 3, length=length, used=used, steps=steps)
    assert len(set(order.tolist())) == used and set(order.tolist()) <= set(range(images))
    assert np.array_equal(order, block_order(images, seed, 3, length=length, used=used, steps=steps))


@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_a_worker_reads_a_block_or_two_for_each_image_of_its_batch(ranks: int) -> None:
    images, length, steps, lanes = 48_000, 40, 50, 960
    order = block_order(images, 1, 0, length=length, used=images, steps=steps)
    for rank in range(ranks):
        mine = np.stack([rank_share(order, step, steps, [1] * ranks, rank) for step in range(steps)])
        assert mine.shape == (steps, lanes // ranks)
        blocks, counts = np.unique(mine // length, return_counts=True)
        assert len(blocks) <= images // ranks // length + 2  # those at its edges are shared with a neighbor
        assert (counts == length).sum() >= len(blocks) - 2
        held = [len(np.unique(mine[step] // length)) for step in range(steps)]
        assert max(held) <= lanes // ranks


def test_batches_are_as_mixed_as_random_ones_even_of_sorted_images() -> None:
    """The measure of mixing that `prepare` prints; images sorted by class are the worst that can lie on disk."""
    labels = np.repeat(np.arange(100), 480)
    order = block_order(len(labels), 1, 0, length=50, used=len(labels), steps=50)
    assert mean_classes_in_window(labels) < 1.1
    assert mean_classes_in_window(labels[order]) > 0.95 * expected_classes_in_window(labels)
    again = block_order(len(labels), 1, 1, length=50, used=len(labels), steps=50)
    batches = [set(map(tuple, np.sort(o.reshape(50, -1)[:, :WINDOW], axis=1).tolist())) for o in (order, again)]
    assert not batches[0] & batches[1]


def test_blocks_are_read_once_given_back_and_hold_what_the_shards_hold(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Shards(data, "train")
    expected = [images.read(i) for i in range(len(images))]
    sizes: list[int] = []

    def pread(fd: int, length: int, offset: int) -> bytes:
        sizes.append(length)
        return real(fd, length, offset)

    real = os.pread
    monkeypatch.setattr(shards.os, "pread", pread)
    length = block_length(images.bytes_per_image, 20 * images.bytes_per_image, 30)
    assert length == 20 and block_length(images.bytes_per_image, 1e9, 30) == 30
    order = block_order(len(images), 1, 0, length=length, used=len(images), steps=30)
    reader = BlockReader(images, length, order)
    found: dict[int, bytes] = {}

    def work(part: np.ndarray) -> None:
        for i in part.tolist():
            found[i] = reader.read(i)

    threads = [threading.Thread(target=work, args=(part,)) for part in np.array_split(order, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(images))] == expected
    assert len(sizes) <= 6 + 2  # blocks, and one more for each border between shards
    assert sum(sizes) < 1.3 * sum(path.stat().st_size for path in images.paths)
    assert not reader._blocks


def test_a_damaged_byte_is_named_and_its_neighbors_are_whole(data: Path) -> None:
    images = Shards(data, "train")
    record = images.index[7]
    with Shards(data, "train").paths[int(record["shard"])].open("r+b") as file:
        file.seek(int(record["offset"]) + 20)
        file.write(b"x")
    reader = BlockReader(Shards(data, "train"), 10, np.arange(10))
    with pytest.raises(OSError, match=f"damaged at byte {int(record['offset']):,}"):
        reader.read(7)
    assert reader.read(6) == images.read(6)


@pytest.fixture
def group(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_copies_are_read_once_they_are_there_and_removed(data: Path, tmp_path: Path, group: None) -> None:
    dataset = open_dataset(str(data))
    expected = [dataset.train.read(i) for i in range(120)]
    with staged_shards(dataset, str(tmp_path / "scratch"), ALONE, HERE):
        folder = tmp_path / "scratch" / copies_folder_name([*dataset.train.paths, *dataset.val.paths])
        next(thread for thread in threading.enumerate() if thread.name == "stage").join(30)
        assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in data.glob("*.tar"))
        for path in dataset.train.paths:
            path.write_bytes(b"")  # whoever reads on from here reads copies
        assert [dataset.train.read(i) for i in range(120)] == expected
    assert not list((tmp_path / "scratch").iterdir())


def test_a_damaged_copy_is_not_believed(data: Path, tmp_path: Path) -> None:
    dataset = open_dataset(str(data))
    expected = dataset.train.read(5)
    dataset.train.use_copies(tmp_path / "copies")
    assert dataset.train.read(5) == expected, "there is no copy yet"
    (tmp_path / "copies").mkdir()
    for path in dataset.train.paths:
        (tmp_path / "copies" / path.name).write_bytes(bytes(path.stat().st_size))
    assert dataset.train.read(5) == expected


def test_a_copy_that_is_broken_off_is_not_there(data: Path, tmp_path: Path) -> None:
    over = threading.Event()
    over.set()
    with pytest.raises(InterruptedError):
        copy(data / "train-00000.tar", tmp_path / "copy.tar", over)
    assert not list(tmp_path.glob("*copy*"))


def test_what_cannot_be_staged_is_refused_before(
    data: Path, tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(InputError, match=r"copies shards, but data.path has none"),
        staged_shards(open_dataset(str(tmp_path / "images")), str(tmp_path / "s"), ALONE, HERE),
    ):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"Not a directory|File exists"),
        staged_shards(open_dataset(str(data)), str(tmp_path / "file"), ALONE, HERE),
    ):
        pass
    usage = shards.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda _folder: usage._replace(free=10))
    with (
        pytest.raises(InputError, match=r"has 0\.0 GB free, but the shards need"),
        staged_shards(open_dataset(str(data)), str(tmp_path / "s"), ALONE, HERE),
    ):
        pass


@pytest.mark.long
def test_a_training_stages_augments_and_leaves_nothing(data: Path, tmp_path: Path) -> None:
    settings = (
        f"data.path={data}",
        f"data.stage_dir={tmp_path / 'scratch'}",
        *("data.crop=32", "batch.local=6", "epochs=1", "schedule.warmup_epochs=0", f"plan.ppn={PPN}", "output=run"),
        *("model.name=resnet18", "data.train_crop=random", "data.augment.rotate=0.05", "data.augment.zoom=0.2"),
        *("data.augment.shift=0.2", "data.augment.lighting=0.1", "data.augment.saturation=0.4"),
        "data.last_batch=spread",
    )
    result = in_fork("train", "imagefolder", *settings, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "top-1" in result.stdout and not list((tmp_path / "scratch").iterdir())
