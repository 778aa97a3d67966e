"""A curve for a terminal, and `plan --curve`."""

from cputrain.cli.output import HEIGHT, LEVELS, WIDTH, curve, sampled
from tests.support.commands import here, refused


def test_columns_are_as_high_as_their_values() -> None:
    values = sampled(float, WIDTH)
    assert values == [float(i) for i in range(WIDTH)]
    lines = curve(values, "end").splitlines()
    assert len(lines) == HEIGHT + 2
    start = lines[0].index("│") + 1
    rows = [(line[start:] + " " * WIDTH)[:WIDTH] for line in lines[:HEIGHT]]
    heights = [sum(LEVELS.index(row[column]) for row in rows) for column in range(WIDTH)]
    assert heights == [round(8 * HEIGHT * i / (WIDTH - 1)) for i in range(WIDTH)]
    assert lines[0].strip().startswith("63 │") and lines[-1].endswith("end")
    assert "│" in curve([0.0] * 8, "end")


def test_plan_draws_the_learning_rate() -> None:
    where = ("--machine", "skx-8160-2s", "--nodes", "256")
    expected = here("plan", "resnet50-skx-256node", *where, "--curve").stdout
    chart = expected[expected.index("learning rate\n  ") :].splitlines()
    top = next(line for line in chart if "│" in line)
    assert top.strip().startswith("4.7") and "█" in chart[chart.index(top) + HEIGHT - 1]
    assert any(line.endswith("90 epochs") for line in chart)
    assert "name a RECIPE" in refused(here("plan", "--curve"))
