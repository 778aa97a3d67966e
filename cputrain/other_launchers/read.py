"""Words of a command line -> the launcher they call, its options, the command that it starts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePath

from affinity.errors import InputError
from cputrain.other_launchers.option import Option, Program
from cputrain.other_launchers.programs import PROGRAMS
from cputrain.other_launchers.shell_words import line_of
from cputrain.other_launchers.wanted import Given

ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
PYTHON = re.compile(r"python[0-9.]*")
PREFIXES = ("nohup", "time", "timeout", "nice", "ionice", "stdbuf", "setsid", "exec", "sudo")
MOST_WORDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A command line as read: the launcher, the variables set before it, the options that have a counterpart and those
    that have none with the reason, what else to know of the options, and the command."""

    program: Program
    variables: tuple[str, ...]
    given: tuple[Given, ...]
    without: tuple[tuple[str, str], ...]
    notes: tuple[tuple[str, str], ...]
    command: tuple[str, ...]


def read(
    words: Sequence[str], name: str | None = None, launcher_of: Callable[[str], str | None] = lambda program: None
) -> Reading:
    """Read a command line, of the launcher `name` where the first word does not decide it, else of the first that has
    its options, beginning with the one that `launcher_of` finds the called program to be.

    Raises InputError for a launcher or an option that is not known.
    """
    if len(words) > MOST_WORDS:
        raise InputError(f"the command line has more than {MOST_WORDS:,} words: give one command")
    start = next((i for i, word in enumerate(words) if word != "env" and not ASSIGNMENT.match(word)), len(words))
    variables = tuple(word for word in words[:start] if word != "env")
    candidates, program, rest = _called(tuple(words[start:]))
    if name is not None:
        candidates = [PROGRAMS[name]]
    if len(candidates) > 1:
        first = launcher_of(program)
        candidates = sorted(candidates, key=lambda candidate: candidate.name != first)
    failures = []
    for candidate in candidates:
        try:
            return _options(candidate, variables, rest)
        except InputError as error:
            failures.append((candidate, error))
    raise max(failures, key=lambda failure: _recognized(failure[0], rest))[1]


def _recognized(program: Program, words: tuple[str, ...]) -> int:
    """How many of the words are options of the launcher."""
    keys = {_key(name) for option in program.options for name in option.names}
    return sum(word.startswith("-") and _key(word.partition("=")[0]) in keys for word in words)


def _called(words: tuple[str, ...]) -> tuple[list[Program], str, tuple[str, ...]]:
    """The launchers that a command line may be of, the program that it calls, and the words behind the call."""
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
        shown = f"{' '.join(words)[:60]!r} calls no launcher that is known here" if words else "no command line"
        if python and len(words) > 1:
            script = line_of(called if called != words else ("--", *words))
            raise InputError(
                f"{shown}: cputrain launch {script} starts it once for each planned worker, with --instances 1 before "
                "it once in all"
            )
        if plain[:1] in (("numactl",), ("taskset",)):
            raise InputError(f"{shown}: put {plain[0]} before cputrain launch, whose plan stays inside what it allows")
        if plain[:1] and plain[0] in PREFIXES:
            raise InputError(f"{shown}: import what follows {plain[0]}, and put {plain[0]} before cputrain launch")
        raise InputError(f"{shown}: give a command line of {known} or python -m torch.backends.xeon.run_cpu")
    length = next(len(call) for call in found[0].called if plain[: len(call)] == call)
    return found, called[0], called[length:]


def _options(program: Program, variables: tuple[str, ...], words: tuple[str, ...]) -> Reading:
    """Read the words behind a launcher's call."""
    given: list[Given] = []
    without: list[tuple[str, str]] = []
    notes: list[tuple[str, str]] = []
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-", "--"):
        if program.joins_letters:
            words = (*words[:place], *_separated(program, words[place]), *words[place + 1 :])
        name, equals, attached = _split(program, words[place])
        option = option_named(program, name)
        behind = [attached] if equals else []
        count = option.takes - len(behind)
        following = words[place + 1 : place + 1 + count]
        if option.takes == 2 and following and ASSIGNMENT.match(following[0]):
            behind, count = list(following[0].partition("=")[::2]), 1  # -genv NAME=VALUE
        else:
            behind += following
        if len(behind) < option.takes:
            raise InputError(f"{program.title}: {name} needs a value: give it")
        place += 1 + max(0, count)
        written = " ".join((name, *behind))
        if option.field == "environment" and option.takes == 1 and option.value == "{}" and "=" not in behind[0]:
            without.append((written, "the ranks inherit the environment"))
        else:
            found, whole = _set_by(option, written, behind)
            given += found
            if not whole:
                without.append((written, option.why))
            elif option.why and re.fullmatch(option.when, " ".join(behind)):
                notes.append((written, option.why))
    command = words[place + 1 :] if words[place : place + 1] == ("--",) else words[place:]
    if not command:
        raise InputError(f"{program.title}: the command line ends before what it starts: add the script or the program")
    if not program.starts_python and (inner := _launcher_in(command)):
        raise InputError(
            f"{program.title} starts {inner} here: import that command line alone, as cputrain launch starts the ranks "
            "of all hosts by itself"
        )
    if not program.starts_python and ":" in command:
        raise InputError(f"{program.title}: several programs in one job (:) are not supported: start them one by one")
    return Reading(
        program=program,
        variables=variables,
        given=tuple(given),
        without=tuple(without),
        notes=tuple(notes),
        command=command,
    )


def _launcher_in(command: tuple[str, ...]) -> str:
    """The launcher that a command calls; "" where it calls none."""
    start = next((i for i, word in enumerate(command) if word != "env" and not ASSIGNMENT.match(word)), len(command))
    called, behind = command[start:], command[start + 1 :]
    if not called:
        return ""
    name = PurePath(called[0]).name
    module = behind[behind.index("-m") + 1 :][:1] if PYTHON.fullmatch(name) and "-m" in behind else ()
    for program in PROGRAMS.values():
        if any((name, *behind)[: len(call)] == call for call in program.called) or set(module) & set(program.modules):
            return program.title
    return ""


def _split(program: Program, word: str) -> tuple[str, str, str]:
    """An option's name, "=" where a value is attached to it, and that value: of --nodes=2, and of -N2."""
    letter = word[:2]
    with_value = any(letter in each.names and each.takes for each in program.options)
    if with_value and word[2:].isdecimal():
        return letter, "=", word[2:]
    name, equals, attached = word.partition("=")
    return name, equals, attached


def _separated(program: Program, word: str) -> tuple[str, ...]:
    """The first of the options that are joined in a word, and the rest: -t10:00 is -t 10:00, -lN2 is -l -N2."""
    letter, rest = word[:2], word[2:]
    if letter == "--" or not rest:
        return (word,)
    if option_named(program, letter).takes:
        return letter, rest
    return (letter, f"-{rest}") if rest[0].isalpha() else (f"{letter}={rest}",)


def _set_by(option: Option, written: str, behind: list[str]) -> tuple[list[Given], bool]:
    """The fields that an option sets to the words behind it, and whether that is all that they say."""
    if option.field:
        value = option.value.format(*behind) if behind else option.value
        return [Given(written=written, field=option.field, value=value)], True
    if not option.parts:
        return [], False
    found, rest = [], behind[0]
    for field, pattern in option.parts:
        matches = re.finditer(pattern, behind[0], re.IGNORECASE)
        found += [Given(written=written, field=field, value=match[1]) for match in matches]
        rest = re.sub(pattern, "", rest, flags=re.IGNORECASE)
    rest = re.sub(option.understood, "", rest, flags=re.IGNORECASE)
    return found, bool(found) and re.search(r"\w", rest) is None


def option_named(program: Program, name: str) -> Option:
    """A launcher's option by its name: with one dash or two, - or _, and shortened where only one begins so.

    Raises InputError for one that it does not have.
    """
    wanted = _key(name)
    by_key = {_key(each): option for option in program.options for each in option.names if not each.endswith("*")}
    if wanted in by_key:
        return by_key[wanted]
    for option in program.options:
        if any(each.endswith("*") and wanted.startswith(_key(each[:-1])) for each in option.names):
            return option
    begin_so = {id(option): option for key, option in by_key.items() if key.startswith(wanted) and len(wanted) > 2}
    if len(begin_so) == 1 and program.starts_python:
        return next(iter(begin_so.values()))
    near = get_close_matches(wanted, by_key, n=1, cutoff=0.7)
    hint = f": did you mean --{near[0]}?" if near else ": remove it, and import the rest"
    raise InputError(f"{program.title} has no option {name[:60]} that is known here{hint}")


def _key(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
