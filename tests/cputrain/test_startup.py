"""The line about what happens before a first step, and what a run says at its start of what it uses."""

import io
from dataclasses import replace

import pytest

from cputrain.affinity.rank import Rank
from cputrain.launch.rank_process import Startup, startup_of
from cputrain.mpi.supervise.ranks import Stream
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE
from cputrain.training.environment import SET, startup_lines

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


NO_CCL = 'rank 0: oneCCL is not installed: pip install "cputrain[ccl]", or set comm.backend=gloo'
NO_TURBO = "Pillow: data.decoder=turbo: it needs libjpeg-turbo 3, but none was found: pip install 'cputrain[turbo]'"


NATIVE = ("native", "/cache/batchnorm.so")
NO_COMPILER = "no C++ compiler on PATH; install g++, or set engine=eager"


def output(
    backend: str,
    why: str,
    decoder: str,
    allocator: str,
    ranks: int = 2,
    engine: tuple[str, str] = NATIVE,
    bf16_speedup: float = 1.0,
    precision: tuple[str, str] = ("float32", SET),
) -> list[str]:
    names = ("backend", "backend_why", "engine", "engine_why", "decoder", "allocator", "precision", "precision_why")
    environment = dict(zip(names, (backend, why, *engine, decoder, allocator, *precision), strict=True))
    return startup_lines(environment, ranks=ranks, bf16_speedup=bf16_speedup)


def test_where_all_is_fast_there_is_one_line() -> None:
    why = "over MPI (measured: 25 MiB all-reduce 10.8 ms over MPI, 38.9 ms over libfabric)"
    rest = "engine native, decoder libjpeg-turbo, allocator tcmalloc"
    turbo = "libjpeg-turbo: /lib/libturbojpeg.so"
    assert output("ccl", why, turbo, "tcmalloc") == [f"backend ccl {why}, {rest}"]
    assert output("ccl", why, turbo, "tcmalloc", ranks=1) == [f"backend ccl, {rest}"]


def test_what_would_be_faster_is_said_with_how_to_get_it() -> None:
    first, ccl, engine, turbo, allocator = output("gloo", NO_CCL, NO_TURBO, "glibc", engine=("eager", NO_COMPILER))
    assert first == "backend gloo, engine eager, decoder Pillow, allocator glibc"
    assert ccl == f"faster: oneCCL (all-reduces of 25 MiB up to 3.2 times as fast): {NO_CCL}"
    assert engine.startswith("faster: native kernels (") and engine.endswith(NO_COMPILER)
    assert turbo.endswith("CPU-second): it needs libjpeg-turbo 3, but none was found: pip install 'cputrain[turbo]'")
    assert "libtcmalloc-minimal4" in allocator


def test_what_the_user_has_chosen_or_nobody_uses_is_not_said_to_be_slow() -> None:
    assert len(output("gloo", "comm.backend=gloo", "Pillow: data.decoder=pillow", "jemalloc")) == 1
    assert len(output("gloo", NO_CCL, "libjpeg-turbo: /lib/libturbojpeg.so", "tcmalloc", ranks=1)) == 1
    for why in ("engine=eager", "precision=float64, which the native kernels do not support"):
        made = output("ccl", "", "libjpeg-turbo: /lib/libturbojpeg.so", "tcmalloc", engine=("eager", why))
        assert len(made) == 1


def test_bf16_is_named_where_its_convolutions_are_faster() -> None:
    fast = ("ccl", "", "libjpeg-turbo: /lib/libturbojpeg.so", "tcmalloc")
    line = output(*fast, bf16_speedup=2.13)[1]
    assert line.startswith("faster: precision=bf16, with which a convolution is 2.1 times as fast on this CPU")
    assert len(output(*fast, bf16_speedup=1.1)) == 1
    chosen = output(*fast, precision=("bf16", "steps are 2.00 times as fast"))
    assert chosen[1:] == ["precision bf16 (auto): steps are 2.00 times as fast"]
