"""Write checkpoints in a thread while training continues.

Each rank writes its own file; rank 0 also writes the shared files, and completes the checkpoint when every rank has
finished. What a rank has written, it says in a key of the job's store.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from cputrain.affinity.errors import RunError
from cputrain.affinity.filesystem import errors_name
from cputrain.checkpoint.files import (
    FileRecord,
    checkpoint_name,
    partial_name,
    publish_checkpoint,
    rank_file,
    remove_old,
    set_best,
    write_content,
    write_tensors,
)

POLL_S = 0.05
WRITTEN_S = 600.0  # limit for a rank to write its files after rank 0 has finished
VISIBLE_S = 60.0  # limit for another host's file to appear: network file systems cache directory listings


class Keys(Protocol):
    """Keys of a job's store."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> str | None:
        """Return a key's value, None if no rank of this job has set it."""


@dataclass(slots=True, kw_only=True)
class CheckpointWriter:
    """Writes checkpoints into a folder, one at a time, in a thread. All ranks must make the same calls.

    `enter` is called first in each thread; `keys` may be None in a job of one rank. `limit_s` is the longest wait for
    another rank's file.
    """

    folder: Path
    keys: Keys | None
    rank: int
    world_size: int
    keep: int
    enter: Callable[[], object] = lambda: None
    limit_s: float = WRITTEN_S
    _count: int = 0
    _thread: threading.Thread | None = None
    _error: Exception | None = None
    _content: dict[str, Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank's files, or on rank 0 the complete checkpoint, are still being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self,
        step: int,
        files: dict[str, dict[str, Tensor]],
        metadata: Mapping[str, str],
        content: Mapping[str, Any] | None,
    ) -> None:
        """Start to write a checkpoint when the previous one is complete: the tensors of this rank's `files`, which are
        removed from it, and the text in the header of the rank's own file. Rank 0 passes checkpoint.json, whose "files"
        are filled in."""
        self._count += 1
        number = self._count

        def work() -> None:
            try:
                sums = self._write_files(step, files, metadata)
            except OSError as error:
                self._say(number, f"failed {error.errno or errno.EIO} {error.filename or self.folder}")
                raise
            record = sums[rank_file(self.rank)]
            self._say(number, f"{record.bytes} {record.crc32c}")
            if content is not None:
                self._complete(step, content, sums, number)

        self.wait()
        self._start(work)

    def check(self) -> None:
        """Raise the exception with which the thread failed, if any."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the pending write, and raise its exception if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def take_error(self) -> Exception | None:
        """Wait for the pending write, and return its exception if it failed; the next write can begin then."""
        with suppress(Exception):
            self.wait()
        error, self._error = self._error, None
        return error

    def amend(self, change: Callable[[dict[str, Any]], dict[str, Any]], *, best: bool) -> None:
        """Change checkpoint.json of the last checkpoint on rank 0 once it is written; with `best` mark it as the
        best."""

        def work() -> None:
            assert self._content is not None
            self._content = change(self._content)
            path = self.folder / checkpoint_name(self._content["step"])
            write_content(path, self._content)
            if best:
                set_best(path)

        self._start(work)

    def _start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread, after the work that was started before."""
        before = self._thread

        def guarded() -> None:
            if before is not None:
                before.join()
            if self._error is not None:
                return
            try:
                self.enter()
                work()
            except Exception as error:  # noqa: BLE001  raised again by check() in the training's thread
                self._error = error

        self._thread = threading.Thread(target=guarded, name="cputrain-checkpoint", daemon=True)
        self._thread.start()

    def _write_files(
        self, step: int, files: dict[str, dict[str, Tensor]], metadata: Mapping[str, str]
    ) -> dict[str, FileRecord]:
        partial = self.folder / partial_name(step)
        names, sums = list(files), {}
        try:
            partial.mkdir(parents=True, exist_ok=True)
            for name in names:  # free each file's copies as soon as it is written
                text = metadata if name == rank_file(self.rank) else {}
                with errors_name(self.folder / checkpoint_name(step) / name):
                    sums[name] = write_tensors(partial / name, files.pop(name), text)
        except OSError:
            with suppress(OSError):
                for name in names:  # free a full disk for the log
                    (partial / name).unlink(missing_ok=True)
                if self.world_size == 1:  # other ranks may still write into it; then the next start removes it
                    partial.rmdir()
            raise
        return sums

    def _complete(self, step: int, content: Mapping[str, Any], sums: dict[str, FileRecord], number: int) -> None:
        partial = self.folder / partial_name(step)
        for rank in range(1, self.world_size):
            sums[rank_file(rank)] = record = self._await(rank, number)
            if not wait_until_visible(partial / rank_file(rank), record.bytes):
                file = self.folder / checkpoint_name(step) / rank_file(rank)
                raise RunError(f"{file}, written by rank {rank}, is not visible on rank 0's host")
        self._content = {**content, "files": {name: asdict(record) for name, record in sums.items()}}
        write_content(partial, self._content)
        publish_checkpoint(partial, self.folder / checkpoint_name(step))
        remove_old(self.folder, self.keep)

    def _say(self, number: int, text: str) -> None:
        """Tell rank 0 about this rank's files of a checkpoint."""
        if self.rank > 0:
            assert self.keys is not None
            self.keys.set(_key(self.rank, number), f"{number} {text}")

    def _await(self, rank: int, number: int) -> FileRecord:
        """Wait for a rank's file of this checkpoint and return its size and checksum. Raises OSError if the rank could
        not write it, RunError at the limit, which is for a rank whose message is lost."""
        assert self.keys is not None
        begun = time.monotonic()
        while True:
            words = (self.keys.get(_key(rank, number)) or "0").split(" ", 3)
            if int(words[0]) == number and words[1] == "failed":
                raise OSError(int(words[2]), os.strerror(int(words[2])), words[3])
            if int(words[0]) == number:
                return FileRecord(bytes=int(words[1]), crc32c=int(words[2]))
            if time.monotonic() - begun > self.limit_s:
                raise RunError(
                    f"rank {rank} has not written its part of a checkpoint after {self.limit_s:g} s: check for a slow "
                    "disk on its host, or for other processes that write to the job's store"
                )
            time.sleep(POLL_S)


def wait_until_visible(path: Path, size: int) -> bool:
    """Return whether a file of `size` bytes, written on another host, becomes visible within VISIBLE_S."""
    deadline = time.monotonic() + VISIBLE_S
    while not path.is_file() or path.stat().st_size != size:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _key(rank: int, number: int) -> str:
    """Return a rank's key for a checkpoint, one of two in turn: a rank can be at most one checkpoint ahead of rank 0,
    because it waits for rank 0 in the next step."""
    return f"saved/{rank}/{number % 2}"
