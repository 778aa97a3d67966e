"""Pixels as bytes -> the network's input."""

import ctypes
from collections.abc import Mapping
from ctypes import c_size_t, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from affinity.errors import InputError, RunError
from cputrain.data.pixels import turbo

Color = tuple[float, float, float]
"""A value for each of red, green and blue."""

IMAGENET_MEAN: Color = (0.485, 0.456, 0.406)
IMAGENET_STD: Color = (0.229, 0.224, 0.225)


class Normalize:
    """(x / 255 - mean) / std of each color: in one pass by the library `native`, without it in three by torch."""

    def __init__(self, mean: Color, std: Color, native: Path | None) -> None:
        self._shift = torch.tensor(mean).mul(255)
        self._scale = torch.tensor(std).mul(255).reciprocal()
        self._native = ctypes.CDLL(str(native)).pixels_normalize if native else None
        if self._native:
            self._native.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p, c_void_p)

    def __call__(self, images: Tensor) -> Tensor:
        """(N, H, W, 3) uint8 -> (N, 3, H, W) float32, channels-last in memory."""
        out = torch.empty(images.shape, dtype=torch.float32)
        if self._native:
            assert images.is_contiguous()
            constants = self._shift.data_ptr(), self._scale.data_ptr()
            self._native(images.data_ptr(), out.data_ptr(), images.numel() // 3, *constants)
        else:
            for image, square in zip(images, out, strict=True):  # each stays in the cache through its three passes
                square.copy_(image).sub_(self._shift).mul_(self._scale)
        return out.permute(0, 3, 1, 2)


def choose_normalize(mean: Color, std: Color, decoder: str, env: Mapping[str, str]) -> Normalize:
    """Native normalization, or torch's where data.decoder is "pillow" or the native library cannot be compiled."""
    try:
        native = None if decoder == "pillow" else turbo.ensure_built(env)
    except (InputError, RunError):  # choose_decoder has reported it
        native = None
    return Normalize(mean, std, native)
