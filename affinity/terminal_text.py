"""Text of others on its way to a terminal, which obeys control characters: it could be made to retitle its window, to
write to the clipboard, or to type an answer."""

import re

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
    return ascii(character)[1:-1]
