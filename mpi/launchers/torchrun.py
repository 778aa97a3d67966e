"""torchrun: the same command on every host, to be started on each of them."""

from affinity.ranks import launcher_variables
from affinity.ranks.host_names import network_name
from affinity.ranks.rank import MASTER_PORT
from mpi.launchers.job import Job
from mpi.launchers.launcher import InstalledLauncher, Launcher, Tokens


def _rank_counts(job: Job, _installed: InstalledLauncher) -> Tokens:
    first = network_name(job.hosts[0])
    endpoint = f"{f'[{first}]' if ':' in first else first}:{job.master_port or MASTER_PORT}"
    return (
        *(f"--nnodes={len(job.hosts)}", f"--nproc-per-node={job.ppn}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"),
    )


TORCHRUN = Launcher(
    name="torchrun",
    title="torchrun",
    programs=("torchrun",),
    package="torch",
    rank_counts=_rank_counts,
    own_variables=launcher_variables.ENV,
    equal_hosts=True,
    reaches_hosts=False,
    variables=lambda job: job.variables,  # it tells its ranks itself where to meet
    last_options=("--no-python",),
)
