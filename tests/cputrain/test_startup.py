"""The line about what happens before a first step."""

import io
from dataclasses import replace

import pytest

from cputrain.affinity.ranks import Rank
from cputrain.launch import Startup, startup_of
from cputrain.mpi.supervise import TOKEN_VARIABLE, Stream

RANK = Rank(rank=0, world_size=2, local_rank=0, local_world_size=2, convention="env")


def test_each_phase_is_drawn_over_the_one_before_and_the_seconds_are_told() -> None:
    times = iter((0.0, 0.5, 4.7, 4.7, 4.75, 6.0))
    file = io.StringIO()
    startup = Startup(shown=True, file=file, clock=lambda: next(times))
    startup.phase("importing PyTorch")
    startup.phase("opening data")
    assert startup.done() == "ready after 6.0 s: importing PyTorch 4.2 s"
    drawn = file.getvalue().split("\r")
    assert [text.rstrip() for text in drawn if text.strip()] == [
        "starting: importing PyTorch",
        "starting: opening data",
    ]
    assert len({len(text) for text in drawn if text}) == 2, "a shorter text covers a longer one"


def test_in_another_launcher_s_log_each_phase_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    startup = startup_of(RANK, {}, shown=True)
    startup.phase("importing PyTorch")
    startup.phase("opening data")
    startup.done()
    out, err = capsys.readouterr()
    assert out.splitlines() == ["starting: importing PyTorch", "starting: opening data"] and err == ""
    supervised = startup_of(RANK, {TOKEN_VARIABLE: "x"}, shown=True)
    assert supervised.redrawn and not startup_of(replace(RANK, rank=1), {}, shown=True).shown


def test_a_rank_that_is_not_shown_writes_nothing() -> None:
    file = io.StringIO()
    startup = Startup(shown=False, file=file)
    startup.phase("opening data")
    startup.done()
    assert file.getvalue() == ""


def test_what_is_printed_in_a_phase_is_a_line_of_its_own() -> None:
    terminal, log = io.StringIO(), io.BytesIO()
    stream = Stream(label="", terminal=terminal, log=log, live=False)
    stream.feed(b"\rstarting: opening data\r")
    stream.feed(b"cputrain: data.path=x is not there\n")
    assert terminal.getvalue() == "starting: opening data\ncputrain: data.path=x is not there\n"
