"""The files of checkpoints: what is in them, damage, foreign and hostile files."""

import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cputrain.affinity.errors import InputError
from cputrain.checkpoint.files import (
    DTYPES,
    MANIFEST,
    DamagedError,
    checkpoint_name,
    list_checkpoints,
    read_tensors,
    write_tensors,
)
from cputrain.checksums import crc32c_of_json
from cputrain.manifest import EMA
from cputrain.models.weights import read_weights
from cputrain.optim import OPTIMIZERS
from cputrain.training.engine import choose_engine, prepare_model
from cputrain.training.snapshot import TrainProgress, check_learner, load, load_eval_model, load_newest, restore
from cputrain.training.state import Learner
from cputrain.training.step import EpochMetrics, StepResult, StepSettings
from cputrain.training.watchers.non_finite import NonFiniteHandler
from tests.support.checkpoint_files import network, state_of, train, written
from tests.support.checkpoints import content

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("group")]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_everything_is_restored_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    made = state_of(network(), optimizer, bf16=True, ema=True)
    train(made)
    made.all_reduce.residuals = {weight: torch.randn(weight.numel()) for weight in made.network.parameters()}
    progress = TrainProgress(
        step=7,
        best_score=50.0,
        epoch=EpochMetrics(1.25, 3.0, 12.0, ["a.jpg"]),
        epoch_s=2.5,
        epoch_done=False,
        first_loss=0.1 + 0.2,
        diverged=True,
        rollbacks={"step-0000001": 2},
    )
    path = written(tmp_path, made, progress, optimizer)
    fresh = state_of(network(), optimizer, bf16=True, ema=True)
    torch.manual_seed(5)
    loaded = load(path, 0, 1)
    restore(loaded, fresh, optimizer)
    assert loaded.progress == progress
    again = written(tmp_path / "again", fresh, loaded.progress, optimizer)
    for file in path.glob("*.safetensors"):
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    torch.set_rng_state(load_file(path / "rank-00000.safetensors")["random"])
    train(made, 2)
    torch.set_rng_state(load_file(path / "rank-00000.safetensors")["random"])
    train(fresh, 2)
    ours, theirs = made.network.state_dict(), fresh.network.state_dict()
    assert all(weight.isfinite().all() for weight in ours.values())
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "the optimizer goes on as if nothing had been"


def test_the_weights_alone_are_a_plain_safetensors_file(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    model = network()
    model.load_state_dict(weights)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert {name: value.shape for name, value in read_weights(saved)[0].tensors.items()} == {
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
        written(tmp_path, state, TrainProgress(step=step), keep=3)
    for step, file in ((3, MANIFEST), (2, "model.safetensors")):
        (tmp_path / checkpoint_name(step) / file).write_bytes(b"junk")
    found = load_newest(tmp_path, 0)
    assert (
        found is not None
        and found.path.name == "step-0000001"
        and list(found.damaged) == ["step-0000003", "step-0000002"]
    )
    (tmp_path / "step-0000001" / MANIFEST).unlink()
    with pytest.raises(
        InputError, match=r"none of the 3 checkpoints in .*, the newest because .*checkpoint.json is damaged"
    ):
        load_newest(tmp_path, 0)
    assert load_newest(tmp_path / "none", 0) is None


def test_a_rollback_names_the_damaged_checkpoint_and_the_one_that_is_used(tmp_path: Path) -> None:
    lines: list[str] = []
    state, progress = state_of(network()), TrainProgress(step=4)
    for step in (1, 2):
        written(tmp_path / "checkpoints", state, TrainProgress(step=step))
    (tmp_path / "checkpoints/step-0000002/model.safetensors").write_bytes(b"junk")
    handler = NonFiniteHandler(
        on_nan="rollback",
        folder=tmp_path / "checkpoints",
        optimizer_name="momentum",
        rank=0,
        state=state,
        warn=lambda _step, line: lines.append(line),
        progress=progress,
        wait=lambda: None,
    )
    sums = {"data_wait_s": 0.0, "comm_wait_s": 0.0, "metrics": EpochMetrics(), "layer_ratios": ()}
    settings = StepSettings(images=8, passes=1, lr=0.1, weight_decay=0.0)
    handler.after_step(5, settings, StepResult(loss=math.nan, finite=False, non_finite="somewhere", **sums), 1.0)
    damaged, restored = lines
    assert damaged.endswith("renamed to step-0000002.damaged, using step-0000001")
    assert "restored step-0000001" in restored and progress.rollbacks == {"step-0000001": 1}
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-0000001"]


def test_other_networks_and_optimizers_are_refused_in_a_line(saved: Path) -> None:
    loaded = load(saved, 0, 1)
    with pytest.raises(InputError, match=r"has weights of another model: of another shape 4.weight \(2, 4\) instead"):
        restore(loaded, state_of(network(3)), "momentum")
    with pytest.raises(InputError, match=r"was saved with optim.name=momentum, not adam: set optim.name=momentum"):
        restore(loaded, state_of(network(), "adam"), "adam")
    frozen = network()
    frozen[0].requires_grad_(False)
    with pytest.raises(InputError, match=r"was saved with other trainable parameters: restore model.freeze_to"):
        restore(loaded, state_of(frozen), "momentum")
    with pytest.raises(InputError, match="has no moving average"):
        restore(loaded, state_of(network(), ema=True), "momentum")


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
        "hostile.pt": r"would run code \((posix|os)\.system\) when loaded",
        "inside.pt": r"would run code \((posix|os)\.system\) when loaded",
        "text.pt": "is not a file of weights, or is damaged",
        "text.safetensors": "is not a safetensors file, or its header is damaged",
        "list.pt": "contains a list instead of weights",
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


class Tied(nn.Module):
    """Two layers of one weight, and two names of one batch-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.last, self.same_norm = nn.Linear(4, 4, bias=False), self.norm
        self.last.weight = self.first.weight


def test_the_moving_average_of_tied_weights_is_saved_under_both_names(tmp_path: Path) -> None:
    made = state_of(Tied(), ema=True)
    made.averages["first.weight"].fill_(5.0)
    path = written(tmp_path, made, TrainProgress(step=1))
    files = content(path)["files"]
    assert torch.equal(files[EMA]["last.weight"], torch.full((4, 4), 5.0))
    evaluated = Tied()
    load_eval_model(path, evaluated)
    assert torch.equal(evaluated.first.weight, torch.full((4, 4), 5.0))
    again = state_of(Tied(), ema=True)
    restore(load(path, 0, 1), again, "momentum")
    with again.averaged() as averaged:
        assert torch.equal(averaged.last.weight, torch.full((4, 4), 5.0))
    assert torch.equal(again.network.first.weight, made.network.first.weight)


class Buffered(nn.Module):
    """A layer and a buffer."""

    def __init__(self, value: torch.Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("kept", value, persistent=persistent)


class More(Buffered):
    """It has state that is no tensor."""

    def get_extra_state(self) -> dict:
        return {"a": 1}


def learner_of(module: nn.Module) -> Learner:
    return state_of(module).learner


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_every_type_of_tensor_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.tensor([0, 1, 1]).to(dtype)
    check_learner(learner_of(Buffered(value)))
    fresh = state_of(Buffered(torch.zeros_like(value)))
    restore(load(written(tmp_path, state_of(Buffered(value)), TrainProgress(step=1)), 0, 1), fresh, "momentum")
    assert torch.equal(fresh.network.kept, value) and fresh.network.kept.dtype == dtype


def test_a_network_that_checkpoints_cannot_hold_is_refused_before_it_trains() -> None:
    with pytest.raises(InputError, match=r"kept of the network is torch\.complex128, which checkpoints cannot store"):
        check_learner(learner_of(Buffered(torch.zeros(3, dtype=torch.complex128))))
    with pytest.raises(InputError, match="_extra_state of the network is not a tensor"):
        check_learner(learner_of(More(torch.zeros(3))))
    with pytest.raises(InputError, match="kept of the network is a sparse tensor"):
        check_learner(learner_of(Buffered(torch.eye(3).to_sparse())))


def test_a_buffer_that_is_no_part_of_the_state_may_have_another_size(tmp_path: Path) -> None:
    """A cache that grows. Its values are not spread over another size."""
    path = written(tmp_path, state_of(Buffered(torch.tensor([7.0]), persistent=False)), TrainProgress(step=1))
    for size in (1, 3):
        fresh = state_of(Buffered(torch.zeros(size), persistent=False))
        restore(load(path, 0, 1), fresh, "momentum")
        assert torch.equal(fresh.network.kept, torch.full((size,), 7.0 if size == 1 else 0.0))


@pytest.mark.parametrize(
    ("tensors", "header", "why"),
    [
        ({"random": torch.zeros(3, dtype=torch.uint8)}, True, "has no random state that this torch can load"),
        ({}, True, "has no random state that this torch can load"),
        ({"random": torch.get_rng_state()}, True, "has no 1.running_mean of shape"),
        ({"random": torch.get_rng_state()}, False, "is damaged: a rank's file has no valid sums of the epoch"),
    ],
)
def test_a_rank_s_file_of_something_else_is_refused_in_a_line(
    tensors: dict, header: bool, why: str, saved: Path
) -> None:
    """With right checksums: put together by hand, or by another program."""
    name = "rank-00000.safetensors"
    text = read_tensors(saved / name)[1] if header else {}
    record = write_tensors(saved / name, tensors, {key: value for key, value in text.items() if key != "crc32c"})

    def change(content: dict) -> None:
        content["files"][name] = asdict(record)
        content["training"]["epoch_done"] = False

    rewrite(saved, change)
    with pytest.raises(InputError, match=why):
        restore(load(saved, 0, 1), state_of(network(), bf16=True), "momentum")


def test_a_manifest_without_workers_is_refused_in_a_line(saved: Path) -> None:
    rewrite(saved, lambda content: content["scale"].update(workers=0))
    with pytest.raises(InputError, match=r"scale\.workers"):
        load(saved, 0, 1)


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """Change a manifest, with its checksum."""
    data = json.loads((path / MANIFEST).read_text())
    change(data["checkpoint"])
    data["crc32c"] = crc32c_of_json(data["checkpoint"])
    (path / MANIFEST).write_text(json.dumps(data))


def test_complex_tensors_are_refused_and_not_made_real() -> None:
    """Module.to(float32) drops their imaginary parts."""
    engine = choose_engine("eager", "float32", {})
    with pytest.raises(InputError, match=r"kept of the network is torch\.complex64: convert it with torch"):
        prepare_model(Buffered(torch.ones(3, dtype=torch.complex64)), engine, "float32")
