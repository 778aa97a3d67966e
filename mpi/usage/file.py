"""A file of usage records: appended to during a run and by the run that resumes it, limited in size."""

import errno
import os
from pathlib import Path
from typing import BinaryIO, Generic

from mpi.usage.records import MOST_RECORDS, Use, fitting_period, from_line, merged, thinned, to_line

FOLDER = "usage"  # beside a run's logs
SHORTEST_S = 0.5  # the kernel counts CPU time in steps of 0.01 s


def worker_file(folder: Path, rank: int) -> Path:
    """The file of a rank's records."""
    return folder / f"rank-{rank}.jsonl"


def host_file(folder: Path, host: str) -> Path:
    """The file of a host's records."""
    return folder / f"host-{host}.jsonl"


def read_records(path: Path, kind: type[Use]) -> list[Use]:
    """A file's records, oldest first; a line cut short by a crash and what follows it are left out."""
    records: list[Use] = []
    for line in path.read_bytes().splitlines():
        try:
            records.append(from_line(line, kind))
        except (ValueError, RecursionError):
            break
    return records


class UsageFile(Generic[Use]):
    """A file of at most MOST_RECORDS lines: at that number they are merged into half as many longer records."""

    def __init__(self, path: Path, kind: type[Use]) -> None:
        self._path = path
        self._records: list[Use] = read_records(path, kind) if path.is_file() else []
        self._pending: Use | None = None
        self._period_s = SHORTEST_S
        self._file = self._rewritten()

    def add(self, record: Use) -> None:
        """Add a record; it is written once it covers as much time as each record in the file."""
        self._pending = record if self._pending is None else merged(self._pending, record)
        if self._pending.seconds >= self._period_s:
            self._flush()

    def close(self) -> None:
        """Write the rest, as part of the last record where it is so short that its rates would be noise."""
        if self._pending is not None and self._records and self._pending.seconds < self._period_s:
            self._records[-1] = merged(self._records[-1], self._pending)
            self._pending = None
            self._rewrite()
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        if self._pending is None:
            return
        line = to_line(self._pending)
        self._records.append(self._pending)
        self._pending = None
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        if len(self._records) >= MOST_RECORDS:
            self._rewrite()

    def _rewrite(self) -> None:
        before, self._file = self._file, self._rewritten()
        before.close()

    def _rewritten(self) -> BinaryIO:
        """The file, written again without a line that was cut short, and thinned where due."""
        if len(self._records) > MOST_RECORDS // 2:
            self._period_s = max(self._period_s, fitting_period(self._records))
            self._records = thinned(self._records)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        try:
            beside.write_bytes(b"".join(map(to_line, self._records)))
            beside.rename(self._path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        return self._path.open("ab", buffering=0)
