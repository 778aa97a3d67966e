"""Jobs of several ranks on this host: start them with torchrun's variables, wait for them, read their output."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import cache_folder
from cputrain.comm.ccl.environment import ensure_extension, find_libraries
from cputrain.mpi.supervise.run import free_port
from tests.support.forked import ROOT, Ended, Forked, ended, forked, writing


def missing_ccl() -> str:
    """Return what the ccl backend needs and does not find here; "" if it is complete."""
    try:
        find_libraries(os.environ)
    except InputError:
        return "needs oneCCL: pip install 'cputrain[ccl]'"
    return ""


needs_ccl = pytest.mark.skipif(missing_ccl() != "", reason=missing_ccl())


def unmeasured_cache(folder: Path) -> dict[str, str]:
    """Return the variable of a cache with the backend and kernels compiled here, and without measurements."""
    if not missing_ccl():
        ensure_extension(find_libraries(os.environ), os.environ)
    folder.mkdir(exist_ok=True)
    cache = cache_folder(os.environ)
    for built in cache.iterdir() if cache.is_dir() else ():
        if built.name != "measured":
            (folder / built.name).symlink_to(built)
    return {"CPUTRAIN_CACHE": str(folder)}


@contextmanager
def command(*argv: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that ends with the block; its output goes to files."""
    whole = {**os.environ, **env}
    with writing(lambda out, err: subprocess.Popen(argv, cwd=ROOT, env=whole, stdout=out, stderr=err)) as process:
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


def ran(code: str, *words: str, limit_s: float = 240, **env: str) -> Ended:
    """Run `python -c CODE WORDS` to its end."""
    with forked("-c", code, *words, **env) as process:
        return ended(process, limit_s)


OWN_SHM = """
import ctypes, os, subprocess
from pathlib import Path
user, group = os.geteuid(), os.getegid()
assert ctypes.CDLL(None).unshare(0x10020000) == 0, "no namespaces of users and mounts"
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {user} 1")
Path("/proc/self/gid_map").write_text(f"0 {group} 1")
subprocess.run("mount --make-rprivate / && mount -t tmpfs -o size=%s none /dev/shm", shell=True, check=True)
"""


def ran_with_shm(size: str, code: str, **env: str) -> Ended:
    """Run `python -c CODE` to its end, with a /dev/shm of its own of that size, as `unshare -Urm` and mount give it."""
    return ran(OWN_SHM % size + code, **env)


def lines_of(text: str) -> list[dict]:
    """Return the JSON lines in the output of ranks."""
    return [json.loads(line[line.index("{") :]) for line in text.splitlines() if '{"rank"' in line]
