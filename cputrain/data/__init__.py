"""Images on disk -> batches of tensors. `ImageLoader` is the pipeline of the trainer, and for any other training loop.

From the bottom: `order/` (which image is used when), `pixels/` (what is done to one image), `formats/` (how images are
stored), `batches.py` (threads that decode ahead), `loader.py`; beside them `prepare/`, which packs images into shards.
"""

from typing import TYPE_CHECKING

from cputrain.lazy import lazy_names

if TYPE_CHECKING:
    from cputrain.data.loader import ImageLoader
    from cputrain.data.pixels.augment import Augmentation, Transform

__all__ = ["Augmentation", "ImageLoader", "Transform"]

# Other modules of this package must not need torch.
__getattr__ = lazy_names(
    __name__,
    {"Augmentation": "pixels.augment", "ImageLoader": "loader", "Transform": "pixels.augment"},
)
