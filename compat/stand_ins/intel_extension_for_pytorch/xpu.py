"""Intel's GPUs are PyTorch's own device "xpu"; this package is for CPUs."""

from ._absent import absent

__getattr__ = absent(__name__, {}, "torch.xpu, of PyTorch's build for Intel GPUs")


def is_available() -> bool:
    """Return False."""
    return False


def device_count() -> int:
    """Return 0."""
    return 0
