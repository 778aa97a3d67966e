"""The supervisor of the ranks that this process starts: their output, logs, resource use, exits and end."""

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from affinity.errors import InputError
from mpi.supervise.exits import LAST_LINES, RankExit
from mpi.supervise.output import Stream
from mpi.supervise.process import signal_group, start_rank
from mpi.supervise.signals import InterruptedBySignalError, stopped_again
from mpi.usage.file import FOLDER as USAGE
from mpi.usage.sampler import Sampler

STOP_POLL_S = 0.05
CHUNK_BYTES = 1 << 16


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """A started rank. `exited_at` is the monotonic time at which its exit was noticed."""

    rank: int
    process: subprocess.Popen[bytes]
    log: BinaryIO
    streams: list[Stream] = field(default_factory=list)
    exited_at: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the rank has exited with a status other than 0."""
        return self.exited_at is not None and self.process.returncode != 0

    def exit(self) -> RankExit:
        """How the rank has exited, with its last output."""
        for stream in self.streams:
            stream.flush()
        assert self.exited_at is not None
        lines = Path(self.log.name).read_text(errors="replace").splitlines()
        return RankExit(
            rank=self.rank,
            host=socket.gethostname(),
            status=self.process.returncode,
            time=self.exited_at,
            log=self.log.name,
            tail=tuple(lines[-LAST_LINES:]),
        )


class RankSupervisor:
    """Starts ranks on this host, shows and logs their output, samples their use, notes their exits, ends them.

    `log_dir` gets rank-N.log of each rank; their resource use goes to usage/ beside it. With `live` progress
    bars are redrawn, for a person who watches; None: where the stream is a terminal.
    """

    def __init__(self, log_dir: Path, out: TextIO, err: TextIO, *, live: bool | None = None) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.ranks: list[RankProcess] = []
        self._log_dir = log_dir
        self._terminals = (out, err)
        self._live = live
        self._selector = selectors.DefaultSelector()
        self._open_pipes = 0
        self._sampler: Sampler | None = None

    @property
    def all_exited(self) -> bool:
        """Whether every rank's exit has been noted."""
        return all(rank.exited_at is not None for rank in self.ranks)

    def start(
        self, number: int, argv: tuple[str, ...], env: Mapping[str, str], *, label: str, inherit_files: bool = False
    ) -> None:
        """Start rank `number`, whose lines are shown behind the label. Raises InputError where there is no such
        program, OSError where it cannot be logged."""
        log = (self._log_dir / f"rank-{number}.log").open("wb", buffering=0)
        try:
            process = start_rank(argv, env, inherit_files=inherit_files)
        except OSError as error:
            log.close()
            raise InputError(f"cannot start {argv[0]!r}: {error.strerror}") from None
        rank = RankProcess(rank=number, process=process, log=log)
        self.ranks.append(rank)
        for pipe, terminal in zip((process.stdout, process.stderr), self._terminals, strict=True):
            assert pipe is not None
            live = terminal.isatty() if self._live is None else self._live
            stream = Stream(label=label, terminal=terminal, log=log, live=live)
            rank.streams.append(stream)
            self._open_pipes += 1
            self._selector.register(
                pipe, selectors.EVENT_READ, lambda pipe=pipe, stream=stream: self._read(pipe, stream)
            )

    def sample(self, *, whole_host: bool) -> None:
        """Sample from now on what the started ranks use, and with `whole_host` the host."""
        pids = {rank.rank: rank.process.pid for rank in self.ranks}
        self._sampler = Sampler(self._log_dir.parent / USAGE, pids, whole_host=whole_host)

    def watch(self, connection: socket.socket, receive: Callable[[], None]) -> None:
        """Call `receive` in `poll` when the connection has something to read."""
        self._selector.register(connection, selectors.EVENT_READ, receive)

    def poll(self, timeout_s: float) -> None:
        """Move output, note exits and take a sample where one is due; waits that long for something to happen."""
        if self._open_pipes:
            self._dispatch(timeout_s)
        else:  # a rank that has closed its output is about to exit
            self._dispatch(0)
            running = next((rank for rank in self.ranks if rank.exited_at is None), None)
            with suppress(subprocess.TimeoutExpired):
                if running is not None:
                    running.process.wait(timeout_s)
        self._note_exits()
        if self._sampler is not None:
            self._sampler.tick()

    def signal(self, number: int) -> None:
        """Send a signal to every rank, not to the processes below it."""
        for rank in self.ranks:
            rank.process.send_signal(number)

    def stop(self, grace_s: float, reap_s: float = 0.0) -> None:
        """End every rank and all that it has started: first by SIGTERM, after grace_s or at a second stop signal by
        SIGKILL. Waits up to reap_s until init has reaped what the ranks had started."""
        self._signal_groups(signal.SIGTERM)
        self._signal_groups(signal.SIGCONT)
        try:
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and not self.all_exited and not stopped_again():
                time.sleep(STOP_POLL_S)
                self._note_exits()
        except InterruptedBySignalError:
            pass  # the first Ctrl-C, while the ranks are being ended
        finally:
            self._signal_groups(signal.SIGKILL)
            for rank in self.ranks:
                rank.process.wait()
                self._note_exits()  # one at a time: the sampler counts the CPU time of each as it is reaped
            deadline = time.monotonic() + reap_s
            while time.monotonic() < deadline and self._signal_groups(0):
                time.sleep(STOP_POLL_S)

    def drain(self) -> None:
        """Move the output that is still in the pipes."""
        while self._open_pipes and self._dispatch(0):
            continue

    def close(self) -> None:
        """Write the last samples and the last output. The ranks have been stopped before."""
        if self._sampler is not None:
            self._sampler.close()
        self.drain()
        for rank in self.ranks:
            for stream in rank.streams:
                stream.close()
            rank.log.close()
        self._selector.close()

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
                if self._sampler is not None:
                    self._sampler.ended(rank.rank)

    def _signal_groups(self, number: int) -> bool:
        """Send a signal (0: none) to every rank and all that it has started; whether any of them is still there."""
        reached = [signal_group(rank.process.pid, number) for rank in self.ranks]
        return any(reached)
