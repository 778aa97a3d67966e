"""The page of a run, and the live view, of folders in which anything may be damaged."""

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.report.page import report_html
from cputrain.report.run import read_run
from cputrain.report.watch import EventTail, WatchState, watch_screen
from tests.fuzz.inputs import COUNT, damaged, fuzzed
from tests.support.run_folders import write_run

LIMIT_S = 5.0
FILES = ("events.jsonl", "recipe.yaml", "environment.json", "plan.json", "usage/rank-0.jsonl", "usage/host-n00.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", ranks=2, epochs=2, steps=4)


@settings(fuzzed, max_examples=max(COUNT // 10, 1))  # a page takes as long as a hundred lines
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_a_damaged_run_has_a_page_and_a_screen(seed: int, data: st.DataObject, run: Path) -> None:
    rng = random.Random(seed)
    kept = {name: (run / name).read_bytes() for name in FILES}
    try:
        for name in FILES:
            if rng.random() < 0.5:
                (run / name).write_bytes(data.draw(damaged(kept[name])))
        began = time.process_time()
        try:
            assert "</html>" in report_html(read_run(run))
            state = WatchState()
            state.add(EventTail(run / "events.jsonl").read()[0])
            watch_screen("run", state, width=80)
        except InputError as error:
            assert "\n" not in str(error)
        assert time.process_time() - began < LIMIT_S
    finally:
        for name, content in kept.items():
            (run / name).write_bytes(content)
