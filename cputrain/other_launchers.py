"""Translate command lines of other launchers to `cputrain launch`.

other_launchers.yaml has, for each launcher, a table of its options and their counterparts. A line is split into words,
parsed with its launcher's table, and translated.

Shell expansions ($NAME, ${NAME}, $(command), ~/) stay expandable: in words such a `$` or `~` is replaced by a marker
character (VARIABLE, HOME), except in single quotes.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import read_yaml
from cputrain.affinity.planner.request import CPUS, NUMBER, OPTIONS, SWITCH
from cputrain.affinity.ranks.host_names import is_loopback
from cputrain.affinity.wording import join_or, plural
from cputrain.mpi.hosts.hostfile import expand, fold, split_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A launcher's option by its `names`, with the number of words that follow it; see other_launchers.yaml.

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
class Program:
    """A launcher: the words that call it, the modules for `python -m`, and its options.

    `starts_python`: the command after its options is a Python script, not a program. `joins_letters`: letters after one
    dash are separate options, the last one with its value, as in -lN2. `remark` is a note for all its command lines,
    `remark_on_one_host` for those that name no other hosts, `remark_without_ranks` for those without a number of ranks.
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


TABLES = read_yaml(Path(__file__).with_suffix(".yaml"))
REASONS: dict[str, str] = TABLES["reasons"]


def _options_of(table: Mapping[str, Any]) -> Iterator[Option]:
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


def _by_words(names: str, **settings: Any) -> Iterator[Option]:
    """Yield an option for each group of names that are followed by equally many words."""
    counts = {name.rstrip("="): len(name) - len(name.rstrip("=")) for name in names.split()}
    for takes in dict.fromkeys(counts.values()):
        yield Option(names=tuple(name for name in counts if counts[name] == takes), takes=takes, **settings)


def _program(name: str, table: Mapping[str, Any]) -> Program:
    return Program(
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


def option_named(program: Program, name: str) -> Option:
    """Find a launcher's option by name: with one dash or two, - or _, and abbreviated if unambiguous.

    Raises InputError for an unknown option.
    """
    normalized = key_of(name)
    by_key = {key_of(each): option for option in program.options for each in option.names if not each.endswith("*")}
    if normalized in by_key:
        return by_key[normalized]
    for option in program.options:
        if any(each.endswith("*") and normalized.startswith(key_of(each[:-1])) for each in option.names):
            return option
    with_prefix = {id(each): each for key, each in by_key.items() if key.startswith(normalized) and len(normalized) > 2}
    if len(with_prefix) == 1 and program.starts_python:
        return next(iter(with_prefix.values()))
    near = get_close_matches(normalized, by_key, n=1, cutoff=0.7)
    hint = f": did you mean --{near[0]}?" if near else ": remove it, and import the rest"
    raise InputError(f"{program.title} has no option {name[:60]} known to cputrain{hint}")


def key_of(name: str) -> str:
    """Normalize an option name: no leading dashes, and - for _."""
    return name.lstrip("-").replace("_", "-")


# A command up to its first operator outside quotes (a redirection, a pipe, "&&", ";", "&") or up to a comment.
COMMAND = re.compile(
    r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\\'"|&;<>#]|(?<=\S)#)*""",
    re.DOTALL,
)
OPERATORS = "|&;<>"
VARIABLE, HOME = "\ue000", "\ue001"  # from Unicode's private use area, which no command line contains


def command_and_rest(text: str) -> tuple[str, str]:
    """Split a line into its first command and what follows it: "2>&1 | tee log"; "" for nothing or a comment."""
    command = COMMAND.match(text)
    assert command is not None  # it also matches ""
    end = command.end()
    if text[end : end + 1] not in tuple(OPERATORS):
        return (text[:end] if text[end : end + 1] == "#" else text), ""
    if re.search(r"\s\d$", text[:end]) and text[end] in "<>":
        end -= 1
    return text[:end], text[end:].strip()


def split_words(text: str) -> tuple[str, ...]:
    """Split a shell line into words; it may have continuation lines. Raises InputError if a quote is not closed."""
    try:
        words = shlex.split(_marked(text.replace("\\\n", " ")))
    except ValueError as error:
        raise InputError(f"{text[:60]!r} is not a command line ({error}); close the quotes") from None
    return tuple(words[1:] if words[:1] == ["$"] else words)


def _marked(line: str) -> str:
    """Replace the start of each shell expansion by VARIABLE or HOME."""
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


def join_words(words: Sequence[str]) -> str:
    """Join words to a shell line: quoted where necessary, with double quotes if the shell must expand a part."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.startswith(HOME):
        rest = word[2:]
        return f"~{word[1:2]}{_quoted(rest) if rest else ''}"
    if VARIABLE not in word:
        return shlex.quote(word)
    return '"' + re.sub(r'(["\\$`])', r"\\\1", word).replace(VARIABLE, "$") + '"'


def restore_text(text: str) -> str:
    """Restore the original characters in a text, even if repr() has escaped the markers."""
    for mark, char in ((VARIABLE, "$"), (HOME, "~")):
        text = text.replace(mark, char).replace(repr(mark)[1:-1], char)
    return text


DIGITS = re.compile("[0-9]{1,6}")
HOSTS_OR_RANGE = re.compile("(?:[0-9]{1,6}[:-])?([0-9]{1,6})")
LEFT_OPEN = ("auto", "cpu", "gpu", "xpu", "", "-1", "0")  # values that let the launcher choose a number


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


def spec_of(given: Iterable[ParsedOption], command: tuple[str, ...]) -> LaunchSpec:
    """Return what the options request; the last one of a repeated option counts. Raises InputError for bad values."""
    values: dict[str, Any] = {}
    for each in given:
        field = FIELDS[each.field]
        if field.must_be_known and VARIABLE in each.value:
            raise InputError(f"{each.written}: shell variables are not expanded here: replace it by its value")
        try:
            value = field.read(each.value)
        except ValueError as error:
            raise InputError(f"{each.written}: {each.value[:30]!r} {error}") from None
        values[each.field] = (*values.get("environment", ()), value) if each.field == "environment" else value
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
class Field:
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
    "output": Field(option="--output", value="DIR"),
    "instances": Field(option="--instances", read=_instances, must_be_known=True),
    "instance": Field(option="--instance", value="LIST", read=_instance),
    "hosts": Field(option="--hosts", value="LIST", must_be_known=True),
    "hostfile": Field(option="--hostfile", value="FILE"),
    "nodes": Field(option="--nodes", value="N", read=_nodes, must_be_known=True),
    **{
        option.name: Field(
            option=option.flag,
            value={NUMBER: "N", CPUS: "CPUS", SWITCH: "on"}.get(option.kind, ""),
            read=READ.get(option.name, _text),
            must_be_known=option.name in ("ppn", "threads", "comm_cores", "cores"),
        )
        for option in OPTIONS
    },
    "restarts": Field(option="--restarts", value="N", read=_number, must_be_known=True),
}
"""In the order of --help."""
FIELDS = {
    **LAUNCH_OPTIONS,
    "ranks": Field(option="--ppn", value="N", read=_number, must_be_known=True),
    "distributed": Field(option="the default: without --instances", read=_true),
    "environment": Field(option="env NAME=VALUE before the command"),
    "folder": Field(option="cd DIR first"),
    "dry_run": Field(option="--dry-run", read=_true),
    "module": Field(option="-m", read=_true),
    "no_python": Field(option="the command after --", read=_true),
}


ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
PYTHON = re.compile(r"python[0-9.]*")
PREFIXES = ("nohup", "time", "timeout", "nice", "ionice", "chrt", "stdbuf", "setsid", "strace", "exec", "sudo")
KEYWORDS = ("if", "then", "else", "elif", "while", "until", "do", "{", "!")  # of a shell, before a command
MOST_WORDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCommand:
    """A parsed command line: the launcher, the variables set before it, the options with a counterpart, those without
    and the reason, notes on options, and the command."""

    program: Program
    variables: tuple[str, ...]
    given: tuple[ParsedOption, ...]
    without: tuple[tuple[str, str], ...]
    notes: tuple[tuple[str, str], ...]
    command: tuple[str, ...]


def read(
    words: Sequence[str], name: str | None = None, launcher_of: Callable[[str], str | None] = lambda program: None
) -> ParsedCommand:
    """Parse a command line. If its first word leaves the launcher open, use `name`, else the first launcher that has
    its options, starting with the one that `launcher_of` returns for the called program.

    Raises InputError for an unknown launcher or option.
    """
    if len(words) > MOST_WORDS:
        raise InputError(f"the command line has more than {MOST_WORDS:,} words; pass one command")
    start = next((i for i, word in enumerate(words) if word != "env" and not ASSIGNMENT.match(word)), len(words))
    variables = tuple(word for word in words[:start] if word != "env")
    candidates, program, rest = _called(tuple(words[start:]))
    if name is not None:
        candidates = [PROGRAMS[name]]
    first = None
    if len(candidates) > 1:
        first = launcher_of(program)
        candidates = sorted(candidates, key=lambda candidate: candidate.name != first)
    found, failures = [], []
    for candidate in candidates:
        try:
            found.append(_options(candidate, variables, rest))
        except InputError as error:
            failures.append((candidate, error))
        if found and candidate.name in (first, name):
            break
    if not found:
        raise max(failures, key=lambda failure: _recognized(failure[0], rest))[1]
    others = [
        each.program.name for each in found[1:] if (each.given, each.without) != (found[0].given, found[0].without)
    ]
    if not others:
        return found[0]
    guess = f"read as {found[0].program.title}, as its installation is not known here; --from {join_or(others)} differs"
    return replace(found[0], notes=(*found[0].notes, (program, guess)))


def _recognized(program: Program, words: tuple[str, ...]) -> int:
    """Count the words that are options of the launcher."""
    keys = {key_of(name) for option in program.options for name in option.names}
    return sum(word.startswith("-") and key_of(word.partition("=")[0]) in keys for word in words)


def _called(words: tuple[str, ...]) -> tuple[list[Program], str, tuple[str, ...]]:
    """Return the launchers that a command line may belong to, the program it calls, and the words after the call."""
    python = bool(words) and PYTHON.fullmatch(PurePath(words[0]).name) is not None
    if python and "-m" in words[:-1]:
        at = words.index("-m")
        found = [program for program in PROGRAMS.values() if words[at + 1] in program.modules]
        if found and all(word.startswith("-") for word in words[1:at]):
            return found, words[0], words[at + 2 :]
    called = words[1:] if python and len(words) > 1 and not words[1].startswith("-") else words  # python PATH/torchrun
    plain = (PurePath(called[0]).name, *called[1:]) if called else ()
    found = [program for program in PROGRAMS.values() if any(plain[: len(call)] == call for call in program.called)]
    if not found:
        known = ", ".join(dict.fromkeys(" ".join(call) for p in PROGRAMS.values() for call in p.called[:1]))
        shown = f"{' '.join(words)[:60]!r} calls no known launcher" if words else "no command line"
        if python and len(words) > 1:
            script = join_words(called if called != words else ("--", *words))
            raise InputError(
                f"{shown}: cputrain launch {script} starts it once per planned worker, or only once with --instances 1 "
                "before it"
            )
        if plain[:1] in (("numactl",), ("taskset",)):
            raise InputError(f"{shown}: put {plain[0]} before cputrain launch, whose plan uses only the allowed CPUs")
        if plain[:1] and plain[0] in PREFIXES:
            raise InputError(f"{shown}; import what follows {plain[0]}, and put {plain[0]} before cputrain launch")
        raise InputError(f"{shown}; pass a command line of {known} or python -m torch.backends.xeon.run_cpu")
    length = next(len(call) for call in found[0].called if plain[: len(call)] == call)
    return found, called[0], called[length:]


def _options(program: Program, variables: tuple[str, ...], words: tuple[str, ...]) -> ParsedCommand:
    """Parse the words after a launcher's call."""
    given: list[ParsedOption] = []
    without: list[tuple[str, str]] = []
    notes: list[tuple[str, str]] = []
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-", "--"):
        if program.joins_letters:
            words = (*words[:place], *_separated(program, words[place]), *words[place + 1 :])
        name, equals, attached = _split(program, words[place])
        option = option_named(program, name)
        values = [attached] if equals else []
        count = option.takes - len(values)
        following = words[place + 1 : place + 1 + count]
        if option.takes == 2 and following and ASSIGNMENT.match(following[0]):
            values, count = list(following[0].partition("=")[::2]), 1  # -genv NAME=VALUE
        else:
            values += following
        if len(values) < option.takes:
            raise InputError(f"{program.title}: {name} needs a value: give it")
        place += 1 + max(0, count)
        written = " ".join((name, *values))
        if option.field == "environment" and option.takes == 1 and option.value == "{}" and "=" not in values[0]:
            without.append((written, "the ranks inherit the environment"))
        else:
            found, whole = _set_by(option, written, values)
            given += found
            if not whole:
                without.append((written, option.why))
            elif option.why and re.fullmatch(option.when, " ".join(values)):
                notes.append((written, option.why))
    command = words[place + 1 :] if words[place : place + 1] == ("--",) else words[place:]
    if not command:
        raise InputError(f"{program.title}: the command line contains no command: add the script or the program")
    if not program.starts_python and ":" in command:
        raise InputError(f"{program.title}: several programs in one job (:) are not supported: start them separately")
    parsed = ParsedCommand(
        program=program,
        variables=variables,
        given=tuple(given),
        without=tuple(without),
        notes=tuple(notes),
        command=command,
    )
    started = [] if program.starts_python else commands_in(command)
    inner = launcher_in(started[0].words) if len(started) == 1 else None  # else the script of a shell, which stays
    return parsed if inner is None else _with_inner(parsed, started[0], inner)


NESTED = ("accelerate", "torchrun")  # launchers of scripts that mpirun or srun starts, once for each rank or host


def _with_inner(outer: ParsedCommand, started: "StartedCommand", inner: Program) -> ParsedCommand:
    """Merge a launcher with the launcher that it starts: with its ranks if that starts one process each time, else with
    its hosts. Raises InputError if both have numbers of ranks, or if the inner launcher is not one of NESTED."""
    if inner.name not in NESTED:
        raise InputError(
            f"{outer.program.title} starts {inner.title} here: import that command line alone, and give cputrain "
            f"launch the hosts and --ppn of {outer.program.title}"
        )
    found = read(started.words)
    theirs, own = spec_of(outer.given, outer.command), spec_of(found.given, found.command)
    given = outer.given
    if own.ppn is not None or (own.ranks or 1) > 1 or (own.nodes or 1) > 1:
        each = theirs.ppn or (theirs.ranks or 1) // (theirs.nodes or theirs.ranks or 1)
        if each > 1:
            raise InputError(
                f"{outer.program.title} starts {inner.title} {each} times on each host, which has a number of ranks "
                "itself: remove one of the two numbers"
            )
        nodes = theirs.nodes or theirs.ranks
        if own.nodes is not None and nodes not in (None, own.nodes):
            raise InputError(
                f"{outer.program.title} starts {inner.title} {nodes} times, but that has {plural(own.nodes, 'host')}: "
                "give equal numbers"
            )
        given = tuple(
            replace(each, field="nodes") if each.field == "ranks" else each
            for each in outer.given
            if each.field != "ppn" and (each.field != "ranks" or theirs.nodes is own.nodes is None)
        )
    assignments = tuple(word for word in started.before if ASSIGNMENT.match(word))
    wrappers = [word for word in started.before if word not in (*assignments, "env", "exec", "-c", *SHELLS)]
    lost = ((join_words(wrappers), "put it before cputrain launch"),) if wrappers else ()
    return replace(
        found,
        variables=(*outer.variables, *assignments, *found.variables),
        given=(*given, *(each for each in found.given if each.field != "ranks" or (own.ranks or 1) > 1)),
        without=(*outer.without, *lost, *found.without),
        notes=(*outer.notes, *found.notes),
    )


VALUE = re.compile(r"[0-9.]+[smhd]?|[A-Z0-9]+")  # of a wrapper's option: seconds, a signal, a buffering mode
SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
BINDERS = ("taskset", "numactl", "hwloc-bind", "likwid-pin", "likwid-mpirun")
# Words with which such a program or a launcher only prints; the options of some of them must come first.
HELP = frozenset(("-h", "-help", "--help", "-V", "-version", "--version"))
PRINTING = {
    "numactl": ("-H", "--hardware", "-s", "--show"),
    "hwloc-bind": ("--get", "--get-last-cpu-location"),
    "likwid-pin": ("-p",),
}


def binder_in(command: tuple[str, ...]) -> str:
    """Return a note if a command's ranks would not stay bound as planned, as it starts a program that binds again or a
    launcher; "" if it does not."""
    return next(filter(None, (_binds_again(each.words) for each in commands_in(command))), "")


def _binds_again(words: tuple[str, ...]) -> str:
    name = PurePath(words[0]).name
    if _only_prints(name, words[1:]):
        return ""
    if name in BINDERS:
        return (
            f"{name} in the command replaces the plan's binding of each worker: remove it, or put it before cputrain "
            "launch, whose plan uses only the allowed CPUs"
        )
    if inner := launcher_in(words):
        return (
            f"each worker starts {inner.title}, which starts and binds processes of its own: translate its command "
            "line with cputrain import"
        )
    return ""


def _only_prints(name: str, words: tuple[str, ...]) -> bool:
    """Whether a program with these words binds and starts nothing, as it prints a binding, the hardware or its help."""
    if name == "taskset" and any(word == "--pid" or re.fullmatch("-[ac]*p[ac]*", word) for word in words):
        return sum(not word.startswith("-") for word in words) == 1  # a process; with a mask before it, it is bound
    first = takewhile(lambda word: word.startswith("-"), words)
    return HELP.issuperset(words) or not {*PRINTING.get(name, ())}.isdisjoint(first)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedCommand:
    """A command that another one starts, and the words before it: env and variables, nice, a shell and its -c."""

    before: tuple[str, ...]
    words: tuple[str, ...]


def commands_in(command: tuple[str, ...]) -> list[StartedCommand]:
    """Return what a command starts through env, nice, timeout and the like: one command, or those of a shell's -c. A
    file to which a shell's command writes counts as one, too."""
    words = command
    while words:
        name, before = PurePath(words[0]).name, command[: len(command) - len(words)]
        if name in SHELLS and (at := _script_at(words)):
            inner = [each for line in _lines_of(words[at]) for each in commands_in(line)]
            return [replace(each, before=(*before, *words[:at], *each.before)) for each in inner]
        if ASSIGNMENT.match(words[0]) or words[0] in KEYWORDS:
            words = words[1:]
        elif name in ("env", *PREFIXES):
            start = next((i for i in range(1, len(words)) if not _is_option(words[i])), len(words))
            words = words[start:]
        else:
            return [StartedCommand(before=before, words=words)]
    return []


def _script_at(words: tuple[str, ...]) -> int:
    """Return the place of the script after a shell's -c or -lc; 0 if it has none."""
    for at, word in enumerate(words[1:-1], start=1):
        if re.fullmatch("-[a-zA-Z]*c", word):
            return at + 1
        if not word.startswith("-") and words[at - 1] not in ("-o", "-O"):
            break
    return 0


def _lines_of(script: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command in a shell's script, up to a quote that is not closed."""
    rest = script.replace("\\\n", " ").replace("\n", ";")
    while rest := rest.lstrip(f"{OPERATORS} ("):
        line, rest = command_and_rest(rest)
        try:
            yield split_words(line)
        except InputError:
            return


def _is_option(word: str) -> bool:
    return word.startswith("-") or VALUE.fullmatch(word) is not None


def launcher_in(words: tuple[str, ...]) -> Program | None:
    """Return the launcher that a command calls by itself; None if it calls none."""
    name, rest = PurePath(words[0]).name, words[1:]
    at = next((i for i, word in enumerate(rest) if word == "-m" or not word.startswith("-")), 0)
    module = rest[at + 1 : at + 2] if PYTHON.fullmatch(name) and rest[at : at + 1] == ("-m",) else ()
    for program in PROGRAMS.values():
        if any((name, *rest)[: len(call)] == call for call in program.called) or set(module) & set(program.modules):
            return program
    return None


def _split(program: Program, word: str) -> tuple[str, str, str]:
    """Return an option's name, "=" if a value is attached to it, and that value: for --nodes=2, and for -N2."""
    letter = word[:2]
    with_value = any(letter in each.names and each.takes for each in program.options)
    if with_value and word[2:].isdecimal():
        return letter, "=", word[2:]
    name, equals, attached = word.partition("=")
    return name, equals, attached


def _separated(program: Program, word: str) -> tuple[str, ...]:
    """Split joined options after the first one: -t10:00 is -t 10:00, -lN2 is -l -N2."""
    letter, rest = word[:2], word[2:]
    if letter == "--" or not rest:
        return (word,)
    if option_named(program, letter).takes:
        return letter, rest
    return (letter, f"-{rest}") if rest[0].isalpha() else (f"{letter}={rest}",)


def _set_by(option: Option, written: str, values: list[str]) -> tuple[list[ParsedOption], bool]:
    """Return the options set by the following words, and whether these have no other meaning."""
    if option.field:
        value = option.value.format(*values) if values else option.value
        return [ParsedOption(written=written, field=option.field, value=value)], True
    if not option.parts:
        return [], False
    found, rest = [], values[0]
    for field, pattern in option.parts:
        matches = re.finditer(pattern, values[0], re.IGNORECASE)
        found += [ParsedOption(written=written, field=field, value=match[1]) for match in matches]
        rest = re.sub(pattern, "", rest, flags=re.IGNORECASE)
    rest = re.sub(option.understood, "", rest, flags=re.IGNORECASE)
    return found, bool(found) and re.search(r"\w", rest) is None


# Variables that the plan sets; other values would contradict it.
PLANNED = (
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"),
    *("I_MPI_PIN", "I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "CCL_WORKER_AFFINITY"),
    *("MALLOC_CONF", "OMP_SCHEDULE"),
)
# Variables that correspond to options of launch -> field of LaunchSpec.
VARIABLES = {"OMP_NUM_THREADS": "threads", "CCL_WORKER_COUNT": "comm_cores"}
MEETING = ("MASTER_ADDR", "MASTER_PORT")
ALLOCATION = "in a scheduler's job launch uses the job's hosts; elsewhere add --hosts n1,n2 or --hostfile FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A shell line, the options that it does not contain with reasons, and notes."""

    line: str
    without: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def translate(parsed: ParsedCommand, *, cores: int, hosts_in: Callable[[str], int | None]) -> Translation:
    """Translate a command line to `cputrain launch` on a machine with this number of cores; `hosts_in` counts the hosts
    of a hostfile, None if unreadable. Raises InputError if hosts would differ."""
    options, dropped = _without_planned(spec_of(parsed.given, parsed.command), parsed.variables)
    front = tuple(word for word in parsed.variables if word.partition("=")[0] in MEETING)
    notes = [f"{written}: {why}" for written, why in parsed.notes]
    if parsed.program.name in ("ipexrun", "run_cpu"):
        asked, options = options, _instances_or_ranks(options, cores)
        dropped += _of_the_other_mode(parsed, asked, options)
    if parsed.program.name == "ipexrun" and (options.nodes or 1) > 1 and not options.hostfile:
        options = replace(options, hostfile="hostfile")
    options, more = _sized(options, hosts_in)
    notes += more
    one_host = not options.hosts and not options.hostfile and (options.nodes or 1) == 1
    numbered = any(each.field in ("ppn", "ranks") for each in parsed.given)
    program = parsed.program
    notes += (binder_in(options.command),)
    notes += (program.remark, program.remark_on_one_host if one_host else "")
    notes += ("" if numbered else program.remark_without_ranks,)
    words = ("cputrain", "launch", *_words_of(options), *_command(options, starts_python=parsed.program.starts_python))
    folder = f"{join_words(('cd', options.folder))} && " if options.folder else ""
    return Translation(
        line=folder + join_words((*(("env", *front) if front else ()), *words)),
        without=tuple((restore_text(option), why) for option, why in (*parsed.without, *dropped)),
        notes=tuple(dict.fromkeys(restore_text(note) for note in notes if note)),
    )


def _without_planned(options: LaunchSpec, variables: tuple[str, ...]) -> tuple[LaunchSpec, list[tuple[str, str]]]:
    """Split environment variables into those to pass to the ranks and those that the plan sets."""
    kept, dropped = [], []
    for variable in (*variables, *options.environment):
        name, _, value = variable.partition("=")
        if name in PLANNED:
            dropped.append((variable, "the plan sets it"))
        elif name in VARIABLES and value.isdecimal():
            field = VARIABLES[name]
            number: Any = int(value) if getattr(options, field) is None else getattr(options, field)
            options = replace(options, **{field: number})
        elif name not in MEETING:
            kept.append(variable)
    return replace(options, environment=tuple(kept)), dropped


def _instances_or_ranks(options: LaunchSpec, cores: int) -> LaunchSpec:
    """Decide between independent copies and ranks: ipexrun starts ranks with --nnodes or --distributed only."""
    if options.nodes is not None or options.distributed:
        return replace(options, instances=None, instance=None)
    copies = replace(options, comm_cores=None, ppn=None)
    if options.instances in ("latency", "throughput"):
        return replace(copies, threads=None)
    return replace(
        copies, instances=options.instances or (str(max(1, cores // options.threads)) if options.threads else "1")
    )


def _of_the_other_mode(parsed: ParsedCommand, asked: LaunchSpec, kept: LaunchSpec) -> list[tuple[str, str]]:
    """Return the options for copies if ranks start, and for ranks if copies start, with reasons."""
    copies = "it starts independent copies, which do not communicate"
    reasons = {
        "instances": "it starts the ranks of one job, --ppn on each host",
        "instance": "it starts all ranks of one job",
        "threads": "the mode decides how many cores a copy has",
        "comm_cores": copies,
        "ppn": f"{copies}; --instances sets their number",
    }
    written = {
        **{VARIABLES.get(each.partition("=")[0], ""): each for each in parsed.variables},
        **{each.field: each.written for each in parsed.given},
    }
    return [
        (written[field], why)
        for field, why in reasons.items()
        if getattr(asked, field) is not None and getattr(kept, field) is None
    ]


def _sized(options: LaunchSpec, hosts_in: Callable[[str], int | None]) -> tuple[LaunchSpec, list[str]]:
    """Convert ranks to workers per host, and hosts to names or a number; also return notes."""
    options = asked = _with_slots(options)
    named = len(expand(options.hosts)) if options.hosts else None
    if options.hostfile:
        named = hosts_in(options.hostfile)
    hosts = named or options.nodes or (1 if not options.hostfile else None)
    notes = []
    if (
        options.ranks is not None
        and options.ppn is not None
        and named is None
        and not options.nodes
        and not options.hostfile
    ):
        hosts = -(-options.ranks // options.ppn)
    if options.ranks is not None and options.ppn is None and hosts is None:
        notes.append(
            f"{options.hostfile} cannot be read: add --ppn with {options.ranks} divided by its number of hosts"
        )
    elif options.ranks is not None and hosts is not None:
        if options.ranks % hosts or (options.ppn is not None and options.ppn * hosts != options.ranks and hosts > 1):
            of_each = f", {options.ppn} on each" if options.ppn is not None else ""
            raise InputError(
                f"{plural(options.ranks, 'rank')} on {plural(hosts, 'host')}{of_each}: cputrain starts equally many "
                "workers on every host, so give another number"
            )
        options = replace(options, ppn=options.ranks // hosts)
    if named is None and not options.hostfile and (hosts or 1) > 1:
        options = replace(options, nodes=hosts)
        notes.append(ALLOCATION)
    else:
        needed = options.nodes
        if options.ranks is not None and asked.ppn is not None:
            needed = needed or -(-options.ranks // asked.ppn)
        if options.hostfile and needed is not None and named is None:
            notes.append(f"{options.hostfile} cannot be read: all its hosts are used, so keep only {needed} in it")
        elif options.hostfile and needed is not None and named is not None and needed != named:
            of_the_file = f"all {named} hosts of {options.hostfile} are used"
            advice = f"keep only {needed} in it" if needed < named else f"add the other {needed - named} to it"
            notes.append(f"{of_the_file}: {advice}")
        options = replace(options, nodes=None)
    return replace(options, ranks=None), notes


def _with_slots(options: LaunchSpec) -> LaunchSpec:
    """Convert slots after host names to workers per host; this host needs no name."""
    if options.hosts is None:
        return options
    slots: Counter[str] = Counter()
    ranges = "[" in options.hosts  # Slurm's format, which has no slots
    for host in expand(options.hosts) if ranges else options.hosts.split(","):
        name, number = split_slots(host.strip())
        slots[name] += int(number or 1)
    each = set(slots.values())
    has_slots = each != {1} or ":" in options.hosts
    if has_slots and len(each) > 1:
        raise InputError(
            f"hosts {options.hosts[:60]!r} have different numbers of slots; pass one --host-group for each number"
        )
    if has_slots and options.ppn is None and (options.ranks is None or options.ranks == sum(slots.values())):
        options = replace(options, ppn=each.pop(), ranks=None)
    return replace(options, hosts=None if all(map(is_loopback, slots)) else fold(slots) if ranges else ",".join(slots))


def _words_of(options: LaunchSpec) -> tuple[str, ...]:
    """Return the options of `cputrain launch` in the order of its --help."""
    values = ((field, getattr(options, name, None)) for name, field in LAUNCH_OPTIONS.items())
    given = tuple(
        word
        for field, value in values
        if value is not None and value is not False
        for word in (field.option, "on" if value is True else str(value))
    )
    return (*given, "--dry-run") if options.dry_run else given


def _command(options: LaunchSpec, *, starts_python: bool) -> tuple[str, ...]:
    """Return the words of the command after the options."""
    words, variables = options.command, options.environment
    if starts_python and not options.no_python:
        plain = not variables and (options.module or words[0].endswith(".py"))
        if plain:
            return (*(("-m",) if options.module else ()), *words)
        words = ("python", *(("-m",) if options.module else ()), *words)
    return ("--", *(("env", *variables) if variables else ()), *words)
