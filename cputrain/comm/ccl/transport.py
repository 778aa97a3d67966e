"""The choice of oneCCL's transport, MPI or libfabric, the same for all ranks of a job."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from affinity.errors import InputError
from affinity.ranks.launcher_variables import HYDRA, LAUNCHER_VARIABLES, PMI_CONNECTIONS
from affinity.ranks.rank import Rank
from cputrain.comm.store import SignedKeys
from cputrain.transports import LIBFABRIC, MPI, TITLES, VARIABLE, comparison

# affinity.bind sets OMPI_COMM_WORLD_RANK and PMI_RANK for all scripts: they do not tell the launcher.
OTHER_MPI = dict(each.pmi_of for each in LAUNCHER_VARIABLES if each.pmi_of is not None)
PMI_RANK, PMI_SIZE = HYDRA.rank_names[:2]
KEY = "transport"
MEASURE = "`cputrain doctor ccl` measures whether libfabric is faster here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """oneCCL's name of a transport, "mpi" or "ofi", and why it was taken."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{TITLES.get(self.name, self.name)} ({self.why})"


def choose_transport(
    env: Mapping[str, str], rank: Rank, kept: Callable[[], Mapping[str, float]], *, whole: bool = True
) -> Transport:
    """A rank's transport. `whole`: its group has all ranks of the job; `kept` reads the measured seconds by transport.

    MPI needs ranks that a PMI process manager has started: mpirun of Intel MPI or MPICH, or srun with PMI-2. They may
    also use libfabric, like all others, who find each other through the job's store: on one host the faster one of the
    two is taken, where both have been measured there. Raises InputError where MPI is requested but cannot be used.
    """
    requested = env.get(VARIABLE)
    other = next((name for variable, name in OTHER_MPI.items() if variable in env), None)
    connected = PMI_RANK in env and any(name in env for name in PMI_CONNECTIONS)
    managed = other is None and connected and env.get(PMI_SIZE, "") == str(rank.world_size)
    if requested == MPI and not managed:
        starter = other or "a launcher without Intel MPI's process manager (PMI)"
        raise InputError(
            f"{VARIABLE}=mpi, but this rank was started by {starter}: start it with Intel MPI's mpirun or "
            "srun --mpi=pmi2, or unset the variable"
        )
    if requested:
        return Transport(name=requested, why=f"{VARIABLE} is set")
    if not managed:
        why = f"started by {other}" if other else "not started by a PMI process manager"
        return Transport(name=LIBFABRIC, why=why)
    if not whole:
        return Transport(name=LIBFABRIC, why="MPI would wait for ranks that may never join a ccl group")
    if not rank.one_host:
        return Transport(name=MPI, why="the launcher supports PMI, and there are several hosts")
    seconds = kept()
    if len(seconds) < len(TITLES):
        return Transport(name=MPI, why=f"the launcher supports PMI; not measured: {MEASURE}")
    return Transport(name=min(seconds, key=lambda name: seconds[name]), why=f"measured: {comparison(seconds)}")


def agree(rank: Rank, keys: SignedKeys, own: Callable[[], Transport], *, is_set: bool) -> Transport:
    """Rank 0's transport, for all ranks of a job: what each reads from its cache may differ. All must call this.

    `own` is this rank's choice, and `is_set` whether it may use no other. Raises InputError where that is not rank 0's,
    RunError where the store is another job's.
    """
    if rank.rank > 0:
        return _follow(rank, keys, own(), is_set=is_set)
    try:
        chosen = own()
    except InputError:
        keys.set(KEY, json.dumps(None))  # the others wait for it
        raise
    keys.set(KEY, json.dumps(asdict(chosen)))
    return chosen


def _follow(rank: Rank, keys: SignedKeys, own: Transport, *, is_set: bool) -> Transport:
    first = json.loads(keys.read(KEY))
    if first is None:
        return own  # rank 0 stops, and says why
    chosen = Transport(**first)
    if is_set and chosen.name != own.name:
        raise InputError(
            f"rank {rank.rank} uses {own}, rank 0 {chosen}: set {VARIABLE} alike for all ranks, or for none"
        )
    return chosen
