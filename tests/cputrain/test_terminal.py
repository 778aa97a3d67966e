"""TERM=dumb and NO_COLOR, and the live view in a terminal of its own."""

import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from cputrain.affinity.terminal import redraws, shows_color
from tests.support.run_folders import write_run

PATIENCE_S = 120.0


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("env", "drawn_again", "colored"),
    [
        ({"TERM": "xterm"}, True, True),
        ({}, True, True),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
    ],
)
def test_color_and_redrawing_follow_the_terminal_and_no_color(
    env: dict[str, str], drawn_again: bool, colored: bool
) -> None:
    assert redraws(Screen(), env) is drawn_again and shows_color(Screen(), env) is colored
    assert not redraws(io.StringIO(), env) and not shows_color(io.StringIO(), env)


def take_terminal() -> None:
    """Make Ctrl-C a signal of this process, also where the tests' own shell has made them ignore it (`make test &`)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def watch(run: Path, *, columns: int = 100, **env: str) -> "Watched":
    """Start cputrain watch in a pseudo-terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    size = ("COLUMNS", "LINES")  # would be believed before the terminal
    started = subprocess.Popen(
        [sys.executable, "-m", "cputrain", "watch", str(run), "--interval", "0.2"],
        env={**{name: value for name, value in os.environ.items() if name not in size}, "TERM": "xterm", **env},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,  # noqa: PLW1509
    )
    os.close(theirs)
    return Watched(started, ours)


class Watched:
    """cputrain watch in a pseudo-terminal."""

    def __init__(self, started: "subprocess.Popen[bytes]", terminal: int) -> None:
        self.output = b""
        self._process, self._terminal = started, terminal

    def resize(self, columns: int) -> None:
        """Make the terminal so wide; the program gets SIGWINCH."""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type keys."""
        os.write(self._terminal, keys.encode())

    def wait_for(self, text: str) -> str:
        """Read until the text appears; returns what has been read since the last call."""
        begun, deadline = len(self.output), time.monotonic() + PATIENCE_S
        while text.encode() not in self.output[begun:]:
            assert time.monotonic() < deadline, self.output[begun:].decode(errors="replace")
            self._read(1.0)
        return self.output[begun:].decode(errors="replace")

    def ended(self) -> int:
        """Wait for the end; returns the exit status."""
        deadline = time.monotonic() + PATIENCE_S
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                raise AssertionError(self.output.decode(errors="replace"))
            self._read(0.1)
        while self._read(0.1):
            pass
        os.close(self._terminal)
        return self._process.returncode

    def _read(self, seconds: float) -> bool:
        """Read what there is; whether there was something."""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # the program has closed its side
            time.sleep(0.05)
            return False
        self.output += data
        return True


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo", epochs=2, steps=8, end=False, usage=False)


def test_watch_in_a_terminal_follows_its_size_and_ends_with_q(run: Path) -> None:
    watched = watch(run)
    assert "16 of 16" in watched.wait_for("binding: as planned")
    watched.wait_for("─" * 90)
    watched.resize(60)
    watched.wait_for("\x1b[H")  # drawn again
    narrow = watched.wait_for("binding: as planned")
    assert "─" * 61 not in narrow
    watched.press("xq")
    assert watched.ended() == 0
    text = watched.output.decode(errors="replace")
    assert "\x1b[?1049h" in text and "\x1b[?1049l" in text, "the screen before comes back"
    assert "\x1b[?25h" in text and "Traceback" not in text


def test_watch_in_a_terminal_ends_with_ctrl_c_and_with_the_run(run: Path) -> None:
    watched = watch(run)
    watched.wait_for("binding: as planned")
    watched.press("\x03")
    assert watched.ended() == 130 and "Traceback" not in watched.output.decode(errors="replace")
    last = '{"event": "end", "time": 1.0, "status": "done", "steps": 16, "images": 9, "top1": 1.0, "top5": 1.0, '
    watched = watch(run)
    watched.wait_for("binding: as planned")
    with (run / "events.jsonl").open("a") as file:
        file.write(last + '"time_to_train_s": 9.0}\n')
    assert watched.ended() == 0 and "done, 9" in watched.output.decode(errors="replace")


def test_watch_in_a_dumb_terminal_prints_once_without_commands(run: Path) -> None:
    watched = watch(run, TERM="dumb")
    assert watched.ended() == 0
    text = watched.output.decode(errors="replace")
    assert "16 of 16" in text and "\x1b" not in text


def test_a_plan_in_a_terminal_has_color_unless_no_color_is_set(tmp_path: Path) -> None:
    def plan(**env: str) -> str:
        ours, theirs = pty.openpty()
        argv = [sys.executable, "-m", "cputrain.affinity", "plan", "--machine", "pack:1 core:2"]
        with subprocess.Popen(argv, stdout=theirs, env={**os.environ, **env}, cwd=Path(__file__).parents[2]) as started:
            os.close(theirs)
            text = b""
            while True:
                try:
                    text += os.read(ours, 1 << 16)
                except OSError:
                    break
        os.close(ours)
        assert started.returncode == 0
        return text.decode()

    assert "\x1b[" in plan(TERM="xterm", NO_COLOR="")
    assert "\x1b[" not in plan(TERM="xterm", NO_COLOR="1") + plan(TERM="dumb", NO_COLOR="")
