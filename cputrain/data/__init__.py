"""Images on disk -> batches of tensors. `ImageLoader` is the pipeline of the trainer, and for any other training loop.

From the bottom: order.py (which image is used when), pixels.py (what is done to one image), `formats/` (how images are
stored), loader.py (threads that decode ahead); beside them sources.py and prepare.py, which pack images into shards.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
