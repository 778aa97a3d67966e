"""Several runs on one page: their curves, results, differing settings, and the study of worker counts."""

import csv
import json
import re
from pathlib import Path

import pytest

from cputrain.cli import main
from cputrain.studies.sweep.comparison import compare_runs, differing_keys, run_names
from tests.support.run_folders import RECIPE, write_run


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "rates"
    for i, (rate, ranks) in enumerate(((0.1, 2), (0.1, 4), (0.4, 2))):
        recipe = f"{RECIPE}schedule: {{peak_rate: {rate}}}\noutput: run{i}\n"
        write_run(folder / f"run{i}", ranks=ranks, steps=20, seed=i, recipe=recipe, usage=False)
    return folder


def test_the_folder_of_a_sweep_gives_a_page_a_markdown_table_and_a_csv(sweep: Path) -> None:
    assert main(["report", str(sweep)]) == 0
    html = (sweep / "report.html").read_text()
    data = json.loads(re.findall(r'id="data">(.*?)</script>', html, flags=re.DOTALL)[0])
    assert [chart["id"] for chart in data["charts"]] == ["top1", "loss", "val-loss", "train-top1", "throughput", "rate"]
    assert [line["run"] for line in data["charts"][0]["lines"]] == [0, 1, 2]
    assert html.count("<tr data-run=") == 3 and "<h2>Workers</h2>" in html
    rows = list(csv.DictReader((sweep / "report.csv").open()))
    assert [row["schedule.peak_rate"] for row in rows] == ["0.1", "0.1", "0.4"] and rows[1]["workers"] == "4"
    assert all(float(row["compute %"]) > 50 and row["status"] == "done" for row in rows)
    markdown = (sweep / "report.md").read_text()
    assert "## Workers" in markdown and "speed-up" in markdown and markdown.count("\n| ") >= 4 + 3


def test_runs_given_one_by_one_link_to_their_own_pages(sweep: Path, tmp_path: Path) -> None:
    runs = [str(sweep / f"run{i}") for i in (0, 2)]
    assert main(["report", runs[0]]) == 0
    assert main(["report", *runs, "--output", str(tmp_path / "two.html")]) == 0
    html = (tmp_path / "two.html").read_text()
    assert html.count('">report</a>') == 1 and "rates/run0/report.html" in html and (tmp_path / "two.csv").is_file()


def test_a_glob_may_hold_sweeps_and_what_is_no_run(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "alone", steps=10, usage=False)
    (tmp_path / "notes.csv").write_text("a\n")
    (tmp_path / "empty").mkdir()
    others = [str(tmp_path / name) for name in ("alone", "notes.csv", "empty")]
    assert main(["report", str(sweep), *others, "--output", str(tmp_path / "all.html")]) == 0
    runs = [row["run"] for row in csv.DictReader((tmp_path / "all.csv").open())]
    assert len(runs) == 4
    assert capsys.readouterr().err == f"skipped, as they contain no run: {others[1]}, {others[2]}\n"
    assert main(["report", *others[1:]]) == 2 and main(["report", str(sweep), str(tmp_path / "absent")]) == 2


def test_only_settings_that_differ_are_compared(sweep: Path) -> None:
    runs = compare_runs([sweep / f"run{i}" for i in range(3)], 1000)
    assert {key for run in runs for key, _ in run.result.settings} == {"schedule.peak_rate"}
    assert run_names(runs) == ("run0", "run1", "run2"), "the same rate twice does not tell two runs apart"
    assert run_names(runs[1:]) == ("peak_rate 0.1", "peak_rate 0.4")
    assert differing_keys([{"a": 1, "name": "x"}, {"a": 1, "b": 2, "name": "y"}]) == ("b",)


def test_runs_under_way_or_without_a_readable_recipe_are_compared_too(sweep: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "broken", recipe="of_another_version: 1\n", end=False, usage=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/recipe.yaml").write_text("name: x\n")
    assert (
        main(
            [
                "report",
                str(sweep / "run0"),
                str(tmp_path / "broken"),
                str(tmp_path / "empty"),
                "--output",
                str(tmp_path / "c.html"),
            ]
        )
        == 0
    )
    html = (tmp_path / "c.html").read_text()
    assert "of another version" in html and "not started" in html and html.count("<tr data-run=") == 3


def test_names_of_runs_become_neither_markup_nor_cells(tmp_path: Path) -> None:
    for name in ("<img src=x onerror=alert(1)>", "a|b"):
        write_run(tmp_path / name, usage=False)
    out = tmp_path / "out.html"
    assert main(["report", *(str(path) for path in sorted(tmp_path.iterdir())), "--output", str(out)]) == 0
    assert "<img" not in out.read_text() and "<img" not in out.with_suffix(".md").read_text()
    assert "a\\|b" in out.with_suffix(".md").read_text()
