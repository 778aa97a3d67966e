"""The programs that launch trainings, and what each of their options means here: the tables of launchers.yaml."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.request import CPUS, NUMBER, OPTIONS, SWITCH

PLACES = {NUMBER: "N", CPUS: "CPUS", SWITCH: "on"}
# What an option sets in `Wanted` -> how `cputrain launch` has it.
LAUNCH_OPTIONS = {
    **{option.name: f"{option.flag} {PLACES.get(option.kind, '')}".rstrip() for option in OPTIONS},
    "nodes": "--nodes N",
    "ranks": "--ppn N",
    "hosts": "--hosts LIST",
    "hostfile": "--hostfile FILE",
    "instances": "--instances",
    "instance": "--instance LIST",
    "distributed": "the default: without --instances",
    "output": "--output DIR",
    "restarts": "--restarts N",
    "environment": "env NAME=VALUE before the command",
    "folder": "cd DIR first",
    "dry_run": "--dry-run",
    "module": "-m",
    "no_python": "the command after --",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option by its `names`, with the number of words that follow it; as in launchers.yaml.

    `field` is what it sets in `Wanted`, "" where it has no counterpart. With `parts`, what remains of the word behind
    it after the parts that are found, but for words that are `understood`, has no counterpart.
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
        """How `cputrain launch` has it; "" where it does not."""
        if self.parts:
            return ", ".join(LAUNCH_OPTIONS[field] for field, _ in self.parts)
        if "{}" in self.value or self.field in ("environment", "smt", "module", "no_python", "dry_run", "distributed"):
            return LAUNCH_OPTIONS.get(self.field, "")
        return f"{LAUNCH_OPTIONS[self.field].split()[0]} {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A launcher: the words that call it, the modules that `python -m` calls it by, and its options.

    `starts_python`: the command behind its options is a Python script, not a program. `joins_letters`: letters behind
    one dash are options of their own, the last one with its value, as in -lN2. `remark`: what to know of all its
    command lines; `remark_on_one_host`: of those that name no other hosts; `remark_without_ranks`: of those that give
    no number of ranks.
    """

    name: str
    title: str
    called: tuple[tuple[str, ...], ...]
    options: tuple[Option, ...]
    modules: tuple[str, ...] = ()
    starts_python: bool = False
    joins_letters: bool = False
    remark: str = ""
    remark_on_one_host: str = ""
    remark_without_ranks: str = ""


TABLES = yaml.load(
    Path(__file__).with_name("launchers.yaml").read_text(encoding="utf-8"),
    Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # libyaml's, where PyYAML has it, takes a tenth of the time
)
REASONS: dict[str, str] = TABLES["reasons"]


def _options(table: Mapping[str, Any]) -> Iterator[Option]:
    """The options of a program's table."""
    if "includes" in table:
        yield from _options(TABLES[table["includes"]])
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


def _by_words(names: str, **settings: Any) -> Iterator[Option]:
    """An option for those of the names that as many words follow."""
    counts = {name.rstrip("="): len(name) - len(name.rstrip("=")) for name in names.split()}
    for takes in dict.fromkeys(counts.values()):
        yield Option(names=tuple(name for name in counts if counts[name] == takes), takes=takes, **settings)


def _program(name: str, table: Mapping[str, Any]) -> Program:
    return Program(
        name=name,
        title=table["title"],
        called=tuple(tuple(call.split()) for call in table["called"]),
        options=tuple(_options(table)),
        modules=tuple(table.get("modules", ())),
        starts_python=table.get("starts_python", False),
        joins_letters=table.get("joins_letters", False),
        **{key: text.format(**REASONS) for key, text in table.items() if key.startswith("remark")},
    )


PROGRAMS = {name: _program(name, table) for name, table in TABLES["programs"].items()}


def option_named(program: Program, name: str) -> Option:
    """A launcher's option by its name: with one dash or two, - or _, and shortened where only one begins so.

    Raises InputError for one that it does not have.
    """
    wanted = key_of(name)
    by_key = {key_of(each): option for option in program.options for each in option.names if not each.endswith("*")}
    if wanted in by_key:
        return by_key[wanted]
    for option in program.options:
        if any(each.endswith("*") and wanted.startswith(key_of(each[:-1])) for each in option.names):
            return option
    begin_so = {id(option): option for key, option in by_key.items() if key.startswith(wanted) and len(wanted) > 2}
    if len(begin_so) == 1 and program.starts_python:
        return next(iter(begin_so.values()))
    near = get_close_matches(wanted, by_key, n=1, cutoff=0.7)
    hint = f": did you mean --{near[0]}?" if near else ": remove it, and import the rest"
    raise InputError(f"{program.title} has no option {name[:60]} that is known here{hint}")


def key_of(name: str) -> str:
    """A name without its dashes in front, and with dashes for what may be _."""
    return name.lstrip("-").replace("_", "-")
