"""The documents' tables beside what the recipes give: what agrees, and that what does not is expected."""

import json

import pytest
from pydantic import ValidationError

from cputrain.cli import main
from cputrain.studies.reproduce import DOCUMENTS, Experiment, published_tables

FOUND = list(published_tables(DOCUMENTS))


def values_of(experiment: str) -> dict[str, tuple[float | None, float | None]]:
    (row,) = (row for row in FOUND if row.experiment == experiment)
    return {line.quantity: (line.published, line.recipe) for line in row.rows}


def test_every_published_number_is_the_recipe_s_or_its_difference_is_told() -> None:
    differing = {}
    for row in FOUND:
        for line in row.rows:
            if line.differs:
                assert row.note, f"{row.table}: {row.experiment}: {line.quantity} differs, and no note says why"
                differing.setdefault((row.document.split()[0], line.quantity), []).append((line.published, line.recipe))
    assert differing.pop(("SURFsara", "steps per epoch")) == [(52.08, 52)]
    assert differing.pop(("SURFsara", "total steps")) == [(14_075, 14_040)]
    steps = differing.pop(("GIST", "total steps"))
    assert len(steps) == 13 and all(published == ours // 10 * 10 for published, ours in steps), "every tenth step"
    assert differing == {}


def test_rows_are_derived_from_recipes() -> None:
    run = values_of("batch 24,576 on 256 hosts")
    assert run["global batch"] == (24_576, 24_576) and run["warm-up steps"] == (260, 260)
    assert run["total steps"] == (4_680, 4_680) and run["peak rate"] == (4.8, pytest.approx(4.8))
    assert run["images/s"] == (16_400, None)
    assert run["time, from images/s"] == (round(90 * 1_280_000 / 16_400), None), "1 h 57 min: less than 2 hours"
    knl = values_of("batch 256 on 16 KNLs")
    assert knl["images/s, from the time"] == (round(90 * 1_281_167 / (45 * 3600)), None)
    assert knl["steps per epoch"] == (None, 5_004)
    assert values_of("batch 16,000 on 1,600 CPUs")["total steps"] == (None, 7_200)
    assert values_of("Figure 10, 1 GPU")["total steps"] == (None, 30_000), "30 x 50,000 / 50"
    assert values_of("model 6, 8 V100")["peak rate"] == (8, 8)
    assert "images/s, from the time" not in values_of("model 2, 4 GPUs"), "of how many images is not known"


def test_tables_are_text_markdown_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "tables", "you-et-al", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["table"].split(",")[0] for row in rows} == {"Introduction", *(f"Table {n}" for n in (1, 2, 3, 4))}
    assert {"quantity": "global batch", "published": 16000, "recipe": 16000, "differs": False} in rows[-4]["rows"]
    assert main(["reproduce", "tables", "surfsara-intel"]) == 0
    text = capsys.readouterr().out
    assert "recipe resnet50-skx-256node on 256 hosts x 2 workers" in text
    assert "  steps per epoch          52.08         52  differs\n" in text and "note: it counts 1,280,000" in text
    assert main(["reproduce", "tables", "--format", "markdown"]) == 0
    markdown = capsys.readouterr().out
    assert "| batch 256 on 16 KNLs | time | 45:00:00 | - |  |" in markdown
    assert markdown.count("\n### ") + 1 == len({(row.document, row.table) for row in FOUND})
    assert main(["reproduce", "tables", "lab4"]) == 2


def test_a_quantity_that_nothing_derives_is_refused() -> None:
    with pytest.raises(ValidationError, match="no such quantity: rate"):
        Experiment(title="x", published={"rate": 0.1})
