"""Images on disk -> batches of tensors. `ImageLoader` is the pipeline of the trainer, and for any other training loop.

From the bottom: `order/` (which image is used when), `pixels/` (what is done to one image), `formats/` (how images are
stored), `batches.py` (threads that decode ahead), `loader.py`; beside them `prepare/`, which packs images into shards.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cputrain.data.loader import ImageLoader
    from cputrain.data.pixels.augment import Augmentation
    from cputrain.data.pixels.transform import Transform

__all__ = ["Augmentation", "ImageLoader", "Transform"]

MODULES = {"Augmentation": "pixels.augment", "ImageLoader": "loader", "Transform": "pixels.transform"}


def __getattr__(name: str) -> object:
    """Import a public name on its first use: other modules of this package must not need torch."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
