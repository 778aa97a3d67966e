"""README.md and docs/ hang together: links and files exist, the pages from the code can be written."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from site_pages import PAGES as GENERATED
from site_pages.drawing import drawing
from site_pages.events import WHEN, written
from site_pages.imports import import_graph
from site_pages.text import plain, table

from tests.support.markdown import PAGES, ROOT, blocks, inline, name_of, prose

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
WRITTEN = {ROOT / "docs" / name for name in GENERATED}
TOP = {"affinity", "mpi", "cputrain", "configs", "tests", "docs", "benchmarks"}


def anchor(heading: str) -> str:
    """A heading as links name it."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files that a page links to, each with the anchor of a heading or ""."""
    for link in LINK.findall(prose(page)):
        target, _, place = link.partition("#")
        if not target.startswith("http"):
            yield (page.parent / target).resolve() if target else page, place


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    """In a checkout, too, which lacks the pages from the code: docs/reference.md names them."""
    for path, place in links(page):
        assert path.exists() and path not in WRITTEN, path
        if place:
            assert place in map(anchor, HEADING.findall(path.read_text())), f"{path}#{place}"


def test_the_reference_names_every_page_from_the_code() -> None:
    named = re.findall(r"\{doc\}`([^`]+)`", (ROOT / "docs/reference.md").read_text())
    assert sorted(f"{name}.md" for name in named) == sorted(GENERATED)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_the_files_of_the_checkout_that_a_page_names_exist(page: Path) -> None:
    named = {code for code in inline(page) if re.fullmatch(r"[\w./-]+/[\w./-]*", code) and code.split("/")[0] in TOP}
    missing = {
        name for name in named if not (ROOT / name).exists() and ROOT / name not in WRITTEN and "NAME" not in name
    }
    assert missing <= {"docs/_build/html"}


def test_the_files_in_which_to_look_first_exist() -> None:
    """A path is one of the checkout or below cputrain/; a name alone is in a folder of its row."""
    rows = prose(ROOT / "docs/architecture.md").partition("| question | file |")[2].partition("\n\n")[0].splitlines()
    assert len(rows) > 20
    for row in rows:
        paths = re.findall(r"`([\w/]+(?:/|\.py))`", row)
        tops = (ROOT, ROOT / "cputrain")
        named = [place for place in (top / path for top in tops for path in paths) if place.exists()]
        folders = {*tops, *(place if place.is_dir() else place.parent for place in named)}
        assert [path for path in paths if not any((folder / path).exists() for folder in folders)] == []


def test_every_page_is_in_the_site() -> None:
    listed = {line for block in blocks(ROOT / "docs/index.md") for line in block.text.splitlines()}
    pages = {path.relative_to(ROOT / "docs") for path in [*PAGES, *WRITTEN] if ROOT / "docs" in path.parents}
    assert {str(page.with_suffix("")) for page in pages if page.suffix == ".md"} - {"index"} <= listed


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_figures_of_the_readme_are_those_of_the_measurements() -> None:
    measured = "".join((ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "large-batch.md", "start.md"))
    rows = (ROOT / "README.md").read_text().partition("measured by |\n")[2].partition("\n\n")[0]
    figures = re.findall(r"\d[\d,]*\.?\d+(?= img/s| %)", rows)
    assert len(figures) == 12
    assert all(figure in measured for figure in figures)


def test_each_figure_of_the_readme_names_its_processor_and_a_command_that_exists() -> None:
    table = (ROOT / "README.md").read_text().partition("| | processor |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert len(rows) == 7 and all(len(row) == 5 and all(row) for row in rows)
    assert {"AMX", "AVX-512", "only AVX2"} <= {row[1].rpartition(", ")[2] for row in rows}
    for row in rows:
        words = row[4].strip("`").split()
        if words[0] == "python":
            text = (ROOT / f"{words[2].replace('.', '/')}.py").read_text()
            assert 'print(f"{processor_text(this_machine())}\\n")' in text
            assert all(f'"{word}"' in text for word in words[3:] if word.startswith("--"))
        else:
            assert words[:2] == ["cputrain", "reproduce"]


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATED)
def test_a_page_from_the_code_can_be_written(name: str) -> None:
    text = GENERATED[name]()
    assert text.endswith("\n")
    assert "TODO" not in text
    anchors = {anchor(heading) for heading in HEADING.findall(text)}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors


def test_every_event_of_a_run_is_described() -> None:
    assert set(written()) == set(WHEN)


@pytest.mark.slow
def test_the_drawing_of_the_packages_is_that_of_the_code(golden: Callable[[str, str], None]) -> None:
    graph = import_graph()
    text = drawing(graph)
    for name in graph:
        if "." in name:
            assert text.count(f">{name.partition('.')[2]}</text>") == 1
    golden("../../docs/pictures/packages.svg", text)


def test_a_line_of_the_drawing_is_an_import_that_follows_from_no_other() -> None:
    graph = {"mpi.a": {"mpi.b", "mpi.c"}, "mpi.b": {"mpi.c"}, "mpi.c": {"mpi"}, "mpi.d": {"mpi.b"}, "mpi": {"mpi.a"}}
    graph |= {f"{top}.one": set() for top in ("cputrain", "affinity")}
    assert drawing(graph).count('<path d="M') - 4 == 3  # a to b, b to c and d to b, besides two arrows of two paths


def test_text_in_a_page_reads_as_it_was_written() -> None:
    assert plain("workers.* of [A] in `a*b` and two_words") == r"workers.\* of \[A\] in `a*b` and two_words"
    assert table(["a"], [["x | y"]]) == "| a |\n|---|\n| x \\| y |"
