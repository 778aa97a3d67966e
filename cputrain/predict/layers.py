"""Layers of a network: sizes as traced, and the operations and bytes of each pass over a layer."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cputrain.affinity.filesystem import shipped_folder
from cputrain.affinity.planner.workload import BYTES, Workload

NETWORKS = shipped_folder("networks")  # traced networks; a library's are in a subfolder, as in torchvision/
CLASSES = 1000  # ImageNet's, of all traced networks
NOT_MEASURED = (1.0, 1.0)
# Reads plus writes of a layer's tensor, forward and backward. Batch-norm reads its input for the statistics and again
# to normalize; its backward pass reads input and gradient twice. Elementwise functions run in place; a sum adds two
# tensors. Convolutions and products read their input and write their output, and do so twice in the backward pass.
PASSES = {"norm": (3, 5), "act": (2, 3), "add": (3, 3), "copy": (2, 2), "pool": (1, 2)}
_traced: dict[str, dict[str, Any]] = {}  # sizes by name, of networks without a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer: the number of values of each weight tensor, in the order of registration; other values are per image.

    `flop` has the forward and the backward pass, `moved_bytes` the float32 activations read and written in each.
    `reordered`: oneDNN copies the weights to another layout in each pass. `slowness` is the factor from the modeled to
    the measured time of each pass, 1 if it was not measured.
    """

    name: str
    weights: tuple[int, ...] = ()
    flop: tuple[float, float] = (0.0, 0.0)
    moved_bytes: tuple[float, float]
    reordered: bool = False
    slowness: tuple[float, float] = NOT_MEASURED

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in float32, which is also the size of their gradients."""
        return BYTES * sum(self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """An operation of a network with the sizes of its weights, and input, output and FLOP per image.

    `kind`: conv, linear, product (of activations), norm, act (elementwise), add, pool, copy, or norm+act if fused.
    `weights`: number of values of each tensor, in the order of registration. `inputs`, `outputs`: number of values.
    `flop`: FLOP of the forward pass and of the backward pass.
    """

    name: str
    kind: str
    weights: tuple[int, ...]
    inputs: int
    outputs: int
    flop: tuple[int, int]


def network_file(name: str) -> Path:
    """Return the path of a network's sizes, which exists if it was traced. torchvision:resnet50 shares resnet50's, and
    timm:resnet50.a1_in1k, whose tag is of weights, timm:resnet50's."""
    file = NETWORKS / f"{name.replace(':', '/').partition('.')[0]}.json"
    return file if file.exists() else NETWORKS / f"{name.removeprefix('torchvision:')}.json"


def keep_network(name: str, sizes: dict[str, Any]) -> None:
    """Keep the sizes of a network that has no file, for this process."""
    _traced[name] = sizes
    read_network.cache_clear()


@lru_cache(maxsize=8)
def read_network(name: str) -> dict[str, Any] | None:
    """Read a network's sizes; None if it was not traced."""
    file = network_file(name)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else _traced.get(name)


def layers_at(network: dict[str, Any], side: int, classes: int = CLASSES) -> tuple[LayerSize, ...]:
    """Return the layers of a traced network in forward order; the first layer computes no input gradient."""
    layers: list[LayerSize] = []
    for name, kind, weights, *quantities in network["layers"]:
        inputs, outputs, flop = (quantity_at(quantity, network["maps"], side) for quantity in quantities)
        sizes = [quantity_at(weight, network["maps"], side) for weight in weights]
        if quantities[1] == CLASSES or (isinstance(quantities[1], list) and quantities[1][0] == CLASSES):
            outputs, flop, *sizes = (number * classes // CLASSES for number in (outputs, flop, *sizes))
        layers.append(
            LayerSize(
                name=name,
                kind=kind,
                weights=tuple(sizes),
                inputs=inputs,
                outputs=outputs,
                flop=(flop, 2 * flop if layers else flop),
            )
        )
    return tuple(layers)


def quantity_at(quantity: Any, maps: list[list[int]], side: int) -> int:
    """Evaluate a quantity for images of side x side: a constant, or [factor, index of a map], which is factor times the
    positions of a feature map with side floor((side + offset) / stride)."""
    if not isinstance(quantity, list):
        return int(quantity)
    offset, stride = maps[quantity[1]]
    return int(quantity[0] * max(1, (side + offset) // stride) ** 2)


def layer_of(size: LayerSize, *, first: bool) -> Layer:
    """Return a traced layer with the bytes that it moves; the first layer computes no gradient of its input."""
    if size.flop[0]:
        forward = backward = float(BYTES * (size.inputs + size.outputs))
        moved = forward, backward if first else 2 * backward
    else:
        tensor = BYTES * (size.inputs if size.kind == "pool" else size.outputs)
        forward, backward = (float(tensor * sum(PASSES[kind][way] for kind in size.kind.split("+"))) for way in (0, 1))
        moved = forward, backward
    forward_flop, backward_flop = size.flop
    return Layer(
        name=size.name,
        weights=size.weights,
        flop=(float(forward_flop), float(backward_flop)),
        moved_bytes=moved,
        reordered=size.kind == "conv",
    )


@lru_cache(maxsize=8)
def layers_of_workload(workload: Workload) -> tuple[Layer, ...]:
    """Return the layers of a workload's traced network; a single layer of all its operations if it was not traced."""
    network = read_network(workload.network)
    if network is None:
        gflop = workload.gflop * 1e9
        moved = float(workload.activation_bytes)
        return (
            Layer(
                name=workload.name,
                weights=(workload.parameters,),
                flop=(gflop / 3, 2 * gflop / 3),
                moved_bytes=(2 * moved, 4 * moved),
            ),
        )
    sizes = layers_at(network, workload.side)
    return tuple(layer_of(size, first=number == 0) for number, size in enumerate(sizes))


def gflop_of(layers: tuple[LayerSize, ...]) -> float:
    """Return the GFLOP of a forward and a backward pass, to four digits."""
    return float(f"{sum(sum(layer.flop) for layer in layers) / 1e9:.4g}")


def early_strides(layers: tuple[LayerSize, ...]) -> tuple[LayerSize, ...]:
    """Change a bottleneck ResNet's layers to resnet_version=v1, with the stride in each block's first convolution."""
    by_name = {layer.name: layer for layer in layers}
    for name, second in tuple(by_name.items()):
        if name.endswith(".conv2") and second.outputs != second.inputs:
            block, small = name.removesuffix("conv2"), second.outputs
            first = by_name[f"{block}conv1"]
            forward, backward = (flop * small // second.inputs for flop in first.flop)
            by_name[first.name] = replace(first, outputs=small, flop=(forward, backward))
            by_name[f"{block}bn1"] = replace(by_name[f"{block}bn1"], inputs=small, outputs=small)
            by_name[name] = replace(second, inputs=small)
    return tuple(by_name.values())
