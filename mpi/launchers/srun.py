"""Slurm's srun, inside an allocation.

Each host is taken whole: only then does Slurm honor masks, and may a rank bind itself to any CPU of the plan.
"""

from pathlib import Path

from affinity.errors import InputError
from affinity.ranks import launcher_variables
from affinity.ranks.host_names import LOCALHOST
from affinity.topology.cpuset import format_mask
from mpi.launchers.job import Job
from mpi.launchers.launcher import Files, HostOptions, InstalledLauncher, Launcher, Tokens

PLACEMENT = "--distribution=block:block"


def _rank_counts(job: Job, _installed: InstalledLauncher) -> Tokens:
    if job.hosts == (LOCALHOST,):
        raise InputError("srun starts ranks on the hosts of an allocation, not on localhost: name them with --hosts")
    cpus = len(job.plan.machine.allowed_pus)
    return (
        *(f"--nodes={len(job.hosts)}", f"--ntasks={job.world_size}", f"--ntasks-per-node={job.ppn}"),
        f"--cpus-per-task={max(1, cpus // job.ppn)}",
        # An exclusive step gets a CPU for each task or is refused; one that may overcommit has the whole allocation.
        "--overcommit" if job.ppn > cpus else "--exclusive",
    )


def _bound(job: Job, _installed: InstalledLauncher, _folder: Path | None) -> tuple[Tokens, Files]:
    masks = ",".join(format_mask(worker.pus) for worker in job.plan.workers)
    return (PLACEMENT, f"--cpu-bind=mask_cpu:{masks}"), ()


SRUN = Launcher(
    name="srun",
    title="srun",
    programs=("srun",),
    package="slurm-client (Debian), Slurm",
    job_variable=launcher_variables.SLURM.job_variable,
    schedulers=("slurm",),
    rank_counts=_rank_counts,
    own_variables=launcher_variables.SLURM,
    hosts=HostOptions(
        file_format="plain",
        slots=False,
        from_file=lambda path: (f"--nodefile={path}",),
        inline=lambda job: (f"--nodelist={','.join(job.hosts)}",),
    ),
    equal_hosts=True,
    component=lambda number: (f"--het-group={number}",),
    unbound=(PLACEMENT, "--cpu-bind=none"),
    bound=_bound,
    has_pmi=True,
    last_options=("--kill-on-bad-exit=1",),
)
