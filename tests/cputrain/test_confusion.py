"""Which classes are hard, which are confused, which images are most wrong; and the page of an evaluation."""

import csv
from pathlib import Path

import numpy as np
import pytest

from cputrain.checkpoint.files import MANIFEST
from cputrain.cli import main
from cputrain.report.page import (
    MAX_CLASSES,
    Predicted,
    class_accuracies,
    confused_classes,
    confusion_heat,
    confusion_text,
    most_wrong,
    write_eval_page,
)

CLASSES = ("cat", "dog", "<b>owl</b>", "unseen")


def predictions(labels: list[int], predicted: list[int]) -> Predicted:
    """Losses grow with the image's number."""
    count = len(labels)
    return Predicted(
        image=np.arange(count) + 100,
        label=np.array(labels),
        predicted=np.array(predicted),
        loss=np.arange(count, dtype=float),
        label_share=np.full(count, 0.25),
        predicted_share=np.full(count, 0.5),
    )


MADE = predictions([0, 0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 0, 0])


def test_each_class_has_its_accuracy_and_an_unseen_one_none() -> None:
    found = {each.name: (each.images, each.top1) for each in class_accuracies(MADE, CLASSES)}
    assert found == {"cat": (4, 50.0), "dog": (2, 50.0), "<b>owl</b>": (1, 0.0), "unseen": (0, None)}


def test_confused_pairs_come_by_number_and_wrong_images_by_loss() -> None:
    pairs = [(each.label, each.predicted, each.images) for each in confused_classes(MADE, CLASSES)]
    assert pairs == [("cat", "dog", 2), ("dog", "cat", 1), ("<b>owl</b>", "cat", 1)]
    assert list(most_wrong(MADE, 3)) == [6, 5, 3]
    text = confusion_text(MADE, CLASSES)
    assert text.startswith("Hardest: <b>owl</b> 0.00 %") and "cat as dog (2 times)" in text
    assert confusion_text(predictions([0, 1], [0, 1]), CLASSES).count("confused") == 0


def test_the_matrix_counts_every_image_and_shows_the_hardest_of_very_many_classes() -> None:
    heat = confusion_heat(MADE, CLASSES)
    assert heat.measures["images"].sum() == 7 and heat.measures["images"][0, 1] == 2
    assert heat.measures["% of the class"][0].tolist() == [50.0, 50.0, 0.0, 0.0]
    labels = np.repeat(np.arange(1000), 2)
    guesses = np.where(labels >= 900, 0, labels)
    heat = confusion_heat(predictions(labels.tolist(), guesses.tolist()), tuple(map(str, range(1000))))
    assert len(heat.rows) == MAX_CLASSES and set(map(str, range(900, 1000))) <= set(heat.rows)
    assert "with the lowest accuracy" in heat.title


def test_the_page_shows_the_most_wrong_images_and_escapes_their_names(tmp_path: Path) -> None:
    out = write_eval_page(
        tmp_path / "page.html",
        title="demo",
        rows=[("top-1", "42.86 %")],
        predicted=MADE,
        classes=CLASSES,
        name_of=lambda number: f"folder/<i>{number}.jpg",
        thumbnail=lambda number: np.full((8, 8, 3), number, dtype=np.uint8),
    )
    html = out.read_text()
    assert html.count('src="data:image/jpeg;base64,') == 4 and "<b>owl" not in html and "<i>106" not in html
    rows = list(csv.DictReader((tmp_path / "page.csv").open()))
    assert len(rows) == 7 and rows[6]["image"] == "folder/<i>106.jpg" and rows[6]["label"] == "<b>owl</b>"
    assert rows[0]["predicted"] == "cat" and rows[0]["probability of the label"] == "0.25"


def test_a_page_is_html_and_of_one_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = []
    for name in ("step-0000001", "step-0000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).touch()
        named += ["--checkpoint", str(tmp_path / name)]
    assert main(["eval", "imagefolder", *named, "--report", "a.pdf"]) == 2
    assert "--report a.pdf does not end in .html: the page is HTML" in capsys.readouterr().err
    assert main(["eval", "imagefolder", *named, "--report", "a.html"]) == 2
    assert "2 are evaluated: name one" in capsys.readouterr().err
