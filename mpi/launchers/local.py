"""Workers of this host, started without a launcher."""

from affinity.ranks.rank import LOOPBACK, Rank, rendezvous
from mpi.launchers.job import Job, bound_command
from mpi.launchers.launcher import LaunchCommand


def local_commands(job: Job, port: int) -> tuple[LaunchCommand, ...]:
    """The command of each worker that is started on this host; ranks meet at this port of the loopback interface,
    those of several pods at that of the first one."""
    if job.instances is not None:
        return tuple(LaunchCommand(argv=bound_command(job, i), variables=job.variables) for i in job.instances)
    world = job.pods.count * job.ppn
    ranks = (
        Rank(rank=rank, world_size=world, local_rank=i, local_world_size=job.ppn, convention="env")
        for i, rank in enumerate(job.started)
    )
    argv = bound_command(job)
    address = LOOPBACK if job.pods.count == 1 else job.master_addr or LOOPBACK
    meeting = (rendezvous(rank, address, port).items() for rank in ranks)
    return tuple(LaunchCommand(argv=argv, variables=(*variables, *job.variables)) for variables in meeting)
