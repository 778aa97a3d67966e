"""A control group with a memory limit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LIMITS = {Path("/sys/fs/cgroup"): "memory.max", Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes"}  # v2, v1


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yield the folder of a new control group with this memory limit; skips if none can be created."""
    for root, name in LIMITS.items():
        group = root / f"cputrain-oom-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / name).is_file():
                (group / name).write_text(str(limit_bytes))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip(reason="needs a control group that limits memory: root, and the memory controller")


def inside(group: Path, *argv: str) -> list[str]:
    """Return the command-line prefix that runs a command in the group."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *argv]
