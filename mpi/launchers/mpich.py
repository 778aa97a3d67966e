"""MPICH's mpiexec (Hydra)."""

import re
from pathlib import Path

from affinity.ranks import launcher_variables
from mpi.launchers.job import Job
from mpi.launchers.launcher import Files, InstalledLauncher, Launcher, Tokens, by_genv, hosts_with_ranks


def _bound(job: Job, _installed: InstalledLauncher, _folder: Path | None) -> tuple[Tokens, Files]:
    domains = ("+".join(map(str, worker.pus)) for worker in job.plan.workers)
    return ("-bind-to", f"user:{','.join(domains)}"), ()


MPICH = Launcher(
    name="mpich",
    title="MPICH",
    programs=("mpiexec", "mpirun"),
    package="mpich (Debian, conda, PyPI)",
    version=re.compile(r"(?s)HYDRA build details:.*?Version:\s*(\d+)\.(\d+)"),
    newest=(5, 0),
    schedulers=("pbs",),
    rank_counts=lambda job, _installed: ("-n", str(job.world_size)),
    own_variables=launcher_variables.HYDRA,
    hosts=hosts_with_ranks("hydra", "-f", "-hosts"),
    unbound=("-bind-to", "none"),
    bound=_bound,
    has_pmi=True,
    mpi_operator_name="MPICH",
    rank_variable=by_genv,
)
