"""Image pipeline from files on disk to batches of tensors. `ImageLoader` serves the trainer and other training loops.

Bottom up: order.py (sampling order), pixels.py (decoding, cropping and augmenting one image), `formats/` (storage
formats), loader.py (threads that decode ahead). from_settings.py opens the data that settings.py names. sources.py and
prepare.py pack images into shards.
"""

from cputrain import lazy_names

__getattr__ = lazy_names(__name__)
