"""What a command line of another launcher requests -> the `cputrain launch` that does it, and what to know."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from affinity.errors import InputError
from affinity.ranks.host_names import is_loopback
from affinity.wording import counted
from cputrain.other_launchers.read import Reading
from cputrain.other_launchers.shell_words import line_of, unmarked
from cputrain.other_launchers.wanted import Wanted, wanted
from mpi.hosts.hostfile import split_slots
from mpi.hosts.nodelist import expand, fold

# Variables that the plan sets: one beside it would contradict it.
PLANNED = (
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"),
    *("I_MPI_PIN", "I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "CCL_WORKER_AFFINITY"),
    *("MALLOC_CONF", "OMP_SCHEDULE"),
)
# Variables that are options of launch -> what they set in `Wanted`.
VARIABLES = {"OMP_NUM_THREADS": "threads", "CCL_WORKER_COUNT": "comm_cores"}
MEETING = ("MASTER_ADDR", "MASTER_PORT")
ALLOCATION = "in a scheduler's job launch takes the job's hosts; elsewhere add --hosts n1,n2 or --hostfile FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A line for a shell, the options that are not in it and why, and what else to know."""

    line: str
    without: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def translated(reading: Reading, *, cores: int, hosts_in: Callable[[str], int | None]) -> Translation:
    """The `cputrain launch` of a command line, on a machine of so many cores; `hosts_in` counts the hosts of a
    hostfile, None where it cannot be read. Raises InputError where hosts would differ."""
    options, dropped = _without_planned(wanted(reading.given, reading.command), reading.variables)
    front = tuple(word for word in reading.variables if word.partition("=")[0] in MEETING)
    notes = [f"{written}: {why}" for written, why in reading.notes]
    if reading.program.name in ("ipexrun", "run_cpu"):
        asked, options = options, _instances_or_ranks(options, cores)
        dropped += _of_the_other_mode(reading, asked, options)
    if reading.program.name == "ipexrun" and (options.nodes or 1) > 1 and not options.hostfile:
        options = replace(options, hostfile="hostfile")
    options, more = _sized(options, hosts_in)
    notes += more
    one_host = not options.hosts and not options.hostfile and (options.nodes or 1) == 1
    numbered = any(each.field in ("ppn", "ranks") for each in reading.given)
    program = reading.program
    notes += (program.remark, program.remark_on_one_host if one_host else "")
    notes += ("" if numbered else program.remark_without_ranks,)
    words = ("cputrain", "launch", *_words_of(options), *_command(options, starts_python=reading.program.starts_python))
    folder = f"{line_of(('cd', options.folder))} && " if options.folder else ""
    return Translation(
        line=folder + line_of((*(("env", *front) if front else ()), *words)),
        without=tuple((unmarked(option), why) for option, why in (*reading.without, *dropped)),
        notes=tuple(dict.fromkeys(unmarked(note) for note in notes if note)),
    )


def _without_planned(options: Wanted, variables: tuple[str, ...]) -> tuple[Wanted, list[tuple[str, str]]]:
    """The variables for the ranks, those before the call among them, without what the plan sets; and that."""
    kept, dropped = [], []
    for variable in (*variables, *options.environment):
        name, _, value = variable.partition("=")
        if name in PLANNED:
            dropped.append((variable, "the plan sets it"))
        elif name in VARIABLES and value.isdecimal():
            field = VARIABLES[name]
            number: Any = int(value) if getattr(options, field) is None else getattr(options, field)
            options = replace(options, **{field: number})
        elif name not in MEETING:
            kept.append(variable)
    return replace(options, environment=tuple(kept)), dropped


def _instances_or_ranks(options: Wanted, cores: int) -> Wanted:
    """ipexrun and run_cpu start independent copies; ipexrun with --nnodes, older ones with --distributed, ranks."""
    if options.nodes is not None or options.distributed:
        return replace(options, instances=None, instance=None)
    copies = replace(options, comm_cores=None, ppn=None)
    if options.instances in ("latency", "throughput"):
        return replace(copies, threads=None)
    return replace(
        copies, instances=options.instances or (str(max(1, cores // options.threads)) if options.threads else "1")
    )


def _of_the_other_mode(reading: Reading, asked: Wanted, kept: Wanted) -> list[tuple[str, str]]:
    """What is given of copies where ranks start, and of ranks where copies start."""
    copies = "independent copies start, which do not communicate"
    reasons = {
        "instances": "the ranks of one job start: --ppn is their number on each host",
        "instance": "the ranks of one job start, all of them",
        "threads": "the mode decides how many cores a copy has",
        "comm_cores": copies,
        "ppn": f"{copies}: --instances is their number",
    }
    written = {
        **{VARIABLES.get(each.partition("=")[0], ""): each for each in reading.variables},
        **{each.field: each.written for each in reading.given},
    }
    return [
        (written[field], why)
        for field, why in reasons.items()
        if getattr(asked, field) is not None and getattr(kept, field) is None
    ]


def _sized(options: Wanted, hosts_in: Callable[[str], int | None]) -> tuple[Wanted, list[str]]:
    """The same with workers per host in place of ranks, and with names or a number of hosts; and notes."""
    options = _with_slots(options)
    named = len(expand(options.hosts)) if options.hosts else None
    if options.hostfile:
        named = hosts_in(options.hostfile)
    hosts = named or options.nodes or (1 if not options.hostfile else None)
    notes = []
    if (
        options.ranks is not None
        and options.ppn is not None
        and named is None
        and not options.nodes
        and not options.hostfile
    ):
        hosts = -(-options.ranks // options.ppn)
    if options.ranks is not None and options.ppn is None and hosts is None:
        notes.append(
            f"{options.hostfile} cannot be read: add --ppn, {options.ranks} divided by the number of its hosts"
        )
    elif options.ranks is not None and hosts is not None:
        if options.ranks % hosts or (options.ppn is not None and options.ppn * hosts != options.ranks and hosts > 1):
            of_each = f", {options.ppn} on each" if options.ppn is not None else ""
            raise InputError(
                f"{counted(options.ranks, 'rank')} on {counted(hosts, 'host')}{of_each}: cputrain starts as many "
                "workers on every host: give another number"
            )
        options = replace(options, ppn=options.ranks // hosts)
    if named is None and not options.hostfile and (hosts or 1) > 1:
        options = replace(options, nodes=hosts)
        notes.append(ALLOCATION)
    else:
        if options.hostfile and options.nodes is not None and named not in (None, options.nodes):
            notes.append(f"all {named} hosts of {options.hostfile} are used: leave {options.nodes} in it")
        options = replace(options, nodes=None)
    return replace(options, ranks=None), notes


def _with_slots(options: Wanted) -> Wanted:
    """The same without slots behind the hosts' names, which become workers per host; this host needs no name."""
    if options.hosts is None:
        return options
    slots: Counter[str] = Counter()
    ranges = "[" in options.hosts  # Slurm's, and without slots
    for host in expand(options.hosts) if ranges else options.hosts.split(","):
        name, number = split_slots(host.strip())
        slots[name] += int(number or 1)
    each = set(slots.values())
    has_slots = each != {1} or ":" in options.hosts
    if has_slots and len(each) > 1:
        raise InputError(
            f"hosts {options.hosts[:60]!r} have different numbers of slots: give one --host-group for each"
        )
    if has_slots and options.ppn is None and (options.ranks is None or options.ranks == sum(slots.values())):
        options = replace(options, ppn=each.pop(), ranks=None)
    return replace(options, hosts=None if all(map(is_loopback, slots)) else fold(slots) if ranges else ",".join(slots))


def _words_of(options: Wanted) -> tuple[str, ...]:
    """The options of `cputrain launch`, in the order of its help."""
    pairs = (
        ("--output", options.output),
        ("--instances", options.instances),
        ("--instance", options.instance),
        ("--hosts", options.hosts),
        ("--hostfile", options.hostfile),
        ("--nodes", options.nodes),
        ("--ppn", options.ppn),
        ("--threads", options.threads),
        ("--comm-cores", options.comm_cores),
        ("--smt", "on" if options.smt else None),
        ("--openmp", options.openmp),
        ("--allocator", options.allocator),
        ("--cores", options.cores),
        ("--restarts", options.restarts),
    )
    given = tuple(word for option, value in pairs if value is not None for word in (option, str(value)))
    return (*given, "--dry-run") if options.dry_run else given


def _command(options: Wanted, *, starts_python: bool) -> tuple[str, ...]:
    """The words of the command, behind the options."""
    words, variables = options.command, options.environment
    if starts_python and not options.no_python:
        plain = not variables and (options.module or words[0].endswith(".py"))
        if plain:
            return (*(("-m",) if options.module else ()), *words)
        words = ("python", *(("-m",) if options.module else ()), *words)
    return ("--", *(("env", *variables) if variables else ()), *words)
