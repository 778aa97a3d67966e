"""Terminal output and exit status: encodings, control codes, tables, error lines.

Text from outside (file names, ranks' output) is sanitized before it reaches a terminal: control characters could
retitle the window, write to the clipboard, or type an answer.
"""

import codecs
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

from cputrain.affinity.errors import InputError, RunError, Wording, as_field, describe_error
from cputrain.affinity.filesystem import filesystem_refusal

CODES = "cputrain.codes"  # the name under which `as_codes` is registered as an error handler
ASCII = "ascii_with_codes"  # a name other than ASCII, as click writes UTF-8 to streams whose encoding is ASCII
# ASCII replacements of the characters that charts are drawn with.
CHART_TO_ASCII = str.maketrans("│└─━·░▒▓█▁▂▃▄▅▆▇", "|+-=.:+##_.-=+*#")
BRAILLE = range(0x2800, 0x2900)  # the dots of plotted curves
QUOTED_BYTE = re.compile(r"(?<!\\)((?:\\\\)*)\\udc([89a-f][0-9a-f])")  # repr() of a byte that is not UTF-8
JOINERS = "\u200c\u200d"  # in Persian and Indic words and in emoji: not printable by isprintable(), but harmless
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # ECMA-48, 5.4: colors, cursor movement and the like
# Sequences of progress bars and colored logs: cursor up, down, right, left, to a column; erase in line; colors.
PROGRESS_SEQUENCE = re.compile(r"\x1b\[[0-9;:]{0,32}[A-DGKm]")
BEGINNING = re.compile(r"\x1b(\[[0-9;:]{0,32})?\Z")  # a sequence whose end may come with the next chunk
CONTROLS = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all control characters but BS, TAB, LF and CR

Rows = Sequence[Sequence[str]]
LOCALE = "cputrain_locale"  # passes the locale's encoding as Python's option -X, which accepts any name


def redraws(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether the stream is a terminal with cursor movement, which TERM=dumb (an editor's shell window, a serial
    console) has not."""
    return stream.isatty() and env.get("TERM") != "dumb"


def shows_color(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether to write in color: only to a terminal with cursor movement, and not if NO_COLOR is set and not empty
    (no-color.org)."""
    return redraws(stream, env) and not env.get("NO_COLOR")


def printable(text: str) -> str:
    """Remove colors from a line and escape all other unprintable characters, as `\\x07`."""
    plain = CONTROL_SEQUENCE.sub("", text.replace("\t", "    "))
    return plain if plain.isprintable() else "".join(c if c.isprintable() or c in JOINERS else _code(c) for c in plain)


def printable_lines(text: str) -> str:
    """Apply `printable` to each line of a message, and to the names in it that repr() has quoted."""
    return "\n".join(map(printable, QUOTED_BYTE.sub(r"\1\\x\2", text).split("\n")))


def safe_output(text: str) -> str:
    """Keep line ends, colors and progress bars of a program's output, and escape all other control characters."""
    pieces, end = [], 0
    for sequence in PROGRESS_SEQUENCE.finditer(text):
        pieces += [_escape_controls(text[end : sequence.start()]), sequence[0]]
        end = sequence.end()
    return "".join((*pieces, _escape_controls(text[end:])))


def clip_line(text: str, columns: int) -> str:
    """Cut a line to a number of columns; control sequences have no width, and all of them stay, so that colors end."""
    pieces, end, columns_left = [], 0, max(columns, 0)
    for sequence in (*CONTROL_SEQUENCE.finditer(text), None):
        shown = text[end : sequence.start() if sequence else None][:columns_left]
        pieces += [shown, sequence[0] if sequence else ""]
        columns_left -= len(shown)
        end = sequence.end() if sequence else len(text)
    return "".join(pieces)


class SafeOutput:
    """Incremental `safe_output`: a control sequence may be split over two chunks."""

    def __init__(self) -> None:
        self._pending = ""

    def feed(self, text: str) -> str:
        """Return the output that is complete, and keep an unfinished control sequence for the next call."""
        text = self._pending + text
        beginning = BEGINNING.search(text)
        self._pending = beginning[0] if beginning else ""
        return safe_output(text[: len(text) - len(self._pending)])

    def finish(self) -> str:
        """Return a control sequence whose end never came."""
        pending, self._pending = self._pending, ""
        return safe_output(pending)


def _escape_controls(text: str) -> str:
    return CONTROLS.sub(lambda match: _code(match[0]), text)


def _code(character: str) -> str:
    """Escape a character as in a Python string literal; a surrogate that stands for a non-UTF-8 byte as `\\xe9`."""
    number = ord(character)
    return f"\\x{number - 0xDC00:02x}" if 0xDC80 <= number <= 0xDCFF else ascii(character)[1:-1]


def as_codes(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: replace the characters of charts by ASCII ones, and escape all other unencodable ones."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_replacement, error.object[error.start : error.end])), error.end


def _replacement(character: str) -> str:
    if ord(character) in BRAILLE:
        return " " if ord(character) == BRAILLE.start else "*"
    drawn = character.translate(CHART_TO_ASCII)
    return drawn if drawn.isascii() else _code(character)


def printable_name(name: str) -> str:
    """Escape the bytes of a file name that are not UTF-8, so that it can be printed and encoded."""
    return name if name.isascii() else name.encode(errors=CODES).decode()


def discard_output(stream: TextIO) -> None:
    """Redirect a broken stream to /dev/null, so that flushing its buffer at exit does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def accept_any_text(stream: TextIO, encoding: str) -> None:
    """Let a stream accept any text by escaping what its encoding lacks. Replaced standard streams stay as they are."""
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


def align_columns(rows: Rows, *, numbers: bool = False) -> str:
    """Pad columns to their widest cell, left-aligned; with `numbers` all but the first right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown_table(rows: Rows, *, rules: Sequence[str] = ()) -> str:
    """Return a Markdown table; `rules` are the cells under the headings, such as "---:" for a right-aligned column."""
    head, *body = [f"| {' | '.join(map(_markdown_cell, row))} |" for row in rows]
    return "\n".join([head, f"|{'|'.join(rules or ('---',) * len(rows[0]))}|", *body]) + "\n"


def _markdown_cell(text: str) -> str:
    """Put a cell's text on one line, and escape bars and HTML."""
    return " ".join(printable_lines(text).replace("|", "\\|").replace("<", "&lt;").split())


def csv_table(rows: Sequence[Sequence[object]]) -> str:
    """Return comma-separated values, one row per line."""
    import csv  # few tables are written as such

    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


class ExitStatus(IntEnum):
    """Exit status of a command that was not ended by a signal."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2

    @property
    def meaning(self) -> str:
        """Explanation of the status for the documentation."""
        return {
            ExitStatus.DONE: "done",
            ExitStatus.FAILED: "it failed while running: the message names rank, host, signal or status, and the log",
            ExitStatus.WRONG_INPUT: "the input is wrong: one line with what was requested, what was found and what to "
            "do next; nothing was written",
        }[self]


def status_of_signal(number: int) -> int:
    """Return the exit status that shells report for a command ended by a signal (POSIX, 2.8.2)."""
    return 128 + number


def one_line(error: Exception, wording: Wording = as_field) -> str | None:
    """Return the one-line message of an error that a user can fix; None for any other error, which is a bug."""
    if isinstance(error, InputError | RunError):
        return describe_error(error, wording)
    return filesystem_refusal(error) if isinstance(error, OSError) else None


def exit_status(error: Exception, program: str, wording: Wording = as_field) -> int:
    """Print the error as `program: ...` to stderr and return its exit status.

    `wording` spells the settings that the message names. Raises the error again, with its traceback, if it is a bug.
    """
    line = one_line(error, wording)
    if line is None:
        raise error
    print(f"{program}: {printable_lines(line)}", file=sys.stderr)
    return status_of(error)


def status_of(error: Exception) -> ExitStatus:
    """Return the exit status of an error that is reported in one line."""
    return ExitStatus.WRONG_INPUT if isinstance(error, InputError) else ExitStatus.FAILED


def use_utf8() -> None:
    """Restart this program by exec in Python's UTF-8 mode if the locale has another encoding.

    File names in recipes, plans and messages of other hosts are UTF-8 and could not be opened otherwise. To be called
    first in a program.
    """
    if sys.getfilesystemencoding() != "utf-8":
        mode = ("-X", "utf8", "-X", f"{LOCALE}={locale.getpreferredencoding(False)}")
        os.execv(sys.executable, [sys.executable, *mode, *sys.orig_argv[1:]])


def locale_encoding() -> str:
    """Return the locale's encoding, in which other programs print here."""
    return str(sys._xoptions.get(LOCALE) or locale.getpreferredencoding(False))


def printed_text(data: bytes) -> str:
    """Decode a program's output as UTF-8, else in the locale's encoding with undecodable bytes escaped."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode(locale_encoding(), errors="backslashreplace")


def text_of(name: str) -> str:
    """Decode a file name as UTF-8 under any locale, with a surrogate for each byte that is not UTF-8."""
    return os.fsencode(name).decode(errors="surrogateescape")


def one_form(text: str) -> str:
    """Normalize a text to NFC: macOS writes accents as separate characters (NFD)."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)
