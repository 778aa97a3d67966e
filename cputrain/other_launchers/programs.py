"""The programs that launch trainings, and what each of their options means here: the tables of launchers.yaml. Shell
lines as words and back, and what a command line asks for.

What a shell would expand in a line ($NAME, ${NAME}, $(command), ~/) stays expandable: in words a `$` or `~` of that
kind is a character of its own (VARIABLE, HOME); in single quotes there are none.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


# A command as far as its first operator outside quotes: a redirection, a pipe, "&&", ";", "&"; or as far as a comment.
COMMAND = re.compile(
    r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\\'"|&;<>#]|(?<=\S)#)*""",
    re.DOTALL,
)
OPERATORS = "|&;<>"
VARIABLE, HOME = "\ue000", "\ue001"  # of Unicode's private use area: no command line has them


def command_and_rest(text: str) -> tuple[str, str]:
    """A line's first command, and what follows it: "2>&1 | tee log"; "" for nothing, or a comment."""
    command = COMMAND.match(text)
    assert command is not None  # it matches "" too
    end = command.end()
    if text[end : end + 1] not in tuple(OPERATORS):
        return (text[:end] if text[end : end + 1] == "#" else text), ""
    if re.search(r"\s\d$", text[:end]) and text[end] in "<>":
        end -= 1
    return text[:end], text[end:].strip()


def words_of(text: str) -> tuple[str, ...]:
    """The words of a shell's line; a line may be continued. Raises InputError where quotes are open."""
    try:
        words = shlex.split(_marked(text.replace("\\\n", " ")))
    except ValueError as error:
        raise InputError(f"{text[:60]!r} is not a command line: {error}: close the quotes") from None
    return tuple(words[1:] if words[:1] == ["$"] else words)


def _marked(line: str) -> str:
    """The line with VARIABLE and HOME for what a shell expands."""
    marked: list[str] = []
    quote, escaped = "", False
    for char, after in zip(line, f"{line[1:]} ", strict=True):
        kept = char
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
            if quote and after in "$`":
                continue  # a backslash that shlex would keep in double quotes
        elif char in "'\"" and quote in ("", char):
            quote = "" if quote else char
        elif char == "$" and quote != "'" and (after.isalpha() or after in "_{("):
            kept = VARIABLE
        elif char == "~" and not quote and (after == "/" or after.isspace()) and (not marked or marked[-1].isspace()):
            kept = HOME
        marked.append(kept)
    return "".join(marked)


def line_of(words: Sequence[str]) -> str:
    """The line for a shell that has these words: quoted where that is needed, in double quotes what it expands."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.startswith(HOME):
        rest = word[2:]
        return f"~{word[1:2]}{_quoted(rest) if rest else ''}"
    if VARIABLE not in word:
        return shlex.quote(word)
    return '"' + re.sub(r'(["\\$`])', r"\\\1", word).replace(VARIABLE, "$") + '"'


def unmarked(text: str) -> str:
    """A text as it was written, also where repr() has escaped it."""
    for mark, char in ((VARIABLE, "$"), (HOME, "~")):
        text = text.replace(mark, char).replace(repr(mark)[1:-1], char)
    return text


DIGITS = re.compile("[0-9]{1,6}")
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
    if not DIGITS.fullmatch(given.value):
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
