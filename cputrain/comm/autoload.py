"""The entry point (group torch.backends) by which `import torch` knows the backend "ccl"; it imports nothing heavy."""

from typing import Any


def register() -> None:
    """Register the backend, unless another package has; oneCCL is found and loaded with the first group."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "CCL"):
        dist.Backend.register_backend("ccl", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from cputrain.comm.ccl import create

    return create(options, backend_options)
