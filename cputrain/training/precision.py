"""precision=auto: bfloat16 for a training whose steps are much faster with it on this CPU, chosen once for a run."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import plural
from cputrain.comm.group import all_gather
from cputrain.kernels.apply import apply_plan
from cputrain.kernels.evidence import random_numbers_kept, restore
from cputrain.kernels.measure import kept_speedups
from cputrain.measurements import AUTO_BF16_GAIN
from cputrain.models.settings import ModelSettings
from cputrain.optim import build_optimizer
from cputrain.optim_settings import OptimSettings
from cputrain.training.engine import (
    Engine,
    agree_on_engine,
    choose_engine,
    has_bf16,
    optimize_training,
    plan_network,
    prepare_model,
)
from cputrain.training.state import Learner
from cputrain.training.task import Task

FLOAT32, BF16 = "float32", "bf16"
RECORD = "precision"
"""Kind of the records with measured speedups of steps."""

ROUNDS = 4  # of a step in each precision, so that other load on the host slows both; the first is a warm-up
MAX_S = 10.0  # after which no further round begins, for networks with long steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is measured: steps with `images` images a pass, `side` pixels wide, on a host with `workers` ranks; `engine`
    is the one in float32, chosen for the setting `engine_setting`, and `cpus` are the types of CPU of all ranks."""

    model: ModelSettings
    optim: OptimSettings
    engine_setting: str
    task: Task
    engine: Engine
    images: int
    side: int
    workers: int
    cpus: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def steps(self) -> str:
        """The steps in words: "steps of resnet50 at 64 x 64 with 16 images and 1 thread"."""
        size = f"{self.side} x {self.side}"
        return f"steps of {self.model.name} at {size} with {plural(self.images, 'image')} and {self.threads}"

    @property
    def threads(self) -> str:
        """The number of threads of a rank in words."""
        return plural(torch.get_num_threads(), "thread")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The precision of a run and the reason for it."""

    precision: str
    why: str


def instructions_missing(isa: Sequence[str]) -> str:
    """Return why bfloat16 cannot be faster with these instructions, "" if it may be.

    Without instructions for it oneDNN converts to float32 and back: on a Xeon with AVX-512 only, a training in bf16
    takes longer than in float32.
    """
    if not any("bf16" in flag for flag in isa):
        return "no instructions for bfloat16 (AVX512-BF16 or AMX)"
    return "" if has_bf16() else "no bfloat16 in this torch"


def choose_precision(trial: Trial, first: str | None, measure: Callable[[Trial], float] | None = None) -> Choice:
    """Choose the precision of all ranks. `first` is that of the run that rank 0 continues, None for a new run; only its
    value on rank 0 counts. A new run takes bf16 if its steps are AUTO_BF16_GAIN times as fast by `measure`, by default
    `kept_step_speedup`. All ranks must call this."""
    first = all_gather(first)[0]
    if first is not None:
        return Choice(precision=first, why="as this run began")
    for rank, missing in enumerate(all_gather(instructions_missing(this_machine().isa))):
        if missing:
            return Choice(precision=FLOAT32, why=f"the CPU of rank {rank} has {missing}")
    if not trial.task.traceable:
        return Choice(precision=FLOAT32, why="a network of your own is not measured; precision=bf16 takes bf16")
    return decided((measure or kept_step_speedup)(trial), trial.steps)


def decided(speedup: float, steps: str) -> Choice:
    """Return the choice for a measured speedup of `steps`."""
    rounded = round(speedup, 2)
    figure = f"{steps} are {rounded:.2f} times as fast in bf16 as in float32 on this CPU"
    if rounded >= AUTO_BF16_GAIN:
        return Choice(precision=BF16, why=f"{figure}, {AUTO_BF16_GAIN} or more; precision=float32 keeps float32")
    return Choice(precision=FLOAT32, why=f"{figure}, less than {AUTO_BF16_GAIN}; precision=bf16 takes bf16")


def kept_step_speedup(trial: Trial) -> float:
    """Return the speedup of steps by bfloat16: kept on rank 0's host for this network, batch, optimizer, engine,
    threads and workers, or measured now. All ranks must call this."""
    engine = f"{trial.engine.name}{' with kernels of operators' if trial.engine.operators else ''}"
    own = f"{trial.steps}, {trial.optim.name}, {engine}, {', '.join(sorted(set(trial.cpus)))}"
    key = all_gather(own)[0]  # batches and threads of ranks may differ
    name = f"{trial.threads}, {plural(trial.workers, 'worker')}"
    return kept_speedups(RECORD, name, (key,), lambda _: step_speedup(trial), trial.env)[key]


def step_speedup(trial: Trial) -> float:
    """Measure how many times as fast a step is in bf16 as in float32: forward, backward and update of a network that is
    built for it, with random inputs.

    All ranks measure at the same time, as they will train; the slowest one of each precision counts, as ranks wait for
    each other in every step. The all-reduce, which is the same in both, is left out.
    """
    with random_numbers_kept():
        of_ranks = all_gather(_fastest_steps(trial))
    return max(wide for wide, _ in of_ranks) / max(narrow for _, narrow in of_ranks)


def _fastest_steps(trial: Trial) -> tuple[float, float]:
    """Return the seconds of the fastest step in float32 and in bf16, in which this thread had a CPU: it takes part in
    all of a step, and seconds in which other processes had the CPU do not count."""
    task, env, images, winograd = trial.task, trial.env, trial.images, trial.model.winograd
    narrow = choose_engine(trial.engine_setting, BF16, env)
    engines = {FLOAT32: trial.engine, BF16: agree_on_engine(all_gather((narrow.name, narrow.why)), narrow)}
    network = task.build()
    planned = {
        precision: plan_network(engine, network, task.example, images, precision, env, winograd=winograd)
        for precision, engine in engines.items()
    }
    prepare_model(network, planned[FLOAT32][0], FLOAT32, planned[FLOAT32][1])
    optimizer = build_optimizer(network, trial.optim, task.loss_module)  # with a rate of 0
    network, optimizer = optimize_training(network, optimizer, trial.engine)
    learner = Learner(network, task.losses, FLOAT32, task.loss_module)
    inputs, targets = task.example(images)
    assert isinstance(inputs, Tensor), "recipes have images or rows of numbers"
    inputs.normal_()
    if inputs.ndim == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)

    def step() -> float:
        started = time.thread_time()
        _, losses = learner(inputs, targets, task.label_smoothing)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time() - started

    seconds, started = {FLOAT32: inf, BF16: inf}, time.perf_counter()
    for number in range(ROUNDS):
        for precision, (engine, plan, _) in planned.items():
            if plan is not None and engine.kernels is not None:
                restore(network)
                apply_plan(network, plan, engine.kernels)
            learner.precision = precision
            duration = step()
            if number:
                seconds[precision] = min(seconds[precision], duration)
        if number and time.perf_counter() - started > MAX_S:
            break
    return seconds[FLOAT32], seconds[BF16]
