"""Translate command lines of other launchers to `cputrain launch`.

tables.yaml has, for each launcher, a table of its options and their counterparts, which this file reads. A line is
split into words and parsed with its launcher's table (parsing.py), and translated (translation.py).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import read_yaml
from cputrain.affinity.planner.request import CPUS, NUMBER, OPTIONS, SWITCH

TABLES = read_yaml(Path(__file__).with_name("tables.yaml"))
REASONS: dict[str, str] = TABLES["reasons"]

# Marks of shell expansions and of the home directory, from Unicode's private use area: no command line contains them.
VARIABLE, HOME = "\ue000", "\ue001"
DIGITS = re.compile("[0-9]{1,6}")
HOSTS_OR_RANGE = re.compile("(?:[0-9]{1,6}[:-])?([0-9]{1,6})")
LEFT_OPEN = ("auto", "cpu", "gpu", "xpu", "", "-1", "0")  # values that let the launcher choose a number


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOption:
    """A launcher's option by its `names`, with the number of words that follow it; see tables.yaml.

    `field` is the field of `LaunchSpec` that it sets, "" if it has no counterpart. With `parts`, whatever remains of
    the following word after removing the matched parts and what is `understood` has no counterpart.
    """

    names: tuple[str, ...]
    takes: int
    field: str = ""
    value: str = "{}"
    why: str = ""
    when: str = ".*"
    parts: tuple[tuple[str, str], ...] = ()
    understood: str = r"(?!)"

    @property
    def launch_option(self) -> str:
        """The counterpart in `cputrain launch`; "" if there is none."""
        if self.parts:
            return ", ".join(FIELDS[field].shown for field, _ in self.parts)
        if not self.field:
            return ""
        field = FIELDS[self.field]
        shown = "{}" in self.value or field.read is _true or self.field == "environment"
        return field.shown if shown else f"{field.option} {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLauncher:
    """A launcher: the words that call it, the modules for `python -m`, and its options.

    `starts_python`: the command after its options is a Python script, not a program. `joins_letters`: letters after one
    dash are separate options, the last one with its value, as in -lN2. `remark` is a note for all its command lines,
    `remark_on_one_host` for those that name no other hosts, `remark_without_ranks` for those without a number of ranks.
    """

    name: str
    title: str
    called: tuple[tuple[str, ...], ...]
    options: tuple[ForeignOption, ...]
    modules: tuple[str, ...] = ()
    starts_python: bool = False
    joins_letters: bool = False
    remark: str = ""
    remark_on_one_host: str = ""
    remark_without_ranks: str = ""


def _options_of(table: Mapping[str, Any]) -> Iterator[ForeignOption]:
    """Yield the options of a launcher's table."""
    if "includes" in table:
        yield from _options_of(TABLES[table["includes"]])
    for entry in table.get("options", ()):
        more = {**entry, "why": entry.get("why", "").format(**REASONS)}
        if "parts" in more:
            names, parts = more.pop("names"), tuple(more.pop("parts").items())
            yield from _by_words(names, parts=parts, **{"when": "", **more})
        else:
            field = next(iter(more))
            yield from _by_words(more.pop(field), field=field, **more)
    for why, names in table["without"].items():
        yield from _by_words(names, why=REASONS.get(why) or why.format(**REASONS))


def _by_words(names: str, **settings: Any) -> Iterator[ForeignOption]:
    """Yield an option for each group of names that are followed by equally many words."""
    counts = {name.rstrip("="): len(name) - len(name.rstrip("=")) for name in names.split()}
    for takes in dict.fromkeys(counts.values()):
        yield ForeignOption(names=tuple(name for name in counts if counts[name] == takes), takes=takes, **settings)


def _program(name: str, table: Mapping[str, Any]) -> ForeignLauncher:
    return ForeignLauncher(
        name=name,
        title=table["title"],
        called=tuple(tuple(call.split()) for call in table["called"]),
        options=tuple(_options_of(table)),
        modules=tuple(table.get("modules", ())),
        starts_python=table.get("starts_python", False),
        joins_letters=table.get("joins_letters", False),
        **{key: text.format(**REASONS) for key, text in table.items() if key.startswith("remark")},
    )


PROGRAMS = {name: _program(name, table) for name, table in TABLES["programs"].items()}


def option_named(program: ForeignLauncher, name: str) -> ForeignOption:
    """Find a launcher's option by name: with one dash or two, - or _, and abbreviated if unambiguous.

    Raises InputError for an unknown option.
    """
    normalized = normalized_option(name)
    by_key = {
        normalized_option(alias): option
        for option in program.options
        for alias in option.names
        if not alias.endswith("*")
    }
    if normalized in by_key:
        return by_key[normalized]
    for option in program.options:
        if any(alias.endswith("*") and normalized.startswith(normalized_option(alias[:-1])) for alias in option.names):
            return option
    with_prefix = {
        id(option): option for key, option in by_key.items() if key.startswith(normalized) and len(normalized) > 2
    }
    if len(with_prefix) == 1 and program.starts_python:
        return next(iter(with_prefix.values()))
    near = get_close_matches(normalized, by_key, n=1, cutoff=0.7)
    hint = f": did you mean --{near[0]}?" if near else ": remove it, and import the rest"
    raise InputError(f"{program.title} has no option {name[:60]} known to cputrain{hint}")


def normalized_option(name: str) -> str:
    """Normalize an option name: no leading dashes, and - for _."""
    return name.lstrip("-").replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What a command line requests; None or () if it does not say.

    `ranks` counts all hosts, `ppn` each host. `instances`: a number, "latency" or "throughput". `environment` has
    NAME=VALUE for the ranks. `command` is the program to start, or with `module` a Python module, and its arguments.
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
class ParsedOption:
    """An option as written in a command line, the field that it sets, and the value as text."""

    written: str
    field: str
    value: str


def spec_of(options: Iterable[ParsedOption], command: tuple[str, ...]) -> LaunchSpec:
    """Return what the options request; the last one of a repeated option counts. Raises InputError for bad values."""
    values: dict[str, Any] = {}
    for option in options:
        field = FIELDS[option.field]
        if field.must_be_known and VARIABLE in option.value:
            raise InputError(f"{option.written}: shell variables are not expanded here: replace it by its value")
        try:
            value = field.read(option.value)
        except ValueError as error:
            raise InputError(f"{option.written}: {option.value[:30]!r} {error}") from None
        values[option.field] = (*values.get("environment", ()), value) if option.field == "environment" else value
    return LaunchSpec(**values, command=command)


def _text(value: str) -> str | None:
    return value or None


def _true(_value: str) -> bool:
    return True


def _number(value: str) -> int | None:
    if value in LEFT_OPEN:
        return None
    if not DIGITS.fullmatch(value):
        raise ValueError("is not a number of at most 6 digits; correct it")
    return int(value)


def _cores(value: str) -> int | None:
    return 0 if value == "0" else _number(value)


def _nodes(value: str) -> int | None:
    match = HOSTS_OR_RANGE.fullmatch(value)
    if match is None:
        raise ValueError("is not a number of hosts; write N, MIN:MAX or MIN-MAX")
    return int(match[1]) or None


def _instances(value: str) -> str | None:
    return None if value in LEFT_OPEN else value


def _instance(value: str) -> str | None:
    """Parse indices of copies, from 0; -1 means all of them."""
    return None if value == "-1" else _list(value)


def _list(value: str) -> str | None:
    return "".join(value.split()) or None


def _one_of(names: dict[str, str | None]) -> Callable[[str], str | None]:
    def of_names(value: str) -> str | None:
        if value not in names:
            raise ValueError(f"is unknown; choose one of {', '.join(names)}")
        return names[value]

    return of_names


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchField:
    """A field of `LaunchSpec`: its option in `cputrain launch`, or a description, and the option's value; `read` parses
    the text of another launcher's option. `must_be_known`: the value must not be a shell variable.
    """

    option: str
    value: str = ""
    read: Callable[[str], Any] = _text
    must_be_known: bool = False

    @property
    def shown(self) -> str:
        """Format the counterpart in `cputrain launch`."""
        return f"{self.option} {self.value}".rstrip()


READ: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("ppn", "threads"), _number),
    "comm_cores": _cores,
    "cores": _list,
    "smt": _true,
    "openmp": _one_of({"intel": "libiomp5", "default": "libgomp", "libgomp": "libgomp", "auto": None}),
    "allocator": _one_of(
        {"default": "glibc", "glibc": "glibc", "tcmalloc": "tcmalloc", "jemalloc": "jemalloc", "auto": None}
    ),
}
"""Parsers of the values of planning options."""
LAUNCH_OPTIONS = {
    "output": LaunchField(option="--output", value="DIR"),
    "instances": LaunchField(option="--instances", read=_instances, must_be_known=True),
    "instance": LaunchField(option="--instance", value="LIST", read=_instance),
    "hosts": LaunchField(option="--hosts", value="LIST", must_be_known=True),
    "hostfile": LaunchField(option="--hostfile", value="FILE"),
    "nodes": LaunchField(option="--nodes", value="N", read=_nodes, must_be_known=True),
    **{
        option.name: LaunchField(
            option=option.flag,
            value={NUMBER: "N", CPUS: "CPUS", SWITCH: "on"}.get(option.kind, ""),
            read=READ.get(option.name, _text),
            must_be_known=option.name in ("ppn", "threads", "comm_cores", "cores"),
        )
        for option in OPTIONS
    },
    "restarts": LaunchField(option="--restarts", value="N", read=_number, must_be_known=True),
}
"""In the order of --help."""
FIELDS = {
    **LAUNCH_OPTIONS,
    "ranks": LaunchField(option="--ppn", value="N", read=_number, must_be_known=True),
    "distributed": LaunchField(option="the default: without --instances", read=_true),
    "environment": LaunchField(option="env NAME=VALUE before the command"),
    "folder": LaunchField(option="cd DIR first"),
    "dry_run": LaunchField(option="--dry-run", read=_true),
    "module": LaunchField(option="-m", read=_true),
    "no_python": LaunchField(option="the command after --", read=_true),
}
