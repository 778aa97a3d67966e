"""The command line as a user meets it, launchers by name, and honest skips."""

import io
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

import pytest

from tests.support.hangs import children_of, stacks_of

HANGS_S = 300.0  # for a command that takes some seconds


def need(package: str, program: str) -> None:
    """Skip the test where a system package is absent."""
    if not shutil.which(program):
        pytest.skip(reason=f"needs the system package {package} ({program})")


def mpi_path(name: str) -> dict[str, str]:
    """PATH with a launcher first: those of `make mpi`, or the system's "openmpi4"; skips where it is absent."""
    if name == "openmpi4":
        program = shutil.which("mpirun.openmpi", path="/usr/bin")
        if program is None:
            pytest.skip(reason="needs the system package openmpi-bin (mpirun.openmpi)")
        return {"PATH": f"/usr/bin:{os.environ['PATH']}"}
    folder = Path(__file__).parents[2] / ".mpi" / name / "bin"
    if not (folder / "mpirun").exists():
        pytest.skip(reason=f"needs {name}: make mpi")
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def cputrain(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a shell's bare environment. One that hangs fails with where it does."""
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
    """What our packages log is written to a stream, as the command writes it to stderr."""
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
    """Run a command that starts no ranks in this process, which takes milliseconds where `cputrain` takes a second.

    Fails where the command would start again, bound, in place of this process, as `predict` does.
    """
    from cputrain.cli import _PrintableFormatter, _run

    def restarts(*_: object) -> None:
        pytest.fail(f"{arguments[0]} takes the place of this process: run it by `cputrain`")

    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape", write_through=True)
    with pytest.MonkeyPatch.context() as patch, chdir(cwd or "."), redirect_stdout(out):
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
    """The one line of a command that refused its input with status 2; fails on anything else."""
    assert result.returncode == 2, result.stderr + result.stdout
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]
