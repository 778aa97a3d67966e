"""Rows of cells as text."""

from cputrain.affinity.terminal import align_columns, csv_table, markdown_table

ROWS = [("name", "count"), ("a|b", "7")]


def test_columns_are_flush_left_and_numbers_flush_right() -> None:
    assert align_columns(ROWS) == "name  count\na|b   7"
    assert align_columns(ROWS, numbers=True) == "name  count\na|b       7"


def test_markdown_escapes_bars_and_takes_alignments() -> None:
    assert markdown_table(ROWS) == "| name | count |\n|---|---|\n| a\\|b | 7 |\n"
    assert markdown_table(ROWS, rules=("---", "---:")).splitlines()[1] == "|---|---:|"


def test_csv_quotes_separators() -> None:
    assert csv_table([("a,b", 1), ("c", None)]) == '"a,b",1\nc,\n'
