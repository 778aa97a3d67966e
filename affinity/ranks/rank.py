"""Any launcher's environment -> rank, local rank, world size; and torch.distributed's env:// variables."""

from collections.abc import Mapping
from dataclasses import dataclass

from affinity.errors import InputError

LOOPBACK = "127.0.0.1"
MASTER_PORT = 29500  # torch.distributed's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process's place in its job; `convention` names the variables it was read from."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    convention: str

    @property
    def one_host(self) -> bool:
        """Whether all ranks of the job are on this host."""
        return self.local_world_size == self.world_size


# (convention, rank, world size, local rank, local world size), most specific first: srun's variables are also there
# when another launcher runs inside a Slurm job, and PMI's under several of them.
CONVENTIONS = (
    ("env", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "mvapich",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("intelmpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("pals", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)
# Launchers' variables for the local rank.
LOCAL_RANK_VARIABLES = (*(names[3] for names in CONVENTIONS), "SLURM_LOCALID")


def discover(env: Mapping[str, str]) -> Rank | None:
    """This process's rank; None when no launcher started it. Raises InputError where variables are missing."""
    incomplete = []
    for convention, *names in CONVENTIONS:
        if names[0] not in env or names[1] not in env:
            continue
        missing = [name for name in names if name not in env]
        if missing:
            incomplete.append(f"{names[0]} is set but {', '.join(missing)} is not set")
            continue
        rank, world, local, local_world = (_number(env, name) for name in names)
        return _checked(
            Rank(rank=rank, world_size=world, local_rank=local, local_world_size=local_world, convention=convention)
        )
    # srun leaves half of PMI's variables too. A batch script has SLURM_PROCID like a task, but only tasks belong to a
    # numbered step; a step of one task is most often a shell, in which people start things themselves.
    if "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "").isdigit():
        return _srun_rank(env) if _number(env, "SLURM_STEP_NUM_TASKS") > 1 else None
    if "PMIX_RANK" in env:  # prterun's ranks get the rest from its server
        incomplete.append("PMIX_RANK is set but no world size is set")
    if incomplete:
        raise InputError(
            f"{'; '.join(incomplete)}: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for each rank, or, if no "
            "launcher started this process, unset these variables"
        )
    return None


def local_rank_of(env: Mapping[str, str]) -> int | None:
    """This process's local rank, where a launcher has set at least that; else None."""
    return next((int(env[name]) for name in LOCAL_RANK_VARIABLES if env.get(name, "").isdigit()), None)


def _srun_rank(env: Mapping[str, str]) -> Rank:
    return _checked(
        Rank(
            rank=_number(env, "SLURM_PROCID"),
            world_size=_number(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(env, "SLURM_LOCALID"),
            local_world_size=tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[_number(env, "SLURM_NODEID")],
            convention="srun",
        )
    )


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Slurm's run-length format: "2(x3),1" -> (2, 2, 2, 1)."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return tuple(counts)


def rendezvous(rank: Rank, address: str, port: int) -> dict[str, str]:
    """The env:// variables that torch.distributed.init_process_group() reads."""
    return {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _number(env: Mapping[str, str], name: str) -> int:
    if not env.get(name, "").isdigit():
        raise InputError(
            f"{name}={env.get(name)!r} is not a number: start the rank with mpirun, srun, torchrun or cputrain launch"
        )
    return int(env[name])


def _checked(rank: Rank) -> Rank:
    if not (rank.rank < rank.world_size and rank.local_rank < rank.local_world_size <= rank.world_size):
        raise InputError(
            f"the launcher's variables contradict each other (rank {rank.rank} of {rank.world_size}, local rank "
            f"{rank.local_rank} of {rank.local_world_size}): unset them, or start with cputrain launch"
        )
    return rank
