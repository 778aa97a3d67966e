"""Trace a network on torch's meta device, without values: its layers, and the memory that the backward pass needs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cputrain.affinity.errors import InputError
from cputrain.models.networks import OWN_NETWORKS as BY_SIDE
from cputrain.models.networks import build_model
from cputrain.models.settings import TIMM, ModelSettings
from cputrain.predict.layers import CLASSES, LayerSize, gflop_of, layers_at

SIDE = 224  # the default crop for tracing a new network
IMAGES = 11  # does not divide the size of any layer
PERIOD = 32  # the last maps grow by 1 per PERIOD pixels of the image, or per a divisor of them
# Kind of an operation in the table. Operations not listed move no values (views) or few (statistics, random numbers).
ACTIVATIONS = ("relu", "relu_", "silu", "silu_", "hardswish_", "hardtanh_", "hardsigmoid", "sigmoid", "gelu", "tanh")
KINDS = {
    **dict.fromkeys(("convolution",), "conv"),
    **dict.fromkeys(("addmm", "mm"), "linear"),
    **dict.fromkeys(("bmm",), "product"),
    **dict.fromkeys(("native_batch_norm", "native_layer_norm"), "norm"),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), "pool"),
    **dict.fromkeys(("add", "add_", "sub"), "add"),
    **dict.fromkeys(("cat", "clone", "copy_", "constant_pad_nd", "roll"), "copy"),
    **dict.fromkeys((*ACTIVATIONS, "mul", "mul_", "div", "div_", "_softmax", "_safe_softmax", "native_dropout"), "act"),
}


class _Weightless(TorchFunctionMode):
    """Creates weights without values; numbers that a constructor computes with do have values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@dataclass(slots=True)
class TracedRow:
    """A traced operation, per image: values and channels of its input and output, FLOP of its forward pass, and the
    sizes of the weights that it is the first to read."""

    name: str
    kind: str
    inputs: int
    outputs: int
    channels: tuple[int, int]
    flop: int
    weights: list[int]


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of a network's forward pass that compute with feature maps."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[TracedRow] = []
        self.stack = [""]
        self.unread = {p.untyped_storage()._cdata: p.numel() for p in network.parameters()}
        self.pending: list[int] = []
        self.hooks = []
        for name, module in network.named_modules():
            self.hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name)))
            self.hooks.append(module.register_forward_hook(lambda *_: self.stack.pop() and None))

    def remove(self) -> None:
        """Remove the hooks from the network."""
        for hook in self.hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket.__name__
        if operation == "native_batch_norm":  # slow on the meta device
            result = (torch.empty_like(args[0]), *(args[0].new_empty(args[0].shape[1]) for _ in range(2)))
        else:
            result = func(*args, **(kwargs or {}))
        tensors = [each for each in _flat(args) if isinstance(each, Tensor)]
        for each in tensors:
            weight = self.unread.pop(each.untyped_storage()._cdata, None)
            self.pending += [] if weight is None else [weight]
        output = result[0] if isinstance(result, tuple) else result
        if operation in KINDS and isinstance(output, Tensor) and output.numel() % IMAGES == 0:
            self._record(operation, tensors, output)
        return result

    def _record(self, operation: str, tensors: Sequence[Tensor], output: Tensor) -> None:
        kind, name = KINDS[operation], self.stack[-1]
        source = tensors[operation == "addmm"]
        flop = 0
        if kind == "conv":
            flop = 2 * output.numel() * tensors[1].numel() // output.shape[1]
        elif kind in ("linear", "product"):
            flop = 2 * output.numel() * source.shape[-1]
        elif kind == "add" and operation != "sub":
            name = f"{name}.add".lstrip(".")
        if not flop and kind != "norm" and _positions(output) == 1:
            return  # one value per channel: negligible
        if kind == "act" and self.rows and self.rows[-1].kind in ("norm", "add") and operation in ACTIVATIONS:
            self.rows[-1].kind += "+act"
            return
        self.rows.append(
            TracedRow(
                name=name,
                kind=kind,
                inputs=source.numel() // IMAGES,
                outputs=output.numel() // IMAGES,
                channels=(_channels(source), _channels(output)),
                flop=flop // IMAGES,
                weights=self.pending,
            )
        )
        self.pending = []


def _flat(args: Any) -> Iterator[Any]:
    for each in args:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        else:
            yield each


def _channels(tensor: Tensor) -> int:
    """Return C of (N, C, H, W) with square maps, else the last dimension."""
    square = tensor.dim() == 4 and tensor.shape[2] == tensor.shape[3]
    return tensor.shape[1 if square else -1]


def _positions(tensor: Tensor) -> int:
    return tensor.numel() // IMAGES // max(1, _channels(tensor))


@lru_cache(maxsize=2)
def _built(name: str, side: int) -> nn.Module:
    settings = ModelSettings(name=name)
    try:
        with torch.device("meta"):
            return build_model(settings, CLASSES, side)
    except NotImplementedError:  # RegNet's constructor reads values that it computed with tensors
        with _Weightless():
            return build_model(settings, CLASSES, side)


@lru_cache(maxsize=32)
def traced(name: str, side: int) -> tuple[list[TracedRow], int]:
    """Return the operations of a network's forward pass, and the bytes per image saved for the backward pass.

    Raises InputError if the network does not accept such images.
    """
    network = _built(name, side if name in BY_SIDE or name.startswith(TIMM) else SIDE)
    kept: dict[int, int] = {}
    alive = []  # keeps storages, as the address of a freed one is reused

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.dim() and len(tensor) % IMAGES == 0:  # not a weight or statistic
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    trace = _Trace(network)
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor), trace:
            network(torch.zeros(IMAGES, 3, side, side, device="meta"))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise InputError(f"{name} does not accept images of {side} x {side} pixels: {error}") from None
    finally:
        trace.remove()
    if trace.unread or trace.pending:
        raise InputError(f"{name}: {len(trace.unread) + len(trace.pending)} weights are read by no operation")
    return trace.rows, sum(kept.values()) // IMAGES


def table_of(name: str, side: int) -> dict[str, Any]:
    """Build a network's file: its sizes at `side`, and its layers as functions of the side.

    A network of fixed size has the same layers at any side; one that pads its maps is traced at multiples of its side.
    """
    sides = [side, side + 1, side + 2 * PERIOD]
    while (found := _table_by(name, sides)) is not None:
        table, probe = found
        if probe is None:
            return table
        sides.insert(1, probe)
    table, _ = _table_by(name, [side, 2 * side]) or _table_by(name, [side]) or ({}, None)
    return table


def _table_by(name: str, sides: Sequence[int]) -> tuple[dict[str, Any], int | None] | None:
    """Build a network's file from traces at several sides, and return a side that would resolve ambiguities. None if
    the network does not accept all sides, or has different layers at some."""
    traces = [traced(name, sides[0])]
    for other in sides[1:]:
        try:
            traces.append(traced(name, other))
        except InputError:
            return None
        first, last = ([(row.name, row.kind) for row in rows] for rows, _ in (traces[0], traces[-1]))
        if first != last:
            return None
    rows = [rows for rows, _ in traces]
    maps = _Maps(sides)
    layers = []
    for each in zip(*rows, strict=True):
        row = each[0]
        ins, outs = (
            maps.quantity([getattr(one, what) for one in each], row.channels[index])
            for index, what in enumerate(("inputs", "outputs"))
        )
        weights = [maps.quantity(list(sizes), 0) for sizes in zip(*(one.weights for one in each), strict=True)]
        flop = maps.quantity([one.flop for one in each], 0) if row.flop else 0
        layers.append([row.name, row.kind, weights, ins, outs, flop])
    _check_classes(name, layers)
    table = {"maps": maps.found, "layers": layers}
    kept = round(float(f"{traces[0][1]:.3g}"))
    sums = sums_of(layers_at(table, sides[0]))
    return {"side": sides[0], **sums, "activation_bytes": kept, **table}, maps.probe


def sums_of(layers: tuple[LayerSize, ...]) -> dict[str, float]:
    """Return a network's number of parameters, and the GFLOP per image."""
    return {"parameters": sum(sum(layer.weights) for layer in layers), "gflop": gflop_of(layers)}


class _Maps:
    """Sides of maps as floor((side + offset) / stride) of the image's side: exact, as these roundings compose."""

    def __init__(self, sides: Sequence[int]) -> None:
        self.sides = sides
        self.found: list[tuple[int, int]] = [(0, 1)]
        self.probe: int | None = None  # a side that distinguishes offsets which fit all sides so far

    def quantity(self, values: Sequence[int], channels: int) -> Any:
        """Express a quantity at each side as a constant, or as [factor, index of the map whose area it multiplies]."""
        if len(set(values)) == 1:
            return values[0]
        for index in reversed(range(len(self.found))):
            areas = [_side_of(self.found[index], side) ** 2 for side in self.sides]
            if values[0] % areas[0] == 0 and all(
                v * areas[0] == values[0] * a for v, a in zip(values, areas, strict=True)
            ):
                return [values[0] // areas[0], index]
        new = self._fitted([math.isqrt(value // channels) for value in values]) if channels else None
        if new is None or new in self.found:
            return [values[0] / self.sides[0] ** 2, 0]  # scales with the image's area
        self.found.append(new)
        return self.quantity(values, channels)

    def _fitted(self, lengths: Sequence[int]) -> tuple[int, int] | None:
        if lengths[-1] == lengths[0]:
            return None
        stride = round((self.sides[-1] - self.sides[0]) / (lengths[-1] - lengths[0]))
        low = max(stride * n - side for n, side in zip(lengths, self.sides, strict=True))
        high = min(stride * (n + 1) - 1 - side for n, side in zip(lengths, self.sides, strict=True))
        if low < high:
            self.probe = stride * ((self.sides[0] + high) // stride + 1) - (low + high + 1) // 2
        return (low, stride) if low <= high else None


def _side_of(each: tuple[int, int], side: int) -> int:
    return (side + each[0]) // each[1]


def _check_classes(name: str, layers: Sequence[list[Any]]) -> None:
    """Check that the last layer with weights, and only what follows it, has CLASSES outputs, as these are replaced."""
    last = max(number for number, row in enumerate(layers) if row[2])
    wide = [
        number for number, row in enumerate(layers) if CLASSES in (row[4], row[4][0] if isinstance(row[4], list) else 0)
    ]
    if not wide or wide[0] != last:
        raise InputError(f"{name}: its last layer with weights does not have {CLASSES} outputs, or another one does")
