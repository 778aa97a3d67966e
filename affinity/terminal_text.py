"""Text of others on its way to a terminal, which obeys control characters: it could be made to retitle its window, to
write to the clipboard, or to type an answer."""

import codecs
import re
from io import TextIOWrapper
from typing import TextIO

CODES = "cputrain.codes"  # the name of `as_codes`, for what encodes text
ASCII = "ascii_with_codes"  # an encoding: click writes UTF-8 to streams whose encoding is called ASCII
# What charts are drawn with, for streams that have no such characters.
DRAWN = str.maketrans("│└─━·░▒▓█▁▂▃▄▅▆▇", "|+-=.:+##_.-=+*#")
BRAILLE = range(0x2800, 0x2900)  # a curve's dots
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
    """Each line of a text as `printable` has it."""
    return "\n".join(map(printable, text.split("\n")))


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
