"""The facts of a bug report, as plain values for JSON, and as text."""

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cputrain
from affinity.errors import InputError
from affinity.packages import installed_version
from affinity.planner.runtime import find_runtime, target_of
from affinity.text_table import align_columns
from affinity.topology.cpuset import format_list
from affinity.topology.kernel_files import text
from affinity.topology.sysfs import this_machine
from affinity.units import memory_text
from cputrain.doctor.check import OK, Check
from cputrain.doctor.host import shm_size
from cputrain.native_build import compiler
from cputrain.variables import shown_variables
from mpi.fabric import fabric_here

PACKAGES = (
    *("cputrain", "torch", "torchvision", "numpy", "pillow", "pydantic", "click", "rich", "psutil", "safetensors"),
    *("oneccl-devel", "impi-rt", "turbojpeg", "intel-openmp", "mpi4py", "intel-extension-for-pytorch"),
)


def facts(probe: Mapping[str, Mapping[str, Any]], checks: tuple[Check, ...], env: Mapping[str, str]) -> dict[str, Any]:
    """Everything about this host and this Python that decides how a training behaves; `checks` are those of imports."""
    return {
        "cputrain": {"version": cputrain.__version__, "folder": str(Path(cputrain.__file__).parent)},
        "python": {"version": platform.python_version(), "program": sys.executable, "prefix": sys.prefix},
        "system": {
            "host": platform.node(),
            "os": _os_name(Path("/etc/os-release")),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()),
            "architecture": platform.machine(),
        },
        "cpu": _cpu(),
        "memory": _memory(Path("/proc/meminfo")),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "libraries": {**_runtime(env), "compiler": compiler(env), "fabric": fabric_here(), **probe},
        "variables": shown_variables(env),
        "problems": [f"{check.name}: {check.found}: {check.remedy}" for check in checks if check.status != OK],
    }


def facts_text(found: Mapping[str, Any]) -> str:
    """The facts in blocks of aligned lines."""
    blocks = []
    for title, values in found.items():
        if isinstance(values, Mapping):
            rows = [(f"  {name}", _cell(name, value)) for name, value in values.items() if value is not None]
        else:
            rows = [("  -", value) for value in values]
        blocks.append(f"{title}\n{align_columns(rows) if rows else '  none'}")
    return "\n".join(blocks)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return memory_text(value) if name.endswith("_bytes") else " ".join(str(value).split())


def _cpu() -> dict[str, Any]:
    try:
        machine = this_machine()
    except InputError as refused:
        return {"error": str(refused)}
    return {
        "model": machine.model,
        "features": list(machine.isa),
        "packages": len(machine.packages),
        "numa_nodes": len(machine.numa_nodes),
        "cores": len(machine.cores),
        "cpus": len(machine.pus),
        "allowed_cpus": format_list(machine.allowed_pus),
        "cpu_quota": machine.cpu_quota,
        "memory_limit_bytes": machine.memory_limit_bytes,
    }


def _memory(meminfo: Path) -> dict[str, int | None]:
    sizes = dict(line.split(":", 1) for line in text(meminfo).splitlines() if ":" in line)
    kib = {name: int(sizes[key].split()[0]) for name, key in (("total", "MemTotal"), ("available", "MemAvailable"))}
    return {**{f"{name}_bytes": 1024 * size for name, size in kib.items()}, "shm_bytes": shm_size()}


def _runtime(env: Mapping[str, str]) -> dict[str, str]:
    try:
        found = find_runtime(target_of(()), env)
    except InputError as refused:
        return {"openmp": str(refused)}
    return {"openmp": f"{found.openmp}: {found.origin}", "allocator": found.allocator}


def _os_name(path: Path) -> str:
    lines = text(path).splitlines() if path.is_file() else []
    named = (line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME="))
    return next(named, platform.system())
