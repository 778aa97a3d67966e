"""Engines: native kernels, memory format, precision and compilation of a network on the CPU; which one a training uses,
and which of its layers Winograd's algorithm."""

import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import try_cache
from cputrain.affinity.planner.records import ENGINE, Records, read_records
from cputrain.affinity.planner.request import Request, tuning_name
from cputrain.affinity.topology.sysfs import read_machine
from cputrain.comm.group import all_gather
from cputrain.kernels.apply import LoadedKernels, agree_on_plan, apply_plan, convolutions_channels_last, load_for
from cputrain.kernels.convolution import has_amx, winograd_shapes
from cputrain.kernels.evidence import random_numbers_kept
from cputrain.kernels.folding import CacheBlocked, fold_batchnorms
from cputrain.kernels.measure import measured_gains
from cputrain.kernels.operators import disable, enable, kernels_setting, left_out
from cputrain.kernels.plan import BATCHNORM, WEIGHT_GRADIENT, WINOGRAD, Gain, KernelPlan, Target, plan_kernels
from cputrain.manifest import TrainingRecord
from cputrain.training import ipex
from cputrain.variables import KERNELS_VARIABLE

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}  # precision -> dtype of weights
ENGINES = ("native", "eager", "compile", "ipex")
ROUNDS = 5
PASSES = 4
OFF = f"{KERNELS_VARIABLE}=off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Engine of a rank (native, eager, compile or ipex), the reason for it, and if it is native the kernels of layers.
    `operators`: whether it has the kernels below torch's operators."""

    name: str
    why: str
    kernels: LoadedKernels | None = None
    operators: bool = False


def choose_engine(requested: str, precision: str, env: Mapping[str, str]) -> Engine:
    """Choose the engine for engine=`requested`. "auto" is native if its kernels compile, match torch's results and
    support the precision, else eager.

    Raises InputError or RunError if "native" is requested and its kernels cannot be used; InputError if "ipex" is
    requested and cannot be used; RunError if torch.compile has no usable cache directory.
    """
    if requested == "compile":
        _check_compile(env)
    if requested in ("eager", "compile"):
        return Engine(name=requested, why=f"engine={requested}")
    if requested == "ipex":
        if precision == "float64":
            raise InputError("engine=ipex does not support precision=float64: set engine=eager")
        return Engine(name="ipex", why=f"engine=ipex, {ipex.PACKAGE} {ipex.check_ipex()}")
    if precision == "float64":
        return Engine(name="eager", why="precision=float64, which the native kernels do not support")
    kernels = load_for(target_for(precision), env, winograd=False)
    if kernels.norms is None:
        why = kernels.missing[BATCHNORM].removeprefix("native kernels: ")
        if requested == "native":
            why = why.replace("use torch's layers", "set engine=eager")
            raise type(kernels.errors[BATCHNORM])(f"engine=native: {why}")
        return Engine(name="eager", why=why)
    if WEIGHT_GRADIENT in kernels.missing:
        logger.warning("cputrain: weight gradients are computed by torch: %s", kernels.missing[WEIGHT_GRADIENT])
    return Engine(name="native", why=str(kernels.norms.path), kernels=kernels, operators=True)


def target_for(precision: str) -> Target:
    """Return what kernels are chosen for with precision=`precision`."""
    return Target.here(torch.bfloat16 if precision == "bf16" else torch.float32)


def _check_compile(env: Mapping[str, str]) -> None:
    """Raise RunError if torch.compile cannot load compiled code from its cache directory."""
    folder = Path(env.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())
    try:
        try_cache(folder)
    except OSError as error:
        raise RunError(
            f"engine=compile cannot use the cache directory {folder}, {error.strerror}: set TORCHINDUCTOR_CACHE_DIR "
            "to another directory, or set engine=eager"
        ) from None


def agree_on_engine(engines: list[tuple[str, str]], own: Engine) -> Engine:
    """Return the engine for all ranks, given each rank's engine name and reason: eager if any rank needs eager."""
    for rank, (name, why) in enumerate(engines):
        if name != own.name and name == "eager":
            return Engine(name="eager", why=f"rank {rank}: {why}")
    return own


def register_operators(engine: Engine, env: Mapping[str, str]) -> str:
    """Register the kernels below torch's operators if the engine has them, else take them away; return why they cannot
    be registered, "" if they can. Raises InputError if CPUTRAIN_KERNELS is neither auto nor off."""
    if kernels_setting(env) == "off" and engine.operators:
        return OFF
    if not engine.operators:
        disable()
        return ""
    try:
        enable(env)
    except (InputError, RunError) as error:
        return str(error)
    return ""


def agree_on_operators(problems: list[str], own: Engine) -> Engine:
    """Return the engine for all ranks, given why each rank cannot register the kernels below torch's operators: no rank
    has them unless all can."""
    found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if dist.get_rank() == 0 and own.kernels is not None:
        if found and set(problems) != {OFF}:
            logger.warning("cputrain: torch's operators stay in place: %s", found[0])
        for line in left_out():
            logger.warning("cputrain: kernels below torch's operators: %s", line)
    agreed = replace(own, operators=own.operators and not found)
    if not agreed.operators:
        disable()
    return agreed


def with_operators_of(checkpoint: TrainingRecord, engine: Engine, env: Mapping[str, str]) -> Engine:
    """Return the engine with kernels below torch's operators only if a checkpoint's training had them; one of an
    earlier version does not say, and had them where CPUTRAIN_KERNELS=auto, as under `cputrain launch`."""
    had = checkpoint.operators
    if had is None:
        had = kernels_setting(env) == "auto"
    agreed = replace(engine, operators=engine.operators and had)
    if not agreed.operators:
        disable()
    return agreed


def with_measured_engine(engine: Engine, request: Request, precision: str, env: Mapping[str, str]) -> Engine:
    """Return the engine that was measured as fastest for a request on rank 0's host, if every rank can use it, else
    `engine`. All ranks must call this."""
    # Records are of the whole host, while this rank is bound to a part of it.
    records = read_records(read_machine(Path("/")), env) if dist.get_rank() == 0 else Records()
    measured = all_gather(measured_engine(request, records))[0]
    if measured is None:
        return engine
    name, why = measured
    chosen, problem = engine, ""
    if name != engine.name:
        try:
            chosen = choose_engine(name, precision, env)
        except (InputError, RunError) as error:
            problem = str(error)
    problems = [f"rank {rank}: {each}" for rank, each in enumerate(all_gather(problem)) if each]
    return replace(engine, why=problems[0]) if problems else replace(chosen, why=why)


def measured_engine(request: Request, records: Records) -> tuple[str, str] | None:
    """Return the fastest measured engine for a request's network, precision and batch, and the reason; None if there is
    no measurement."""
    name = tuning_name(request)
    for record in records.of(ENGINE):
        engine, why = record.values.get("engine"), record.values.get("why")
        if name is not None and record.name == name and engine in ENGINES and isinstance(why, str):
            return engine, f"{why} ({record.command}, {record.date})"
    return None


def prepare_model(model: nn.Module, engine: Engine, precision: str, plan: KernelPlan | None = None) -> nn.Module:
    """Convert weights to the precision, those of convolutions to channels-last, which oneDNN needs, and apply a plan of
    its kernels, by default without Winograd's algorithm, or set up compilation."""
    convert_weights(model, precision)
    convolutions_channels_last(model)
    if engine.kernels is not None:
        apply_plan(
            model, plan or plan_kernels(model, target_for(precision), {}, engine.kernels.missing), engine.kernels
        )
    if engine.name == "compile":
        model.compile()
    return model


def convert_weights(model: nn.Module, precision: str) -> None:
    """Convert parameters and buffers to the dtype of `precision`.

    Raises InputError for complex tensors: converting them to a real dtype would drop the imaginary parts.
    """
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if value.is_complex():
            raise InputError(f"{name} of the network is {value.dtype}: convert it with torch.view_as_real")
    model.to(dtype=DTYPES[precision])


def with_winograd(engine: Engine, requested: str, precision: str, env: Mapping[str, str]) -> Engine:
    """Return the engine with the kernels for model.winograd=`requested`, if it is native; not in bf16 on AMX, whose
    matrix products are faster."""
    if engine.kernels is None or requested == "off" or (precision == "bf16" and has_amx()):
        return engine
    return replace(engine, kernels=load_for(target_for(precision), env, winograd=True))


def plan_network(
    agreed_engine: Engine,
    network: nn.Module,
    example: Callable[[int], tuple[Any, Any]],
    images: int,
    precision: str,
    env: Mapping[str, str],
    *,
    winograd: str,
    stored: tuple[str, ...] | None = None,
) -> tuple[Engine, KernelPlan | None, dict[str, float | None] | None]:
    """Plan the kernels of a network for `images` a pass, in which convolutions use Winograd's algorithm if they are
    faster with it, or those of a checkpoint (`stored`) do. `example` returns inputs and targets of n samples;
    `winograd` is model.winograd.

    Returns the engine with all kernels that the plan uses, the plan, None if the engine is not native, and the speedups
    of the layers by Winograd's algorithm, None if it cannot be used. All ranks must call this.
    """
    engine = with_winograd(agreed_engine, winograd, precision, env)
    if engine.kernels is None:
        return engine, None, None
    target, missing = target_for(precision), engine.kernels.missing
    has_kernels = engine is not agreed_engine and WINOGRAD not in missing
    problem = missing.get(WINOGRAD, "") if engine is not agreed_engine else ""
    of_ranks = all_gather((problem, has_kernels))
    problems = [f"rank {rank}: {each}" for rank, (each, _) in enumerate(of_ranks) if each]
    gains: dict[str, Gain] = {}
    used = all(has for _, has in of_ranks)
    if used and stored is not None:
        gains = dict.fromkeys(stored, (None, "as in the checkpoint"))
    elif used and engine.kernels.convolutions is not None:
        try:
            with random_numbers_kept():  # which a user's data may draw
                shapes = winograd_shapes(network, example(1)[0])
        except InputError as error:
            shapes, problems = {}, [str(error)]
        gain = measured_gains(set(shapes.values()), images, target, engine.kernels.convolutions, env)
        gains = {name: gain(shape) for name, shape in shapes.items()}
    if problems and dist.get_rank() == 0:
        logger.warning("cputrain: Winograd's algorithm is not used for convolutions: %s", problems[0])
    plan = agree_on_plan(plan_kernels(network, target, gains, missing), missing)
    return engine, plan, plan.speedups(WINOGRAD) if used else None


def optimize_training(model: nn.Module, optimizer: Optimizer, engine: Engine) -> tuple[nn.Module, Optimizer]:
    """Apply the engine's optimization of model and optimizer, once before the first step."""
    return ipex.optimize(model, optimizer) if engine.name == "ipex" else (model, optimizer)


def evaluation_network(model: nn.Module, engine: Engine, precision: str) -> nn.Module:
    """Return a network for evaluation with the current weights of `model`; the native engine returns a faster copy."""
    computes = {"float32": has_onednn, "bf16": has_bf16}.get(precision)
    if engine.kernels is None or computes is None or not computes():
        return model
    folded = fold_batchnorms(model, torch.bfloat16 if precision == "bf16" else torch.float32)
    return model if folded is model else CacheBlocked(folded)


def has_onednn() -> bool:
    """Return whether this torch has oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def has_bf16() -> bool:
    """Return whether oneDNN has bfloat16 convolutions for this CPU."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def to_weight_dtype(images: Tensor, precision: str) -> Tensor:
    """Convert normalized images to the dtype of the weights."""
    return images.to(DTYPES[precision])


def autocast(precision: str) -> AbstractContextManager[object]:
    """Return the context that runs convolutions and matrix products in bfloat16 if `precision` is bf16."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()


def bf16_speedups() -> list[float]:
    """Measure the speedup of bfloat16 over float32 for a 3 x 3 convolution of ResNet-50, in each of 5 rounds.

    It is below 1 on CPUs without bfloat16 instructions.
    """
    images = torch.zeros(4, 64, 56, 56).to(memory_format=torch.channels_last)
    weights = torch.zeros(64, 64, 3, 3).to(memory_format=torch.channels_last)
    pairs = [(images.to(dtype), weights.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]

    def seconds(x: Tensor, w: Tensor) -> float:
        started = time.perf_counter()
        functional.conv2d(x, w, padding=1)
        return time.perf_counter() - started

    def ratio() -> float:
        """Return the ratio of the shortest times, measured alternately: other load on the cores only lengthens them."""
        passes = [[seconds(x, w) for x, w in pairs] for _ in range(PASSES)]
        return min(wide for wide, _ in passes) / min(narrow for _, narrow in passes)

    with torch.inference_mode():
        return [ratio() for _ in range(ROUNDS + 1)][1:]  # the first round is a warm-up
