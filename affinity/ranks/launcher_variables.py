"""The environment variables of each launcher and scheduler: a rank's numbers, a job's id, all that they set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherVariables:
    """What launchers of one kind, or a scheduler, leave in the environment of a rank."""

    convention: str
    """The name of the kind, as `Rank.convention` has it."""
    rank_names: tuple[str, ...] = ()
    """Rank, world size, local rank, local world size; () where it starts no ranks."""
    names_suffice: bool = True
    """Whether `rank_names` alone tell a rank; False: ranks/rank.py has a function for it, or there are none."""
    for_scripts: bool = False
    """Whether the ranks of all launchers get `rank_names` too, for scripts that read them."""
    prefixes: tuple[str, ...] = ()
    """Beginnings of the names of all its variables beside `rank_names`."""
    start_id: tuple[str, ...] = ()
    """Variables that are equal for all ranks of one start and together differ between starts."""
    job_variable: str | None = None
    """The id of a scheduler's job."""
    pmi_of: tuple[str, str] | None = None
    """A variable that only this launcher sets, and its name in messages, where oneCCL cannot use MPI with its PMI."""


ENV = LauncherVariables(
    convention="env",  # torch.distributed's env://, which torchrun and cputrain launch set
    rank_names=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    prefixes=("TORCHELASTIC_",),
)
OPEN_MPI = LauncherVariables(
    convention="openmpi",
    rank_names=(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    for_scripts=True,
    prefixes=("OMPI_", "PRTE_", "PMIX_"),
    start_id=("PMIX_NAMESPACE",),
    pmi_of=("OMPI_UNIVERSE_SIZE", "Open MPI's mpirun"),
)
MVAPICH = LauncherVariables(
    convention="mvapich",
    rank_names=(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    prefixes=("MV2_",),
)
HYDRA = LauncherVariables(
    convention="intelmpi",  # and MPICH
    rank_names=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    for_scripts=True,
    prefixes=("PMI_", "MPI_", "I_MPI_", "HYDRA_", "HYDI_"),
    start_id=("I_MPI_HYDRA_UUID",),
)
PALS = LauncherVariables(
    convention="pals",
    rank_names=("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    prefixes=("PALS_",),
    start_id=("PALS_APID",),
)
SLURM = LauncherVariables(
    convention="srun",
    rank_names=("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    names_suffice=False,
    for_scripts=True,
    prefixes=("SLURM_",),
    start_id=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    job_variable="SLURM_JOB_ID",
)
PBS = LauncherVariables(convention="pbs", names_suffice=False, prefixes=("PBS_",), job_variable="PBS_JOBID")

# Most specific first: srun's variables are also there when another launcher runs inside a Slurm job, and PMI's under
# several of them.
LAUNCHER_VARIABLES = (ENV, OPEN_MPI, MVAPICH, HYDRA, PALS, SLURM, PBS)
# As above, but Intel MPI's mpirun may be started in a task that srun's PMIx has given its own namespace.
START_IDS = tuple(each.start_id for each in (HYDRA, OPEN_MPI, SLURM, PALS))
PREFIXES = tuple(prefix for each in LAUNCHER_VARIABLES for prefix in each.prefixes)
PMI_CONNECTIONS = ("PMI_FD", "PMI_PORT")  # an MPI's connection to PMI's server
