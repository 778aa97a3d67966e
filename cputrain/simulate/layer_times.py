"""Measured times of layers in the model of a training: how much each of them differs from operations and bytes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from cputrain.simulate.compute import Work
from cputrain.simulate.layers import Layer
from cputrain.simulate.measured import LayerSeconds

NOT_MEASURED = (1.0, 1.0)


def as_measured(layers: tuple[Layer, ...], work: Work, measured: Sequence[LayerSeconds]) -> tuple[Layer, ...]:
    """The layers with the slowness that gives them their measured shares of the time that the model says, `work`.

    The steps in which layers are timed take longer than others: their times count relative to one another. Layers
    without weights share the slowness of the layer before them. The same layers where those measured are others.
    """
    weighted = [i for i, layer in enumerate(layers) if layer.weights]
    if [sum(layers[i].weights) for i in weighted] != [each.weights for each in measured]:
        return layers
    predicted_s = sum(work.forward_s) + sum(work.backward_s)
    scale = predicted_s / sum(each.forward + each.backward for each in measured)
    found = list(layers)
    for (start, end), each in zip(pairwise([*weighted, len(layers)]), measured, strict=True):
        slowness = (
            scale * each.forward / sum(work.forward_s[start:end]),
            scale * each.backward / sum(work.backward_s[start:end]),
        )
        found[start:end] = [replace(layer, slowness=slowness) for layer in layers[start:end]]
    return tuple(found)


def slow_as(layers: tuple[Layer, ...], measured: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The measured layers where they are these ones, else these."""
    plain = tuple(replace(layer, slowness=NOT_MEASURED) for layer in measured)
    return measured if plain == layers else layers
