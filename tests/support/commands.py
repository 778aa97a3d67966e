"""Run commands as a user does, find launchers by name, and skip tests whose requirements are missing."""

import io
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

import pytest

from cputrain.affinity.topology.sysfs import this_machine

PYTHON = shlex.quote(sys.executable)  # for a shell's command line
HANGS_S = 300.0  # for commands that take a few seconds
CORES = len(this_machine().allowed_cores)
PPN = min(2, CORES)  # workers of most tests
needs_two_cores = pytest.mark.skipif(CORES < 2, reason="needs two cores")


def need(package: str, program: str) -> None:
    """Skip the test if a system package is missing."""
    if not shutil.which(program):
        pytest.skip(reason=f"needs the system package {package} ({program})")


def optional(module: str, extra: str) -> Any:
    """Return a module of an optional requirement. If it is missing, its first use skips the test."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        return _Missing(f"needs {module}: pip install 'cputrain[{extra}]'")


class _Missing:
    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip(reason=self._reason)


def mpi_path(name: str) -> dict[str, str]:
    """Return PATH with a launcher first: from `make mpi`, or the system's "openmpi4"; skips if it is missing."""
    if name == "openmpi4":
        program = shutil.which("mpirun.openmpi", path="/usr/bin")
        if program is None:
            pytest.skip(reason="needs the system package openmpi-bin (mpirun.openmpi)")
        return {"PATH": f"/usr/bin:{os.environ['PATH']}"}
    folder = Path(__file__).parents[2] / ".mpi" / name / "bin"
    if not (folder / "mpirun").exists():
        pytest.skip(reason=f"needs {name}: make mpi")
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def launchers(*often: str) -> list[Any]:
    """The real launchers as a test's parameters. `make test` has those that are named, which differ from test to test;
    the others are nightly."""
    names, rarely = ("intelmpi", "openmpi", "openmpi4", "mpich"), (pytest.mark.long, pytest.mark.nightly)
    return [pytest.param(name, marks=() if name in often else rarely) for name in names]


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tarball. Python 3.11.3 and older, such as Debian 12's, know no filters."""
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
        opened.extractall(folder)


def children_of(pid: int) -> list[int]:
    """Return the child processes of this process."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            children += map(int, path.read_text().split())
    return children


def stacks_of(pid: int) -> str:
    """Return the stack of every thread of a process from a debugger, or its command line if there is no debugger."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    gdb = shutil.which("gdb")
    if gdb is None:
        return f"{pid}: {command}"
    requested = (gdb, "-p", str(pid), "-batch", "-iex", "set auto-load safe-path /", "-ex", "thread apply all bt 14")
    expected = subprocess.run(requested, capture_output=True, text=True, timeout=120, check=False).stdout
    return f"{pid}: {command}\n" + "\n".join(
        line[:300] for line in expected.splitlines() if line.startswith(("#", "Thr"))
    )


def cputrain(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in the bare environment of a shell. If it hangs, fail with its stacks."""
    argv = [sys.executable, "-m", "cputrain", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=cwd, env={**os.environ, **env}, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=HANGS_S)
        except subprocess.TimeoutExpired:
            where = "\n".join(stacks_of(pid) for pid in [process.pid, *children_of(process.pid)])
            process.terminate()
            out, err = process.communicate()
            pytest.fail(f"hangs: {argv}\n{where}\n{out}\n{err}")
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


@contextmanager
def logged_to(stream: TextIO, lines: logging.Formatter) -> Iterator[None]:
    """Write the log of cputrain's packages to a stream, as the command does to stderr."""
    logger, handler = logging.getLogger("cputrain"), logging.StreamHandler(stream)
    handler.setFormatter(lines)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def here(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts no ranks in this process, in milliseconds instead of a second.

    Fails if the command would replace this process by a bound one, as `predict` does.
    """
    from cputrain.cli import _PrintableFormatter, _run

    def restarts(*_: object) -> None:
        pytest.fail(f"{arguments[0]} takes the place of this process: run it by `cputrain`")

    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape", write_through=True)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.chdir(cwd or ".")
        for name, value in env.items():
            patch.setenv(name, value)
        for name in ("execv", "execve"):
            patch.setattr(os, name, restarts)
        with redirect_stderr(io.StringIO()) as err, logged_to(err, _PrintableFormatter("%(message)s")):
            status = _run([*arguments])
    return subprocess.CompletedProcess(
        arguments, status, out.buffer.getvalue().decode(errors="surrogateescape"), err.getvalue()
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """Return the only line of a command that rejected its input with status 2; fails otherwise."""
    assert result.returncode == 2, result.stderr + result.stdout
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]
