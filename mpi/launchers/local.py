"""Workers of this host, started without a launcher."""

from affinity.ranks.rank import LOOPBACK, Rank, rendezvous
from mpi.launchers.job import Job, bound_command
from mpi.launchers.launcher import LaunchCommand


def local_commands(job: Job, port: int) -> tuple[LaunchCommand, ...]:
    """The command of each worker of this host, by rank; they meet at this port of the loopback interface."""
    ranks = (
        Rank(rank=i, world_size=job.ppn, local_rank=i, local_world_size=job.ppn, convention="env")
        for i in range(job.ppn)
    )
    argv = bound_command(job)
    return tuple(LaunchCommand(argv=argv, variables=tuple(rendezvous(r, LOOPBACK, port).items())) for r in ranks)
