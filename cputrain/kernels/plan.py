"""The plan of a network's kernels: what computes each layer, and why."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import plural
from cputrain.kernels.activations import KINDS
from cputrain.kernels.convolution import (
    MIN_INPUTS,
    ConvolutionShape,
    has_amx,
    supports_matmul,
    supports_native_wgrad,
    supports_winograd,
)
from cputrain.kernels.evidence import Native, departure
from cputrain.kernels.fusion import Fusion
from cputrain.kernels.rewriting import Forward, fused_forwards, native_norms, obstacles
from cputrain.kernels.split_weights import divisible

BATCHNORM, FUSED, WINOGRAD = "batch-norm", "fused forward", "winograd"
WEIGHT_GRADIENT, PRODUCT, CONVOLUTION = "bf16 weight gradient", "matrix product", "convolution"
SPLIT = "bfloat16 weights"
SEPARATE = "activation or addition after batch-norm"
Gain = tuple[float | None, str]
"""Speedup of a kernel over torch's, and why: measured, or None if a rule says yes and 0 if it says no."""
FORMAT = 1
MIN_CHANNELS = {"AVX512": 64, "AVX2": 16}
"""Channels from which on Winograd's three passes were faster than oneDNN's: 1.6 to 3 times on Zen 4 (64 to 512
channels), 1.4 to 3 times on Zen 3 (16 to 512)."""
MIN_TILES = 32
"""Tiles of a batch from which on they were: 8 images of 7 x 7 pixels, or one of 21 x 21."""
MIN_PRODUCT_INPUTS = 160
"""Input channels from which on products of matrices were faster than oneDNN's 1 x 1 convolutions on AMX: 0.4 to 1.18
times their time, with fewer 0.8 to 1.7 (the layers of seven networks, 8 images, 2 threads)."""
MIN_SPEEDUP = 1.05
"""Smallest speedup that is worth the larger rounding error of Winograd's algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What kernels are chosen for: data type of feature maps, instruction sets of the CPU, threads of this process.

    `instructions` has those of AVX2, AVX512, AVX512_BF16 and AMX that the CPU has and the kernel permits.
    """

    dtype: str
    instructions: tuple[str, ...]
    threads: int

    @classmethod
    def here(cls, dtype: torch.dtype) -> "Target":
        """Return this process as a target. Raises InputError for dtypes without kernels."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"dtype={dtype}: kernels exist for torch.float32 and torch.bfloat16")
        capability = torch.backends.cpu.get_cpu_capability()
        supported = {"AVX2": capability in ("AVX2", "AVX512"), "AVX512": capability == "AVX512"}
        supported |= {"AVX512_BF16": torch.cpu._is_avx512_bf16_supported(), "AMX": has_amx()}
        instructions = tuple(name for name, has in supported.items() if has)
        return cls(dtype=str(dtype).removeprefix("torch."), instructions=instructions, threads=torch.get_num_threads())

    @property
    def is_bf16(self) -> bool:
        """Whether feature maps are bfloat16."""
        return self.dtype == "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What computes a layer, and why; its speedup over torch's, if that was measured."""

    layer: str
    kernel: str
    why: str
    speedup: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    """The kernels of a network: layers that get another than torch's, in the order of their application, and those that
    stay torch's although there are kernels of their kind."""

    target: Target
    replaced: tuple[Choice, ...]
    kept: tuple[Choice, ...]
    forwards: Mapping[nn.Module, Forward] = field(default_factory=dict, compare=False, repr=False)
    """The traces of this process from which the plan was made, which `apply_plan` then needs not make again."""

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object, without traces."""
        values = asdict(replace(self, forwards={}))
        del values["forwards"]
        return {"format": FORMAT, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "KernelPlan":
        """Return the plan of a JSON object. Raises InputError if it is none."""
        try:
            if values["format"] != FORMAT:
                raise InputError(f"a kernel plan of format {values['format']}: this version reads format {FORMAT}")
            target = values["target"]
            return cls(
                target=Target(**{**target, "instructions": tuple(target["instructions"])}),
                replaced=tuple(Choice(**choice) for choice in values["replaced"]),
                kept=tuple(Choice(**choice) for choice in values["kept"]),
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"not a kernel plan: {error}") from None

    def speedups(self, kernel: str) -> dict[str, float | None]:
        """Return the measured speedups of the layers that get this kernel, by name; None by a rule."""
        return {choice.layer: choice.speedup for choice in self.replaced if choice.kernel == kernel}

    def layers(self, kernel: str) -> tuple[str, ...]:
        """Return the names of the layers that get this kernel."""
        return tuple(choice.layer for choice in self.replaced if choice.kernel == kernel)

    def refused(self) -> dict[str, str]:
        """Return why forward passes are not fused, by layer."""
        return {choice.layer: choice.why for choice in self.kept if choice.kernel == FUSED}

    def __str__(self) -> str:
        """Return the plan as text: layers by kernel and reason."""
        target = f"{self.target.dtype} on {self.target.instructions[-1] if self.target.instructions else 'this CPU'}"
        lines = [f"kernels for {target}, {plural(self.target.threads, 'thread')}:"]
        for title, choices in (("", self.replaced), ("torch's: ", self.kept)):
            for (kernel, why), group in groupby(sorted(choices, key=_kind), key=_kind):
                alike = list(group)
                gains = [choice.speedup for choice in alike if choice.speedup is not None]
                measured = f", {min(gains):.2f} to {max(gains):.2f} times as fast" if gains else ""
                lines.append(f"  {title}{kernel}, {plural(len(alike), 'layer')}{measured} ({why}):")
                lines.append(f"    {', '.join(choice.layer or 'the network' for choice in alike)}")
        return "\n".join(lines)


def _kind(choice: Choice) -> tuple[str, str]:
    return choice.kernel, choice.why


def plan_kernels(
    network: nn.Module, target: Target, winograd: Mapping[str, Gain], missing: Mapping[str, str]
) -> KernelPlan:
    """Plan the kernels of a network; it is not changed.

    `winograd` has the gains of Winograd's algorithm by layer, if it is wanted. `missing` names kernels that cannot be
    used here, with the reason.
    """
    replaced: list[Choice] = []
    kept: list[Choice] = []

    def choose(layer: str, kernel: str, why: str, no: str = "", speedup: float | None = None) -> None:
        no = missing.get(kernel, "") or no
        (kept if no else replaced).append(Choice(layer=layer, kernel=kernel, why=no or why, speedup=speedup))

    for name, no in native_norms(network).items():
        choose(name, BATCHNORM, "fewer passes over the maps", no)
    forwards = fused_forwards(network)
    for forward in reversed(forwards.values()):
        if forward.fusions or forward.refused:
            choose(forward.layer, FUSED, _fused(forward.fusions[0]) if forward.fusions else "", forward.refused)
        for norm, why in forward.separate:
            choose(norm, SEPARATE, "", why)
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.BatchNorm2d):
            choose(name, BATCHNORM, "", f"no kernel for {type(layer).__name__}")
        elif isinstance(layer, nn.Conv2d) and not isinstance(layer, Native) and (winograd or target.is_bf16):
            _choose_convolution(name, layer, target, winograd, choose)
    return KernelPlan(target=target, replaced=tuple(replaced), kept=tuple(kept), forwards=forwards)


def with_split_weights(plan: KernelPlan, network: nn.Module, trained: Collection[Tensor]) -> KernelPlan:
    """Return a plan in which weights that autocast casts are bfloat16, and `trained`, an optimizer's parameters, have
    the rest of their float32 values beside them."""
    wide = {
        name: f"its kernel, {kernel}, reads float32"
        for kernel in (WINOGRAD, WEIGHT_GRADIENT)
        for name in plan.layers(kernel)
    }
    replaced, kept = list(plan.replaced), list(plan.kept)
    for name, no in divisible(network, trained, wide).items():
        why = no or "autocast casts none at each use; the optimizer has their float32 values"
        (kept if no else replaced).append(Choice(layer=name, kernel=SPLIT, why=why))
    return replace(plan, replaced=tuple(replaced), kept=tuple(kept))


def _fused(fusion: Fusion) -> str:
    joined = Counter(KINDS[name].layer.__name__ for name in re.findall(r"activation = '(\w+)'", fusion.source))
    if joined:
        counts = " and ".join(f"{plural(count, 'batch-norm')} with {name}" for name, count in joined.items())
        return f"{counts} in one pass"
    with_norms = any(part.norm for part in fusion.parts)
    return "batch-norm with the addition in one pass" if with_norms else "sums of gradients in one pass"


def _choose_convolution(
    name: str, layer: nn.Conv2d, target: Target, winograd: Mapping[str, Gain], choose: Callable[..., None]
) -> None:
    changed = departure(layer) if type(layer) is nn.Conv2d else f"{type(layer).__name__}, not torch's Conv2d"
    amx = target.is_bf16 and "AMX" in target.instructions
    speedup, why = winograd[name] if name in winograd and supports_winograd(layer) and not amx else (0.0, "")
    if speedup is None or speedup >= MIN_SPEEDUP:
        choose(name, WINOGRAD, why, speedup=speedup)
    elif amx and supports_matmul(layer):
        few = f"of fewer than {MIN_PRODUCT_INPUTS} channels, which oneDNN convolves faster"
        why = f"oneDNN multiplies matrices faster than it convolves by 1 x 1 from {MIN_PRODUCT_INPUTS} channels on"
        choose(name, PRODUCT, why, few if layer.in_channels < MIN_PRODUCT_INPUTS else "")
    elif target.is_bf16 and not amx and "AVX512_BF16" in target.instructions and supports_native_wgrad(layer):
        choose(name, WEIGHT_GRADIENT, f"faster than oneDNN's from {MIN_INPUTS} channels on")
    elif changed or why:
        choose(name, CONVOLUTION, "", changed or why, speedup or None)


def rule(target: Target, images: int) -> Callable[[ConvolutionShape], Gain]:
    """Return the rule for Winograd's algorithm on this target, from measurements (docs/benchmarks.md)."""

    def gain(shape: ConvolutionShape) -> Gain:
        tiles = images * math.ceil(shape.height / 4) * math.ceil(shape.width / 4)
        if target.is_bf16:
            return 0.0, "in bfloat16 it gains little"
        name = next((name for name in MIN_CHANNELS if name in target.instructions), None)
        if name is None:
            return 0.0, "not measured on such CPUs"
        channels = MIN_CHANNELS[name]
        why = f"on {name} faster from {channels} channels and {MIN_TILES} tiles of 4 x 4 outputs on"
        return (None if min(shape.inputs, shape.outputs) >= channels and tiles >= MIN_TILES else 0.0), why

    return gain


def explain_network(network: nn.Module, plan: KernelPlan | None) -> str:
    """Return the plan that a network was optimized with, and what torch computes now, with reasons."""
    if plan is None:
        return "not optimized: call cputrain.optimize(model)"
    planned = {choice.layer for choice in plan.kept}
    lines = [
        f"  torch's now: {type(network.get_submodule(name)).__name__} ({why}): {name or 'the network'}"
        for name, why in obstacles(network).items()
        if name not in planned
    ]
    return "\n".join([str(plan), *lines])
