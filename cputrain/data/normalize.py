"""Images as bytes -> the network's input."""

import ctypes
from collections.abc import Mapping
from ctypes import c_size_t, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from affinity.errors import InputError, RunError
from cputrain.data import turbo
from cputrain.recipe.schema import DataSection


class Normalize:
    """(x / 255 - mean) / std of each colour: in one pass by the native part of that path, or else by torch in three."""

    def __init__(self, data: DataSection, native: Path | None) -> None:
        self._shift = torch.tensor(data.mean).mul(255)
        self._scale = torch.tensor(data.std).mul(255).reciprocal()
        self._native = ctypes.CDLL(str(native)).pixels_normalize if native else None
        if self._native:
            self._native.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p, c_void_p)

    def __call__(self, images: Tensor) -> Tensor:
        """(N, H, W, 3) uint8 -> (N, 3, H, W) float32, channels-last in memory."""
        made = torch.empty(images.shape, dtype=torch.float32)
        if self._native:
            assert images.is_contiguous()
            constants = self._shift.data_ptr(), self._scale.data_ptr()
            self._native(images.data_ptr(), made.data_ptr(), images.numel() // 3, *constants)
        else:
            for image, place in zip(images, made, strict=True):  # each stays in the cache through its three passes
                place.copy_(image).sub_(self._shift).mul_(self._scale)
        return made.permute(0, 3, 1, 2)


def choose_normalize(data: DataSection, env: Mapping[str, str]) -> Normalize:
    """By the native part where the recipe's decoder may use that and it can be compiled."""
    try:
        native = None if data.decoder == "pillow" else turbo.ensure_built(env)
    except (InputError, RunError):  # the choice of the decoder has told of it
        native = None
    return Normalize(data, native)
