"""What `cputrain bench operators` profiles: steps of a network in this process, or a program of its own."""

import importlib
import inspect
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.wording import plural
from cputrain.kernels import operators as kernels
from cputrain.kernels.recorder import Call, Spent, calls_of, compiled_recorder, load_recorder
from cputrain.kernels.recording import recording_setting
from cputrain.models.networks import OWN_NETWORKS, build_model
from cputrain.models.settings import ModelSettings
from cputrain.models.vision import NETWORK_LIBRARIES
from cputrain.studies.bench.operators import Measured
from cputrain.variables import RECORDING_VARIABLE

CLASSES = 1000
FAULTS = 4096
"""Page faults of a step that are worth a note: 16 MB in pages of 4 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Training steps of a network: `batch` images of `size` x `size` pixels, float32 or bf16, on `threads` threads;
    with and without our kernels in turns, or without them only."""

    network: str
    batch: int
    size: int
    precision: str
    threads: int
    steps: int
    kernels: bool


def measure_steps(what: Steps, env: Mapping[str, str]) -> Measured:
    """Profile training steps after one that compiles and allocates; channels-last images, SGD with momentum.

    Raises InputError if there is no such network or it is not a classifier of these images.
    """
    recorder = load_recorder(compiled_recorder(env))
    torch.manual_seed(1)
    network: Any = build_network(what.network, what.size)
    network.train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
    shape = (what.batch, 3, what.size, what.size)
    images = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    ways = (True, False) if what.kernels else (False,)
    profiles: dict[bool, list[dict[Call, Spent]]] = {way: [] for way in ways}
    seconds: dict[bool, list[float]] = {way: [] for way in ways}
    faults: dict[bool, list[int]] = {way: [] for way in ways}
    with ExitStack() as at_end:
        at_end.callback(torch.set_num_threads, torch.get_num_threads())
        at_end.callback(kernels.disable)
        at_end.callback(recorder.end)
        torch.set_num_threads(what.threads)
        for number in range(-1, what.steps):
            for way in ways:
                (kernels.enable if way else kernels.disable)()
                recorder.begin()
                pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                began = time.perf_counter()
                _train_step(network, optimizer, images, what)
                ended = time.perf_counter()
                if number >= 0:
                    faults[way].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages)
                    profiles[way].append(calls_of(recorder.recorded()["calls"]))
                    seconds[way].append(ended - began)
    first = ways[0]
    size = f"{what.size} x {what.size}"
    return Measured(
        title=f"{what.network}, {plural(what.batch, 'image')} of {size}, {what.precision}, channels-last, "
        f"{plural(what.threads, 'thread')}; {plural(what.steps, 'step')}",
        profiles=profiles[first],
        seconds=seconds[first],
        without=profiles[False] if what.kernels else (),
        seconds_without=seconds[False] if what.kernels else (),
        images=what.batch,
        notes=faults_note(median(faults[first])),
    )


def faults_note(faults: float) -> tuple[str, ...]:
    """Return a line about many page faults of a step: an allocator gives memory back to the kernel, which clears it
    when it is used again, part of it outside of operators."""
    if faults < FAULTS:
        return ()
    return (
        f"{faults:,.0f} page faults a step, most likely as malloc gives freed memory back to the kernel; under "
        "cputrain launch it keeps it: cputrain launch --ppn 1 -- cputrain bench operators ...",
    )


def build_network(name: str, size: int) -> nn.Module:
    """Build a network by its name as in model.name, any other classifier of torchvision, or MODULE:NAME, a class or
    function of the user without arguments. Raises InputError."""
    module, _, member = name.rpartition(":")
    if module and module not in NETWORK_LIBRARIES:
        return _imported(name, module, member)
    known = module or name in OWN_NETWORKS or name == "alexnet-bn"
    return build_model(ModelSettings(name=name if known else f"torchvision:{name}"), CLASSES, size)


def _imported(name: str, module: str, member: str) -> nn.Module:
    sys.path.insert(0, "")
    try:
        make: Any = getattr(importlib.import_module(module), member, None)
        network = make() if not isinstance(make, nn.Module) and _takes_nothing(make) else make
    except ModuleNotFoundError as error:
        raise InputError(f"network {name}: {error.name} is not installed, nor a file here: check the name") from None
    except Exception as error:  # a user's code raises anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"network {name}: {first} ({place.filename}, line {place.lineno}): correct it") from error
    finally:
        sys.path.remove("")
    if not isinstance(network, nn.Module):
        raise InputError(
            f"network {name}: {module} makes no network {member}: name a class or function without arguments"
        )
    return network


def _takes_nothing(make: Any) -> bool:
    """Whether this can be called without arguments."""
    if not callable(make):
        return False
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError):  # it needs some, or has no signature
        return False
    return True


def _train_step(network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, what: Steps) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=what.precision == "bf16"):
        outputs = network(images)
        if not isinstance(outputs, Tensor) or outputs.dim() < 2:
            raise InputError(
                f"network {what.network} does not return logits: profile its own training, with -- SCRIPT ARGS"
            )
        labels = torch.zeros((len(outputs), *outputs.shape[2:]), dtype=torch.int64)
        loss = functional.cross_entropy(outputs, labels)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A program that has ended, its status as `subprocess` gives it, and what was recorded if torch computed."""

    status: int
    measured: Measured | None
    threads: int


def run_program(command: tuple[str, ...], env: Mapping[str, str], *, after: float, seconds: float) -> Ended:
    """Run a program unchanged; record the process that computes most for `seconds`, after its first `after` seconds."""
    library = compiled_recorder(env)
    with tempfile.TemporaryDirectory() as folder:
        setting = recording_setting(library, Path(folder), after, seconds)
        sys.stdout.flush()
        began = time.perf_counter()
        status = subprocess.run(command, env={**env, RECORDING_VARIABLE: setting}, check=False).returncode
        lasted_s = time.perf_counter() - began
        files = [json.loads(path.read_bytes()) for path in Path(folder).glob("*.json")]
    recorded = [(sum(row["ns"] for row in file["calls"]), file) for file in files if file["calls"]]
    if not recorded:
        return Ended(status=status, measured=None, threads=0)
    _, most = max(recorded, key=lambda item: item[0])
    measured = _read_measurement(command, most, len(recorded), lasted_s)
    return Ended(status=status, measured=measured, threads=most["threads"])


def _read_measurement(command: tuple[str, ...], values: Mapping[str, Any], processes: int, lasted_s: float) -> Measured:
    steps, recorded_s, skipped_s = values["steps"], values["recorded_s"], values["skipped_s"]
    notes = [
        f"recorded {recorded_s:.1f} s from {skipped_s:.1f} s after its first operator on; it ran for {lasted_s:.1f} s"
    ]
    if processes > 1:
        rank = f"rank {values['rank']}, " if values["rank"] else ""
        notes.append(f"{plural(processes, 'process')} computed; this one most: {rank}{shlex.join(values['command'])}")
    return Measured(
        title=f"{shlex.join(command)}: {plural(steps, 'step')} of its optimizers, "
        f"{plural(values['threads'], 'thread')}",
        profiles=(calls_of(values["calls"]),),
        seconds=(recorded_s,),
        steps=steps,
        notes=tuple(notes),
    )


def check_ended(ended: Ended, command: tuple[str, ...]) -> None:
    """Raise RunError if the program failed, InputError if torch computed nothing in it."""
    shown = shlex.join(command)
    if ended.status < 0:
        raise RunError(f"{shown} was ended by signal {-ended.status}")
    if ended.status > 0:
        raise RunError(f"{shown} failed with exit status {ended.status}")
    if ended.measured is None:
        raise InputError(
            f"{shown} computed nothing by torch, or in a Python without cputrain: give a program that trains"
        )
