"""The files of checkpoints: what is in them, damage, foreign and hostile files, and their places."""

import errno
import json
import math
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch._C._distributed_c10d import HashStore

from affinity.errors import InputError, RunError
from cputrain.checkpoints import folder as places
from cputrain.checkpoints.folder import list_checkpoints, name_of, remove_old, remove_partial, set_best, step_of
from cputrain.checkpoints.manifest import MANIFEST, DamagedError, Manifest, NetworkRecord, ScaleRecord, TrainingRecord
from cputrain.checkpoints.tensors import read_tensors, write_tensors
from cputrain.comm.hooks import AllReduceHook, Bf16AllReduceHook
from cputrain.comm.store import SignedKeys
from cputrain.models.weights import read_weights
from cputrain.optim.build import OPTIMIZERS, build_optimizer, set_lr_and_decay
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import OptimSection
from cputrain.training.metrics import EpochMetrics, StepResult
from cputrain.training.non_finite import NonFiniteHandler
from cputrain.training.saving.position import Position
from cputrain.training.saving.restore import find_newest, load, load_eval_model, put_back
from cputrain.training.saving.snapshot import take_snapshot
from cputrain.training.saving.writer import CheckpointWriter
from cputrain.training.state import TrainState

pytestmark = pytest.mark.slow
HAS_BETAS = ("adam", "adamw", "lamb")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network(outputs: int = 2) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(4, outputs))
    return layers.to(memory_format=torch.channels_last)


def state_of(model: nn.Module, optimizer: str = "momentum", *, bf16: bool = False, ema: bool = False) -> TrainState:
    return TrainState(
        network=model,
        ddp=model,
        optimizer=build_optimizer(model, OptimSection(name=optimizer)),
        all_reduce=Bf16AllReduceHook() if bf16 else AllReduceHook(),
        bucket_mib=25.0,
        ema_model=network() if ema else None,
    )


def train(state: TrainState, steps: int = 3) -> None:
    set_lr_and_decay(state.optimizer, 0.1, 1e-3)
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.network(torch.randn(4, 3, 3, 3)).square().sum().backward()
        state.optimizer.step()
        state.update_ema(0.5)


def written(
    folder: Path,
    state: TrainState,
    position: Position,
    optimizer: str = "momentum",
    keep: int = 2,
    store: dist.Store | None = None,
    world_size: int = 1,
) -> Path:
    """A checkpoint in this folder, as rank 0 of a training writes it."""
    writer = CheckpointWriter(
        folder=folder,
        keys=SignedKeys(store or HashStore(), "token"),
        rank=0,
        world_size=world_size,
        keep=keep,
        pus=os.sched_getaffinity(0),
    )
    snapshot = take_snapshot(state, 0, optimizer)
    assert snapshot.optimizer is not None
    manifest = Manifest(
        cputrain="0",
        step=position.step,
        network=NetworkRecord(
            model={},
            classes=("a", "b"),
            features=None,
            crop=3,
            resize=3,
            mean=(0.5, 0.5, 0.5),
            std=(1.0, 1.0, 1.0),
        ),
        scale=ScaleRecord(workers=1, global_batch=4, train_images=12, classes=2),
        training=TrainingRecord(
            epoch_done=position.epoch_done,
            own_statistics=True,
            best_score=None if math.isnan(position.best_score) else position.best_score,
            bucket_mib=25.0,
            first_loss=position.first_loss,
            diverged=position.diverged,
            rollbacks=position.rollbacks,
            optimizer=snapshot.optimizer,
        ),
        recipe={},
        files={},
    )
    writer.begin(position.step, snapshot, position.metadata(), manifest)
    writer.wait()
    return folder / name_of(position.step)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = state_of(network(), bf16=True)
    train(state)
    return written(tmp_path / "checkpoints", state, Position(step=7, best_score=50.0))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_everything_is_restored_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    made = state_of(network(), optimizer, bf16=True, ema=True)
    train(made)
    made.all_reduce.residuals = {weight: torch.randn(weight.numel()) for weight in made.network.parameters()}
    position = Position(
        step=7,
        best_score=50.0,
        epoch=EpochMetrics(1.25, 3.0, 12.0, ["a.jpg"]),
        epoch_s=2.5,
        epoch_done=False,
        first_loss=0.1 + 0.2,
        diverged=True,
        rollbacks={"step-0000001": 2},
    )
    path = written(tmp_path, made, position, optimizer)
    fresh = state_of(network(), optimizer, bf16=True, ema=True)
    torch.manual_seed(5)
    loaded = load(path, 0, 1)
    put_back(loaded, fresh, optimizer)
    assert loaded.position == position
    again = written(tmp_path / "again", fresh, loaded.position, optimizer)
    for file in path.glob("*.safetensors"):
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    torch.set_rng_state(load_file(path / "rank-00000.safetensors")["random"])
    train(made, 2)
    torch.set_rng_state(load_file(path / "rank-00000.safetensors")["random"])
    train(fresh, 2)
    ours, theirs = made.network.state_dict(), fresh.network.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "the optimizer goes on as if nothing had been"


def test_the_weights_alone_are_a_plain_safetensors_file(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    model = network()
    model.load_state_dict(weights)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert {name: value.shape for name, value in read_weights(saved).items()} == {
        n: v.shape for n, v in weights.items()
    }
    assert load_eval_model(saved, network()) == 7
    record = json.loads((saved / MANIFEST).read_text())["checkpoint"]
    assert record["network"]["classes"] == ["a", "b"] and record["network"]["mean"] == [0.5] * 3


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    """Or is without any effect, as in the case of a number's e; in 300 places; and cut or missing files."""
    rng = random.Random(1)
    files = sorted(saved.iterdir())
    noticed = 0
    for _ in range(300):
        file = rng.choice(files)
        whole = file.read_bytes()
        place, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        try:
            load(saved, 0, 1)
            assert file.name == MANIFEST and whole[place : place + 1] in b"eE", (file.name, place)
        except DamagedError as error:
            assert str(saved) in str(error) and "\n" not in str(error)
            noticed += 1
        file.write_bytes(whole)
    assert noticed >= 299
    for file in files:
        whole = file.read_bytes()
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            with pytest.raises(DamagedError):
                load(saved, 0, 1)
        file.write_bytes(whole)
        file.rename(file.with_suffix(".away"))
        with pytest.raises(DamagedError):
            load(saved, 0, 1)
        file.with_suffix(".away").rename(file)
    load(saved, 0, 1)


def test_damage_is_named(saved: Path) -> None:
    file = saved / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedError, match=r"damaged: the checksum of \w+\.\w+ is wrong"):
        load(saved, 0, 1)
    with pytest.raises(DamagedError, match=r"the checksum of .* is wrong"):
        read_tensors(file)  # a copy of the file alone
    file.write_bytes(whole[:-4])
    with pytest.raises(DamagedError, match=rf"it has {len(whole) - 4:,} of {len(whole):,} bytes"):
        load(saved, 0, 1)


def test_what_is_no_file_is_not_read_for_ever(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DamagedError, match=r"model.safetensors is a pipe or a device"):
        load(saved, 0, 1)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(DamagedError, match=r"model.safetensors is a pipe or a device"):
        load(saved, 0, 1)


def test_the_newest_good_one_is_found(tmp_path: Path) -> None:
    state = state_of(network())
    for step in (1, 2, 3):
        written(tmp_path, state, Position(step=step), keep=3)
    for step, file in ((3, MANIFEST), (2, "model.safetensors")):
        (tmp_path / name_of(step) / file).write_bytes(b"junk")
    found = find_newest(tmp_path, 0)
    assert (
        found is not None and found.name == "step-0000001" and list(found.damaged) == ["step-0000003", "step-0000002"]
    )
    (tmp_path / "step-0000001" / MANIFEST).unlink()
    with pytest.raises(
        InputError, match=r"none of the 3 checkpoints in .*, the newest because .*checkpoint.json is damaged"
    ):
        find_newest(tmp_path, 0)
    assert find_newest(tmp_path / "none", 0) is None


def test_a_rollback_names_the_damaged_checkpoint_and_the_one_that_is_used(tmp_path: Path) -> None:
    recipe, lines = load_recipe("demo-digits", (f"output={tmp_path}", "on_nan=rollback")), []
    state, position = state_of(network()), Position(step=4)
    for step in (1, 2):
        written(tmp_path / "checkpoints", state, Position(step=step))
    (tmp_path / "checkpoints/step-0000002/model.safetensors").write_bytes(b"junk")
    log = SimpleNamespace(warn=lambda step, line: lines.append(line))
    handler = NonFiniteHandler(recipe=recipe, rank=0, state=state, log=log, position=position, wait=lambda: None)
    sums = {"data_wait_s": 0.0, "comm_wait_s": 0.0, "metrics": EpochMetrics(), "layer_ratios": ()}
    handler.handle(StepResult(loss=math.nan, finite=False, non_finite="somewhere", **sums), step=4, lr=0.1)
    damaged, restored = lines
    assert damaged.endswith("it is now step-0000002.damaged, and step-0000001 is used")
    assert "restored step-0000001" in restored and position.rollbacks == {"step-0000001": 1}
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-0000001"]


def test_other_networks_and_optimizers_are_refused_in_a_line(saved: Path) -> None:
    loaded = load(saved, 0, 1)
    with pytest.raises(InputError, match=r"2 keys differ, first 4.bias: \(2,\) in the file, \(3,\) in the model"):
        put_back(loaded, state_of(network(3)), "momentum")
    with pytest.raises(InputError, match=r"has the state of optim.name=momentum, not of adam: set it back"):
        put_back(loaded, state_of(network(), "adam"), "adam")
    frozen = network()
    frozen[0].requires_grad_(False)
    with pytest.raises(InputError, match=r"has an optimizer of other parameters: set model.freeze_to"):
        put_back(loaded, state_of(frozen), "momentum")
    with pytest.raises(InputError, match="has no moving average"):
        put_back(loaded, state_of(network(), ema=True), "momentum")


def test_foreign_and_hostile_files_are_refused_and_not_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/ran",))

    torch.save(Hostile(), tmp_path / "hostile.pt")
    torch.save({"model": Hostile()}, tmp_path / "inside.pt")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "empty").mkdir()
    torch.save([1], tmp_path / "list.pt")
    expected = {
        "hostile.pt": r"asks to run code \((posix|os)\.system\), which was not done",
        "inside.pt": r"asks to run code \((posix|os)\.system\), which was not done",
        "text.pt": "is not a file of weights, or is damaged",
        "text.safetensors": "is not a safetensors file, or its header is damaged",
        "list.pt": "contains a list, no weights",
        "empty": "has no checkpoint.json, so it is not a checkpoint",
        "absent.pt": "cannot read .*absent.pt: No such file",
    }
    for name, message in expected.items():
        with pytest.raises(InputError, match=message) as refused:
            read_weights(tmp_path / name)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(InputError, match=r"hostile.pt is a file, so it is not a checkpoint: .* set model.weights"):
        load(tmp_path / "hostile.pt", 0, 1)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(DamagedError, match="is not the JSON of a checkpoint"):
        load(tmp_path / "deep", 0, 1)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    state = state_of(network())
    for step in (1, 2, 3, 4):
        path = written(tmp_path, state, Position(step=step))
        if step == 1:
            set_best(path)
    assert [path.name for path in list_checkpoints(tmp_path)] == [name_of(step) for step in (1, 3, 4)]
    set_best(tmp_path / name_of(4))
    remove_old(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", name_of(4)]
    shutil.copytree(tmp_path, tmp_path.with_name("moved"), symlinks=True)
    assert load(tmp_path.with_name("moved") / "best", 0, 1).position.step == 4
    written(tmp_path, state, Position(step=4, best_score=1.0))
    assert load(tmp_path / name_of(4), 0, 1).position.best_score == 1.0, "one of the same step is replaced"


def test_best_is_a_copy_where_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "symlink_to", refuse)
    state = state_of(network())
    for step in (1, 2):
        set_best(written(tmp_path, state, Position(step=step)))
        assert load(tmp_path / "best", 0, 1).position.step == step and not (tmp_path / "best").is_symlink()


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
    monkeypatch.setattr("cputrain.training.saving.writer.partial_name", lambda step: "partial")
    (saved.parent / "partial").mkdir()
    (saved.parent / "partial/rank-00000.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*rank-00000.safetensors"):
        written(saved.parent, state, Position(step=9))
    assert [path.name for path in list_checkpoints(saved.parent)] == [saved.name]
    assert not (saved.parent / "partial").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_leaves_the_folder_that_other_ranks_write_into(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may have made sure of the folder a moment ago; without it, it would not name the full disk."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cputrain.training.saving.writer.write_tensors", full)
    writer = CheckpointWriter(
        folder=tmp_path,
        keys=SignedKeys(HashStore(), ""),
        rank=world_size - 1,
        world_size=world_size,
        keep=2,
        pus=os.sched_getaffinity(0),
    )
    writer.begin(1, take_snapshot(state_of(network()), 0, "momentum"), {}, None)
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    assert (tmp_path / places.partial_name(1)).exists() == (world_size > 1)


def test_a_rank_whose_word_is_lost_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes into the store over what rank 1 has said; what it writes is not signed."""
    monkeypatch.setattr("cputrain.training.saving.writer.WRITTEN_S", 0.2)
    store = HashStore()
    SignedKeys(store, "token").set("saved/1/1", "1 10 10")
    store.set("saved/1/1", "1 10 10")
    with pytest.raises(RunError, match=r"rank 1 has not written its part of a checkpoint after 0\.2 s"):
        written(tmp_path, state_of(network()), Position(step=1), store=store, world_size=2)
    assert list_checkpoints(tmp_path) == []


def test_writing_stays_out_of_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training goes on while a slow disk takes its checkpoint."""
    state = state_of(network())
    slow, disk = write_tensors, threading.Event()

    def sluggish(*arguments):
        assert disk.wait(60)
        return slow(*arguments)

    monkeypatch.setattr("cputrain.training.saving.writer.write_tensors", sluggish)
    snapshot = take_snapshot(state, 0, "momentum")
    writer = CheckpointWriter(
        folder=tmp_path,
        keys=SignedKeys(HashStore(), ""),
        rank=1,
        world_size=2,
        keep=2,
        pus=os.sched_getaffinity(0),
    )
    own = {"rank-00001.safetensors": snapshot.files["rank-00000.safetensors"]}
    writer.begin(1, type(snapshot)(files=own, optimizer=None), {}, None)
    assert writer.busy
    disk.set()
    writer.wait()
    assert not writer.busy and (tmp_path / places.partial_name(1) / "rank-00001.safetensors").is_file()
