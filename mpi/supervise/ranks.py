"""Supervisor of the ranks that this process starts: their output, logs, resource use, activity, exits and end.

Output goes to the terminal and to logs in whole lines, with labels on the terminal; progress bars are redrawn.
"""

import codecs
import os
import queue
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import get_terminal_size
from typing import IO, BinaryIO, TextIO

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import survives_signal
from cputrain.affinity.terminal import SafeOutput, clip_line, discard_output, printed_text, safe_output
from cputrain.mpi.supervise.activity import READ_S, ActivityMeter, process_tree
from cputrain.mpi.supervise.processes import (
    LAST_LINES,
    NO_ANSWER,
    KillCounter,
    OutOfMemory,
    RankExit,
    RankGroup,
    WatchedFiles,
    read_stacks,
)
from cputrain.mpi.supervise.signals import PREEMPTION_SIGNAL, RunningClock
from cputrain.mpi.supervise.stalls import RankState, Stacks, is_where_it_was
from cputrain.mpi.usage import FOLDER as USAGE
from cputrain.mpi.usage import Sampler

CLEAR_LINE = "\r\x1b[2K"
CHUNK_BYTES = 1 << 16
MAX_CHUNKS = 256  # waiting to be shown
BLOCKED_S = 5.0  # limit for blocked output; ranks that are silent for three times as long count as lost
END = bytes(1)  # compared by identity
MAX_LINE_BYTES = 1 << 20  # bytes: a longer line is shown and logged in parts
PLAIN_PROGRESS_S = 10.0  # without a terminal, a progress bar is printed as a line this often


OUR_LINE = re.compile(r"^(?:\r\x1b\[2K)?((?:\[[^\]\n]*\] )?)(cputrain: [^\n]*)\n", re.MULTILINE)
MAX_REMEMBERED_LINES = 1000  # of cputrain's lines

STOP_POLL_S = 0.05
PREEMPT_S = 30.0  # after which a rank gets the preemption signal even if it neither handles nor blocks it
TAIL_BYTES = 1 << 16  # at the end of a log, searched for its last lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """A stream that users read. If it is closed (`| head`) or full, stderr reports this once, and the job continues
    with its logs in `logs`.

    A line `cputrain: ...` that several ranks print to stderr, such as an input error, is shown for one of them.
    """

    stream: TextIO
    name: str
    logs: Path
    _labels: dict[str, str] = field(default_factory=dict)  # line -> label of the first rank that printed it

    def write(self, text: str) -> None:
        """Show a text; characters that the stream's encoding lacks (in a locale without UTF-8) become `?`."""
        if self.name == "stderr":
            text = OUR_LINE.sub(self._of_one_rank, text)
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding
            self.write(text.encode(encoding, errors="replace").decode(encoding))
        except OSError as error:
            self._lose(error)

    def _of_one_rank(self, line: re.Match[str]) -> str:
        label, message = line.groups()
        if len(self._labels) < MAX_REMEMBERED_LINES:
            self._labels.setdefault(message, label)
        return line[0] if self._labels.get(message, label) == label else ""

    def flush(self) -> None:
        """Show what has been written."""
        try:
            self.stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        discard_output(self.stream)
        with suppress(OSError):
            print(
                f"cputrain: {self.name}: {error.strerror}; the job continues, and its output is in {self.logs}",
                file=sys.stderr,
                flush=True,
            )


class Relay:
    """Copy a process's output from a pipe to a stream that users read, in threads, until the pipe ends.

    If the stream is blocked (Ctrl-S, a pager, a stalled connection), output beyond the buffer is dropped with a notice,
    because ranks that wait to write send no heartbeats.
    """

    def __init__(self, pipe: IO[bytes], terminal: Terminal) -> None:
        self._pipe, self._terminal = pipe, terminal
        self._chunks: queue.Queue[bytes] = queue.Queue(MAX_CHUNKS)
        self._threads = [
            threading.Thread(target=target, name="relay", daemon=True) for target in (self._read, self._show)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        left_out = 0
        with self._pipe:
            while data := os.read(self._pipe.fileno(), CHUNK_BYTES):
                try:
                    self._chunks.put(self._notice(left_out) + data, block=not left_out, timeout=BLOCKED_S)
                    left_out = 0
                except queue.Full:
                    left_out += len(data)
        self._chunks.put(self._notice(left_out))
        self._chunks.put(END)

    def _notice(self, left_out: int) -> bytes:
        if not left_out:
            return b""
        text = f"{left_out:,} bytes of output were dropped because nobody read them: see {self._terminal.logs}"
        return f"\ncputrain: {text}\n".encode()

    def _show(self) -> None:
        decoder, output = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace"), SafeOutput()
        while (data := self._chunks.get()) is not END:
            self._terminal.write(output.feed(decoder.decode(data)))
            self._terminal.flush()
        self._terminal.write(output.finish())
        self._terminal.flush()

    def finish(self, patience_s: float) -> None:
        """Wait until the pipe ends, which the process's orphans may hold open, and all output is shown."""
        deadline = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


@dataclass(slots=True, kw_only=True)
class Stream:
    """One pipe of one rank, and its unbuffered log. A carriage return begins a progress bar, which is redrawn if
    `live`, for a terminal."""

    label: str
    terminal: Terminal
    log: BinaryIO
    live: bool
    _pending: bytes = b""
    _log_is_full: bool = False
    _transient: bool = False
    _shown_at: float = float("-inf")

    def feed(self, data: bytes) -> None:
        """Show and log the complete lines of new output; redraw its progress bar."""
        *lines, incomplete = (self._pending + data).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            self._line(line.rpartition(b"\r")[2])
        before, carriage, last = incomplete.rpartition(b"\r")
        self._pending = (carriage + last) if carriage else incomplete
        if len(self._pending) > MAX_LINE_BYTES:
            self._line(self._pending.lstrip(b"\r"))
            self._pending = b""
        drawn = last if last.strip() else before.rpartition(b"\r")[2]
        if drawn.strip() and carriage:
            self._progress(drawn)
        self.terminal.flush()

    def flush(self) -> None:
        """Show and log an unfinished last line; remove an unfinished progress bar."""
        pending, self._pending = self._pending, b""
        if self._transient and self.live:
            self.terminal.write(CLEAR_LINE)
        if pending and not self._transient:
            self._line(pending)
        self._transient = False

    def close(self) -> None:
        """End the stream, but leave the log open for its owner."""
        self.flush()
        self.terminal.flush()

    def _line(self, line: bytes) -> None:
        self._log_line(line)
        if not line and self._transient:
            self._transient = False  # a bar that ends with a line feed is already on the screen
            self.terminal.write("\n" if self.live else "")
            return
        start = CLEAR_LINE if self.live else ""
        self.terminal.write(f"{start}{self.label}{safe_output(printed_text(line))}\n")
        self._transient = False

    def _progress(self, text: bytes) -> None:
        self._transient = True
        shown = f"{self.label}{safe_output(printed_text(text))}"
        if self.live:
            self.terminal.write(
                CLEAR_LINE + clip_line(shown, get_terminal_size().columns - 1)
            )  # CLEAR_LINE clears one row
        elif time.monotonic() - self._shown_at >= PLAIN_PROGRESS_S:
            self.terminal.write(shown.rstrip() + "\n")
            self._log_line(text.rstrip())
            self._shown_at = time.monotonic()

    def _log_line(self, line: bytes) -> None:
        """Log a line. A log that cannot be written must not end a job of many hours."""
        if self._log_is_full:
            return
        try:
            self.log.write(line + b"\n")
        except OSError as error:
            self._log_is_full = True
            self.terminal.write(f"cputrain: {self.log.name}: {error.strerror}; the job continues without this log\n")


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """A started rank. `stack` is its last Python stack, `stacked_at` when it was read (the supervisor's clock),
    `exited_at` when its exit was noticed (monotonic)."""

    rank: int
    process: subprocess.Popen[bytes]
    log: BinaryIO
    files: WatchedFiles
    meter: ActivityMeter
    stack: tuple[str, ...] = ()
    stacked_at: float = 0.0
    streams: list[Stream] = field(default_factory=list)
    exited_at: float | None = None
    shortage: OutOfMemory | None = None

    @property
    def failed(self) -> bool:
        """Whether the rank exited with a status other than 0."""
        return self.exited_at is not None and self.process.returncode != 0

    def exit(self) -> RankExit:
        """Describe the rank's exit, with its last output."""
        for stream in self.streams:
            stream.flush()
        return self._exit(last_lines(Path(self.log.name)))

    def standing(self) -> RankState:
        """Return what the rank is doing, or was doing when it exited."""
        exited = None if self.exited_at is None else self._exit(())
        return RankState(rank=self.rank, host=socket.gethostname(), activity=self.meter.activity, exit=exited)

    def _exit(self, tail: tuple[str, ...]) -> RankExit:
        assert self.exited_at is not None
        return RankExit(
            rank=self.rank,
            host=socket.gethostname(),
            status=self.process.returncode,
            time=self.exited_at,
            log=self.log.name,
            tail=tail,
            shortage=self.shortage,
        )


def last_lines(log: Path) -> tuple[str, ...]:
    """Return the last lines of a log of any length; none if it was deleted."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = printed_text(file.read()).splitlines()
    except OSError:
        return ()
    return tuple(lines[-LAST_LINES:])


class RankSupervisor:
    """Start ranks on this host, show and log their output, track their activity and exits, and end them.

    `log_dir` receives rank-N.log of each rank; their resource use goes to usage/ beside it. `live`: whether progress
    bars are redrawn on `out` and on `err`, for a terminal.
    """

    def __init__(self, log_dir: Path, out: TextIO, err: TextIO, *, live: tuple[bool, bool] = (False, False)) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.ranks: list[RankProcess] = []
        self.clock = RunningClock()
        self._log_dir = log_dir
        self._terminals = tuple(
            Terminal(stream=stream, name=name, logs=log_dir) for stream, name in ((out, "stdout"), (err, "stderr"))
        )
        self._live = live
        self._selector = selectors.DefaultSelector()
        self._open_pipes = 0
        self._sampler: Sampler | None = None
        self._kills = KillCounter()
        self._read_at = self.clock.now()
        self._group = RankGroup()
        self._preempted: set[int] = set()
        self._preempt_until: float | None = None

    @property
    def all_exited(self) -> bool:
        """Whether every rank's exit has been noticed."""
        return all(rank.exited_at is not None for rank in self.ranks)

    def start(
        self, number: int, argv: tuple[str, ...], env: Mapping[str, str], *, label: str, inherit_files: bool = False
    ) -> None:
        """Start rank `number`; its lines are shown after the label. Raises InputError if the program does not exist,
        OSError if the log cannot be opened."""
        log = (self._log_dir / f"rank-{number}.log").open("wb", buffering=0)
        files = WatchedFiles.create()
        try:
            process = self._group.start(argv, env, files, inherit_files=inherit_files)
        except OSError as error:
            log.close()
            files.close()
            raise InputError(f"cannot start {argv[0]!r}: {error.strerror}") from None
        meter = ActivityMeter(process.pid, self.clock.now(), files.state)
        rank = RankProcess(rank=number, process=process, log=log, files=files, meter=meter)
        self.ranks.append(rank)
        pipes = (process.stdout, process.stderr)
        for pipe, terminal, live in zip(pipes, self._terminals, self._live, strict=True):
            assert pipe is not None
            stream = Stream(label=label, terminal=terminal, log=log, live=live)
            rank.streams.append(stream)
            self._open_pipes += 1
            self._selector.register(
                pipe, selectors.EVENT_READ, lambda pipe=pipe, stream=stream: self._read(pipe, stream)
            )
        if self._sampler is not None:
            self._sampler.started(number, process.pid)

    def sample(self, *, whole_host: bool) -> None:
        """Sample the resource use of the ranks, none of which has been started, and with `whole_host` of the host."""
        self._sampler = Sampler(self._log_dir.parent / USAGE, {}, whole_host=whole_host)

    def watch(self, connection: socket.socket, receive: Callable[[], None]) -> None:
        """Call `receive` in `poll` when the connection has data."""
        self._selector.register(connection, selectors.EVENT_READ, receive)

    def poll(self, timeout_s: float) -> bool:
        """Move output, notice exits, and read activity and resource use if due; wait up to timeout_s for an event.
        Return True if the activity was read."""
        self._group.guard()
        if self._open_pipes:
            self._dispatch(timeout_s)
        else:  # a rank that has closed its output is about to exit
            self._dispatch(0)
            running = next((rank for rank in self.ranks if rank.exited_at is None), None)
            with suppress(subprocess.TimeoutExpired):
                if running is not None:
                    running.process.wait(timeout_s)
        self._note_exits()
        if self._preempt_until is not None:
            self._send_preemptions(self._preempt_until)
        if self._sampler is not None:
            self._sampler.tick()
        now = self.clock.now()
        if now - self._read_at < READ_S:
            return False
        self._read_at = now
        for rank in self.ranks:
            rank.meter.read(now)
        self._kills.read()
        return True

    def rank_states(self) -> tuple[RankState, ...]:
        """Return what the ranks are doing, or were doing when they exited."""
        return tuple(rank.standing() for rank in self.ranks)

    def stacks(self, numbers: Sequence[int]) -> Stacks:
        """Return the Python stacks of the running ranks among these: an earlier one if a rank does not answer in time
        and is where it was, empty for a rank without one."""
        shown = [rank for rank in self.ranks if rank.rank in numbers and rank.exited_at is None]
        stacks = read_stacks([(process_tree(rank.process.pid), rank.files) for rank in shown])
        now = self.clock.now()
        for rank, stack in zip(shown, stacks, strict=True):
            answered = stack and stack != (NO_ANSWER,)
            if answered or not rank.stack or not is_where_it_was(rank.meter.activity, now - rank.stacked_at):
                rank.stack, rank.stacked_at = stack, now
        return {rank.rank: rank.stack for rank in shown}

    def preempt(self) -> None:
        """Make `poll` send the preemption signal to every rank (not its descendants) once the rank handles or blocks
        it, or after PREEMPT_S: a program that is still starting would be killed by it. Safe in a signal handler."""
        self._preempted, self._preempt_until = set(), time.monotonic() + PREEMPT_S

    def _send_preemptions(self, until: float) -> None:
        waiting = [rank for rank in self.ranks if rank.exited_at is None and rank.rank not in self._preempted]
        for rank in waiting:
            if survives_signal(rank.process.pid, PREEMPTION_SIGNAL) or time.monotonic() > until:
                self._preempted.add(rank.rank)
                rank.process.send_signal(PREEMPTION_SIGNAL)

    def stop(self, grace_s: float, at_once: Callable[[], bool] = lambda: False) -> None:
        """End every rank and its descendants: by SIGTERM, then by SIGKILL after grace_s or once `at_once` is true. If
        all ranks succeeded, processes that they put into new sessions keep running."""
        succeeded = self.all_exited and not any(rank.failed for rank in self.ranks)
        ended = self.all_exited
        self._group.signal(signal.SIGTERM)
        self._group.signal(signal.SIGCONT)
        deadline = time.monotonic() + grace_s
        while not (ended or time.monotonic() > deadline or at_once()):
            self._dispatch(STOP_POLL_S)
            self._note_exits()
            ended = self.all_exited and not self._group.running
        if succeeded:
            self._group.signal(signal.SIGKILL)
        else:
            self._group.kill()
        for rank in self.ranks:
            rank.process.wait()
            self._note_exits()  # one at a time: the sampler counts each rank's CPU time as it is reaped

    def say(self, text: str) -> None:
        """Show the supervisor's own message on `err`, which may be closed or full."""
        self._terminals[1].write(f"{text}\n")
        self._terminals[1].flush()

    def drain(self) -> None:
        """Show and log the output that is still in the pipes."""
        while self._open_pipes and self._dispatch(0):
            continue

    def close(self) -> None:
        """Write the last samples and output. The ranks must have been stopped before."""
        if self._sampler is not None:
            self._sampler.close()
        self.drain()
        for rank in self.ranks:
            for stream in rank.streams:
                stream.close()
            for pipe in (rank.process.stdout, rank.process.stderr):
                if pipe is not None:
                    pipe.close()
            rank.log.close()
            rank.files.close()
        self._selector.close()
        self._group.close()

    def _dispatch(self, timeout_s: float) -> bool:
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _read(self, pipe: BinaryIO, stream: Stream) -> None:
        data = os.read(pipe.fileno(), CHUNK_BYTES)
        if data:
            stream.feed(data)
        else:
            self._selector.unregister(pipe)
            self._open_pipes -= 1

    def _note_exits(self) -> None:
        for rank in self.ranks:
            if rank.exited_at is None and rank.process.poll() is not None:
                rank.exited_at = time.monotonic()
                if rank.failed:
                    rank.shortage = self._kills.shortage(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
                self._group.note_exit(rank.process.pid)
                if self._sampler is not None:
                    self._sampler.ended(rank.rank)
