"""Training rates measured by `cputrain bench model`: a file for each machine, network and precision, with versions."""

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from affinity.topology.machine import Machine
from cputrain import __version__
from cputrain.files import write_atomic
from cputrain.native_build import cache_folder
from cputrain.recipe.schema import Recipe

GOVERNOR = Path("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Images/s of one host in training (median, lowest and highest step), its plan, and what it was measured with."""

    model: str
    cores: int
    network: str
    crop: int
    precision: str
    optimizer: str
    local_batch: int
    workers: int
    threads: int
    comm_cores: int
    loader_cores: int
    backend: str
    images_per_s: float
    low: float
    high: float
    date: str
    versions: tuple[str, ...]


def versions(root: Path = Path("/")) -> tuple[str, ...]:
    """What a measurement depends on besides the machine: "torch 2.13.0", the kernel's clock governor."""
    governor = root / GOVERNOR
    clock = governor.read_text().strip() if governor.is_file() else "unknown"
    return (
        f"cputrain {__version__}",
        f"torch {version('torch')}",
        f"Python {platform.python_version()}",
        f"clock governor {clock}",
    )


def keep(measurement: Measurement, env: Mapping[str, str]) -> Path:
    """Write a measurement where `find` looks for it, in place of an older one; its file."""
    name = f"{measurement.model}-{measurement.cores}-{measurement.network}-{measurement.precision}"
    path = _folder(env) / (re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() + ".json")
    write_atomic(path, json.dumps(asdict(measurement), indent=1).encode())
    return path


def find(machine: Machine, recipe: Recipe, env: Mapping[str, str]) -> tuple[Measurement | None, str]:
    """The measurement to predict a recipe from, its own network before others; and a note on one that is out of date.

    A measurement counts for machines with the same processor and number of cores. One with other versions is not used.
    """
    found = [
        measured
        for measured in _all(env)
        if (measured.model, measured.cores, measured.precision)
        == (machine.model, len(machine.allowed_cores), recipe.precision)
    ]
    now = versions()
    current = [measured for measured in found if measured.versions == now]
    if current:
        return max(current, key=lambda measured: (measured.network == recipe.model.name, measured.date)), ""
    if not found:
        return None, ""
    old = max(found, key=lambda measured: measured.date)
    changed = ", ".join(f"{was}, now {new}" for was, new in zip(old.versions, now, strict=False) if was != new)
    return None, f"the rate measured on {old.date} is not used ({changed}): run `cputrain bench model` again"


def _folder(env: Mapping[str, str]) -> Path:
    return cache_folder(env) / "rates"


def _all(env: Mapping[str, str]) -> list[Measurement]:
    texts = (path.read_text() for path in sorted(_folder(env).glob("*.json")))
    return [Measurement(**{**values, "versions": tuple(values["versions"])}) for values in map(json.loads, texts)]
