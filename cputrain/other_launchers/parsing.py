"""Parse a command line of another launcher, also one inside a script or a wrapper.

Shell expansions ($NAME, ${NAME}, $(command), ~/) stay expandable: in words such a `$` or `~` is replaced by a marker
character (VARIABLE, HOME), except in single quotes.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import PurePath

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import join_or, plural
from cputrain.other_launchers import (
    HOME,
    PROGRAMS,
    VARIABLE,
    ForeignLauncher,
    ForeignOption,
    ParsedOption,
    normalized_option,
    option_named,
    spec_of,
)

# A command up to its first operator outside quotes (a redirection, a pipe, "&&", ";", "&") or up to a comment.
COMMAND = re.compile(
    r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\\'"|&;<>#]|(?<=\S)#)*""",
    re.DOTALL,
)
OPERATORS = "|&;<>"

ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
PYTHON = re.compile(r"python[0-9.]*")
PREFIXES = ("nohup", "time", "timeout", "nice", "ionice", "chrt", "stdbuf", "setsid", "strace", "exec", "sudo")
KEYWORDS = ("if", "then", "else", "elif", "while", "until", "do", "{", "!")  # of a shell, before a command
MAX_WORDS = 10_000

NESTED = ("accelerate", "torchrun")  # launchers of scripts that mpirun or srun starts, once for each rank or host

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
        written = char
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
            if quote and after in "$`":
                continue  # a backslash that shlex would keep in double quotes
        elif char in "'\"" and quote in ("", char):
            quote = "" if quote else char
        elif char == "$" and quote != "'" and (after.isalpha() or after in "_{("):
            written = VARIABLE
        elif char == "~" and not quote and (after == "/" or after.isspace()) and (not marked or marked[-1].isspace()):
            written = HOME
        marked.append(written)
    return "".join(marked)


def join_words(words: Sequence[str]) -> str:
    """Join words to a shell line: quoted where necessary, with double quotes if the shell must expand a part."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.startswith(HOME):
        path = word[2:]
        return f"~{word[1:2]}{_quoted(path) if path else ''}"
    if VARIABLE not in word:
        return shlex.quote(word)
    return '"' + re.sub(r'(["\\$`])', r"\\\1", word).replace(VARIABLE, "$") + '"'


def restore_text(text: str) -> str:
    """Restore the original characters in a text, even if repr() has escaped the markers."""
    for mark, char in ((VARIABLE, "$"), (HOME, "~")):
        text = text.replace(mark, char).replace(repr(mark)[1:-1], char)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCommand:
    """A parsed command line: the launcher, the variables set before it, the options with a counterpart, those without
    and the reason, notes on options, and the command."""

    program: ForeignLauncher
    variables: tuple[str, ...]
    given: tuple[ParsedOption, ...]
    without: tuple[tuple[str, str], ...]
    notes: tuple[tuple[str, str], ...]
    command: tuple[str, ...]


def parse_command(
    words: Sequence[str], name: str | None = None, launcher_of: Callable[[str], str | None] = lambda program: None
) -> ParsedCommand:
    """Parse a command line. If its first word leaves the launcher open, use `name`, else the first launcher that has
    its options, starting with the one that `launcher_of` returns for the called program.

    Raises InputError for an unknown launcher or option.
    """
    if len(words) > MAX_WORDS:
        raise InputError(f"the command line has more than {MAX_WORDS:,} words; pass one command")
    start = next((i for i, word in enumerate(words) if word != "env" and not ASSIGNMENT.match(word)), len(words))
    variables = tuple(word for word in words[:start] if word != "env")
    candidates, program, arguments = _called(tuple(words[start:]))
    if name is not None:
        candidates = [PROGRAMS[name]]
    first = None
    if len(candidates) > 1:
        first = launcher_of(program)
        candidates = sorted(candidates, key=lambda candidate: candidate.name != first)
    parsed, failures = [], []
    for candidate in candidates:
        try:
            parsed.append(_options(candidate, variables, arguments))
        except InputError as error:
            failures.append((candidate, error))
        if parsed and candidate.name in (first, name):
            break
    if not parsed:
        raise max(failures, key=lambda failure: _recognized(failure[0], arguments))[1]
    differing = [
        command.program.name
        for command in parsed[1:]
        if (command.given, command.without) != (parsed[0].given, parsed[0].without)
    ]
    if not differing:
        return parsed[0]
    guess = (
        f"read as {parsed[0].program.title}, as its installation is not known here; --from {join_or(differing)} differs"
    )
    return replace(parsed[0], notes=(*parsed[0].notes, (program, guess)))


def _recognized(program: ForeignLauncher, words: tuple[str, ...]) -> int:
    """Count the words that are options of the launcher."""
    keys = {normalized_option(name) for option in program.options for name in option.names}
    return sum(word.startswith("-") and normalized_option(word.partition("=")[0]) in keys for word in words)


def _called(words: tuple[str, ...]) -> tuple[list[ForeignLauncher], str, tuple[str, ...]]:
    """Return the launchers that a command line may belong to, the program it calls, and the words after the call."""
    python = bool(words) and PYTHON.fullmatch(PurePath(words[0]).name) is not None
    if python and "-m" in words[:-1]:
        at = words.index("-m")
        candidates = [program for program in PROGRAMS.values() if words[at + 1] in program.modules]
        if candidates and all(word.startswith("-") for word in words[1:at]):
            return candidates, words[0], words[at + 2 :]
    called = words[1:] if python and len(words) > 1 and not words[1].startswith("-") else words  # python PATH/torchrun
    plain = (PurePath(called[0]).name, *called[1:]) if called else ()
    candidates = [
        program for program in PROGRAMS.values() if any(plain[: len(call)] == call for call in program.called)
    ]
    if not candidates:
        calls = ", ".join(dict.fromkeys(" ".join(call) for p in PROGRAMS.values() for call in p.called[:1]))
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
        raise InputError(f"{shown}; pass a command line of {calls} or python -m torch.backends.xeon.run_cpu")
    length = next(len(call) for call in candidates[0].called if plain[: len(call)] == call)
    return candidates, called[0], called[length:]


def _options(program: ForeignLauncher, variables: tuple[str, ...], words: tuple[str, ...]) -> ParsedCommand:
    """Parse the words after a launcher's call."""
    options: list[ParsedOption] = []
    without: list[tuple[str, str]] = []
    notes: list[tuple[str, str]] = []
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
        if program.joins_letters:
            words = (*words[:index], *_separated(program, words[index]), *words[index + 1 :])
        name, equals, attached = _split(program, words[index])
        option = option_named(program, name)
        values = [attached] if equals else []
        count = option.takes - len(values)
        following = words[index + 1 : index + 1 + count]
        if option.takes == 2 and following and ASSIGNMENT.match(following[0]):
            values, count = list(following[0].partition("=")[::2]), 1  # -genv NAME=VALUE
        else:
            values += following
        if len(values) < option.takes:
            raise InputError(f"{program.title}: {name} needs a value: give it")
        index += 1 + max(0, count)
        written = " ".join((name, *values))
        if option.field == "environment" and option.takes == 1 and option.value == "{}" and "=" not in values[0]:
            without.append((written, "the ranks inherit the environment"))
        else:
            settings, whole = _set_by(option, written, values)
            options += settings
            if not whole:
                without.append((written, option.why))
            elif option.why and re.fullmatch(option.when, " ".join(values)):
                notes.append((written, option.why))
    command = words[index + 1 :] if words[index : index + 1] == ("--",) else words[index:]
    if not command:
        raise InputError(f"{program.title}: the command line contains no command: add the script or the program")
    if not program.starts_python and ":" in command:
        raise InputError(f"{program.title}: several programs in one job (:) are not supported: start them separately")
    parsed = ParsedCommand(
        program=program,
        variables=variables,
        given=tuple(options),
        without=tuple(without),
        notes=tuple(notes),
        command=command,
    )
    started = [] if program.starts_python else commands_in(command)
    inner = launcher_in(started[0].words) if len(started) == 1 else None  # else the script of a shell, which stays
    return parsed if inner is None else _with_inner(parsed, started[0], inner)


def _with_inner(outer: ParsedCommand, started: "StartedCommand", inner: ForeignLauncher) -> ParsedCommand:
    """Merge a launcher with the launcher that it starts: with its ranks if that starts one process each time, else with
    its hosts. Raises InputError if both have numbers of ranks, or if the inner launcher is not one of NESTED."""
    if inner.name not in NESTED:
        raise InputError(
            f"{outer.program.title} starts {inner.title} here: import that command line alone, and give cputrain "
            f"launch the hosts and --ppn of {outer.program.title}"
        )
    nested = parse_command(started.words)
    theirs, spec = spec_of(outer.given, outer.command), spec_of(nested.given, nested.command)
    outer_options = outer.given
    if spec.ppn is not None or (spec.ranks or 1) > 1 or (spec.nodes or 1) > 1:
        ppn = theirs.ppn or (theirs.ranks or 1) // (theirs.nodes or theirs.ranks or 1)
        if ppn > 1:
            raise InputError(
                f"{outer.program.title} starts {inner.title} {ppn} times on each host, which has a number of ranks "
                "itself: remove one of the two numbers"
            )
        nodes = theirs.nodes or theirs.ranks
        if spec.nodes is not None and nodes not in (None, spec.nodes):
            raise InputError(
                f"{outer.program.title} starts {inner.title} {nodes} times, but that has {plural(spec.nodes, 'host')}: "
                "give equal numbers"
            )
        outer_options = tuple(
            replace(option, field="nodes") if option.field == "ranks" else option
            for option in outer.given
            if option.field != "ppn" and (option.field != "ranks" or theirs.nodes is spec.nodes is None)
        )
    assignments = tuple(word for word in started.before if ASSIGNMENT.match(word))
    wrappers = [word for word in started.before if word not in (*assignments, "env", "exec", "-c", *SHELLS)]
    lost = ((join_words(wrappers), "put it before cputrain launch"),) if wrappers else ()
    return replace(
        nested,
        variables=(*outer.variables, *assignments, *nested.variables),
        given=(
            *outer_options,
            *(option for option in nested.given if option.field != "ranks" or (spec.ranks or 1) > 1),
        ),
        without=(*outer.without, *lost, *nested.without),
        notes=(*outer.notes, *nested.notes),
    )


def binder_in(command: tuple[str, ...]) -> str:
    """Return a note if a command's ranks would not stay bound as planned, as it starts a program that binds again or a
    launcher; "" if it does not."""
    return next(filter(None, (_binds_again(started.words) for started in commands_in(command))), "")


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
            inner = [started for line in _lines_of(words[at]) for started in commands_in(line)]
            return [replace(started, before=(*before, *words[:at], *started.before)) for started in inner]
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
    remaining = script.replace("\\\n", " ").replace("\n", ";")
    while remaining := remaining.lstrip(f"{OPERATORS} ("):
        line, remaining = command_and_rest(remaining)
        try:
            yield split_words(line)
        except InputError:
            return


def _is_option(word: str) -> bool:
    return word.startswith("-") or VALUE.fullmatch(word) is not None


def launcher_in(words: tuple[str, ...]) -> ForeignLauncher | None:
    """Return the launcher that a command calls by itself; None if it calls none."""
    name, arguments = PurePath(words[0]).name, words[1:]
    at = next((i for i, word in enumerate(arguments) if word == "-m" or not word.startswith("-")), 0)
    module = arguments[at + 1 : at + 2] if PYTHON.fullmatch(name) and arguments[at : at + 1] == ("-m",) else ()
    for program in PROGRAMS.values():
        if any((name, *arguments)[: len(call)] == call for call in program.called) or set(module) & set(
            program.modules
        ):
            return program
    return None


def _split(program: ForeignLauncher, word: str) -> tuple[str, str, str]:
    """Return an option's name, "=" if a value is attached to it, and that value: for --nodes=2, and for -N2."""
    letter = word[:2]
    with_value = any(letter in option.names and option.takes for option in program.options)
    if with_value and word[2:].isdecimal():
        return letter, "=", word[2:]
    name, equals, attached = word.partition("=")
    return name, equals, attached


def _separated(program: ForeignLauncher, word: str) -> tuple[str, ...]:
    """Split joined options after the first one: -t10:00 is -t 10:00, -lN2 is -l -N2."""
    letter, remaining = word[:2], word[2:]
    if letter == "--" or not remaining:
        return (word,)
    if option_named(program, letter).takes:
        return letter, remaining
    return (letter, f"-{remaining}") if remaining[0].isalpha() else (f"{letter}={remaining}",)


def _set_by(option: ForeignOption, written: str, values: list[str]) -> tuple[list[ParsedOption], bool]:
    """Return the options set by the following words, and whether these have no other meaning."""
    if option.field:
        value = option.value.format(*values) if values else option.value
        return [ParsedOption(written=written, field=option.field, value=value)], True
    if not option.parts:
        return [], False
    options, remaining = [], values[0]
    for field, pattern in option.parts:
        matches = re.finditer(pattern, values[0], re.IGNORECASE)
        options += [ParsedOption(written=written, field=field, value=match[1]) for match in matches]
        remaining = re.sub(pattern, "", remaining, flags=re.IGNORECASE)
    remaining = re.sub(option.understood, "", remaining, flags=re.IGNORECASE)
    return options, bool(options) and re.search(r"\w", remaining) is None
