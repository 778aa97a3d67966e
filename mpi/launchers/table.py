"""Every launcher by its name."""

from mpi.launchers.intelmpi import INTEL_MPI
from mpi.launchers.launcher import Launcher
from mpi.launchers.mpich import MPICH
from mpi.launchers.openmpi import OPEN_MPI
from mpi.launchers.srun import SRUN
from mpi.launchers.torchrun import TORCHRUN

LAUNCHERS: dict[str, Launcher] = {launcher.name: launcher for launcher in (INTEL_MPI, OPEN_MPI, MPICH, SRUN, TORCHRUN)}


def launchers_for(scheduler: str) -> tuple[Launcher, ...]:
    """The launchers that may start the ranks of a job script for "slurm" or "pbs", the preferred one first."""
    return tuple(launcher for launcher in LAUNCHERS.values() if scheduler in launcher.schedulers)
