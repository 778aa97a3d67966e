"""Replaces the old name of Intel's oneCCL bindings for PyTorch."""

from oneccl_bindings_for_pytorch import __version__ as __version__
