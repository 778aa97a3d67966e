"""A rank's output on its way to the terminal and its log: whole lines with labels, progress bars kept moving."""

import codecs
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import IO, BinaryIO, TextIO

from cputrain.affinity.terminal import SafeOutput, clip, printed_text, safe_output

CLEAR_LINE = "\r\x1b[2K"
CHUNK_BYTES = 1 << 16
MAX_CHUNKS = 256  # that wait to be shown
BLOCKED_S = 5.0  # that a process waits to be shown; its ranks are taken for lost after three times as long
END = bytes(1)  # known by its identity
MOST_OF_A_LINE = 1 << 20  # bytes: a longer line is shown and logged in parts
PLAIN_PROGRESS_S = 10.0  # where there is no terminal, a progress bar is one line this often


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """A stream that people see. Where it is closed (`| head`) or full, that is said once on stderr, and the job goes on
    with its logs, which are in a folder."""

    stream: TextIO
    name: str
    logs: Path

    def write(self, text: str) -> None:
        """Show a text; a character that the stream's encoding lacks (a locale without UTF-8) as `?`."""
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding
            self.write(text.encode(encoding, errors="replace").decode(encoding))
        except OSError as error:
            self._lose(error)

    def flush(self) -> None:
        """Show what has been written."""
        try:
            self.stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        discard(self.stream)
        with suppress(OSError):
            print(
                f"cputrain: {self.name}: {error.strerror}: the job goes on, and its output is in {self.logs}",
                file=sys.stderr,
                flush=True,
            )


class Relay:
    """Copies what a process writes to a pipe to a stream that people see, from threads, to the pipe's end.

    Where the stream takes nothing (Ctrl-S, a pager, a stalled connection), what does not fit into the memory for it is
    left out, and that is said: ranks that wait to write send no heartbeats.
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
        return f"\ncputrain: {left_out:,} bytes that nobody read were left out: see {self._terminal.logs}\n".encode()

    def _show(self) -> None:
        decoder, output = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace"), SafeOutput()
        while (data := self._chunks.get()) is not END:
            self._terminal.write(output.feed(decoder.decode(data)))
            self._terminal.flush()
        self._terminal.write(output.finish())
        self._terminal.flush()

    def finish(self, patience_s: float) -> None:
        """Wait for the pipe's end, which what the process has left behind may hold open, and until all is shown."""
        deadline = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


def discard(stream: TextIO) -> None:
    """From now on, let a stream that cannot be written lead nowhere: what it still holds fails no more at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@dataclass(slots=True, kw_only=True)
class Stream:
    """One pipe of one rank and its log, which is unbuffered. A carriage return begins a progress bar, which is redrawn
    where `live`, when a person watches."""

    label: str
    terminal: Terminal
    log: BinaryIO
    live: bool
    _pending: bytes = b""
    _log_is_full: bool = False
    _transient: bool = False
    _shown_at: float = float("-inf")

    def feed(self, data: bytes) -> None:
        """Show and log the whole lines of new output, redraw its progress bar."""
        *lines, rest = (self._pending + data).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            self._line(line.rpartition(b"\r")[2])
        before, carriage, last = rest.rpartition(b"\r")
        self._pending = (carriage + last) if carriage else rest
        if len(self._pending) > MOST_OF_A_LINE:
            self._line(self._pending.lstrip(b"\r"))
            self._pending = b""
        drawn = last if last.strip() else before.rpartition(b"\r")[2]
        if drawn.strip() and carriage:
            self._progress(drawn)
        self.terminal.flush()

    def flush(self) -> None:
        """Show and log an unfinished last line; remove an unfinished bar."""
        pending, self._pending = self._pending, b""
        if self._transient and self.live:
            self.terminal.write(CLEAR_LINE)
        if pending and not self._transient:
            self._line(pending)
        self._transient = False

    def close(self) -> None:
        """End the stream; the log stays with its owner."""
        self.flush()
        self.terminal.flush()

    def _line(self, line: bytes) -> None:
        self._log_line(line)
        if not line and self._transient:
            self._transient = False  # a bar that ends with a line feed: already on the screen
            self.terminal.write("\n" if self.live else "")
            return
        start = CLEAR_LINE if self.live else ""
        self.terminal.write(f"{start}{self.label}{safe_output(printed_text(line))}\n")
        self._transient = False

    def _progress(self, text: bytes) -> None:
        self._transient = True
        shown = f"{self.label}{safe_output(printed_text(text))}"
        if self.live:
            self.terminal.write(CLEAR_LINE + clip(shown, get_terminal_size().columns - 1))  # a second row would stay
        elif time.monotonic() - self._shown_at >= PLAIN_PROGRESS_S:
            self.terminal.write(shown.rstrip() + "\n")
            self._log_line(text.rstrip())
            self._shown_at = time.monotonic()

    def _log_line(self, line: bytes) -> None:
        """Log a line. A log that cannot be written is no reason to end a job of many hours."""
        if self._log_is_full:
            return
        try:
            self.log.write(line + b"\n")
        except OSError as error:
            self._log_is_full = True
            self.terminal.write(f"cputrain: {self.log.name}: {error.strerror}: the job goes on without this log\n")
