"""The table of docs/reliability.md is of the faults that `make faults` causes, and of what it expects."""

from tests.faults.fault import Seen
from tests.faults.faults import FAULTS
from tests.faults.table import DOCUMENTED, HEAD, documented_rows, expected_cells, table
from tests.support.markdown import ROOT

PAGE = ROOT / "docs/reliability.md"
DONE_TWICE, SECONDS = 5, 4  # columns
SEEN = Seen(status=0, text="", seconds=1.0)
# Faults without a line, as the machine of the table cannot cause them.
UNSEEN: frozenset[str] = frozenset()


def test_every_documented_fault_leads_to_what_is_expected() -> None:
    text = DOCUMENTED.read_text()
    rows = documented_rows(text)
    expected = {expected_cells(fault)[1]: expected_cells(fault) for fault in FAULTS}
    assert text.startswith(HEAD)
    assert [cells[:4] for cells in rows.values()] == [cells for name, cells in expected.items() if name in rows]
    assert expected.keys() - rows.keys() == UNSEEN and rows.keys() <= expected.keys()


def test_a_fault_that_led_to_something_else_loses_its_line() -> None:
    first, second, third = FAULTS[:3]
    documented = table(FAULTS[:3], dict.fromkeys((fault.name for fault in FAULTS[:3]), SEEN), "")
    rows = documented_rows(table(FAULTS[:3], {first.name: None, second.name: SEEN}, documented))
    assert [cells[1] for cells in rows.values()] == [expected_cells(fault)[1] for fault in (second, third)]


def test_the_changelog_has_their_number() -> None:
    assert f"when something fails, in {len(FAULTS)} faults;" in (ROOT / "CHANGELOG.md").read_text()


def test_what_was_seen_is_within_what_is_allowed() -> None:
    rows = documented_rows(DOCUMENTED.read_text())
    for fault in FAULTS:
        cells = rows.get(expected_cells(fault)[1])
        if cells is None:
            continue
        assert fault.within_s is None or float(cells[SECONDS]) <= fault.within_s
        assert cells[DONE_TWICE] == "-" if fault.loses is None else int(cells[DONE_TWICE]) <= fault.loses


def test_the_page_shows_the_table() -> None:
    assert "```{include} ../tests/golden/faults.md" in PAGE.read_text()
