"""Shards copied to a host's own disk: used once they are whole, sources where not, gone at the end."""

import os
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from cputrain.affinity.errors import InputError
from cputrain.affinity.ranks import Rank
from cputrain.data.formats import copies_folder_name, copy, open_dataset, shards, staged
from cputrain.data.prepare import Options, prepare
from tests.cputrain.test_training import PPN
from tests.support.commands import cputrain
from tests.support.images import write_images

ALONE = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="env")
HERE = tuple(sorted(os.sched_getaffinity(0)))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = write_images(tmp_path / "images")
    prepare(open_dataset(str(folder)), tmp_path / "data", Options(kind="imagefolder", source="x", shards=3))
    return tmp_path / "data"


@pytest.fixture
def group(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_copies_are_read_once_they_are_there_and_removed(data: Path, tmp_path: Path, group: None) -> None:
    dataset = open_dataset(str(data))
    expected = [dataset.train.read(i) for i in range(36)]
    with staged(dataset, str(tmp_path / "scratch"), ALONE, HERE):
        folder = tmp_path / "scratch" / copies_folder_name([*dataset.train.paths, *dataset.val.paths])
        next(thread for thread in threading.enumerate() if thread.name == "stage").join(30)
        assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in data.glob("*.tar"))
        for path in dataset.train.paths:
            path.write_bytes(b"")  # whoever reads on from here reads copies
        assert [dataset.train.read(i) for i in range(36)] == expected
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
        staged(open_dataset(str(tmp_path / "images")), str(tmp_path / "s"), ALONE, HERE),
    ):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"Not a directory|File exists"),
        staged(open_dataset(str(data)), str(tmp_path / "file"), ALONE, HERE),
    ):
        pass
    usage = shards.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda _folder: usage._replace(free=10))
    with (
        pytest.raises(InputError, match=r"has 0\.0 GB free there, the shards need"),
        staged(open_dataset(str(data)), str(tmp_path / "s"), ALONE, HERE),
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
    result = cputrain("train", "imagefolder", *settings, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "top-1" in result.stdout and not list((tmp_path / "scratch").iterdir())
