"""What `import torch` runs (its entry point in the group torch.backends): the backend "ccl" becomes known, and the
launcher of a rank can read its Python stack.

It runs in other people's programs, where an error would break `import torch`. So it lies beside the packages, imports
none of them, and has a name that no file of a user's folder has; what fails is said once "ccl" is used.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

STACK_VARIABLE = "CPUTRAIN_STACK_FILE"  # the number of the open file
STACK_SIGNAL = signal.SIGRTMAX - 2  # a real-time signal that neither Python, MPI nor a scheduler uses
STACK_FILE = "cputrain-stack"


def register() -> None:
    """Register the backend, unless another package has; oneCCL is found and loaded with the first group."""
    import torch.distributed as dist

    offer_stack(os.environ)
    if dist.is_available() and not hasattr(dist.Backend, "CCL"):
        dist.Backend.register_backend("ccl", _create, extended_api=True, devices=["cpu"])


def offer_stack(env: Mapping[str, str]) -> None:
    """Let this process's stack be read by the watcher that has started it; nothing where there is none."""
    number = env.get(STACK_VARIABLE, "")
    if not (number.isdecimal() and number.isascii() and len(number) <= 6):
        return
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # not inherited
        return
    if target.startswith(f"/memfd:{STACK_FILE} "):
        faulthandler.register(STACK_SIGNAL, file=int(number), all_threads=False)


def _create(options: Any, backend_options: Any) -> Any:
    try:
        from cputrain.comm.ccl import create
    except ImportError as error:
        raise RuntimeError(f"ccl: cputrain cannot be loaded: {error}{_other()}") from error
    return create(options, backend_options)


def _other() -> str:
    """The module that has cputrain's name, and what to do about it."""
    file = getattr(sys.modules.get("cputrain"), "__file__", None)
    ours = file is None or file.startswith(os.path.dirname(os.path.abspath(__file__)))
    return "" if ours else f": {file} has the name of a package of cputrain: rename it"
