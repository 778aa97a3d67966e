"""Before a host's first job whose ranks may use MPI or libfabric: oneCCL's transports are measured, in processes of
their own."""

import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from affinity.errors import RunError
from affinity.filesystem import cache_folder
from affinity.ranks.host_names import is_this_host
from affinity.start import own_program
from cputrain.transports import TITLES, VARIABLE, kept_seconds
from mpi.launchers.job import Job
from mpi.launchers.launcher import Launcher

MAY_USE_CCL = ("python", "cputrain")  # what a command starts with
BACKENDS = "ccl-torch*/*.so"


def measure_transports(job: Job, launcher: Launcher, env: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Measure, where nothing is known of this host and nothing else decides; reports what was found, or why nothing."""
    if not is_due(job, launcher, env):
        return
    report(f"measuring oneCCL over MPI and libfabric, once ({VARIABLE}=mpi or ofi starts without)")
    command = own_program("cputrain.comm.ccl.check")
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8", check=False
    )
    last_line = (done.stdout.strip().splitlines() or [f"the measurement ended with status {done.returncode}"])[-1]
    report(f"warning: not measured: {last_line}" if done.returncode else f"measured: {last_line}")


def is_due(job: Job, launcher: Launcher, env: Mapping[str, str]) -> bool:
    """Whether a job may use oneCCL over both transports, on this host alone, and their times are not known."""
    here = len(job.hosts) == 1 and is_this_host(job.hosts[0])
    may_use_ccl = Path(job.command[0]).name.startswith(MAY_USE_CCL) and _has_backend(env)
    open_choice = here and launcher.has_pmi and VARIABLE not in env and may_use_ccl
    return open_choice and len(kept_seconds(env)) < len(TITLES)


def _has_backend(env: Mapping[str, str]) -> bool:
    """Whether the backend has been compiled for this user, as its first use does."""
    with suppress(RunError):  # no cache folder
        return any(cache_folder(env).glob(BACKENDS))
    return False
