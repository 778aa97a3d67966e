"""What is printed: text of others made harmless, and tables."""

import os
import re
from io import BytesIO, TextIOWrapper

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.terminal import (
    SafeOutput,
    accept_any_text,
    align_columns,
    clip_line,
    csv_table,
    markdown_table,
    printable,
    printable_lines,
    printable_name,
    safe_output,
)

# What a terminal would obey: titles and clipboard (OSC), questions that it answers, clearing and scrolling the screen,
# other character sets, a reset, device control strings, C1 characters, a printer, the alternate screen.
OBEYED = (
    "\x1b]0;title\x07", "\x1b]52;c;cm0gLXJm\x07", "\x1b[6n", "\x1b[c", "\x1b[21t", "\x1b[2J", "\x1b[H", "\x1b[1;9r",
    "\x1b(0", "\x1bc", "\x1bP+q544e\x1b\\", "\x9b2J", "\x1b[5i", "\x1b[?1049h", "\x1b[?25l", "\x0e", "\x05", "\x7f",
)  # fmt: skip
PASS = ("1 %\r2 %\n", "\x1b[31mred\x1b[0m", "\x1b[38;5;196m", "\x1b[2K", "\x1b[A", "a\tb\b", "漢 e\u0301 👩\u200d🔬")
TEXTS = st.lists(st.sampled_from((*OBEYED, *PASS, "\x1b", "\x1b[", "3", "1m")) | st.text()).map("".join)


@pytest.mark.parametrize("sequence", OBEYED)
def test_what_a_terminal_would_obey_is_shown_as_codes(sequence: str) -> None:
    for text in (safe_output(f"a{sequence}b"), printable(f"a{sequence}b")):
        assert text.isprintable() and text[0] == "a" and text[-1] == "b"
    assert safe_output(sequence) == "".join(c if c.isprintable() else ascii(c)[1:-1] for c in sequence)


@pytest.mark.parametrize("text", PASS)
def test_colors_and_progress_bars_pass(text: str) -> None:
    assert safe_output(text) == text


def test_colors_are_left_out_of_a_line_and_other_control_characters_are_named() -> None:
    assert printable("\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b2J\u202e") == "red\\x1b]0;title\\x07\\x9b2J\\u202e"
    assert printable("ä 漢 e\u0301 a\tb\n👩\u200d🔬") == "ä 漢 e\u0301 a    b\\n👩\u200d🔬"
    assert printable_lines("one\x07\n\x1b[1mtwo") == "one\\x07\ntwo"


@given(TEXTS, st.integers(1, 7))
def test_output_in_parts_is_shown_as_the_whole(text: str, size: int) -> None:
    output = SafeOutput()
    parts = [output.feed(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join((*parts, output.finish())) == safe_output(text)


@given(TEXTS)
def test_only_the_sequences_of_progress_bars_are_left(text: str) -> None:
    left = re.sub(r"\x1b\[[0-9;:]*[A-DGKm]", "", safe_output(text))
    assert not re.search(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]", left)


def test_a_sequence_without_end_is_not_waited_for() -> None:
    output = SafeOutput()
    assert output.feed("a\x1b[" + "1;" * 40) == "a\\x1b[" + "1;" * 40
    assert output.feed("b\x1b[3") == "b" and output.finish() == "\\x1b[3"


def test_a_clipped_line_keeps_its_sequences_whole() -> None:
    assert clip_line("ab\x1b[31mcd\x1b[0mef", 3) == "ab\x1b[31mc\x1b[0m"
    assert clip_line("abc", 5) == "abc" and clip_line("abc", 0) == clip_line("abc", -1) == ""


def test_streams_write_what_their_encoding_lacks_as_codes() -> None:
    """A byte that is not UTF-8 is a surrogate (PEP 383); charts are drawn with ASCII."""
    for encoding, expected in (
        ("ascii", rb"caf\xe9 th\xe9 \u2192 #_|-"),
        ("iso8859-1", rb"caf\xe9 " + b"th\xe9" + rb" \u2192 #_|-"),
        ("utf-8", rb"caf\xe9 " + "th\u00e9 \u2192 █▁│─".encode()),
    ):
        stream = TextIOWrapper(BytesIO(), encoding=encoding)
        accept_any_text(stream, encoding)
        stream.write("caf\udce9 th\u00e9 \u2192 █▁│─")
        stream.flush()
        assert stream.buffer.getvalue() == expected, encoding
    assert printable_name("caf\udce9 th\u00e9") == "caf\\xe9 th\u00e9" and printable("caf\udce9") == r"caf\xe9"


def test_a_byte_that_is_not_utf_8_has_its_code_also_where_a_message_quotes_it() -> None:
    name = os.fsdecode(b"caf\xe9\\udce9")  # a byte, and the text of a code
    assert printable_lines(f"no class {name[:4]}") == r"no class caf\xe9"
    assert printable_lines(f"no class {name!r}\nnor {name[:4]!r}") == "no class 'caf\\xe9\\\\udce9'\nnor 'caf\\xe9'"


ROWS = [("name", "count"), ("a|b", "7")]


def test_columns_are_flush_left_and_numbers_flush_right() -> None:
    assert align_columns(ROWS) == "name  count\na|b   7"
    assert align_columns(ROWS, numbers=True) == "name  count\na|b       7"


def test_markdown_escapes_bars_and_takes_alignments() -> None:
    assert markdown_table(ROWS) == "| name | count |\n|---|---|\n| a\\|b | 7 |\n"
    assert markdown_table(ROWS, rules=("---", "---:")).splitlines()[1] == "|---|---:|"


def test_csv_quotes_separators() -> None:
    assert csv_table([("a,b", 1), ("c", None)]) == '"a,b",1\nc,\n'
