"""One encoded image -> the pixels of a batch: the crop that is taken, decoding, augmentation, normalization.

Nothing here knows where images come from or in which order they are used. `native/` is compiled on first use.
"""
