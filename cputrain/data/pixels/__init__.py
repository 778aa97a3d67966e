"""One encoded image -> the pixels of a batch: the crop that is taken, decoding, augmentation, normalization.

Nothing here knows where images come from or in which order they are used. `native/` is compiled on first use.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
