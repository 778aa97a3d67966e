"""Which launcher this host has: found on PATH, identified by its version."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import either
from cputrain.mpi.launchers.launcher import InstalledLauncher, Launcher
from cputrain.mpi.launchers.programs import LAUNCHERS

VERSION_TIMEOUT_S = 60.0
SYSTEM_PREFIXES = ("/usr", "/usr/local")
SUGGESTED = "openmpi"  # to those who have no launcher


def newest_version(name: str) -> InstalledLauncher:
    """The launcher in its newest version, for hosts that cannot be inspected."""
    launcher = LAUNCHERS[name]
    return InstalledLauncher(launcher=launcher, version=launcher.newest, program=launcher.programs[0])


def on_job_hosts(name: str) -> InstalledLauncher:
    """The launcher as job scripts call it: in its newest version, whose options all versions take, and by its binary,
    as a shell script would end at a signal that is meant for the ranks."""
    newest = newest_version(name)
    return replace(newest, program=newest.launcher.binary or newest.program)


def find_launcher(
    requested: str, env: Mapping[str, str], launchers: Mapping[str, Launcher] = LAUNCHERS
) -> InstalledLauncher:
    """The requested launcher on PATH; "auto" takes that of the job around this process, else whatever mpirun is.

    Raises InputError naming the package to install where there is none, or where mpirun is another launcher.
    """
    path = env.get("PATH")
    if requested == "auto":
        launcher = next((one for one in launchers.values() if _is_inside(one, env)), None)
    else:
        launcher = launchers[requested]
    if launcher is not None and launcher.version is None:
        return _by_name(launcher, path)
    mpis = [one for one in launchers.values() if one.version is not None]
    programs = launcher.programs if launcher else dict.fromkeys(name for one in mpis for name in one.programs)
    found = [one for name in programs if (one := identify(name, env, launchers))]
    match = next((one for one in found if launcher in (None, one.launcher)), None)
    if match is None:
        missing = f"no {_any_program(launchers)}" if launcher is None else f"no {requested}"
        here = f"; {Path(found[0].program).name} here is {found[0].launcher.title}" if found else ""
        raise InputError(f"{missing} on PATH{here}: install {(launcher or launchers[SUGGESTED]).package}")
    return match


def without_path(installed: InstalledLauncher) -> InstalledLauncher:
    """The same launcher, to be called from any environment: a script among its programs looks for the binary on PATH,
    which nothing has set where the installation needs variables of its own."""
    if installed.launcher.binary is None or not installed.variables:
        return installed
    binary = Path(installed.program).with_name(installed.launcher.binary)
    return replace(installed, program=str(binary)) if binary.is_file() else installed


def _is_inside(launcher: Launcher, env: Mapping[str, str]) -> bool:
    """Whether this process is in a job of the launcher's own, and the launcher is there."""
    variable = launcher.job_variable
    inside = variable is not None and variable in env
    return inside and shutil.which(launcher.programs[0], path=env.get("PATH")) is not None


def _by_name(launcher: Launcher, path: str | None) -> InstalledLauncher:
    program = shutil.which(launcher.programs[0], path=path)
    if program is None:
        raise InputError(f"no {launcher.programs[0]} on PATH: install {launcher.package}")
    return InstalledLauncher(launcher=launcher, version=(), program=program)


def identify(
    name: str, env: Mapping[str, str], launchers: Mapping[str, Launcher] = LAUNCHERS
) -> InstalledLauncher | None:
    """The program of this name on PATH, or of this path, as the launcher whose version it prints; None where there is
    none."""
    program = shutil.which(name, path=env.get("PATH"))
    if program is None:
        return None
    candidates = [one for one in launchers.values() if one.version is not None]
    prefix = Path(program).resolve().parent.parent
    needed = {launcher.name: launcher.environment(prefix, env) for launcher in candidates}
    all_needed = dict(variable for variables in needed.values() for variable in variables)
    try:
        result = subprocess.run(
            [program, "--version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            env={**env, **all_needed},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{program} --version fails: {error}: put a working launcher first on PATH") from None
    for launcher in candidates:
        assert launcher.version is not None
        match = launcher.version.search(result.stdout + result.stderr)
        if match:
            return InstalledLauncher(
                launcher=launcher,
                version=tuple(int(part) for part in match.groups() if part),
                program=program,
                prefix=None if str(prefix) in SYSTEM_PREFIXES else str(prefix),
                as_root=os.geteuid() == 0,
                variables=needed[launcher.name],
            )
    known = either([launcher.title for launcher in candidates])
    raise InputError(f"{program} is an unknown launcher: put {known} first on PATH")


def _any_program(launchers: Mapping[str, Launcher]) -> str:
    """The programs that "auto" looks for, in every job or in one of the launcher's own."""
    found = [one for one in launchers.values() if one.version is not None or one.job_variable is not None]
    return either(list(dict.fromkeys(name for one in found for name in one.programs)))
