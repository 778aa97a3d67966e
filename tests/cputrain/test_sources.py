"""Where images come from: ImageNet's archives, MNIST's files, Caltech-256, torchvision's data sets."""

import gzip
import io
import struct
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cputrain.affinity.errors import InputError
from cputrain.data.formats.folder import DEVKIT, SYNSETS
from cputrain.data.formats.open import open_dataset
from cputrain.data.prepare import pack_dataset
from cputrain.data.sources import TRAIN, VAL, open_source, read_idx
from tests.cputrain.test_prepare import options
from tests.support.commands import unpack
from tests.support.images import jpeg, write_mnist

SYNSET_NAMES = ("n01440764", "n01443537", "n02086240")


def archive(path: Path | None, files: dict[str, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    if path is not None:
        path.write_bytes(out.getvalue())
    return out.getvalue()


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """ILSVRC2012's archives in small: 3 classes, 5 images each, 6 for validation, with a link among them."""
    folder = tmp_path / "ilsvrc"
    folder.mkdir()
    inner = {
        f"{synset}.tar": archive(None, {f"{synset}_{i}.JPEG": jpeg(10 * k + i) for i in range(5)})
        for k, synset in enumerate(SYNSET_NAMES)
    }
    archive(folder / TRAIN, inner)
    archive(folder / VAL, {f"ILSVRC2012_val_0000000{i}.JPEG": jpeg(100 + i) for i in range(6)})
    with tarfile.open(folder / VAL, "a") as tar:
        link = tarfile.TarInfo("../../etc/evil.JPEG")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    (folder / SYNSETS[0]).write_text("".join(f"{SYNSET_NAMES[(i + 1) % 3]}\n" for i in range(6)))
    return folder


def test_imagenet_s_archives_are_read_where_they_lie(imagenet: Path, tmp_path: Path) -> None:
    dataset = open_source("imagenet", imagenet, val_fraction=None, seed=1)
    assert dataset.classes == SYNSET_NAMES
    assert dataset.train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert [dataset.train.read(i) for i in (0, 7, 14)] == [jpeg(0), jpeg(12), jpeg(24)]
    assert dataset.train.name(7).endswith(f"{TRAIN}:n01443537/n01443537_2.JPEG")
    assert dataset.val.labels.tolist() == [1, 2, 0, 1, 2, 0]  # the link is no image
    assert dataset.val.read(3) == jpeg(103)
    made = pack_dataset(dataset, tmp_path / "out", options(imagenet, "imagenet"))
    assert (made["train"]["images"], made["val"]["images"]) == (15, 6)
    assert not list(tmp_path.rglob("evil*"))


def test_validation_labels_come_from_the_devkit_or_a_list_of_files(imagenet: Path) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    (imagenet / SYNSETS[0]).write_text("".join(f"ILSVRC2012_val_0000000{i}.JPEG {SYNSET_NAMES[0]}\n" for i in range(6)))
    assert open_source("imagenet", imagenet, val_fraction=None, seed=1).val.labels.tolist() == [0] * 6
    (imagenet / SYNSETS[0]).unlink()
    meta = io.BytesIO()
    rows = np.array(
        [(2, "n01440764"), (1, "n01443537"), (3, "n02086240")], dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O")]
    )
    scipy_io.savemat(meta, {"synsets": rows})
    kit = {
        "kit/data/ILSVRC2012_validation_ground_truth.txt": b"1\n2\n3\n3\n2\n1\n",
        "kit/data/meta.mat": meta.getvalue(),
    }
    archive(imagenet / DEVKIT, kit, "w:gz")
    assert open_source("imagenet", imagenet, val_fraction=None, seed=1).val.labels.tolist() == [1, 0, 2, 2, 0, 1]
    whole = (imagenet / DEVKIT).read_bytes()
    (imagenet / DEVKIT).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=rf"cannot read {imagenet / DEVKIT}: EOFError .*; is the download complete"):
        open_source("imagenet", imagenet, val_fraction=None, seed=1)
    archive(imagenet / DEVKIT, {**kit, "kit/data/meta.mat": b"<html>"}, "w:gz")
    with pytest.raises(
        InputError, match=rf"cannot read {imagenet / DEVKIT}: MatReadError .*; is the download complete"
    ):
        open_source("imagenet", imagenet, val_fraction=None, seed=1)


def append_twice(folder: Path) -> None:
    """As `tar --append` of a file that is there already does."""
    with tarfile.open(folder / VAL, "a") as tar:
        again = tarfile.TarInfo("ILSVRC2012_val_00000001.JPEG")
        again.size = 1
        tar.addfile(again, io.BytesIO(b"x"))


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda f: (f / VAL).unlink(), f"has no {VAL}"),
        (lambda f: (f / SYNSETS[0]).unlink(), "6 images, but no labels: put "),
        (lambda f: (f / SYNSETS[0]).write_text("n01440764\n"), "has 1 line, .* 6 images"),
        (lambda f: (f / SYNSETS[0]).write_text("n09999999\n" * 6), "'n09999999' in .* is not a class of"),
        (lambda f: archive(f / TRAIN, {"../n01440764.zip": b"x"}), "n01440764.zip in .* contains no image"),
        (lambda f: archive(f / TRAIN, {"readme.txt": b"x"}), "has member 'readme.txt', not SYNSET.tar"),
        (append_twice, "contains ILSVRC2012_val_00000001.JPEG twice"),
        (lambda f: (f / TRAIN).write_bytes((f / TRAIN).read_bytes()[:30000]), "is the download complete"),
        (lambda f: (f / TRAIN).write_bytes(b"junk" * 1000), "cannot read .*; is the download complete"),
    ],
)
def test_bad_imagenet_folders_are_named(imagenet: Path, harm: object, expected: str) -> None:
    harm(imagenet)  # type: ignore[operator]
    with pytest.raises(InputError, match=expected):
        open_source("imagenet", imagenet, val_fraction=None, seed=1)


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_becomes_gray_pngs(tmp_path: Path, zipped: bool) -> None:
    pixels = write_mnist(tmp_path / "mnist", train=20, val=10, zipped=zipped)
    made = pack_dataset(
        open_source("mnist", tmp_path / "mnist", val_fraction=None, seed=1),
        tmp_path / "out",
        options(tmp_path, "mnist"),
    )
    assert made["train"]["unusual"] == {"gray": 20, "no jpeg": 20}
    dataset = open_dataset(str(tmp_path / "out"))
    assert dataset.classes == tuple("0123456789")
    found = {np.asarray(Image.open(io.BytesIO(dataset.train.read(i)))).tobytes() for i in range(20)}
    assert found == {image.tobytes() for image in pixels[:20]}
    (tmp_path / "mnist").joinpath(f"t10k-labels-idx1-ubyte{'.gz' if zipped else ''}").unlink()
    with pytest.raises(InputError, match="has no t10k-labels-idx1-ubyte"):
        open_source("mnist", tmp_path / "mnist", val_fraction=None, seed=1)


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x-ubyte"
    head = struct.pack(">HBBI", 0, 8, 1, 10)
    for data, expected in ((b"", "not an idx file"), (head + b"12345", "has 5 values, but its header describes 10")):
        path.write_bytes(data)
        with pytest.raises(InputError, match=expected):
            read_idx(path, 1)
    packed = tmp_path / "x.gz"
    packed.write_bytes(gzip.compress(head + bytes(10))[:-9])
    with pytest.raises(InputError, match="cannot read"):
        read_idx(packed, 1)


def test_caltech256_comes_as_an_archive_or_a_folder(tmp_path: Path) -> None:
    files = {
        f"256_ObjectCategories/{k:03d}.thing{k}/{k:03d}_{i:04d}.jpg": jpeg(10 * k + i)
        for k in (1, 2)
        for i in range(10)
    }
    tar = tmp_path / "256_ObjectCategories.tar"
    archive(tar, {**files, "256_ObjectCategories/001.thing1/RENAME2": b"text"})
    packed = open_source("caltech256", tar, val_fraction=None, seed=1)
    assert packed.notes[-1].endswith(
        "has no validation images: using 4 images drawn from its classes in proportion, a fraction of 0.2"
    )
    unpack(tar, tmp_path / "unpacked")
    unpacked = open_source("caltech256", tmp_path / "unpacked", val_fraction=0.2, seed=1)
    for dataset in (packed, unpacked):
        assert dataset.classes == ("001.thing1", "002.thing2")
        assert (len(dataset.train), len(dataset.val)) == (16, 4)
        assert Counter(dataset.val.labels.tolist()) == {0: 2, 1: 2}
    assert [packed.val.read(i) for i in range(4)] == [unpacked.val.read(i) for i in range(4)]


def test_torchvision_s_data_sets_are_taken_and_others_named(tmp_path: Path) -> None:
    (tmp_path / "MNIST").mkdir()
    write_mnist(tmp_path / "MNIST" / "raw", train=20, val=10, zipped=False)
    dataset = open_source("torchvision:MNIST", tmp_path, val_fraction=None, seed=1)
    assert (len(dataset.train), len(dataset.val), dataset.train.labels.tolist()[:3]) == (20, 10, [0, 1, 2])
    assert Image.open(io.BytesIO(dataset.train.read(0))).size == (28, 28)
    with pytest.raises(InputError, match="no data set 'CIFAR11' with a training split: the nearest names are CIFAR1"):
        open_source("torchvision:CIFAR11", tmp_path, val_fraction=None, seed=1)
