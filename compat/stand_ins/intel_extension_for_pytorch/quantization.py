"""Not in the stand-in: each name says what to use instead."""

from ._absent import absent

__getattr__ = absent(__name__, {}, "torchao, or Intel's neural-compressor")
