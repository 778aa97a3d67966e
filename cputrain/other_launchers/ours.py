"""What a command line of another launcher asks for -> the `cputrain launch` that does it, and what to know."""

import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from affinity.errors import InputError
from affinity.wording import counted
from cputrain.other_launchers.read import Reading
from cputrain.other_launchers.wanted import Wanted, wanted
from mpi.hosts.nodelist import expand, fold

# Variables that the plan sets: one beside it would contradict it.
PLANNED = (
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"),
    *("I_MPI_PIN", "I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "CCL_WORKER_AFFINITY", "CCL_WORKER_COUNT"),
    *("MALLOC_CONF", "OMP_SCHEDULE"),
)
MEETING = ("MASTER_ADDR", "MASTER_PORT")
LOCAL = ("localhost", "127.0.0.1")
ALLOCATION = "in a Slurm or PBS job launch takes the job's hosts; elsewhere add --hosts n1,n2 or --hostfile FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A line for a shell, the options that are not in it and why, and what else to know."""

    line: str
    without: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def translated(reading: Reading, *, cores: int, hosts_in: Callable[[str], int | None]) -> Translation:
    """The `cputrain launch` of a command line, on a machine of so many cores; `hosts_in` counts the hosts of a
    hostfile, None where it cannot be read. Raises InputError where hosts would differ."""
    asked, dropped = _without_planned(wanted(reading.given, reading.command), reading.variables)
    front = tuple(word for word in reading.variables if word.partition("=")[0] in MEETING)
    notes = [f"{written}: {why}" for written, why in reading.notes]
    if reading.program.name in ("ipexrun", "run_cpu"):
        asked = _instances_or_ranks(asked, cores)
    if reading.program.name == "ipexrun" and (asked.nodes or 1) > 1 and not asked.hostfile:
        asked = replace(asked, hostfile="hostfile")
    asked, more = _sized(asked, hosts_in)
    notes += more
    one_host = not asked.hosts and not asked.hostfile and (asked.nodes or 1) == 1
    notes += filter(None, (reading.program.remark, reading.program.remark_on_one_host if one_host else ""))
    words = ("cputrain", "launch", *_options(asked), *_command(asked, starts_python=reading.program.starts_python))
    folder = f"cd {shlex.quote(asked.folder)} && " if asked.folder else ""
    return Translation(
        line=folder + shlex.join((*(("env", *front) if front else ()), *words)),
        without=(*reading.without, *dropped),
        notes=tuple(dict.fromkeys(notes)),
    )


def _without_planned(asked: Wanted, variables: tuple[str, ...]) -> tuple[Wanted, list[tuple[str, str]]]:
    """The variables for the ranks, those before the call among them, without what the plan sets; and that."""
    kept, dropped = [], []
    for variable in (*variables, *asked.environment):
        name, _, value = variable.partition("=")
        if name in PLANNED:
            dropped.append((variable, "the plan sets it"))
        elif name == "OMP_NUM_THREADS" and value.isdecimal():
            asked = replace(asked, threads=asked.threads or int(value))
        elif name not in MEETING:
            kept.append(variable)
    return replace(asked, environment=tuple(kept)), dropped


def _instances_or_ranks(asked: Wanted, cores: int) -> Wanted:
    """ipexrun and run_cpu start independent copies, ipexrun with --nnodes ranks."""
    if asked.nodes is not None:
        return replace(asked, instances=None, instance=None)
    if asked.instances in ("latency", "throughput"):
        return replace(asked, threads=None)
    number = asked.instances or (str(max(1, cores // asked.threads)) if asked.threads else "1")
    return replace(asked, instances=number, comm_cores=None)


def _sized(asked: Wanted, hosts_in: Callable[[str], int | None]) -> tuple[Wanted, list[str]]:
    """The same with workers per host in place of ranks, and with names or a number of hosts; and notes."""
    asked = _with_slots(asked)
    named = len(expand(asked.hosts)) if asked.hosts else None
    if asked.hostfile:
        named = hosts_in(asked.hostfile)
    hosts = named or asked.nodes or (1 if not asked.hostfile else None)
    notes = []
    if asked.ranks is not None and asked.ppn is not None and named is None and not asked.nodes and not asked.hostfile:
        hosts = -(-asked.ranks // asked.ppn)
    if asked.ranks is not None and asked.ppn is None and hosts is None:
        notes.append(f"{asked.hostfile} cannot be read: add --ppn, {asked.ranks} divided by the number of its hosts")
    elif asked.ranks is not None and hosts is not None:
        if asked.ranks % hosts or (asked.ppn is not None and asked.ppn * hosts != asked.ranks and hosts > 1):
            of_each = f", {asked.ppn} on each" if asked.ppn is not None else ""
            raise InputError(
                f"{counted(asked.ranks, 'rank')} on {counted(hosts, 'host')}{of_each}: cputrain starts as many "
                "workers on every host: give another number"
            )
        asked = replace(asked, ppn=asked.ranks // hosts)
    if named is None and not asked.hostfile and (hosts or 1) > 1:
        asked = replace(asked, nodes=hosts)
        notes.append(ALLOCATION)
    else:
        if asked.hostfile and asked.nodes is not None and named not in (None, asked.nodes):
            notes.append(f"all {named} hosts of {asked.hostfile} are used: leave {asked.nodes} in it")
        asked = replace(asked, nodes=None)
    return replace(asked, ranks=None), notes


def _with_slots(asked: Wanted) -> Wanted:
    """The same without slots behind the hosts' names, which become workers per host; this host needs no name."""
    if asked.hosts is None:
        return asked
    slots: Counter[str] = Counter()
    ranges = "[" in asked.hosts  # Slurm's, and without slots
    for host in expand(asked.hosts) if ranges else asked.hosts.split(","):
        name, colon, number = host.strip().rpartition(":")
        numbered = bool(colon) and number.isdecimal()
        slots[name if numbered else host.strip()] += int(number) if numbered else 1
    each = set(slots.values())
    said = each != {1} or ":" in asked.hosts
    if said and len(each) > 1:
        raise InputError(f"hosts {asked.hosts[:60]!r} have different numbers of slots: give one --host-group for each")
    if said and asked.ppn is None and (asked.ranks is None or asked.ranks == sum(slots.values())):
        asked = replace(asked, ppn=each.pop(), ranks=None)
    return replace(asked, hosts=None if set(slots) <= set(LOCAL) else fold(slots) if ranges else ",".join(slots))


def _options(asked: Wanted) -> tuple[str, ...]:
    """The options of `cputrain launch`, in the order of its help."""
    pairs = (
        ("--output", asked.output),
        ("--instances", asked.instances),
        ("--instance", asked.instance),
        ("--hosts", asked.hosts),
        ("--hostfile", asked.hostfile),
        ("--nodes", asked.nodes),
        ("--ppn", None if asked.instances else asked.ppn),
        ("--threads", asked.threads),
        ("--comm-cores", asked.comm_cores),
        ("--smt", "on" if asked.smt else None),
        ("--openmp", asked.openmp),
        ("--allocator", asked.allocator),
        ("--cores", asked.cores),
        ("--restarts", asked.restarts),
    )
    given = tuple(word for option, value in pairs if value is not None for word in (option, str(value)))
    return (*given, "--dry-run") if asked.dry_run else given


def _command(asked: Wanted, *, starts_python: bool) -> tuple[str, ...]:
    """The words of the command, behind the options."""
    words, variables = asked.command, asked.environment
    if starts_python and not asked.no_python:
        plain = not variables and (asked.module or words[0].endswith(".py"))
        if plain:
            return (*(("-m",) if asked.module else ()), *words)
        words = ("python", *(("-m",) if asked.module else ()), *words)
    return ("--", *(("env", *variables) if variables else ()), *words)
