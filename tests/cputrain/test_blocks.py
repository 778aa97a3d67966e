"""Large reads and well-mixed batches at once."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.data import (
    WINDOW,
    block_length,
    block_order,
    expected_classes_in_window,
    mean_classes_in_window,
    rank_share,
)
from cputrain.data.formats import BlockReader, Shards, open_dataset
from cputrain.data.formats import shards as shards_module
from cputrain.data.prepare import Options, prepare
from tests.support.images import write_images


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = open_dataset(str(write_images(tmp_path / "in", classes=3, train=40)))
    return prepare(source, tmp_path / "out", Options(kind="imagefolder", source="in", shards=3)) and tmp_path / "out"


def test_blocks_are_read_once_given_back_and_hold_what_the_shards_hold(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Shards(folder, "train")
    expected = [images.read(i) for i in range(len(images))]
    sizes: list[int] = []

    def pread(fd: int, length: int, offset: int) -> bytes:
        sizes.append(length)
        return real(fd, length, offset)

    real = os.pread
    monkeypatch.setattr(shards_module.os, "pread", pread)
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


def test_a_damaged_byte_is_named_and_its_neighbors_are_whole(folder: Path) -> None:
    images = Shards(folder, "train")
    record = images.index[7]
    with Shards(folder, "train").paths[int(record["shard"])].open("r+b") as file:
        file.seek(int(record["offset"]) + 20)
        file.write(b"x")
    reader = BlockReader(Shards(folder, "train"), 10, np.arange(10))
    with pytest.raises(OSError, match=f"damaged at byte {int(record['offset']):,}"):
        reader.read(7)
    assert reader.read(6) == images.read(6)
