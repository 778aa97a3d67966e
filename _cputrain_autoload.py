"""Entry point that `import torch` runs (group torch.backends): registers the backend "ccl", lets the launcher of a rank
read its Python stack and end its gloo groups, registers kernels below torch's operators with CPUTRAIN_KERNELS=auto, and
records operators for `cputrain bench operators`.

An error here would break `import torch` in other people's programs. Therefore this module lies beside the packages,
imports none of them, and has a name that no user file has; errors are reported when "ccl" is used.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

STACK_VARIABLE = "CPUTRAIN_STACK_FILE"  # the descriptor of the open file
STACK_SIGNAL = signal.SIGRTMAX - 2  # a real-time signal that neither Python, MPI nor a scheduler uses
STACK_FILE = "cputrain-stack"
STATE_VARIABLE = "CPUTRAIN_STATE_FILE"  # the same for the rank's heartbeats
STATE_FILE = "cputrain-state"


def register() -> None:
    """Register the backend unless another package has; oneCCL is found and loaded with the first process group."""
    import torch.distributed as dist

    offer_stack(os.environ)
    if os.environ.get("CPUTRAIN_KERNELS", "off") != "off":
        _enable_kernels()
    if "CPUTRAIN_RECORDING" in os.environ:
        _record()
    if dist.is_available() and STACK_VARIABLE in os.environ:
        _end_groups_without_lock()
    if dist.is_available() and not hasattr(dist.Backend, "CCL"):
        dist.Backend.register_backend("ccl", _create, extended_api=True, devices=["cpu"])


def offer_stack(env: Mapping[str, str]) -> None:
    """Let the watcher that started this process read its Python stack; do nothing without a watcher."""
    file = file_of_watcher(env, STACK_VARIABLE, STACK_FILE)
    if file is not None:
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=False)


def file_of_watcher(env: Mapping[str, str], variable: str, name: str) -> int | None:
    """Return the open file `name` that a watcher gave to this process; None without a watcher."""
    number = env.get(variable, "")
    if not (number.isdecimal() and number.isascii() and len(number) <= 6):
        return None
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # not inherited
        return None
    return int(number) if target.startswith(f"/memfd:{name} ") else None


def _enable_kernels() -> None:
    try:
        from cputrain.kernels.operators import enable_if_requested
    except ImportError as error:
        print(
            f"cputrain: torch's operators stay in place: cputrain cannot be loaded: {error}{_other()}", file=sys.stderr
        )
    else:
        enable_if_requested(os.environ)


def _record() -> None:
    try:
        from cputrain.kernels.recording import record_if_requested
    except ImportError as error:
        print(f"cputrain: no operator is recorded: cputrain cannot be loaded: {error}{_other()}", file=sys.stderr)
    else:
        record_if_requested(os.environ)


def _end_groups_without_lock() -> None:
    try:
        from cputrain.comm.gloo_end import end_groups_without_lock
    except ImportError as error:
        print(f"cputrain: gloo may hang at the end: cputrain cannot be loaded: {error}{_other()}", file=sys.stderr)
    else:
        end_groups_without_lock()


def _create(options: Any, backend_options: Any) -> Any:
    try:
        from cputrain.comm.ccl import create
    except ImportError as error:
        raise RuntimeError(f"ccl: cputrain cannot be loaded: {error}{_other()}") from error
    return create(options, backend_options)


def _other() -> str:
    """Return which other module is loaded as cputrain and what to do; "" if it is ours."""
    file = getattr(sys.modules.get("cputrain"), "__file__", None)
    ours = file is None or file.startswith(os.path.dirname(os.path.abspath(__file__)))
    return "" if ours else f"; {file} has the name of a package of cputrain: rename it"
