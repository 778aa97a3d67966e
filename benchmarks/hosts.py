"""Hosts for a benchmark: network namespaces of this one."""

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.support.fake_hosts import FakeHosts, fake_hosts


@contextmanager
def benchmark_hosts(count: int) -> Iterator[FakeHosts]:
    """So many hosts, h1 to hN, in a temporary folder. SIGTERM (`timeout`) ends the benchmark as an error does, so that
    neither they nor the bridge between them are left behind."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with tempfile.TemporaryDirectory() as folder, fake_hosts(Path(folder), count) as hosts:
            yield hosts
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleanup
    sys.exit(128 + number)
