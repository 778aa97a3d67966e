"""Which checkpoints are kept, and how they get onto a disk: replaced, unfinished, full, slow."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from cputrain.affinity.errors import InputError, RunError
from cputrain.checkpoint.files import (
    checkpoint_name,
    list_checkpoints,
    partial_name,
    remove_old,
    remove_partial,
    set_best,
    step_of,
    write_tensors,
)
from cputrain.checkpoint.writer import CheckpointWriter
from cputrain.comm.store import SignedKeys
from cputrain.training.saving import try_out
from cputrain.training.snapshot import TrainProgress, load, take_snapshot
from tests.support.checkpoint_files import network, state_of, written

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("group")]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    state = state_of(network())
    for step in (1, 2, 3, 4):
        path = written(tmp_path, state, TrainProgress(step=step))
        if step == 1:
            set_best(path)
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(step) for step in (1, 3, 4)]
    set_best(tmp_path / checkpoint_name(4))
    remove_old(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", checkpoint_name(4)]
    shutil.copytree(tmp_path, tmp_path.with_name("moved"), symlinks=True)
    assert load(tmp_path.with_name("moved") / "best", 0, 1).progress.step == 4
    written(tmp_path, state, TrainProgress(step=4, best_score=1.0))
    assert load(tmp_path / checkpoint_name(4), 0, 1).progress.best_score == 1.0, "one of the same step is replaced"


def test_best_is_a_copy_where_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "symlink_to", refuse)
    state = state_of(network())
    for step in (1, 2):
        set_best(written(tmp_path, state, TrainProgress(step=step)))
        assert load(tmp_path / "best", 0, 1).progress.step == step and not (tmp_path / "best").is_symlink()


def test_a_checkpoint_that_was_being_replaced_when_the_host_crashed_has_its_name_again(tmp_path: Path) -> None:
    """Between the two renamings its name is gone, and the new one may not have reached the disk."""
    replaced = tmp_path / ".step-0000009.replaced"
    replaced.mkdir()
    (tmp_path / ".step-0000009.partial").mkdir()
    (tmp_path / "step-0000008").mkdir()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [8, 9], "eval and --resume find it, too"
    remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000008", "step-0000009"]
    (tmp_path / "step-0000008").rmdir()
    replaced.mkdir()
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000009"]


def test_what_was_not_finished_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-0000009.partial").mkdir()
    (tmp_path / ".step-0000009.partial/model.safetensors").write_bytes(b"half")
    (tmp_path / ".best.partial").symlink_to("step-0000009")
    (tmp_path / "step-0000008").mkdir()
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000008"]


def test_a_full_disk_is_named_where_the_training_waits(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full stands for the disk."""
    state = state_of(network())
    monkeypatch.setattr("cputrain.checkpoint.writer.partial_name", lambda step: "partial")
    (saved.parent / "partial").mkdir()
    (saved.parent / "partial/rank-00000.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*rank-00000.safetensors"):
        written(saved.parent, state, TrainProgress(step=9))
    assert [path.name for path in list_checkpoints(saved.parent)] == [saved.name]
    assert not (saved.parent / "partial").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_leaves_the_folder_that_other_ranks_write_into(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may have made sure of the folder a moment ago; without it, it would not name the full disk."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cputrain.checkpoint.writer.write_tensors", full)
    writer = CheckpointWriter(
        folder=tmp_path,
        keys=SignedKeys(HashStore(), ""),
        rank=world_size - 1,
        world_size=world_size,
        keep=2,
    )
    writer.begin(1, take_snapshot(state_of(network()), 0, "momentum").files, {}, None)
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    assert (tmp_path / partial_name(1)).exists() == (world_size > 1)


def test_before_the_first_step_a_folder_is_written_to_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cputrain.checkpoint.writer.VISIBLE_S", 0.1)
    free = shutil.disk_usage(tmp_path).free
    try_out(tmp_path / "run", 0, 1000, first_on_host=True)
    assert list((tmp_path / "run").iterdir()) == []
    with pytest.raises(InputError, match=r"has [\d,.]+ MB free, a checkpoint needs [\d,.]+ or more"):
        try_out(tmp_path / "full", 0, 2 * free, first_on_host=True)
    assert list((tmp_path / "full").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"rank 0 cannot write into .*file: (Not a directory|File exists)"):
        try_out(tmp_path / "file", 0, 1000, first_on_host=True)


def test_a_folder_that_hosts_do_not_share_is_noticed_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 does not find what a host has said to have written."""
    monkeypatch.setattr("cputrain.checkpoint.writer.VISIBLE_S", 0.1)
    monkeypatch.setattr("cputrain.training.saving.write_bytes", lambda *_: None)
    with pytest.raises(InputError, match="is not visible here: set output to a folder that all hosts share"):
        try_out(tmp_path / "run", 0, 1000, first_on_host=True)


def test_a_rank_whose_word_is_lost_is_named(tmp_path: Path) -> None:
    """Another process writes into the store over what rank 1 has said; what it writes is not signed."""
    store = HashStore()
    SignedKeys(store, "token").set("saved/1/1", "1 10 10")
    store.set("saved/1/1", "1 10 10")
    with pytest.raises(RunError, match=r"rank 1 has not written its part of a checkpoint after 0\.2 s"):
        written(tmp_path, state_of(network()), TrainProgress(step=1), store=store, world_size=2, limit_s=0.2)
    assert list_checkpoints(tmp_path) == []


def test_writing_stays_out_of_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training goes on while a slow disk takes its checkpoint."""
    state = state_of(network())
    slow, disk = write_tensors, threading.Event()

    def sluggish(*arguments):
        assert disk.wait(60)
        return slow(*arguments)

    monkeypatch.setattr("cputrain.checkpoint.writer.write_tensors", sluggish)
    snapshot = take_snapshot(state, 0, "momentum")
    writer = CheckpointWriter(folder=tmp_path, keys=SignedKeys(HashStore(), ""), rank=1, world_size=2, keep=2)
    own = {"rank-00001.safetensors": snapshot.files["rank-00000.safetensors"]}
    writer.begin(1, own, {}, None)
    assert writer.busy
    disk.set()
    writer.wait()
    assert not writer.busy and (tmp_path / partial_name(1) / "rank-00001.safetensors").is_file()


def test_a_checkpoint_that_was_moved_and_linked_is_replaced_and_removed_like_others(tmp_path: Path) -> None:
    """To another disk, for room: the link goes, and what it leads to stays."""
    state, places = state_of(network()), tmp_path / "checkpoints"
    for step in (1, 1, 2, 3, 3):
        if (path := places / checkpoint_name(step)).is_dir() and not (far := tmp_path / f"far-{step}").exists():
            shutil.move(path, far)
            path.symlink_to(far)
        written(places, state, TrainProgress(step=step))
    assert sorted(path.name for path in places.iterdir()) == [checkpoint_name(step) for step in (2, 3)]
    assert not any(path.is_symlink() for path in places.iterdir())
    shutil.move(places / checkpoint_name(2), tmp_path / "far-2")
    (places / checkpoint_name(2)).symlink_to(tmp_path / "far-2")
    for step in (4, 5):
        written(places, state, TrainProgress(step=step))
    assert sorted(path.name for path in places.iterdir()) == [checkpoint_name(step) for step in (4, 5)]
    assert all(load(tmp_path / f"far-{step}", 0, 1).progress.step == step for step in (1, 2, 3))


def test_names_that_no_training_gives_are_passed_over(tmp_path: Path) -> None:
    for name in (".step-old.replaced", ".step-0000007.replaced", "step-7", "step-0000008.damaged"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == [".step-0000007.replaced"]


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a removed file that another process reads in its folder, which is not empty then."""
    remove_folder = os.rmdir

    def refuse(path: str, **more: object) -> None:
        if "removed" in os.fspath(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        remove_folder(path, **more)

    monkeypatch.setattr(os, "rmdir", refuse)
    for step in (1, 2, 3):
        written(tmp_path, state_of(network()), TrainProgress(step=step))
    remove_partial(tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(2), checkpoint_name(3)]
    monkeypatch.undo()
    remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(2), checkpoint_name(3)]
