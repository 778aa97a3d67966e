"""Layer-wise optimizers of split weights in two passes over memory, norms and update (native/split_layers.hpp), by
operations that are compared with torch's when they are first used."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int64
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from cputrain.kernels.split_optimizers import SplitSteps, States, Weight, structs_of, tensors_of
from cputrain.kernels.split_weights import SplitParameter, split

WAYS = tuple((lanes, fused) for lanes in (8, 16) for fused in (False, True))
"""How torch adds squares, by how it was compiled: float32 values in a vector; product and sum in one operation."""
CHECKED_SIZES = (*range(1, 64), *range(8180, 8200), 24571)
"""Sizes of weights whose norms are compared: any rest, more than a block (split_layers.hpp)."""


class LambOptions(ctypes.Structure):
    """struct Lamb of split_layers.hpp: the options of a weight's step."""

    _fields_ = tuple(
        (name, c_float) for name in ("lerp", "beta2", "square", "added", "correction", "decay", "ratio", "rate")
    )


class LayerSteps:
    """Norms of split weights, and LAMB's passes. `way` is None if no way gives the bits of torch's norms here."""

    def __init__(self, steps: SplitSteps) -> None:
        structs, norms = (POINTER(Weight), c_int64), POINTER(c_float)
        self._norms = steps.function("split_norms", *structs, *(c_int,) * 3, norms)
        self._averages = steps.function("split_lamb_averages", *structs, *(c_int,) * 2, POINTER(LambOptions), norms)
        self._update = steps.function("split_lamb_update", *structs, POINTER(LambOptions))
        weights = [random_weight(size, seed) for seed, size in enumerate(CHECKED_SIZES)]
        self.way: tuple[int, bool] | None = next((way for way in WAYS if self._is_torch_s(way, weights)), None)

    def _is_torch_s(self, way: tuple[int, bool], weights: Sequence[Any]) -> bool:
        """Return whether norms have the bits of torch's."""
        self.way = way
        expected = [norm for weight in weights for norm in torch._foreach_norm([weight.joined(), weight.grad.float()])]
        return torch.equal(torch.tensor(self.norms(weights)).flatten(), torch.stack(expected))

    def _known_way(self) -> tuple[int, bool]:
        assert self.way is not None, "without it the passes are not used"
        return self.way

    def norms(self, weights: Sequence[SplitParameter], *, of_weights: bool = True) -> list[tuple[float, float]]:
        """Return the norms of each weight (without `of_weights`, twice the latter) and of its gradient."""
        found = (c_float * (2 * len(weights)))()
        self._norms(*structs_of(weights, [[] for _ in weights]), *self._known_way(), of_weights, found)
        return list(zip(found[::2], found[1::2], strict=True))

    def lamb_averages(
        self, weights: Sequence[SplitParameter], states: States, options: Sequence[LambOptions]
    ) -> list[tuple[float, float]]:
        """Update the averages of gradients and of their squares; return the norms of each weight and of its update."""
        found = (c_float * (2 * len(weights)))()
        structs = structs_of(weights, tensors_of(weights, states, ("exp_avg", "exp_avg_sq")))
        self._averages(*structs, *self._known_way(), (LambOptions * len(options))(*options), found)
        return list(zip(found[::2], found[1::2], strict=True))

    def lamb_update(self, weights: Sequence[SplitParameter], states: States, options: Sequence[LambOptions]) -> None:
        """Update the weights by their averages."""
        structs = structs_of(weights, tensors_of(weights, states, ("exp_avg", "exp_avg_sq")))
        self._update(*structs, (LambOptions * len(options))(*options))


@cache
def layer_steps(steps: SplitSteps) -> LayerSteps:
    """Return the passes of a loaded library."""
    return LayerSteps(steps)


def random_weight(size: int, seed: int = 1) -> Any:
    """Return a split weight of random values, with a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shape: dict[str, Any] = {"size": (size,), "generator": generator, "device": "cpu", "dtype": torch.float32}
    upper, lower = split(torch.randn(**shape))
    weight = nn.Parameter(upper)
    weight.__class__ = SplitParameter
    cast(SplitParameter, weight).lower = lower
    weight.grad = torch.randn(**shape).bfloat16()
    return weight
