"""The files of checkpoints: what is in them, damage, foreign and hostile files."""

import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from affinity.errors import InputError
from cputrain.checkpoints.folder import list_checkpoints, name_of
from cputrain.checkpoints.manifest import MANIFEST, DamagedError
from cputrain.checkpoints.tensors import read_tensors
from cputrain.models.weights import read_weights
from cputrain.optim.build import OPTIMIZERS
from cputrain.recipe.loading import load_recipe
from cputrain.training.metrics import EpochMetrics, StepResult
from cputrain.training.non_finite import NonFiniteHandler
from cputrain.training.saving.position import Position
from cputrain.training.saving.restore import find_newest, load, load_eval_model, put_back
from tests.support.checkpoint_files import group_of_one, network, saved_once, state_of, train, written

pytestmark = pytest.mark.slow
HAS_BETAS = ("adam", "adamw", "lamb")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of this process alone."""
    with group_of_one():
        yield


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return saved_once(tmp_path)


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
    handler = NonFiniteHandler(
        recipe=recipe,
        rank=0,
        state=state,
        warn=lambda _step, line: lines.append(line),
        position=position,
        wait=lambda: None,
    )
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
