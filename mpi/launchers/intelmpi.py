"""Intel MPI's mpirun: pinning off, or given the plan's masks by local rank."""

import re
from collections.abc import Mapping
from pathlib import Path

from affinity.ranks import launcher_variables
from affinity.topology.cpuset import format_mask
from mpi.launchers.job import Job, Variables
from mpi.launchers.launcher import Files, HostOptions, InstalledLauncher, Launcher, Tokens, by_genv

MASKS_IN_HEX = (2021,)  # from this version on a mask needs its 0x, which older ones refuse


def _rank_counts(job: Job, _installed: InstalledLauncher) -> Tokens:
    per_host = ("-ppn", str(job.ppn)) if len(job.groups) == 1 else ()
    return ("-np", str(job.world_size), *per_host)


def _bound(job: Job, installed: InstalledLauncher, _folder: Path | None) -> tuple[Tokens, Files]:
    masks = [format_mask(worker.pus) for worker in job.plan.workers]
    if installed.version < MASKS_IN_HEX:
        masks = [mask.removeprefix("0x") for mask in masks]
    return ("-genv", "I_MPI_PIN", "1", "-genv", "I_MPI_PIN_DOMAIN", f"[{','.join(masks)}]"), ()


def _environment(prefix: Path, env: Mapping[str, str]) -> Variables:
    """What setvars.sh would set for an Intel MPI from PyPI, which has its libraries in prefix/lib."""
    lib = prefix / "lib"
    if "I_MPI_ROOT" in env or not (lib / "libmpi.so.12").exists():
        return ()
    libraries = ":".join(filter(None, (str(lib), env.get("LD_LIBRARY_PATH"))))
    return (("I_MPI_ROOT", str(prefix)), ("FI_PROVIDER_PATH", str(lib)), ("LD_LIBRARY_PATH", libraries))


INTEL_MPI = Launcher(
    name="intelmpi",
    title="Intel MPI",
    programs=("mpirun", "mpiexec"),
    binary="mpiexec.hydra",
    package="impi-rt (PyPI) or Intel oneAPI's MPI",
    version=re.compile(r"Intel\(R\) MPI Library.*Version (\d+)[. Update]*(\d*)"),
    newest=(2021, 17),
    environment=_environment,
    schedulers=("pbs",),
    rank_counts=_rank_counts,
    own_variables=launcher_variables.HYDRA,
    hosts=HostOptions(
        file_format="hydra",
        from_file=lambda path: ("-machinefile", str(path)),
        inline=lambda job: ("-hosts", ",".join(job.hosts)),
    ),
    unbound=("-genv", "I_MPI_PIN", "0"),
    bound=_bound,
    has_pmi=True,
    mpi_operator_name="Intel",
    rank_variable=by_genv,
)
