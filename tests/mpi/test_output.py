import errno
import io
import os
from pathlib import Path

import pytest

from cputrain.mpi.supervise import ranks
from cputrain.mpi.supervise.ranks import CLEAR_LINE, Stream


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def feed(terminal: io.StringIO, *chunks: bytes, label: str = "[1] ") -> tuple[str, bytes]:
    log = io.BytesIO()
    stream = Stream(label=label, terminal=terminal, log=log, live=terminal.isatty())
    for chunk in chunks:
        stream.feed(chunk)
    stream.close()
    return terminal.getvalue(), log.getvalue()


def test_a_stream_that_nobody_reads_holds_no_rank_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BLOCKED_S", 0.1)
    (theirs, ours), (shown, terminal) = os.pipe(), os.pipe()
    with os.fdopen(theirs, "rb") as pipe, os.fdopen(terminal, "w") as stream:
        relay = ranks.Relay(pipe, ranks.Terminal(stream=stream, name="stdout", logs=Path("run/logs")))
        with os.fdopen(ours, "wb") as rank:
            for number in range(700):
                rank.write(f"{number:>{ranks.CHUNK_BYTES - 1}}\n".encode())
        relay.finish(0.1)
        seen = [b""]
        while b"because nobody read them: see run/logs" not in b"".join(seen[-2:]):
            seen.append(os.read(shown, 1 << 20))
        relay.finish(10)
    os.close(shown)
    assert seen[1].split()[0] == b"0" and sum(map(len, seen)) < 300 * ranks.CHUNK_BYTES


@pytest.mark.parametrize("chunks", [(b"one\ntwo\n",), (b"o", b"ne\ntw", b"o\n"), (b"one\r\ntwo",)])
def test_lines_are_labeled_whole(chunks: tuple[bytes, ...]) -> None:
    assert feed(io.StringIO(), *chunks) == ("[1] one\n[1] two\n", b"one\ntwo\n")


def test_a_bar_moves_on_a_terminal_and_stays_out_of_the_log() -> None:
    shown, log = feed(Terminal(), b"\r10%", b"\r20%", b"\repoch 1 done\n", label="")
    assert shown == f"{CLEAR_LINE}10%{CLEAR_LINE}20%{CLEAR_LINE}epoch 1 done\n"
    assert log == b"epoch 1 done\n"


def test_a_bar_is_a_line_now_and_then_elsewhere() -> None:
    shown, log = feed(io.StringIO(), b"\r   \r", b"\r10%", b"\r20%", b"\r30%", b"\rdone\n", label="")
    assert shown == "10%\ndone\n"
    assert log == b"10%\ndone\n"


def test_a_bar_cut_short_goes_away() -> None:
    shown, log = feed(Terminal(), b"one\n\r10%", label="")
    assert shown == f"{CLEAR_LINE}one\n{CLEAR_LINE}10%{CLEAR_LINE}"
    assert log == b"one\n"


def test_a_terminal_gets_colors_and_no_titles_and_the_log_gets_all() -> None:
    shown, log = feed(io.StringIO(), b"\x1b[31mred\x1b[0m\x1b]0;title\x07\n", label="")
    assert shown == "\x1b[31mred\x1b[0m\\x1b]0;title\\x07\n"
    assert log == b"\x1b[31mred\x1b[0m\x1b]0;title\x07\n"


def test_a_relay_shows_no_more_than_a_stream() -> None:
    (theirs, ours), shown = os.pipe(), io.StringIO()
    with os.fdopen(theirs, "rb") as pipe:
        relay = ranks.Relay(pipe, ranks.Terminal(stream=shown, name="stdout", logs=Path("run/logs")))
        with os.fdopen(ours, "wb", buffering=0) as rank:
            for part in (b"\x1b[3", b"1mred\x1b", b"[0m\x1b]0;title\x07\xc3", b"\xa4\x1b["):
                rank.write(part)
        relay.finish(10)
    assert shown.getvalue() == "\x1b[31mred\x1b[0m\\x1b]0;title\\x07ä\\x1b["


@pytest.mark.parametrize("label", ["[0] ", ""])
def test_a_refusal_of_all_ranks_is_shown_once_and_logged_by_each(label: str) -> None:
    refusal, other = b"cputrain: data.path=/none does not exist\n", b"cputrain: rank 1: no such file\n"
    shown, logs = io.StringIO(), [io.BytesIO(), io.BytesIO()]
    terminal = ranks.Terminal(stream=shown, name="stderr", logs=Path("logs"))
    labels = (label, "[1] ")
    first, second = (
        Stream(label=label, terminal=terminal, log=log, live=i > 0)
        for i, (label, log) in enumerate(zip(labels, logs, strict=True))
    )
    for rank in (first, first, second):
        rank.feed(refusal)
    second.feed(other)
    assert shown.getvalue() == 2 * f"{label}{refusal.decode()}" + f"{CLEAR_LINE}[1] {other.decode()}"
    assert [log.getvalue() for log in logs] == [refusal * 2, refusal + other]


@pytest.mark.parametrize(("name", "times"), [("stderr", 1), ("stdout", 2)])
def test_a_relay_shows_a_refusal_of_ranks_of_other_hosts_once(name: str, times: int) -> None:
    (theirs, ours), shown = os.pipe(), io.StringIO()
    with os.fdopen(theirs, "rb") as pipe:
        relay = ranks.Relay(pipe, ranks.Terminal(stream=shown, name=name, logs=Path("run/logs")))
        with os.fdopen(ours, "wb", buffering=0) as pipe_of_ranks:
            pipe_of_ranks.write(b"[n1:0] cputrain: no\n[n1:0] print\n[n2:1] print\n[n2:1] cputrain: no\n")
        relay.finish(10)
    assert shown.getvalue().count("cputrain: no\n") == times and shown.getvalue().count("print\n") == 2


def test_what_is_not_utf8_is_shown_all_the_same() -> None:
    shown, log = feed(io.StringIO(), b"\xff\xfe\n")
    assert shown.startswith("[1] ")
    assert log == b"\xff\xfe\n"


def test_what_the_locale_lacks_is_shown_as_a_question_mark_and_logged_as_it_is() -> None:
    central = io.TextIOWrapper(io.BytesIO(), encoding="iso8859-2")
    terminal, log = ranks.Terminal(stream=central, name="stdout", logs=Path("logs")), io.BytesIO()
    stream = Stream(label="[1] ", terminal=terminal, log=log, live=False)
    stream.feed("ä → b ø\n".encode())
    stream.close()
    assert central.buffer.getvalue() == "[1] ä ? b ?\n".encode("iso8859-2")
    assert log.getvalue() == "ä → b ø\n".encode()


def test_a_line_that_does_not_end_is_shown_in_parts() -> None:
    shown, log = feed(io.StringIO(), *[b"x" * (1 << 19)] * 9, label="")
    assert [len(line) for line in shown.split()] == [3 << 19] * 3 and log == shown.encode()


def test_a_full_disk_ends_the_log_and_not_the_job() -> None:
    class Full(io.BytesIO):
        name = "logs/rank-1.log"

        def write(self, _data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    terminal = io.StringIO()
    stream = Stream(label="[1] ", terminal=terminal, log=Full(), live=False)
    stream.feed(b"one\ntwo\n")
    message = "cputrain: logs/rank-1.log: No space left on device; the job continues without this log\n"
    assert terminal.getvalue() == f"{message}[1] one\n[1] two\n"
