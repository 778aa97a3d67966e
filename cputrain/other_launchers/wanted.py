"""What a command line of another launcher asks for."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from affinity.errors import InputError
from cputrain.other_launchers.shell_words import VARIABLE

NUMBER = re.compile("[0-9]{1,6}")
HOSTS_OR_RANGE = re.compile("(?:[0-9]{1,6}[:-])?([0-9]{1,6})")
UNDERSTOOD = ("nodes", "ppn", "ranks", "threads", "restarts", "comm_cores", "hosts", "cores", "instances")
PLANNED = ("auto", "cpu", "gpu", "xpu", "", "-1", "0")  # values that leave a number to the launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a command line asks for; None and () where it says nothing.

    `ranks` are those of all hosts, `ppn` those of each. `instances`: a number, "latency" or "throughput". `environment`
    are NAME=VALUE for the ranks. `command` is what is started: with `module` a Python module and its arguments.
    """

    nodes: int | None = None
    ppn: int | None = None
    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    threads: int | None = None
    comm_cores: int | None = None
    smt: bool = False
    cores: str | None = None
    openmp: str | None = None
    allocator: str | None = None
    instances: str | None = None
    instance: str | None = None
    distributed: bool = False
    output: str | None = None
    restarts: int | None = None
    environment: tuple[str, ...] = ()
    folder: str | None = None
    dry_run: bool = False
    module: bool = False
    no_python: bool = False
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """An option of a command line as it was written, and the field that it sets to a text."""

    written: str
    field: str
    value: str


def wanted(given: Iterable[Given], command: tuple[str, ...]) -> Wanted:
    """What the options ask for; of one that is repeated the last counts. Raises InputError for bad values."""
    values: dict[str, Any] = {}
    for each in given:
        if each.field in UNDERSTOOD and VARIABLE in each.value:
            raise InputError(f"{each.written}: a variable of the shell has no value here: put its value in its place")
        value = VALUES.get(each.field, _text)(each)
        if each.field == "environment":
            value = (*values.get("environment", ()), value)
        values[each.field] = value
    return Wanted(**values, command=command)


def _text(given: Given) -> str | None:
    return given.value or None


def _true(given: Given) -> bool:
    return True


def _number(given: Given) -> int | None:
    if given.value in PLANNED:
        return None
    if not NUMBER.fullmatch(given.value):
        raise InputError(f"{given.written}: {given.value[:30]!r} is not a number of at most 6 digits: correct it")
    return int(given.value)


def _cores(given: Given) -> int | None:
    return 0 if given.value == "0" else _number(given)


def _nodes(given: Given) -> int | None:
    match = HOSTS_OR_RANGE.fullmatch(given.value)
    if match is None:
        raise InputError(f"{given.written}: {given.value[:30]!r} is not a number of hosts: give N, MIN:MAX or MIN-MAX")
    return int(match[1]) or None


def _instances(given: Given) -> str | None:
    return None if given.value in PLANNED else given.value


def _instance(given: Given) -> str | None:
    """Numbers of copies, of which 0 is the first; -1 stands for all of them."""
    return None if given.value == "-1" else _list(given)


def _list(given: Given) -> str | None:
    return "".join(given.value.split()) or None


def _one_of(names: dict[str, str | None]) -> Callable[[Given], str | None]:
    def value(given: Given) -> str | None:
        if given.value not in names:
            raise InputError(f"{given.written}: {given.value[:30]!r} is unknown: give {', '.join(names)}")
        return names[given.value]

    return value


VALUES: dict[str, Callable[[Given], Any]] = {
    **dict.fromkeys(("ppn", "ranks", "threads", "restarts"), _number),
    **dict.fromkeys(("smt", "dry_run", "module", "no_python", "distributed"), _true),
    "nodes": _nodes,
    "comm_cores": _cores,
    "cores": _list,
    "instances": _instances,
    "instance": _instance,
    "openmp": _one_of({"intel": "libiomp5", "default": "libgomp", "libgomp": "libgomp", "auto": None}),
    "allocator": _one_of(
        {"default": "glibc", "glibc": "glibc", "tcmalloc": "tcmalloc", "jemalloc": "jemalloc", "auto": None}
    ),
}
