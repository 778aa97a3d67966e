"""Folders, shards, order, decoding and loading, on real files."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.data.formats.dataset import Images
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.shards import Shards
from cputrain.data.loader import MAX_BATCHES_AHEAD, batches_ahead, decoded_batches
from cputrain.data.order import epoch_order, evaluation_share, image_rng, rank_share
from cputrain.data.pixels import Pixels, center_crop, decode_by_pillow
from cputrain.data.prepare import Options, pack_dataset
from tests.support.images import survey, write_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")


def pack(folder: Path, out: Path, **how: object) -> dict:
    return pack_dataset(open_dataset(str(folder)), out, Options(kind="imagefolder", source=str(folder), **how))


def test_a_folder_is_opened_and_surveyed(folder: Path) -> None:
    (folder / "train/class0/notes.txt").write_text("not an image")
    dataset = open_dataset(str(folder))
    found = survey(str(folder))
    assert dataset.classes == found.classes == ("class0", "class1", "class2")
    assert (len(dataset.train), len(dataset.val)) == (found.train, found.val) == (36, 15)
    assert dataset.train.labels.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert dataset.train.read(12) == (folder / "train/class1/000.jpg").read_bytes()


def test_image_files_and_shards_are_counted_without_numpy(folder: Path, tmp_path: Path) -> None:
    """Planning a training takes no longer for its data."""
    pack(folder, tmp_path / "shards")
    code = (
        "import sys; from cputrain.data.formats.open import detect_source; print([detect_source(each).count().train "
        "for each in sys.argv[1:]]); sys.exit('numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder, tmp_path / "shards"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[36, 36]\n"


def test_bad_folders_are_refused(tmp_path: Path, folder: Path) -> None:
    for path, message in (
        (None, "no data.path"),
        (str(tmp_path / "absent"), "does not exist"),
        (str(tmp_path), "no train/"),
    ):
        for reader in (survey, open_dataset):
            with pytest.raises(InputError, match=message):
                reader(path)
    (folder / "val/other").mkdir()
    with pytest.raises(InputError, match="val has classes that train/ lacks, other"):
        survey(str(folder))
    (tmp_path / "empty/train/a").mkdir(parents=True)
    (tmp_path / "empty/val").mkdir()
    with pytest.raises(InputError, match="class a has no image"):
        survey(str(tmp_path / "empty"))
    write_images(tmp_path / "half", val=0)
    with pytest.raises(InputError, match="val contains no image"):
        survey(str(tmp_path / "half"))


def test_shards_hold_every_image_once_and_mixed(folder: Path, tmp_path: Path) -> None:
    done: list[None] = []
    out = tmp_path / "shards"
    options = Options(kind="imagefolder", source=str(folder), seed=3, shard_bytes=20_000)
    splits = pack_dataset(open_dataset(str(folder)), out, options, on_image=lambda: done.append(None))
    assert splits["train"]["images"] == 36 and splits["train"]["shards"] > 1 and len(done) == 51
    plain, packed = open_dataset(str(folder)), open_dataset(str(out))
    for a, b in ((plain.train, packed.train), (plain.val, packed.val)):
        left = sorted((a.read(i), int(a.labels[i])) for i in range(len(a)))
        assert left == sorted((b.read(i), int(b.labels[i])) for i in range(len(b)))
    labels = packed.train.labels
    assert len(set(labels[:12].tolist())) == 3, "categories are mixed"
    assert (survey(str(out)).train, survey(str(out)).val) == (36, 15)


def test_webdataset_reads_the_shards(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "out", seed=1)
    packed = Shards(tmp_path / "out", "train")
    samples = list(webdataset.WebDataset(str(tmp_path / "out/train-00000.tar"), shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{i:08d}" for i in range(len(packed))]
    assert [sample["jpg"] for sample in samples] == [packed.read(i) for i in range(len(packed))]
    assert [int(sample["cls"]) for sample in samples] == packed.labels.tolist()


def test_the_shuffle_is_its_seed_s(folder: Path, tmp_path: Path) -> None:
    order = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pack(folder, tmp_path / name, seed=seed)
        order.append(Shards(tmp_path / name, "train").labels.tolist())
    assert order[0] == order[1] != order[2]


def test_damaged_shards_are_noticed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(folder, out, seed=1)
    shard = out / "train-00000.tar"
    packed = Shards(out, "train")
    data = bytearray(shard.read_bytes())
    data[int(packed.index[4]["offset"]) + 100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(OSError, match="checksum"):
        Shards(out, "train").read(4)
    assert Shards(out, "train").read(5) == packed.read(5)
    shard.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"train-00000.tar has [\d,]+ bytes, not [\d,]+: prepare again"):
        Shards(out, "train")
    shard.unlink()
    with pytest.raises(InputError, match=r"train-00000.tar"):
        Shards(out, "train")
    (out / "manifest.json").write_text('{"version": 9}')
    with pytest.raises(InputError, match="version 9"):
        survey(str(out))


def test_prepare_never_overwrites_and_leaves_nothing_half_made(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").touch()
    with pytest.raises(InputError, match=r"out has other files, mine\.txt: prepare into a new folder"):
        pack(folder, out, seed=1)
    (folder / "train/class1/000.jpg").unlink()
    (folder / "train/class1/000.jpg").symlink_to("/nowhere.jpg")
    splits = pack(folder, tmp_path / "fine", seed=1)
    assert splits["train"]["images"] == 35  # a dangling link is no file


@given(images=st.integers(1, 500), batches=st.lists(st.integers(1, 8), min_size=1, max_size=8), seed=st.integers(0, 9))
def test_ranks_cut_an_epoch_without_overlap(images: int, batches: list[int], seed: int) -> None:
    order = epoch_order(images, seed, 2)
    assert sorted(order.tolist()) == list(range(images))
    batch, workers = sum(batches), len(batches)
    steps = images // batch
    whole = order[: steps * batch]
    shares = [rank_share(whole, step, steps, batches, rank) for step in range(steps) for rank in range(workers)]
    assert [len(share) for share in shares] == batches * steps
    # In the order of steps and ranks the shares are the permutation itself: the same whatever the number of workers.
    assert np.concatenate([*shares, order[steps * batch :]]).tolist() == order.tolist()


@given(images=st.integers(40, 500), shares=st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_a_spread_remainder_leaves_no_image_out(images: int, shares: list[int]) -> None:
    order = epoch_order(images, 1, 0)
    steps = -(-images // sum(shares))
    cut = [[rank_share(order, step, steps, shares, rank) for rank in range(len(shares))] for step in range(steps)]
    assert np.concatenate([share for step in cut for share in step]).tolist() == order.tolist()
    sizes = [sum(map(len, step)) for step in cut]
    assert max(sizes) - min(sizes) <= 1 and max(sizes) <= sum(shares)
    assert all(len(share) <= most for step in cut for share, most in zip(step, shares, strict=True))


def test_epochs_and_seeds_differ() -> None:
    assert epoch_order(50, 1, 0).tolist() != epoch_order(50, 1, 1).tolist() != epoch_order(50, 2, 1).tolist()
    assert image_rng(1, 0, 7).random() == image_rng(1, 0, 7).random() != image_rng(1, 1, 7).random()


@given(images=st.integers(0, 300), workers=st.integers(1, 9))
def test_evaluation_sees_each_image_once(images: int, workers: int) -> None:
    shares = [evaluation_share(images, rank, workers).tolist() for rank in range(workers)]
    assert sorted(i for share in shares for i in share) == list(range(images))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def small(encoded: Sequence[bytes], _numbers: Sequence[int], places: Pixels) -> list[str | None]:
    return decode_by_pillow(encoded, center_crop(16, 16), places)


def alone(images: Images, i: int) -> np.ndarray:
    place = np.empty((1, 16, 16, 3), dtype=np.uint8)
    assert small([images.read(i)], [i], place) == [None]
    return place[0]


def test_batches_come_in_order_with_damage_marked(folder: Path) -> None:
    (folder / "train/class0/003.jpg").write_bytes(b"junk")
    images = open_dataset(str(folder)).train
    shares = [np.array([0, 3, 12]), np.array([30, 1])]
    got = [
        replace(batch, images=batch.images.clone())
        for batch in decoded_batches(images, shares, small, side=16, threads=2, cpus=())
    ]
    assert [batch.labels.tolist() for batch in got] == [[0, 0, 1], [2, 0]]
    assert [batch.weights.tolist() for batch in got] == [[1, 0, 1], [1, 1]]
    assert len(got[0].damaged) == 1 and "class0/003.jpg" in got[0].damaged[0]
    assert (got[0].images[1] == 128).all()
    assert np.array_equal(got[0].images[2].numpy(), alone(images, 12))


def test_loader_threads_stay_on_their_pus(folder: Path) -> None:
    pu = max(os.sched_getaffinity(0))
    where: set[tuple[int, ...]] = set()

    def decode(encoded: Sequence[bytes], numbers: Sequence[int], places: Pixels) -> list[str | None]:
        where.add(tuple(os.sched_getaffinity(0)))
        return small(encoded, numbers, places)

    images = open_dataset(str(folder)).train
    list(decoded_batches(images, [np.arange(8)], decode, side=16, threads=2, cpus=(pu,)))
    assert where == {(pu,)}


def test_a_failing_thread_is_an_error_at_once(folder: Path) -> None:
    def decode(encoded: Sequence[bytes], numbers: Sequence[int], places: Pixels) -> list[str | None]:
        raise ZeroDivisionError("a defect, not a damaged image")

    with pytest.raises(ZeroDivisionError):
        next(decoded_batches(open_dataset(str(folder)).train, [np.arange(4)], decode, side=8, threads=1, cpus=()))


def test_a_batch_s_memory_is_used_again_only_when_the_next_is_asked_for(folder: Path) -> None:
    images = open_dataset(str(folder)).train
    shares = [np.arange(i % 30, i % 30 + 6 - i // 36) for i in range(40)]
    places = set()
    for share, batch in zip(shares, decoded_batches(images, shares, small, side=16, threads=2, cpus=()), strict=True):
        places.add(batch.images.data_ptr())
        for i, found in zip(share.tolist(), batch.images.numpy(), strict=True):
            assert np.array_equal(found, alone(images, i))
    assert len(places) <= MAX_BATCHES_AHEAD + 2


def test_what_is_decoded_ahead_is_bounded_in_bytes() -> None:
    assert [batches_ahead(size) for size in (1, 8 << 20, 64 << 20)] == [8, 4, 2]


@pytest.mark.long
def test_memory_stays_flat_over_many_epochs(tmp_path: Path) -> None:
    images = open_dataset(str(write_images(tmp_path / "images", size=16))).train

    def epochs(first: int, last: int) -> int:
        for epoch in range(first, last):
            order = epoch_order(len(images), 1, epoch)
            shares = [order[i : i + 6] for i in range(0, len(order), 6)]
            assert (
                sum(len(batch.labels) for batch in decoded_batches(images, shares, small, side=16, threads=2, cpus=()))
                == 36
            )
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGESIZE")

    sizes = [epochs(first, first + 50) for first in range(0, 200, 50)]
    growth = [after - before for before, after in pairwise(sizes)]
    assert min(growth) < 1 << 20, "a leak grows with every epoch, a thread's heap once"
