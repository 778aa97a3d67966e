"""How a network runs on the CPU: native kernels, memory format, precision, compilation."""

import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import try_cache
from cputrain.affinity.wording import counted
from cputrain.models.batchnorm_relu import Kernels, checked, load
from cputrain.models.fusion import CacheBlocked, fold_batchnorms, fuse_batchnorms, has_amx, use_products
from cputrain.models.winograd import ConvolutionShape, WinogradKernels, load_winograd
from cputrain.training import ipex

DTYPES = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}  # of weights and images
ENGINES = ("native", "eager", "compile", "ipex")
ROUNDS = 5
PASSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How a rank runs its network: native, eager, compile or ipex, and why; `kernels` are those of native."""

    name: str
    why: str
    kernels: Kernels | None = None


def choose_engine(requested: str, precision: str, env: Mapping[str, str]) -> Engine:
    """The engine for engine=`requested`: with "auto" native, where its kernels compile, compute what torch does and
    support the precision.

    Raises InputError or RunError where "native" is requested and its kernels cannot be used, InputError where "ipex" is
    and cannot be used.
    """
    if requested == "compile":
        _check_compile(env)
    if requested in ("eager", "compile"):
        return Engine(name=requested, why=f"engine={requested}")
    if requested == "ipex":
        if precision == "float64":
            raise InputError("engine=ipex does not compute in precision=float64: set engine=eager")
        return Engine(name="ipex", why=f"engine=ipex, {ipex.PACKAGE} {ipex.check_ipex()}")
    if precision == "float64":
        return Engine(name="eager", why="precision=float64, for which there are no native kernels")
    try:
        kernels = checked(load(env))
    except (InputError, RunError) as error:
        if requested == "native":
            raise
        return Engine(name="eager", why=str(error).removeprefix("engine=native: "))
    return Engine(name="native", why=str(kernels.path), kernels=kernels)


def _check_compile(env: Mapping[str, str]) -> None:
    """Raise RunError where torch.compile cannot load what it compiles, from the folder that it uses."""
    folder = Path(env.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())
    try:
        try_cache(folder)
    except OSError as error:
        raise RunError(
            f"engine=compile: torch cannot use {folder}: {error.strerror}: set TORCHINDUCTOR_CACHE_DIR to another "
            "folder, or set engine=eager"
        ) from None


def same_engine(engines: list[tuple[str, str]], own: Engine) -> Engine:
    """The engine of all ranks from each rank's name and reason: eager, if one rank cannot use native kernels."""
    for rank, (name, why) in enumerate(engines):
        if name != own.name and name == "eager":
            return Engine(name="eager", why=f"rank {rank}: {why}")
    return own


def prepare_model(model: nn.Module, engine: Engine, precision: str) -> nn.Module:
    """Convert the weights to channels-last, which oneDNN's convolutions need; fuse layers or compile on first use.

    Raises InputError for complex tensors, whose imaginary parts the conversion to a real type would drop.
    """
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if value.is_complex():
            raise InputError(f"{name} of the network is {value.dtype}: make it real, by torch.view_as_real")
    model.to(dtype=DTYPES[precision], memory_format=torch.channels_last)  # type: ignore[call-overload]
    if engine.kernels is not None:
        fuse_batchnorms(model, engine.kernels)
        if precision == "bf16" and has_amx():
            use_products(model)
    if engine.name == "compile":
        model.compile()
    return model


WINOGRAD = "winograd"  # the kind of record that says how many times as fast it is
LEAST_GAIN = 1.05  # below it, rounding is not worth it


def winograd_kernels(requested: str, engine: Engine, precision: str, env: Mapping[str, str]) -> WinogradKernels | None:
    """The kernels for model.winograd=`requested`; None where none are to be used: another engine, or bfloat16 on AMX,
    whose products are faster. Raises InputError or RunError where they cannot be used."""
    if requested == "off" or engine.kernels is None or (precision == "bf16" and has_amx()):
        return None
    return load_winograd(env)


def shape_key(shape: ConvolutionShape, images: int) -> str:
    """The name of a measured convolution."""
    sizes = f"{shape.inputs} to {shape.outputs} channels, {shape.height} x {shape.width}, padding {shape.padding}"
    return f"{sizes}, {counted(images, 'image')}"


def optimize_training(model: nn.Module, optimizer: Optimizer, engine: Engine) -> tuple[nn.Module, Optimizer]:
    """The model and its optimizer as the engine trains them, once before the first step."""
    return ipex.optimize(model, optimizer) if engine.name == "ipex" else (model, optimizer)


def evaluation_network(model: nn.Module, engine: Engine, precision: str) -> nn.Module:
    """A network with the outputs of `model` in evaluation, for its present weights: with native, a faster one."""
    computes = {"float32": has_onednn, "bf16": has_bf16}.get(precision)
    if engine.kernels is None or computes is None or not computes():
        return model
    folded = fold_batchnorms(model, torch.bfloat16 if precision == "bf16" else torch.float32)
    return model if folded is model else CacheBlocked(folded)


def has_onednn() -> bool:
    """Whether this torch has oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def has_bf16() -> bool:
    """Whether oneDNN has convolutions in bfloat16 for this CPU."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def network_input(images: Tensor, precision: str) -> Tensor:
    """Normalized images in the data type of the weights."""
    return images.to(DTYPES[precision])


def autocast(precision: str) -> AbstractContextManager[object]:
    """A context in which bf16 computes convolutions and matrix products in bfloat16; no effect for others."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()


def bf16_speedups() -> list[float]:
    """The speed of a 3 x 3 convolution of ResNet-50 in bfloat16, relative to float32, in each of 5 rounds.

    Below 1 on CPUs without instructions for bfloat16.
    """
    images = torch.zeros(4, 64, 56, 56).to(memory_format=torch.channels_last)
    weights = torch.zeros(64, 64, 3, 3).to(memory_format=torch.channels_last)
    pairs = [(images.to(dtype), weights.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]

    def seconds(x: Tensor, w: Tensor) -> float:
        started = time.perf_counter()
        functional.conv2d(x, w, padding=1)
        return time.perf_counter() - started

    def ratio() -> float:
        """Of the shortest times, in turn: whatever else runs on these cores only ever lengthens them."""
        passes = [[seconds(x, w) for x, w in pairs] for _ in range(PASSES)]
        return min(wide for wide, _ in passes) / min(narrow for _, narrow in passes)

    with torch.inference_mode():
        return [ratio() for _ in range(ROUNDS + 1)][1:]  # the first is a warm-up
