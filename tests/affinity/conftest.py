"""Tarballs of machines are unpacked in memory: files in /tmp cost a disk's file system five times as much CPU time."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
MAX_BYTES = 1 << 28  # what tests that are run at a time may unpack


@pytest.fixture(autouse=True)
def scratch_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path_factory.getbasetemp()  # the folder of tmp_path is made at its first use and stays where it is
    if os.access(MEMORY, os.W_OK | os.X_OK):
        free = os.statvfs(MEMORY)
        if free.f_bavail * free.f_frsize > MAX_BYTES:
            monkeypatch.setattr(tempfile, "tempdir", str(MEMORY))


@pytest.fixture
def scratch(scratch_in_memory: None) -> Iterator[Path]:
    """A folder for the thousands of files of a host's /sys."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
