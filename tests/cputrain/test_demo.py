"""The demo, in a folder of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import CORES, cputrain

SMALL = ("model.name=resnet18", "data.crop=32", "data.resize=32", "epochs=1", "schedule.warmup_epochs=0", "max_steps=3")


@pytest.mark.long
def test_the_demo_plans_prepares_trains_and_reports_in_any_folder_and_again(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'cputrain[demo]'")
    for _ in range(2):
        result = cputrain("demo", *SMALL, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        text = result.stdout
        words = (
            "cputrain plan\n",
            "cputrain prepare digits",
            "train 1,442 images",
            "cputrain train demo-digits " + ("plan.ppn=2 " if CORES > 1 else ""),
            "top-1",
        )
        assert sorted(words, key=text.index) == list(words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "runs"]
    assert (tmp_path / "runs/demo/report.html").is_file()


def test_without_scikit_learn_the_demo_says_how_to_get_it(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    code = "import sys; sys.modules['sklearn'] = None; from cputrain.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'cputrain[demo]'" in done.stderr and not any(here.iterdir())
