"""Any command under a plan: the job that starts it, or this process as one of its ranks."""

import re
import shutil
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path, PurePath

from affinity.errors import InputError
from affinity.ranks.rendezvous import port_of
from cputrain.launch.hosts import check_binder
from cputrain.launch.options import PlanningOptions, het_groups, network_of
from cputrain.launch.rank_software import COMPILING
from cputrain.runs.folder import LOGS, PLAN
from mpi.hosts.groups import Cluster
from mpi.launchers.job import Job
from mpi.launchers.table import LAUNCHERS
from mpi.supervise.local import free_port

PYTHON = re.compile(r"python[0-9.]*")


def command_job(
    options: PlanningOptions,
    cluster: Cluster,
    command: tuple[str, ...],
    folder: Path,
    env: Mapping[str, str],
    *,
    verify: bool = True,
    allow_other_layout: bool = False,
    keep_env: bool = False,
    plan_on_host: bool = False,
) -> Job:
    """The job of a command on the planned hosts; the switches are Job's own.

    MASTER_ADDR, MASTER_PORT and the fabric's variables that the user has exported win over the defaults. They are
    handed to the other hosts explicitly, as not every launcher does so.
    """
    port = port_of(env)
    here = options.on_this_host
    settings = () if here and options.pods == 1 else network_of(options).settings
    return Job(
        groups=cluster.groups,
        # By its path: Open MPI puts its own folder first on its ranks' PATH, and a Python may be there.
        command=(shutil.which(command[0]) or command[0], *command[1:]),
        plan_path=folder / PLAN,
        log_dir=folder / LOGS,
        binder=options.bind,
        master_addr=None if here and options.pods == 1 else env.get("MASTER_ADDR") or None,
        master_port=free_port() if here and port is None else port,
        variables=tuple((name, env.get(name, value)) for name, value, _ in settings),
        verify=verify,
        allow_other_layout=allow_other_layout,
        keep_env=keep_env,
        plan_on_host=plan_on_host,
        names_errors="cputrain" in [PurePath(word).name for word in command[:4]],  # or python -m cputrain
        starting=COMPILING,
        het_groups=het_groups(options, cluster),
    )


def program(words: tuple[str, ...], *, module: bool) -> tuple[str, ...]:
    """The command of the words behind launch's options: this Python runs a .py file and, with `module`, a module."""
    if module:
        return (sys.executable, "-m", *words)
    return (sys.executable, *words) if words[0].endswith(".py") else words


def check_program(command: tuple[str, ...], env: Mapping[str, str]) -> None:
    """Raise InputError where this host has no such program, or Python no such script."""
    first, behind = command[0], command[1:2]
    if behind and behind[0].endswith(".py") and is_python(first) and not Path(behind[0]).is_file():
        raise InputError(f"script {behind[0]} does not exist: give an existing one")
    if shutil.which(first, path=env.get("PATH")) is None:
        raise InputError(f"{first[:60]} is {_no_program(first)}")


def is_python(word: str) -> bool:
    """Whether a word names Python's interpreter: "python3", "/usr/bin/python3.11"."""
    return PYTHON.fullmatch(PurePath(word).name) is not None


def _no_program(name: str) -> str:
    """What a word is that was given for a program, and what to do with it."""
    if Path(name).is_dir():
        return "a folder, not a program: give a script or a program"
    if Path(name).is_file():
        return f"a file that cannot be executed: chmod +x {name}, or name its interpreter first"
    if is_python(name):
        return "no program here: leave it out, and a .py script runs under the Python of cputrain"
    from cputrain.recipe.loading import recipe_names  # pydantic: only where it may be one

    if name in recipe_names():
        return f"a recipe, not a program: cputrain train {name} trains it"
    return "no program on PATH: give a script or a program, as in cputrain launch -- python x.py"


def check_launch(options: PlanningOptions, *, plan_on_host: bool) -> None:
    """Raise InputError where options of a launch cannot be combined."""
    here = options.on_this_host
    if options.machine != "this" and here:
        raise InputError("launch runs on real hosts: remove --machine, or name hosts of that machine with --hosts")
    if options.launcher == "local" and not here:
        raise InputError("--launcher local starts workers on this host only: leave out --launcher or --hosts")
    launcher = LAUNCHERS.get(options.launcher)
    if launcher is not None and not launcher.reaches_hosts and not here:
        raise InputError(
            f"{launcher.title} must be started on every host: run there what cputrain plan prints, or name an MPI's "
            "launcher"
        )
    check_binder(options)
    if plan_on_host and options.share:
        raise InputError("--share and --plan-on-host cannot be combined: give one")
    if plan_on_host and (not isinstance(options.ppn, int) or options.bind == "launcher"):
        raise InputError("--plan-on-host needs the same --ppn N on every host, and excludes --bind launcher")


def new_folder(folder: Path, *, named: bool) -> Path:
    """Make a launch's folder, which no other launch shares.

    A `named` folder must be empty or absent (InputError); the default name gets a number where it is taken.
    """
    for number in count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if candidate.is_dir() and any(candidate.iterdir()) and named:
            break
        try:
            (candidate / LOGS).mkdir(parents=True)
        except FileExistsError:
            if named:
                break
            continue
        return candidate
    raise InputError(f"--output {folder} already exists: name another folder")
