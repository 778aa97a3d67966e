"""Jobs of several ranks on this host: start them with torchrun's variables, wait for them, read their output."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import pytest

from cputrain.comm.ccl.environment import ensure_built, find_libraries
from cputrain.mpi.supervise import free_port
from tests.support.commands import stacks_of
from tests.support.forked import ROOT, Forked

Process = subprocess.Popen[bytes] | Forked
Kind = TypeVar("Kind", subprocess.Popen[bytes], Forked)


def unmeasured_cache(folder: Path) -> dict[str, str]:
    """Return the variable of a cache with the compiled backend and kernels, and without measurements."""
    cache = ensure_built(find_libraries(os.environ), os.environ).parents[1]
    folder.mkdir(exist_ok=True)
    for built in cache.iterdir():
        if built.name != "measured":
            (folder / built.name).symlink_to(built)
    return {"CPUTRAIN_CACHE": str(folder)}


@dataclass(frozen=True)
class Ended:
    """A finished rank: its exit status and its output."""

    status: int
    out: str
    err: str


@contextmanager
def _writing(start: Callable[[IO[bytes], IO[bytes]], Kind]) -> Iterator[Kind]:
    """Start a process that ends with the block; its output goes to files."""
    with ExitStack() as stack:
        # Files instead of pipes: a rank must not wait for its reader while another rank waits for it.
        out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        process = start(out, err)
        stack.callback(process.wait)
        stack.callback(process.kill)
        process.stdout, process.stderr = out, err
        yield process


@contextmanager
def command(*argv: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that ends with the block; its output goes to files."""
    whole = {**os.environ, **env}
    with _writing(lambda out, err: subprocess.Popen(argv, cwd=ROOT, env=whole, stdout=out, stderr=err)) as process:
        yield process


@contextmanager
def forked(*words: str, **env: str) -> Iterator[Forked]:
    """`python WORDS` (-m MODULE ... or -c CODE ...) in the same way, without the seconds of an import of torch."""
    with _writing(lambda out, err: Forked(words, {**os.environ, **env}, out, err)) as process:
        yield process


@contextmanager
def started(*argv: str, ranks: int = 2, **env: str) -> Iterator[list[Forked]]:
    """Start ranks of a module, or of "-c", CODE, with torchrun's variables; all of them end with the block."""
    words = argv if argv[0] == "-c" else ("-m", *argv)
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())
    with ExitStack() as stack:
        yield [
            stack.enter_context(forked(*words, **{**common, "RANK": str(i), "LOCAL_RANK": str(i), **env}))
            for i in range(ranks)
        ]


def ended(process: Process, limit_s: float) -> Ended:
    """Wait for a rank; fail with its stacks if it takes longer."""
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pytest.fail(stacks_of(process.pid))
    return Ended(status, *printed(process))


def ran(code: str, *words: str, limit_s: float = 240, **env: str) -> Ended:
    """Run `python -c CODE WORDS` to its end."""
    with forked("-c", code, *words, **env) as process:
        return ended(process, limit_s)


def printed(process: Process) -> tuple[str, str]:
    """Return a rank's output so far: stdout, stderr."""
    texts = []
    for file in (process.stdout, process.stderr):
        assert file is not None
        texts.append(os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace"))
    return texts[0], texts[1]


def lines_of(text: str) -> list[dict]:
    """Return the JSON lines in the output of ranks."""
    return [json.loads(line[line.index("{") :]) for line in text.splitlines() if '{"rank"' in line]
