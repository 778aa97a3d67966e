"""Imports what may be broken in a process of its own: python -m cputrain.doctor.probe prints a line of JSON for each
part as soon as it is known, so that a crash or a slow disk leaves the others."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from cputrain.affinity.start import own_program
from cputrain.affinity.terminal import use_utf8

Found = dict[str, Any]
Env = Mapping[str, str]


def launcher(env: Env) -> Found:
    """The launcher on PATH, by its version."""
    from cputrain.mpi.launchers.command import find_launcher

    found = find_launcher("auto", env)
    return {"name": found.launcher.name, "version": ".".join(map(str, found.version)), "program": found.program}


def decoder(_env: Env) -> Found:
    """libjpeg-turbo 3."""
    from cputrain.data.pixels import find_library

    return {"library": find_library()}


def torch(_env: Env) -> Found:
    """torch: its build, and what its kernels may use."""
    started = time.monotonic()
    import torch

    backends: Any = torch.backends
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "capability": backends.cpu.get_cpu_capability(),
        "onednn": backends.mkldnn.is_available(),
        "mkl": backends.mkl.is_available(),
        "openmp": backends.openmp.is_available(),
        "threads": torch.get_num_threads(),
        "import_s": round(time.monotonic() - started, 2),
    }


def oneccl(env: Env) -> Found:
    """oneCCL, Intel MPI's library, libfabric, and the compiled backend."""
    from cputrain.affinity.errors import RunError
    from cputrain.comm.ccl.environment import built_path, find_libraries
    from cputrain.native_build import is_intact

    found = find_libraries(env)
    built = None
    with suppress(RunError):  # no cache folder
        built = built_path(found, env)
    return {
        "version": ".".join(map(str, found.version)),
        "library": str(found.ccl),
        "mpi": str(found.mpi),
        "fabric": str(found.fabric),
        "compiled": str(built) if built and is_intact(built) else None,
    }


def torchvision(_env: Env) -> Found:
    """torchvision, imported as other programs do; last, as it is slow and the others do not need it."""
    import torchvision

    return {"version": torchvision.__version__}


PARTS: dict[str, Callable[[Env], Found]] = {
    "launcher": launcher,
    "decoder": decoder,
    "torch": torch,
    "oneccl": oneccl,
    "torchvision": torchvision,
}


def main(env: Env) -> None:
    """Print each part: what was found, or the error that its import ended with, which is the finding then."""
    for name, part in PARTS.items():
        try:
            found = part(env)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        os.write(1, json.dumps({name: found}).encode() + b"\n")


def start_probe(env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start the probe."""
    command = own_program("cputrain.doctor.probe")
    return subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def probed(process: "subprocess.Popen[bytes]", patience_s: float) -> dict[str, Found]:
    """What the probe has found after so many seconds at most. A part that it did not reach has an "error"; "late" tells
    that time was too short for it."""
    why, late = "", False
    try:
        out, _ = process.communicate(timeout=patience_s)
        if process.returncode:
            ended = process.returncode
            why = f"the import ended with {signal.Signals(-ended).name if ended < 0 else f'status {ended}'}"
    except subprocess.TimeoutExpired:
        why, late = f"not known after {patience_s:g} s: a slow disk, or a busy host", True
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
    found: dict[str, Found] = {}
    for line in out.splitlines():
        with suppress(ValueError):  # printed by an import
            value = json.loads(line)
            found |= value if isinstance(value, dict) else {}
    missing = [name for name in PARTS if name not in found]
    for name in missing:
        found[name] = {"error": why if late or name == missing[0] else f"not reached: {why}", "late": late}
    return found


if __name__ == "__main__":
    use_utf8()
    main(os.environ)
