"""The entry point (group torch.backends) that `import torch` calls: it makes the backend "ccl" known, and lets the
launcher of a rank read its Python stack. It imports nothing heavy."""

import os
from typing import Any

from mpi.supervise.stacks import offer_stack


def register() -> None:
    """Register the backend, unless another package has; oneCCL is found and loaded with the first group."""
    import torch.distributed as dist

    offer_stack(os.environ)
    if dist.is_available() and not hasattr(dist.Backend, "CCL"):
        dist.Backend.register_backend("ccl", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from cputrain.comm.ccl import create

    return create(options, backend_options)
