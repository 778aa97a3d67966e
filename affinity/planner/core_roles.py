"""A worker's domain and sizes -> the PUs that compute, communicate and load. Geometry only."""

from dataclasses import dataclass

from affinity.errors import RequestError
from affinity.planner.domains import OTHER_TYPE, Domain
from affinity.planner.reasons import Unused
from affinity.topology.machine import Core


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A domain's cores: those reserved for communication and loading, those that compute, spare ones without work."""

    reserved: tuple[Core, ...]
    compute: tuple[Core, ...]
    idle: tuple[Core, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRoles:
    """The PUs of a worker by role.

    `packed`: the worker's PUs in OpenMP's own order, first threads of all cores first, start with `compute`.
    """

    compute: tuple[int, ...]
    comm: tuple[int, ...]
    loader: tuple[int, ...]
    packed: bool
    unused: tuple[Unused, ...]

    @property
    def single_pu(self) -> bool:
        """Whether the worker has one PU: the process's mask alone then binds its one thread."""
        return len(self.compute) + len(self.comm) + len(self.loader) == 1


def reserve(domain: Domain, count: int, *, at_end: bool) -> Reserved:
    """Reserve `count` cores, spare ones first, then the domain's first ones (`at_end`: its last ones).

    At the start because a host's first cores also take its interrupts.
    """
    spare, taken = domain.spare[:count], max(0, count - len(domain.spare))
    kept = len(domain.cores) - taken
    own = domain.cores[kept:] if at_end else domain.cores[:taken]
    compute = domain.cores[:kept] if at_end else domain.cores[taken:]
    return Reserved(reserved=spare + own, compute=compute, idle=domain.spare[count:])


def compute_candidates(cores: tuple[Core, ...], *, smt: bool) -> tuple[int, ...]:
    """The PUs that may compute: the first thread of each core, with `smt` all of them."""
    return tuple(pu for core in cores for pu in (core.pus if smt else core.pus[:1]))


def second_threads(cores: tuple[Core, ...], compute: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Second threads of the first `count` compute cores. Raises RequestError where they compute themselves."""
    second = tuple(core.pus[1] for core in cores if len(core.pus) > 1 and core.pus[0] in compute)[:count]
    if not set(second).isdisjoint(compute):
        raise RequestError("communication on second hardware threads excludes computing on them: leave {smt} off")
    return second


def assign_roles(
    domain: Domain, *, comm_cores: int, loader_cores: int, comm_siblings: int, threads: int, smt: bool, at_end: bool
) -> CoreRoles:
    """Give each PU of a domain its role: comm cores come first among the reserved ones, then loader cores."""
    cores = reserve(domain, comm_cores + loader_cores, at_end=at_end)
    compute = compute_candidates(cores.compute, smt=smt)[:threads]
    siblings = second_threads(cores.compute, compute, comm_siblings)
    comm = _first_threads_first(cores.reserved[:comm_cores]) + siblings
    loader = _pus(cores.reserved[comm_cores:])
    mask = {*compute, *comm, *loader}
    in_order = _first_threads_first(tuple(sorted(cores.compute + cores.reserved, key=lambda core: core.pus)))
    return CoreRoles(
        compute=compute,
        comm=comm,
        loader=loader,
        packed=tuple(pu for pu in in_order if pu in mask)[:threads] == compute,
        unused=_idle(cores, {*compute, *siblings}, threads),
    )


def _pus(cores: tuple[Core, ...]) -> tuple[int, ...]:
    return tuple(pu for core in cores for pu in core.pus)


def _first_threads_first(cores: tuple[Core, ...]) -> tuple[int, ...]:
    """The PUs of cores: the first thread of each, then the second of each, and so on."""
    threads = max((len(core.pus) for core in cores), default=0)
    return tuple(core.pus[i] for i in range(threads) for core in cores if i < len(core.pus))


def _idle(cores: Reserved, busy_pus: set[int], threads: int) -> tuple[Unused, ...]:
    """The PUs that have no work, and why."""
    busy = [core for core in cores.compute if not busy_pus.isdisjoint(core.pus)]
    siblings = tuple(pu for core in busy for pu in core.pus if pu not in busy_pus)
    beyond = tuple(pu for core in cores.compute if core not in busy for pu in core.pus)
    idle = (
        Unused(pus=siblings, why="second threads of compute cores: two would compete for one core's vector units"),
        Unused(pus=beyond, why=f"{{threads={threads}}} leaves them out"),
        Unused(pus=_pus(cores.idle), why=OTHER_TYPE),
    )
    return tuple(item for item in idle if item.pus)
