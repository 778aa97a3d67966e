"""Checkpoints in a loop of a user's own: bit for bit, atomic, verified, and written beside the training."""

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from cputrain.affinity import InputError, RunError
from cputrain.checkpoint.async_checkpoint import AsyncCheckpoint, use_all_cpus
from cputrain.checkpoint.files import MANIFEST, MODEL, DamagedError, checkpoint_name, list_checkpoints, write_tensors
from cputrain.checkpoint.state import Tensors, decode_state, encode_state
from cputrain.checksums import crc32c_of_json
from cputrain.comm.hooks import compress_bf16
from cputrain.models.weights import read_weights
from cputrain.mpi.supervise.run import free_port
from cputrain.optim import Lamb, param_groups
from tests.support.checkpoint_files import TrainProgress, state_of, written
from tests.support.checkpoint_files import network as network_of_trainer
from tests.support.commands import needs_two_cores
from tests.support.forked import ended, forked, forking_python, printed

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python")
DATA = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 2)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, shuffled: torch.Generator) -> float:
    """Three steps with dropout, shuffled samples, and noise of NumPy and Python."""
    for inputs, targets in DataLoader(DATA, batch_size=8, shuffle=True, generator=shuffled):
        noise = random.random() + torch.from_numpy(np.random.rand(6)).float()
        loss = nn.functional.cross_entropy(model(inputs + noise), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return loss.item()


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.Generator]:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = network()
    optimizer = Lamb(param_groups(model, weight_decay=0.01), lr=0.0)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    return model, optimizer, scheduler, torch.Generator().manual_seed(seed)


def test_a_restored_loop_continues_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, shuffling, a schedule, and three libraries' random numbers."""
    model, optimizer, scheduler, shuffled = made(3)
    losses = []
    with AsyncCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.restore(model, optimizer, scheduler=scheduler, shuffled=shuffled) is None
        for number in range(4):
            losses.append(epoch(model, optimizer, scheduler, shuffled))
            if number < 2:
                history = {"losses": losses, "best": (number, float("inf"))}
                checkpoint.save(
                    3 * (number + 1), model, optimizer, scheduler=scheduler, shuffled=shuffled, history=history
                )
    again = made(4)
    for _ in range(3):
        epoch(*again)  # another past
    found = AsyncCheckpoint(tmp_path).restore(again[0], again[1], scheduler=again[2], shuffled=again[3])
    assert found is not None and found.step == 6 and found.path == tmp_path / checkpoint_name(6)
    assert found.values == {"history": {"losses": losses[:2], "best": (1, float("inf"))}}
    assert [epoch(*again) for _ in range(2)] == losses[2:]
    assert same(model.state_dict(), again[0].state_dict())
    assert same(optimizer.state_dict(), again[1].state_dict()) and scheduler.state_dict() == again[2].state_dict()


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, their types included."""
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(np.array_equal(a, b))


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, True, None, -0.0, float("inf"), "\u00e9\ud800"], "b": (1, (2,)), "": {}},
        {1: "one", (2, 3): "two", "!tensor": "x", "a/b": torch.ones(1), "a": {"b": torch.zeros(2)}},
        [Counter({3: 1, 5: 2}), OrderedDict([("x", torch.ones(2, dtype=torch.bfloat16))]), {4, 5}, b"\x00\xff"],
        [np.arange(3, dtype=np.uint32), np.float32(0.1), np.int64(5), np.bool_(True), np.zeros((0, 2))],
    ],
)
def test_states_come_back_with_their_types(state: Any) -> None:
    tensors: Tensors = {}
    tree = json.loads(json.dumps(encode_state(state, "it", tensors)))
    assert same(decode_state(tree, tensors), state) or state == decode_state(tree, tensors)
    assert all(name.startswith("it") for name in tensors)


def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return [
        lr_scheduler.SequentialLR(optimizer, parts, milestones=[2]),
        lr_scheduler.MultiStepLR(optimizer, [2, 2, 3]),
        lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lr_scheduler.ReduceLROnPlateau(optimizer),
    ]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, torch.tensor(0.1), amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_schedulers_of_torch_are_restored(name: str, tmp_path: Path) -> None:
    """Fused ones need their state in the weights' memory format; L-BFGS keeps lists of tensors."""

    def loop(steps: int, *parts: Any) -> None:
        model, optimizer, *others = parts
        for _ in range(steps):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.randn(2, 3, 4, 4)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            for each in others:
                each.step(*([1.0] if isinstance(each, lr_scheduler.ReduceLROnPlateau) else []))

    def fresh() -> list[Any]:
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 2))
        if name != "lbfgs":  # torch's views the weights as vectors
            model = model.to(memory_format=torch.channels_last)
        optimizer = OPTIMIZERS[name](model.parameters())
        return [model, optimizer, *([] if name in ("adam", "lbfgs") else schedulers(optimizer))]

    torch.manual_seed(1)
    whole, parts = fresh(), fresh()
    loop(3, *whole)
    objects = {f"s{number}": each for number, each in enumerate(whole[2:])}
    with AsyncCheckpoint(tmp_path) as checkpoint:
        checkpoint.save(3, whole[0], whole[1], **objects)
    loop(2, *whole)
    found = checkpoint.restore(parts[0], parts[1], **dict(zip(objects, parts[2:], strict=True)))
    assert found is not None and found.step == 3
    loop(2, *parts)
    assert same(whole[0].state_dict(), parts[0].state_dict())
    assert same(whole[1].state_dict(), parts[1].state_dict())


class Compiled(nn.Module):
    """Has its module where torch.compile, whose import takes seconds, has it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


class Odd(nn.Module):
    """bfloat16, tied, non-contiguous and empty weights, and buffers that are and are not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))
        self.tied, self.turned = self.low, nn.Parameter(torch.randn(3, 5).T)
        self.empty, self.slice = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.randn(2), persistent=False)


def test_odd_weights_and_state_of_higher_precision_come_back(tmp_path: Path) -> None:
    model, again = Odd(), Odd()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, again)]
    exact = torch.randn(4, 4)  # as an optimizer with float32 moments; load_state_dict would round it to bfloat16
    optimizers[0].state[model.low] = {"momentum_buffer": exact, "count": 7}
    average = AveragedModel(model)
    with AsyncCheckpoint(tmp_path) as checkpoint:
        checkpoint.save(1, Compiled(model), optimizers[0], average=average)
    other = AveragedModel(again)
    assert checkpoint.restore(again, optimizers[1], average=other) is not None
    assert same(dict(model.state_dict()), dict(again.state_dict())) and torch.equal(model.cache, again.cache)
    assert again.tied is again.low and same(dict(average.state_dict()), dict(other.state_dict()))
    kept = optimizers[1].state[again.low]
    assert torch.equal(kept["momentum_buffer"], exact) and kept["count"] == 7


def test_the_weights_open_in_plain_torch(tmp_path: Path) -> None:
    model = network()
    with AsyncCheckpoint(tmp_path) as checkpoint:
        checkpoint.save(5, Compiled(nn.DataParallel(model)), torch.optim.SGD(model.parameters(), 0.1))
    plain = network()
    plain.load_state_dict(load_file(tmp_path / checkpoint_name(5) / MODEL))
    assert same(dict(plain.state_dict()), dict(model.state_dict()))


def saved(folder: Path, *steps: int, **objects: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Save a network with its optimizer after these steps."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    with AsyncCheckpoint(folder) as checkpoint:
        for step in steps:
            checkpoint.save(step, model, optimizer, **objects)
    return model, optimizer


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = saved(tmp_path, 1, 2)
    file = tmp_path / checkpoint_name(2) / MODEL
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    checkpoint = AsyncCheckpoint(tmp_path)
    found = checkpoint.restore(model)
    assert found is not None and found.step == 1 and file.exists(), "who only reads renames nothing"
    found = checkpoint.restore(model, optimizer)
    assert found is not None and found.step == 1
    assert f"{file} is damaged: the checksum of" in caplog.records[-1].getMessage()
    assert caplog.records[-1].getMessage().endswith("renamed to step-0000002.damaged, using step-0000001")
    checkpoint.save(2, model, optimizer)
    checkpoint.close()
    (tmp_path / checkpoint_name(2) / MANIFEST).unlink()
    (tmp_path / checkpoint_name(1) / MODEL).unlink()
    with pytest.raises(InputError, match=r"none of the 2 checkpoints in .* can be used, the newest because .* has no"):
        checkpoint.restore(model, optimizer)


def test_what_does_not_fit_is_named_in_a_line_and_nothing_is_loaded(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, 3, generator=torch.Generator())
    checkpoint, other = AsyncCheckpoint(tmp_path), network()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    other.append(nn.Linear(2, 2))
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (r"weights of another model: missing 5.bias, 5.weight", (other,), {}),
        (r"weights of another model: unexpected 4.bias, 4.weight", (network()[:4],), {}),
        (r"of another shape 0.weight \(8, 6\) instead of \(9, 6\)", (nn.Sequential(nn.Linear(6, 9)),), {}),
        (r"was saved with Adam, not SGD: use Adam", (model, torch.optim.SGD(model.parameters(), 0.1)), {}),
        (r"other parameters in the optimizer", (model, torch.optim.Adam(model[0].parameters())), {}),
        (r"also has generator: pass all that was saved", (model, optimizer), {}),
        (r"has no scheduler, but generator", (model, optimizer), {"scheduler": torch.Generator()}),
        (r"epoch has no load_state_dict: plain values are in what restore returns", (model, optimizer), {"epoch": 3}),
    ]
    for message, arguments, objects in cases:
        with pytest.raises(InputError, match=message) as refused:
            checkpoint.restore(*arguments, **objects)
        assert "\n" not in str(refused.value)
    assert same(before, {name: value for name, value in other.state_dict().items() if name in before})


def test_a_state_that_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    sparse = nn.Module()
    sparse.register_buffer("kept", torch.eye(3).to_sparse())
    model = network()
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    cases: list[tuple[str, nn.Module, Any, dict[str, Any]]] = [
        (r"weight of the model is on the meta device, so it has no values", nn.Linear(2, 2, device="meta"), None, {}),
        (r"weight of the model has no shape yet, .*: run a forward pass first", nn.LazyLinear(2), None, {}),
        (r"kept of the model is a sparse tensor", sparse, None, {}),
        (r"the optimizer has a parameter that the model has not", model, foreign, {}),
        (r"hook/0 is a builtins.function, which checkpoints cannot store", model, None, {"hook": [saved]}),
    ]
    for message, module, optimizer, objects in cases:
        with AsyncCheckpoint(tmp_path / "new") as checkpoint, pytest.raises(InputError, match=message):
            checkpoint.save(1, module, optimizer, **objects)
    assert not (tmp_path / "new").exists()
    saved(tmp_path / "old", 1)
    for message, module, _, _ in cases[:3]:
        with pytest.raises(InputError, match=message):
            AsyncCheckpoint(tmp_path / "old").restore(module)
    for wrong in ({"keep": 0}, {"step": -1}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))}="):
            AsyncCheckpoint(tmp_path, keep=wrong.get("keep", 1)).save(wrong.get("step", 1), model)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes meanwhile is not in it; the next one waits for it."""
    disk, begun = threading.Event(), []

    def slow(path: Path, *arguments: Any) -> Any:
        begun.append(path.parent.name)
        assert disk.wait(60)
        return write_tensors(path, *arguments)

    monkeypatch.setattr("cputrain.checkpoint.writer.write_tensors", slow)
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with AsyncCheckpoint(tmp_path) as checkpoint:
        checkpoint.save(1, model)
        with torch.no_grad():
            model[0].weight.zero_()
        assert list_checkpoints(tmp_path) == []
        threading.Timer(0.2, disk.set).start()
        checkpoint.save(2, model)
        assert list_checkpoints(tmp_path)[0] == tmp_path / checkpoint_name(1) and begun[0] == ".step-0000001.partial"
    first = load_file(tmp_path / checkpoint_name(1) / MODEL)
    assert first.keys() == before.keys() and all(torch.equal(first[name], before[name]) for name in before)
    assert not load_file(tmp_path / checkpoint_name(2) / MODEL)["0.weight"].any()


def test_a_full_disk_is_raised_at_the_next_call_and_the_loop_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/full stands for the disk."""
    full = "the checkpoint was not saved: .*model.safetensors: No space left on device: free some space"

    def no_space(path: Path, *arguments: Any) -> Any:
        if path.name == MODEL:
            path.symlink_to("/dev/full")
        return write_tensors(path, *arguments)

    monkeypatch.setattr("cputrain.checkpoint.writer.write_tensors", no_space)
    model, checkpoint = network(), AsyncCheckpoint(tmp_path)
    checkpoint.save(1, model)
    with pytest.raises(RunError, match=full) as raised:
        checkpoint.save(2, model)
    assert "\n" not in str(raised.value) and list(tmp_path.iterdir()) == [], "the disk has its space again"
    checkpoint.save(3, model)
    with pytest.raises(RunError, match=full):
        checkpoint.restore(model)
    checkpoint.save(4, model)
    with pytest.raises(RunError, match=full):
        checkpoint.close()
    with pytest.raises(ZeroDivisionError), AsyncCheckpoint(tmp_path) as failing:
        failing.save(5, model)
        raise ZeroDivisionError
    assert "No space left on device" in caplog.records[-1].getMessage(), "it does not hide the loop's own error"
    monkeypatch.undo()
    checkpoint.save(6, model)
    checkpoint.close()
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(6)]


def test_the_newest_are_kept_and_never_lost_to_another_training(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, 1, 2, 3)
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(2), checkpoint_name(3)]
    with pytest.raises(InputError, match=r"step-0000003 is newer than step 1, which is to be saved: restore it first"):
        AsyncCheckpoint(tmp_path).save(1, model, optimizer)
    saved(tmp_path, 3)
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(2), checkpoint_name(3)], (
        "the same step is replaced"
    )


@needs_two_cores
def test_the_writer_stays_off_the_core_to_which_openmp_has_bound_the_loop() -> None:
    own, found = os.sched_getaffinity(0), []
    held = threading.Event()
    other = threading.Thread(target=held.wait)  # as one of the runtime's other threads
    other.start()
    try:
        os.sched_setaffinity(0, {min(own)})
        for enter in (lambda: None, use_all_cpus):
            thread = threading.Thread(target=lambda enter=enter: (enter(), found.append(os.sched_getaffinity(0))))
            thread.start()
            thread.join()
        assert found == [{min(own)}, own]
    finally:
        os.sched_setaffinity(0, own)
        held.set()
        other.join()


KILLED = """
import sys, time, torch
from cputrain.checkpoint import AsyncCheckpoint, writer

write = writer.write_tensors
def slow(path, *arguments):
    if "0000002" in str(path) and path.name == "optimizer.safetensors":
        print("half", flush=True)
        time.sleep(60)
    return write(path, *arguments)
writer.write_tensors = slow
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpoint = AsyncCheckpoint("run")
for step in range(1, 3):
    checkpoint.save(step, model, optimizer)
"""
LEFT = """
import torch
from cputrain.checkpoint import AsyncCheckpoint
AsyncCheckpoint("left").save(1, torch.nn.Linear(4, 4))
"""


def test_a_program_that_is_killed_leaves_whole_checkpoints_and_one_that_ends_completes_its_last(tmp_path: Path) -> None:
    with forked("-c", KILLED, cwd=tmp_path) as process:
        while "half" not in printed(process)[0]:
            assert process.poll() is None, printed(process)[1]
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert (tmp_path / "run/.step-0000002.partial" / MODEL).is_file()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with AsyncCheckpoint(tmp_path / "run") as checkpoint:
        found = checkpoint.restore(model, optimizer)
        assert found is not None and found.step == 1
        checkpoint.save(2, model, optimizer)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [checkpoint_name(1), checkpoint_name(2)]
    with forked("-c", LEFT, cwd=tmp_path) as process:
        assert ended(process).status == 0
    assert [path.name for path in list_checkpoints(tmp_path / "left")] == [checkpoint_name(1)], "also without close()"


def test_foreign_and_hostile_checkpoints_are_refused_in_a_line(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path / "mine", 1, value=(1,))
    file = tmp_path / "mine" / checkpoint_name(1) / MANIFEST
    content = json.loads(file.read_text())["checkpoint"]
    changes: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"version": 2}, InputError, "is from another program, or another version of cputrain"),
        ({"state": {"value": {"!eval": "1"}}}, DamagedError, "is not as AsyncCheckpoint saves"),
        ({"state": {"value": {"!scalar": ["object", 1]}}}, DamagedError, "is not as AsyncCheckpoint saves"),
        ({"ranks": 0}, DamagedError, "is not as AsyncCheckpoint saves"),
        ({"optimizer": [1]}, DamagedError, "is not as AsyncCheckpoint saves"),
    ]
    for change, _, message in changes:
        changed = {**content, **change}
        file.write_text(json.dumps({"crc32c": crc32c_of_json(changed), "checkpoint": changed}))
        with pytest.raises(InputError, match=message) as refused:
            AsyncCheckpoint(tmp_path / "mine").restore(model, optimizer)
        assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("group")
def test_checkpoints_of_the_trainer_and_of_a_loop_are_told_apart(tmp_path: Path) -> None:
    written(tmp_path / "run", state_of(network_of_trainer()), TrainProgress(step=1))
    with pytest.raises(InputError, match=r"was saved by cputrain train, which resumes it; its weights are in .*model"):
        AsyncCheckpoint(tmp_path / "run").restore(network_of_trainer())
    saved(tmp_path / "loop", 1)
    path = tmp_path / "loop" / checkpoint_name(1)
    with pytest.raises(InputError, match=r"was saved by AsyncCheckpoint, .*: name its model.safetensors"):
        read_weights(path)
    assert read_weights(path / MODEL)[0].tensors.keys() == network().state_dict().keys()


RANKS = """
import random, sys, numpy as np, torch, torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from cputrain.checkpoint import AsyncCheckpoint, writer
from tests.cputrain.test_async_checkpoint import epoch, network, same
from cputrain.optim import Lamb, param_groups

dist.init_process_group("gloo")
rank = dist.get_rank()

def say(name, text):
    sys.stdout.write(f"{name} {rank}: {text}\\n")  # in one piece

def refused(name, action):
    try:
        action()
    except Exception as error:
        say(name, f"{type(error).__name__} {error}")

def made(seed):
    torch.manual_seed(1)
    model = network()
    random.seed(rank + seed), np.random.seed(rank + seed), torch.manual_seed(rank + seed)
    optimizer = Lamb(param_groups(model, weight_decay=0.01), lr=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    ddp = DistributedDataParallel(model)
    return ddp, optimizer, scheduler, torch.Generator().manual_seed(rank)

parts = ddp, optimizer, scheduler, shuffled = made(5)
objects = {"scheduler": scheduler, "shuffled": shuffled}
with AsyncCheckpoint("run") as checkpoint:
    for number in range(2):
        epoch(*parts)
        checkpoint.save(3 * number + 3, ddp, optimizer, **objects, mine=rank, epoch=number)
    losses = [epoch(*parts) for _ in range(2)]
again = made(7)
found = AsyncCheckpoint("run").restore(again[0], again[1], scheduler=again[2], shuffled=again[3])
say("values", f"{found.step} {found.values}")
say("same", losses == [epoch(*again) for _ in range(2)] and same(dict(ddp.state_dict()), dict(again[0].state_dict())))
say("random", same(parts[3].get_state(), again[3].get_state()))

refused("step", lambda: checkpoint.save(6 + rank, ddp))
refused("names", lambda: checkpoint.save(6, ddp, **({"extra": 1} if rank else {})))
refused("object", lambda: checkpoint.save(6, ddp, wrong=print if rank else 1))
other = network()
if rank:
    other[0].weight.data[0, 0] += 1
refused("weights", lambda: checkpoint.save(6, other))
write = writer.write_tensors
def full(path, *arguments):
    path.symlink_to("/dev/full")
    return write(path, *arguments)
writer.write_tensors = full if rank else write
checkpoint.save(9, ddp, optimizer)
refused("disk", lambda: checkpoint.save(12, ddp, optimizer))
writer.write_tensors = write
checkpoint.save(15, ddp, optimizer)
checkpoint.close()
dist.barrier()
if rank == 0:
    print("names", sorted(path.name for path in Path("run").iterdir()), flush=True)
    file = Path("run/step-0000015/rank-00001.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
dist.barrier()
found = checkpoint.restore(again[0], again[1], scheduler=again[2], shuffled=again[3])
say("damaged", found.step)
dist.destroy_process_group()
"""


def test_two_ranks_resume_bit_for_bit_and_agree_on_every_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    path = {"PYTHONPATH": str(Path(__file__).parents[2]), "MASTER_PORT": str(free_port())}
    with forked(*TORCHRUN, *forking_python(), "-m", "ranks", cwd=tmp_path, **path) as job:
        end = ended(job)
    assert end.status == 0, end.err
    said = dict(re.findall(r"^(\w+ \d): (.*)$", end.out, re.MULTILINE))
    both = {name: [said[f"{name} {rank}"] for rank in (0, 1)] for name in {key.split()[0] for key in said}}
    assert both["values"] == [f"6 {{'epoch': 1, 'mine': {rank}}}" for rank in (0, 1)]
    assert both["same"] == both["random"] == ["True", "True"]
    for name, message in {
        "step": "InputError rank 1 saves step 7, rank 0 step 6: save the same step",
        "names": "InputError extra is not saved by rank 0 and rank 1: save the same on all ranks",
        "object": "InputError wrong is a builtins.builtin_function_or_method, which checkpoints cannot store",
        "weights": "InputError the weights of ranks 0 and 1 differ, and these checkpoints hold one replica",
        "disk": "RunError the checkpoint was not saved: run/step-0000009/rank-00001.safetensors: No space left",
    }.items():
        assert [each.startswith(message) for each in both[name]] == [True, True], both[name]
    assert f"names ['{checkpoint_name(6)}', '{checkpoint_name(15)}']" in end.out
    assert both["damaged"] == ["6", "6"] and end.err.count("renamed to step-0000015.damaged") == 1

    model, optimizer, scheduler, shuffled = made(3)
    with pytest.raises(InputError, match=r"was saved by 2 ranks, each with its own mine, shuffled: start 2 ranks"):
        AsyncCheckpoint(tmp_path / "run").restore(model, optimizer, scheduler=scheduler, shuffled=shuffled)
    found = AsyncCheckpoint(tmp_path / "run").restore(model)
    assert found is not None and found.values == {"epoch": 1}, "to evaluate it on one rank"


@pytest.mark.usefixtures("group")
def test_rounding_errors_of_bf16_gradients_are_continued(tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(2)
        ddp = DistributedDataParallel(network())
        return ddp, torch.optim.SGD(ddp.parameters(), 0.1), compress_bf16(ddp)

    def loop(ddp: nn.Module, optimizer: torch.optim.Optimizer, hook: Any) -> list[torch.Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
        return [weight.detach().clone() for weight in (*ddp.parameters(), *map(hook.state_dict().get, range(6)))]

    parts = fresh()
    loop(*parts)
    with AsyncCheckpoint(tmp_path) as checkpoint:
        checkpoint.save(2, parts[0], parts[1], hook=parts[2])
    whole, again = loop(*parts), fresh()
    assert checkpoint.restore(again[0], again[1], hook=again[2]) is not None
    assert sum(bool(errors.any()) for errors in again[2].residuals.values()) > 3
    resumed = loop(*again)
    assert len(whole) == len(resumed) == 12 and all(map(torch.equal, whole, resumed))


@pytest.mark.usefixtures("group")
def test_with_another_number_of_ranks_the_generators_stay_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = saved(tmp_path, 1, epoch=1)
    file = tmp_path / checkpoint_name(1) / MANIFEST
    content = {**json.loads(file.read_text())["checkpoint"], "ranks": 3}
    file.write_text(json.dumps({"crc32c": crc32c_of_json(content), "checkpoint": content}))
    torch.manual_seed(6)
    before = torch.get_rng_state()
    found = AsyncCheckpoint(tmp_path).restore(model, optimizer)
    assert found is not None and found.values == {"epoch": 1} and torch.equal(before, torch.get_rng_state())
    assert "was saved by 3 ranks, this job has 1: the random generators stay" in caplog.records[-1].getMessage()


def test_ranks_without_a_group_do_not_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="WORLD_SIZE is 2 and there is no process group"):
        AsyncCheckpoint(tmp_path).save(1, network())
