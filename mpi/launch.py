"""One small function per launcher: Job -> tokens. Nothing here starts anything."""

import sys

from mpi.job import Job
from mpi.rank import Rank, rendezvous

LOOPBACK = "127.0.0.1"
MASTER_PORT = 29500  # torch.distributed's own default


def bound(job: Job, python: str = sys.executable) -> tuple[str, ...]:
    """The job's command behind affinity.bind, the same tokens for every rank."""
    flags = (*(() if job.verify else ("--no-verify",)), *(("--keep-env",) if job.keep_env else ()))
    return (python, "-m", "affinity.bind", "--plan", str(job.plan_path), *flags, "--", *job.command)


def local(job: Job, port: int) -> tuple[tuple[tuple[str, ...], dict[str, str]], ...]:
    """(argv, variables to add) of each worker of this host, by rank."""
    ranks = (
        Rank(rank=i, world_size=job.ppn, local_rank=i, local_world_size=job.ppn, launcher="env") for i in range(job.ppn)
    )
    return tuple((bound(job), rendezvous(rank, LOOPBACK, port)) for rank in ranks)


def intelmpi(job: Job) -> tuple[str, ...]:
    """Intel MPI's mpirun. Its own pinning is switched off: each rank binds itself, so there is one binder."""
    return (
        *("mpirun", "-np", str(job.world_size), "-ppn", str(job.ppn), "-hostfile", "hosts"),
        *("-genv", "I_MPI_PIN", "0", "-genv", "MASTER_ADDR", job.hosts[0], "-genv", "MASTER_PORT", str(MASTER_PORT)),
        *bound(job, python="python"),
    )
