"""Every reader of data sets and of weights: damaged files are refused in a line, a damaged image is an OSError."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cputrain.data.formats.dataset import Dataset
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.shards import index_path
from cputrain.data.prepare import Options, pack_dataset
from cputrain.models.weights import read_weights
from tests.cputrain.test_tfrecord import example, record
from tests.fuzz.inputs import damaged, fuzzed, read
from tests.support.images import png, write_images


def read_images(folder: Path) -> Dataset:
    """Open a data set and read all its images; one that is damaged is an OSError of its own."""
    dataset = open_dataset(str(folder))
    for images in dataset.splits.values():
        for number in range(len(images)):
            with suppress(OSError):
                images.read(number)
        assert len(images.labels) == len(images)
    return dataset


EXAMPLE = example(b"an image" * 20, 1, "n01440764")


@fuzzed
@given(inner=damaged(EXAMPLE), outer=damaged(record(EXAMPLE) * 2))
def test_tfrecords(inner: bytes, outer: bytes, tmp_path: Path) -> None:
    """Records whose checksums are right and whose content is not, and files that are damaged anywhere."""
    (tmp_path / "validation-00000-of-00001").write_bytes(record(EXAMPLE))
    for data in (record(inner), outer):
        (tmp_path / "train-00000-of-00001").write_bytes(data)
        read(lambda: read_images(tmp_path))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, bytes]:
    """A folder of shards, and the bytes of its training images' index and of their only shard."""
    place = tmp_path_factory.mktemp("shards")
    write_images(place / "images", classes=2, train=3, val=1)
    pack_dataset(open_dataset(str(place / "images")), place / "shards", Options(kind="imagefolder", source="images"))
    folder = place / "shards"
    return folder, index_path(folder, "train").read_bytes(), (folder / "train-00000.tar").read_bytes()


@fuzzed
@given(data=st.data())
def test_shards_and_their_index(data: st.DataObject, shards: tuple[Path, bytes, bytes]) -> None:
    folder, index, images = shards
    for path, content in ((index_path(folder, "train"), index), (folder / "train-00000.tar", images)):
        path.write_bytes(data.draw(damaged(content)))
        read(lambda: read_images(folder))
        path.write_bytes(content)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes]]:
    """A folder with a Parquet file of images, and that file's bytes."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("tables")
    rows = {"image": pyarrow.array([{"bytes": png(9), "path": None}] * 6), "label": [0, 1] * 3}
    features = {"label": {"_type": "ClassLabel", "names": ["a", "b"]}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(pyarrow.table(rows).replace_schema_metadata(metadata), folder / "train.parquet")
    yield folder, (folder / "train.parquet").read_bytes()


@fuzzed
@given(data=st.data())
def test_tables(data: st.DataObject, table: tuple[Path, bytes]) -> None:
    folder, content = table
    (folder / "train.parquet").write_bytes(data.draw(damaged(content)))
    read(lambda: read_images(folder))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save({"model": {"a": torch.zeros(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}}, path)
    return path.read_bytes()


@fuzzed
@given(data=st.data())
def test_weights(data: st.DataObject, weights: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(data.draw(damaged(weights)))
    read(lambda: read_weights(tmp_path / "weights.pt"))
