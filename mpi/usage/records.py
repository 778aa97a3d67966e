"""Records of CPU, memory and network over time, and their file."""

import errno
import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

MOST_RECORDS = 600  # of a worker or a host, however long the run
MOST = 1 << 62  # of any number in a record
MOST_INTERFACES = 8  # of a host in a record, the busiest: hosts of containers have hundreds

Number = Annotated[float, Meta(ge=0, lt=MOST)]
Count = Annotated[int, Meta(ge=0, lt=MOST)]
Network = dict[str, tuple[Count, Count]]  # interface -> bytes received, bytes sent


class WorkerUse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The use of a rank and all processes below it in the `seconds` up to `time` (Unix).

    `cpu_s` is user and system time; `rss_bytes` the largest sum of their resident memory, in which pages that
    processes share count once for each; `processes` the most at a time.
    """

    time: Number
    seconds: Number
    host: str
    cpu_s: Number
    rss_bytes: Count
    processes: Count


class HostUse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The use of a whole host, by all its processes, in the `seconds` up to `time` (Unix).

    `cpu_s` is the time that its PUs were busy; `memory_available_bytes` the least that was left for new allocations
    without swapping; `network` the bytes received and sent by interface, the loopback ("lo") among them.
    """

    time: Number
    seconds: Number
    cpu_s: Number
    memory_available_bytes: Count
    network: Network


Use = TypeVar("Use", WorkerUse, HostUse)


def merged(earlier: Use, later: Use) -> Use:
    """Two successive records as one."""
    names = earlier.__struct_fields__
    return type(earlier)(**{name: MERGE[name](getattr(earlier, name), getattr(later, name)) for name in names})


def total(*parts: Mapping[str, tuple[int, int]]) -> Network:
    """Bytes by interface, summed."""
    summed: Network = {}
    for part in parts:
        for name, (received, sent) in part.items():
            before = summed.get(name, (0, 0))
            summed[name] = (before[0] + received, before[1] + sent)
    return summed


def moved(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Network:
    """Bytes by interface between two readings, without interfaces that were idle, new or reset."""
    found = {
        name: (received - before[name][0], sent - before[name][1])
        for name, (received, sent) in after.items()
        if name in before
    }
    return busiest({name: both for name, both in found.items() if min(both) >= 0 and max(both) > 0})


def busiest(network: Mapping[str, tuple[int, int]]) -> Network:
    """The MOST_INTERFACES interfaces of the most bytes."""
    return dict(sorted(network.items(), key=lambda item: (-sum(item[1]), item[0]))[:MOST_INTERFACES])


MERGE: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("time", "host"), lambda _earlier, later: later),
    **dict.fromkeys(("seconds", "cpu_s"), operator.add),
    **dict.fromkeys(("rss_bytes", "processes"), max),
    "memory_available_bytes": min,
    "network": lambda earlier, later: busiest(total(earlier, later)),
}
"""How each field of two successive records becomes that of both."""


def grouped(records: Iterable[Use], period_s: float) -> list[Use]:
    """Successive records, merged until each covers at least the period, except perhaps the last one."""
    made: list[Use] = []
    for record in records:
        if made and made[-1].seconds < period_s:
            made[-1] = merged(made[-1], record)
        else:
            made.append(record)
    return made


def thinned(records: Sequence[Use], most: int = MOST_RECORDS) -> list[Use]:
    """At most half of `most` records, and one, of about the same length: no second, byte or peak is lost."""
    return grouped(records, fitting_period(records, most))


def fitting_period(records: Iterable[Use], most: int = MOST_RECORDS) -> float:
    """Seconds for each record with which those covered so far take half of `most` records."""
    return sum(record.seconds for record in records) / (most // 2)


def to_line(record: Use) -> bytes:
    """A record as a line of JSON, times to the millisecond."""
    values = {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(record).items()}
    return json.dumps(values).encode() + b"\n"


def from_line(line: bytes, kind: type[Use]) -> Use:
    """The inverse of `to_line`. Raises ValueError on a line that is cut short, damaged or of another kind."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


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
