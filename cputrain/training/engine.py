"""Engines: native kernels, memory format, precision and compilation of a network on the CPU."""

import logging
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import try_cache
from cputrain.kernels.apply import LoadedKernels, apply_plan, convolutions_channels_last, load_for
from cputrain.kernels.convolution import has_amx
from cputrain.kernels.folding import CacheBlocked, fold_batchnorms
from cputrain.kernels.plan import BATCHNORM, WEIGHT_GRADIENT, KernelPlan, Target, plan_kernels
from cputrain.training import ipex

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}  # precision -> dtype of weights
ENGINES = ("native", "eager", "compile", "ipex")
ROUNDS = 5
PASSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Engine of a rank (native, eager, compile or ipex), the reason for it, and if it is native the kernels."""

    name: str
    why: str
    kernels: LoadedKernels | None = None


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
    return Engine(name="native", why=str(kernels.norms.path), kernels=kernels)


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


def same_engine(engines: list[tuple[str, str]], own: Engine) -> Engine:
    """Return the engine for all ranks, given each rank's engine name and reason: eager if any rank needs eager."""
    for rank, (name, why) in enumerate(engines):
        if name != own.name and name == "eager":
            return Engine(name="eager", why=f"rank {rank}: {why}")
    return own


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


def network_input(images: Tensor, precision: str) -> Tensor:
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
