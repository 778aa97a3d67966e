"""A rank's output on its way to the terminal and its log: whole lines with labels, progress bars kept moving."""

import time
from dataclasses import dataclass
from typing import BinaryIO, TextIO

CLEAR_LINE = "\r\x1b[2K"
PLAIN_PROGRESS_S = 10.0  # where there is no terminal, a progress bar is one line this often


@dataclass(slots=True, kw_only=True)
class Stream:
    """One pipe of one rank and its log, which is unbuffered. A carriage return begins a progress bar, which is redrawn
    where `live`, when a person watches."""

    label: str
    terminal: TextIO
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
        _, carriage, last = rest.rpartition(b"\r")
        self._pending = (carriage + last) if carriage else rest
        if last.strip() and carriage:
            self._progress(last)
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
        self.terminal.write(f"{start}{self.label}{line.decode(errors='replace')}\n")
        self._transient = False

    def _progress(self, text: bytes) -> None:
        self._transient = True
        shown = f"{self.label}{text.decode(errors='replace')}"
        if self.live:
            self.terminal.write(CLEAR_LINE + shown)
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
