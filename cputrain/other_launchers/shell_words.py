"""A shell's line as words and back: what a shell would expand in it ($NAME, ${NAME}, $(command), ~/) stays expandable.

In words a `$` or `~` of that kind is a character of its own (VARIABLE, HOME); in single quotes there are none.
"""

import re
import shlex
from collections.abc import Sequence

from affinity.errors import InputError

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
