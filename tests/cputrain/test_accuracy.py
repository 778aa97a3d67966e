"""bfloat16 and Winograd's algorithm train to the accuracy of float32: the benchmark's judgment, and small trainings."""

from pathlib import Path

import pytest

from benchmarks.accuracy import Result, Study, trained
from tests.support.commands import here

SMALL = ["model.name=resnet18", "data.crop=32", "data.resize=32", "epochs=3"]
LEARNED, DIFFERS = 80.0, 4.0  # percent; points


def test_a_change_passes_within_the_range_of_seeds_and_not_outside() -> None:
    same = Result(before=(98.0, 99.0, 98.5), after=(98.5, 98.0, 98.7))
    assert same.allowed == 1.0 and same.is_within
    assert same.difference == pytest.approx(-0.1)
    for shift in (-1.01, 1.01):
        assert not Result(before=(98.0, 99.0), after=(98.0 + shift, 99.0 + shift)).is_within
    assert Result(before=(97.9, 98.2), after=(97.6, 97.9)).is_within, "as far as the range, but for rounding"


@pytest.mark.long
@pytest.mark.nightly
def test_the_digits_are_learned_as_well(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'cputrain[demo]'")
    prepared = here("prepare", "digits", "folder", "digits", cwd=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    study = Study(name="digits", recipe="demo-digits", data=tmp_path / "digits")
    result = trained(study, tmp_path, 1, "both", SMALL)
    assert min(*result.before, *result.after) > LEARNED, result
    assert abs(result.difference) < DIFFERS, result
