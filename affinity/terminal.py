"""What a program prints and how it ends: encodings, control codes, tables, error lines and exit statuses.

Text of others on its way to a terminal is made harmless: control characters could retitle the window, write to the
clipboard, or type an answer.
"""

import codecs
import csv
import io
import locale
import os
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from enum import IntEnum
from io import TextIOWrapper
from typing import TextIO

from cputrain.affinity.errors import InputError, RunError, Wording, as_field, describe
from cputrain.affinity.filesystem import refusal


def redraws(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether the stream is a terminal that moves its cursor: TERM=dumb (an editor's shell window, a serial console)
    is none."""
    return stream.isatty() and env.get("TERM") != "dumb"


def shows_color(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether to write in color: to such a terminal, unless NO_COLOR is set to anything but nothing (no-color.org)."""
    return redraws(stream, env) and not env.get("NO_COLOR")


CODES = "cputrain.codes"  # the name of `as_codes`, for what encodes text
ASCII = "ascii_with_codes"  # an encoding: click writes UTF-8 to streams whose encoding is called ASCII
# What charts are drawn with, for streams that have no such characters.
DRAWN = str.maketrans("│└─━·░▒▓█▁▂▃▄▅▆▇", "|+-=.:+##_.-=+*#")
BRAILLE = range(0x2800, 0x2900)  # a curve's dots
QUOTED_BYTE = re.compile(r"(?<!\\)((?:\\\\)*)\\udc([89a-f][0-9a-f])")  # of a byte that is not UTF-8, by repr()
JOINERS = "\u200c\u200d"  # of Persian and Indic words and of emoji: formats, but nothing that a terminal obeys
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # ECMA-48, 5.4: colors, moves and the like
# What progress bars and colored logs need: cursor up, down, right, left, to a column; erase in line; colors.
PROGRESS_SEQUENCE = re.compile(r"\x1b\[[0-9;:]{0,32}[A-DGKm]")
BEGINNING = re.compile(r"\x1b(\[[0-9;:]{0,32})?\Z")  # of a sequence whose end may come with the next text
OBEYED = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all control characters but BS, TAB, LF and CR


def printable(text: str) -> str:
    """One line without colors; any other character that is not printable is written as its code: `\\x07`."""
    plain = CONTROL_SEQUENCE.sub("", text.replace("\t", "    "))
    return plain if plain.isprintable() else "".join(c if c.isprintable() or c in JOINERS else _code(c) for c in plain)


def printable_lines(text: str) -> str:
    """Each line of a message as `printable` has it, and so the names that repr() has quoted in it."""
    return "\n".join(map(printable, QUOTED_BYTE.sub(r"\1\\x\2", text).split("\n")))


def safe_output(text: str) -> str:
    """A program's output with its line ends, colors and progress bars; other control characters as their codes."""
    pieces, end = [], 0
    for sequence in PROGRESS_SEQUENCE.finditer(text):
        pieces += [_obeyed_as_codes(text[end : sequence.start()]), sequence[0]]
        end = sequence.end()
    return "".join((*pieces, _obeyed_as_codes(text[end:])))


def clip(text: str, columns: int) -> str:
    """The first columns of a line, in which sequences take no room; all its sequences stay, so that colors end."""
    pieces, end, left = [], 0, max(columns, 0)
    for sequence in (*CONTROL_SEQUENCE.finditer(text), None):
        shown = text[end : sequence.start() if sequence else None][:left]
        pieces += [shown, sequence[0] if sequence else ""]
        left -= len(shown)
        end = sequence.end() if sequence else len(text)
    return "".join(pieces)


class SafeOutput:
    """`safe_output` of a text that comes in parts: a sequence may be in two of them."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """What can be shown of the output so far."""
        text = self._held + text
        beginning = BEGINNING.search(text)
        self._held = beginning[0] if beginning else ""
        return safe_output(text[: len(text) - len(self._held)])

    def finish(self) -> str:
        """What was held back for a sequence's end that did not come."""
        held, self._held = self._held, ""
        return safe_output(held)


def _obeyed_as_codes(text: str) -> str:
    return OBEYED.sub(lambda match: _code(match[0]), text)


def _code(character: str) -> str:
    """A character as Python's text literals have it; a byte that is not UTF-8, which is a surrogate, as `\\xe9`."""
    number = ord(character)
    return f"\\x{number - 0xDC00:02x}" if 0xDC80 <= number <= 0xDCFF else ascii(character)[1:-1]


def as_codes(error: UnicodeError) -> tuple[str, int]:
    """Write what an encoding lacks as its code, and a chart's lines as ASCII has them: an error handler of codecs."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_stand_in, error.object[error.start : error.end])), error.end


def _stand_in(character: str) -> str:
    if ord(character) in BRAILLE:
        return " " if ord(character) == BRAILLE.start else "*"
    drawn = character.translate(DRAWN)
    return drawn if drawn.isascii() else _code(character)


def shown(name: str) -> str:
    """A name that is valid text: its bytes that are not UTF-8 as codes."""
    return name if name.isascii() else name.encode(errors=CODES).decode()


def discard(stream: TextIO) -> None:
    """From now on, let a stream that cannot be written lead nowhere: what it still holds fails no more at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def accept_any_text(stream: TextIO, encoding: str) -> None:
    """Let a stream take any text: what its encoding lacks is written as codes. A stream that somebody has put in place
    of a standard one is left alone."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(encoding=ASCII if codecs.lookup(encoding).name == "ascii" else encoding, errors=CODES)


def _find_codec(name: str) -> codecs.CodecInfo | None:
    if name != ASCII:
        return None
    ascii_ = codecs.lookup("ascii")
    return codecs.CodecInfo(
        *ascii_, incrementalencoder=ascii_.incrementalencoder, incrementaldecoder=ascii_.incrementaldecoder, name=ASCII
    )


codecs.register_error(CODES, as_codes)
codecs.register(_find_codec)


Rows = Sequence[Sequence[str]]


def align_columns(rows: Rows, *, numbers: bool = False) -> str:
    """Columns as wide as their widest cell, flush left; with `numbers` all but the first flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown_table(rows: Rows, *, rules: Sequence[str] = ()) -> str:
    """A Markdown table; `rules` are the cells under the headings, as "---:" for a column flush right."""
    head, *body = [f"| {' | '.join(map(_markdown_cell, row))} |" for row in rows]
    return "\n".join([head, f"|{'|'.join(rules or ('---',) * len(rows[0]))}|", *body]) + "\n"


def _markdown_cell(text: str) -> str:
    """A cell's text on one line, in which a bar ends no cell and a name begins no HTML."""
    return " ".join(printable_lines(text).replace("|", "\\|").replace("<", "&lt;").split())


def csv_table(rows: Sequence[Sequence[object]]) -> str:
    """Comma-separated values, one row a line."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


class ExitStatus(IntEnum):
    """How a command ends that no signal has ended."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2

    @property
    def meaning(self) -> str:
        """The status as the documentation explains it."""
        return {
            ExitStatus.DONE: "done",
            ExitStatus.FAILED: "it failed while running: the message names rank, host, signal or status, and the log",
            ExitStatus.WRONG_INPUT: "the input is wrong: one line with what was requested, what was found and what to "
            "do next; nothing was written",
        }[self]


def status_of_signal(number: int) -> int:
    """The status of a command that a signal has ended, as shells count it (POSIX, 2.8.2)."""
    return 128 + number


def one_line(error: Exception, wording: Wording = as_field) -> str | None:
    """The message of an error that a user can mend, in one line; None for any other error, which is a bug."""
    if isinstance(error, InputError | RunError):
        return describe(error, wording)
    return refusal(error) if isinstance(error, OSError) else None


def exit_status(error: Exception, program: str, wording: Wording = as_field) -> int:
    """Print the error as `program: ...` to stderr; the status is that of wrong input, or of a failure while running.

    `wording` spells the settings that the message names. Raises the error again, with its traceback, where it is a bug.
    """
    line = one_line(error, wording)
    if line is None:
        raise error
    print(f"{program}: {printable_lines(line)}", file=sys.stderr)
    return status_of(error)


def status_of(error: Exception) -> ExitStatus:
    """The status of an error that is one line."""
    return ExitStatus.WRONG_INPUT if isinstance(error, InputError) else ExitStatus.FAILED


LOCALE = "cputrain_locale"  # an option -X of Python, which takes any name: the encoding that the locale has


def use_utf8() -> None:
    """Start this program anew in Python's UTF-8 mode where the locale has another encoding: names in recipes, plans and
    messages of other hosts are UTF-8, and could not be opened. For a program's first line; the process stays."""
    if sys.getfilesystemencoding() != "utf-8":
        mode = ("-X", "utf8", "-X", f"{LOCALE}={locale.getpreferredencoding(False)}")
        os.execv(sys.executable, [sys.executable, *mode, *sys.orig_argv[1:]])


def locale_encoding() -> str:
    """The encoding of what programs print here: the locale's."""
    return str(sys._xoptions.get(LOCALE) or locale.getpreferredencoding(False))


def printed_text(data: bytes) -> str:
    """What a program has printed: UTF-8, else in the locale's encoding, a byte that is neither as its code."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode(locale_encoding(), errors="backslashreplace")


def text_of(name: str) -> str:
    """A file's name as text: UTF-8 whatever the locale, a byte that is none as one surrogate."""
    return os.fsencode(name).decode(errors="surrogateescape")


def one_form(text: str) -> str:
    """A text in one of the Unicode forms that look the same: macOS writes an accent as a character of its own (NFD)."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)
