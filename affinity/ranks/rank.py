"""Any launcher's environment -> rank, local rank, world size; and torch.distributed's env:// variables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from affinity.errors import InputError
from affinity.ranks.launcher_variables import ENV, LAUNCHER_VARIABLES, SLURM
from affinity.wording import counted

LOOPBACK = "127.0.0.1"
MASTER_PORT = 29500  # torch.distributed's own default
MAX_RANKS = 1 << 24
NUMBER = re.compile("[0-9]{1,9}")
STEP_TASKS = "SLURM_STEP_TASKS_PER_NODE"
SET_TASKS = "set it to the tasks of each host as Slurm does, 4(x2) for two hosts of 4"
TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


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


# Launchers' variables for the local rank.
LOCAL_RANK_VARIABLES = tuple(each.rank_names[2] for each in LAUNCHER_VARIABLES if each.rank_names)


def discover(env: Mapping[str, str]) -> Rank | None:
    """This process's rank; None when no launcher started it. Raises InputError where variables are missing."""
    incomplete = []
    for launcher in LAUNCHER_VARIABLES:
        names = launcher.rank_names
        if not launcher.names_suffice or names[0] not in env or names[1] not in env:
            continue
        missing = [name for name in names if name not in env]
        if missing:
            incomplete.append(f"{names[0]} is set but {', '.join(missing)} is not set")
            continue
        rank, world, local, local_world = (_number(env, name) for name in names)
        return _checked(
            Rank(
                rank=rank,
                world_size=world,
                local_rank=local,
                local_world_size=local_world,
                convention=launcher.convention,
            )
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
    return next((int(env[name]) for name in LOCAL_RANK_VARIABLES if NUMBER.fullmatch(env.get(name, ""))), None)


def _srun_rank(env: Mapping[str, str]) -> Rank:
    tasks, node = tasks_per_node(env, STEP_TASKS), _number(env, "SLURM_NODEID")
    if node >= len(tasks):
        raise InputError(
            f"SLURM_NODEID={node}, but {STEP_TASKS}={env[STEP_TASKS][:60]} has "
            f"{counted(len(tasks), 'host')}: start the rank with srun"
        )
    return _checked(
        Rank(
            rank=_number(env, "SLURM_PROCID"),
            world_size=_number(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(env, "SLURM_LOCALID"),
            local_world_size=tasks[node],
            convention=SLURM.convention,
        )
    )


def tasks_per_node(env: Mapping[str, str], name: str) -> tuple[int, ...]:
    """A variable in Slurm's run-length format: "2(x3),1" -> (2, 2, 2, 1). Raises InputError on anything else."""
    text = env.get(name, "")
    counts: list[int] = []
    for part in text.split(","):
        match = TASKS.fullmatch(part)
        if match is None:
            raise InputError(f"{name}={text[:60]!r}: {part[:30]!r} is not N or N(xM): {SET_TASKS}")
        if len(counts) + int(match[2] or 1) > MAX_RANKS:
            raise InputError(f"{name}={text[:60]!r} has more than {MAX_RANKS:,} hosts: {SET_TASKS}")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def rendezvous(rank: Rank, address: str, port: int) -> dict[str, str]:
    """The env:// variables that torch.distributed.init_process_group() reads."""
    numbers = (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size)
    return {
        **{name: str(number) for name, number in zip(ENV.rank_names, numbers, strict=True)},
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _number(env: Mapping[str, str], name: str) -> int:
    if not NUMBER.fullmatch(env.get(name, "")):
        raise InputError(
            f"{name}={env.get(name, '')[:60]!r} is not a number of at most 9 digits: start the rank with mpirun, "
            "srun, torchrun or cputrain launch"
        )
    return int(env[name])


def _checked(rank: Rank) -> Rank:
    if not (rank.rank < rank.world_size and rank.local_rank < rank.local_world_size <= rank.world_size):
        raise InputError(
            f"the launcher's variables contradict each other (rank {rank.rank} of {rank.world_size}, local rank "
            f"{rank.local_rank} of {rank.local_world_size}): unset them, or start with cputrain launch"
        )
    return rank
