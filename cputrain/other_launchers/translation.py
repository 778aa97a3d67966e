"""Translate a parsed command line to the words of `cputrain launch`, with notes on what has no counterpart."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.host_names import is_loopback
from cputrain.affinity.wording import plural
from cputrain.mpi.hostfile import expand_hosts, fold_hosts, split_slots
from cputrain.other_launchers import LAUNCH_OPTIONS, LaunchSpec, spec_of
from cputrain.other_launchers.parsing import ParsedCommand, binder_in, join_words, restore_text

# Variables that the plan sets; other values would contradict it.
PLANNED = (
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"),
    *("I_MPI_PIN", "I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "CCL_WORKER_AFFINITY"),
    *("MALLOC_CONF", "OMP_SCHEDULE"),
)
# Variables that correspond to options of launch -> field of LaunchSpec.
VARIABLES = {"OMP_NUM_THREADS": "threads", "CCL_WORKER_COUNT": "comm_cores"}
MEETING = ("MASTER_ADDR", "MASTER_PORT")
ALLOCATION = "in a scheduler's job launch uses the job's hosts; elsewhere add --hosts n1,n2 or --hostfile FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A shell line, the options that it does not contain with reasons, and notes."""

    line: str
    without: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def translate(parsed: ParsedCommand, *, cores: int, hosts_in: Callable[[str], int | None]) -> Translation:
    """Translate a command line to `cputrain launch` on a machine with this number of cores; `hosts_in` counts the hosts
    of a hostfile, None if unreadable. Raises InputError if hosts would differ."""
    options, dropped = _without_planned(spec_of(parsed.given, parsed.command), parsed.variables)
    front = tuple(word for word in parsed.variables if word.partition("=")[0] in MEETING)
    notes = [f"{written}: {why}" for written, why in parsed.notes]
    if parsed.program.name in ("ipexrun", "run_cpu"):
        requested, options = options, _instances_or_ranks(options, cores)
        dropped += _of_the_other_mode(parsed, requested, options)
    if parsed.program.name == "ipexrun" and (options.nodes or 1) > 1 and not options.hostfile:
        options = replace(options, hostfile="hostfile")
    options, more = _sized(options, hosts_in)
    notes += more
    one_host = not options.hosts and not options.hostfile and (options.nodes or 1) == 1
    numbered = any(option.field in ("ppn", "ranks") for option in parsed.given)
    program = parsed.program
    notes += (binder_in(options.command),)
    notes += (program.remark, program.remark_on_one_host if one_host else "")
    notes += ("" if numbered else program.remark_without_ranks,)
    words = ("cputrain", "launch", *_words_of(options), *_command(options, starts_python=parsed.program.starts_python))
    folder = f"{join_words(('cd', options.folder))} && " if options.folder else ""
    return Translation(
        line=folder + join_words((*(("env", *front) if front else ()), *words)),
        without=tuple((restore_text(option), why) for option, why in (*parsed.without, *dropped)),
        notes=tuple(dict.fromkeys(restore_text(note) for note in notes if note)),
    )


def _without_planned(options: LaunchSpec, variables: tuple[str, ...]) -> tuple[LaunchSpec, list[tuple[str, str]]]:
    """Split environment variables into those to pass to the ranks and those that the plan sets."""
    passed, dropped = [], []
    for variable in (*variables, *options.environment):
        name, _, value = variable.partition("=")
        if name in PLANNED:
            dropped.append((variable, "the plan sets it"))
        elif name in VARIABLES and value.isdecimal():
            field = VARIABLES[name]
            number: Any = int(value) if getattr(options, field) is None else getattr(options, field)
            options = replace(options, **{field: number})
        elif name not in MEETING:
            passed.append(variable)
    return replace(options, environment=tuple(passed)), dropped


def _instances_or_ranks(options: LaunchSpec, cores: int) -> LaunchSpec:
    """Decide between independent copies and ranks: ipexrun starts ranks with --nnodes or --distributed only."""
    if options.nodes is not None or options.distributed:
        return replace(options, instances=None, instance=None)
    copies = replace(options, comm_cores=None, ppn=None)
    if options.instances in ("latency", "throughput"):
        return replace(copies, threads=None)
    return replace(
        copies, instances=options.instances or (str(max(1, cores // options.threads)) if options.threads else "1")
    )


def _of_the_other_mode(parsed: ParsedCommand, requested: LaunchSpec, converted: LaunchSpec) -> list[tuple[str, str]]:
    """Return the options for copies if ranks start, and for ranks if copies start, with reasons."""
    copies = "it starts independent copies, which do not communicate"
    reasons = {
        "instances": "it starts the ranks of one job, --ppn on each host",
        "instance": "it starts all ranks of one job",
        "threads": "the mode decides how many cores a copy has",
        "comm_cores": copies,
        "ppn": f"{copies}; --instances sets their number",
    }
    written = {
        **{VARIABLES.get(variable.partition("=")[0], ""): variable for variable in parsed.variables},
        **{option.field: option.written for option in parsed.given},
    }
    return [
        (written[field], why)
        for field, why in reasons.items()
        if getattr(requested, field) is not None and getattr(converted, field) is None
    ]


def _sized(options: LaunchSpec, hosts_in: Callable[[str], int | None]) -> tuple[LaunchSpec, list[str]]:
    """Convert ranks to workers per host, and hosts to names or a number; also return notes."""
    options = requested = _with_slots(options)
    host_count = len(expand_hosts(options.hosts)) if options.hosts else None
    if options.hostfile:
        host_count = hosts_in(options.hostfile)
    hosts = host_count or options.nodes or (1 if not options.hostfile else None)
    notes = []
    if (
        options.ranks is not None
        and options.ppn is not None
        and host_count is None
        and not options.nodes
        and not options.hostfile
    ):
        hosts = -(-options.ranks // options.ppn)
    if options.ranks is not None and options.ppn is None and hosts is None:
        notes.append(
            f"{options.hostfile} cannot be read: add --ppn with {options.ranks} divided by its number of hosts"
        )
    elif options.ranks is not None and hosts is not None:
        if options.ranks % hosts or (options.ppn is not None and options.ppn * hosts != options.ranks and hosts > 1):
            of_each = f", {options.ppn} on each" if options.ppn is not None else ""
            raise InputError(
                f"{plural(options.ranks, 'rank')} on {plural(hosts, 'host')}{of_each}: cputrain starts equally many "
                "workers on every host, so give another number"
            )
        options = replace(options, ppn=options.ranks // hosts)
    if host_count is None and not options.hostfile and (hosts or 1) > 1:
        options = replace(options, nodes=hosts)
        notes.append(ALLOCATION)
    else:
        needed = options.nodes
        if options.ranks is not None and requested.ppn is not None:
            needed = needed or -(-options.ranks // requested.ppn)
        if options.hostfile and needed is not None and host_count is None:
            notes.append(f"{options.hostfile} cannot be read: all its hosts are used, so keep only {needed} in it")
        elif options.hostfile and needed is not None and host_count is not None and needed != host_count:
            of_the_file = f"all {host_count} hosts of {options.hostfile} are used"
            advice = (
                f"keep only {needed} in it" if needed < host_count else f"add the other {needed - host_count} to it"
            )
            notes.append(f"{of_the_file}: {advice}")
        options = replace(options, nodes=None)
    return replace(options, ranks=None), notes


def _with_slots(options: LaunchSpec) -> LaunchSpec:
    """Convert slots after host names to workers per host; this host needs no name."""
    if options.hosts is None:
        return options
    slots: Counter[str] = Counter()
    ranges = "[" in options.hosts  # Slurm's format, which has no slots
    for host in expand_hosts(options.hosts) if ranges else options.hosts.split(","):
        name, number = split_slots(host.strip())
        slots[name] += int(number or 1)
    slot_counts = set(slots.values())
    has_slots = slot_counts != {1} or ":" in options.hosts
    if has_slots and len(slot_counts) > 1:
        raise InputError(
            f"hosts {options.hosts[:60]!r} have different numbers of slots; pass one --host-group for each number"
        )
    if has_slots and options.ppn is None and (options.ranks is None or options.ranks == sum(slots.values())):
        options = replace(options, ppn=slot_counts.pop(), ranks=None)
    return replace(
        options, hosts=None if all(map(is_loopback, slots)) else fold_hosts(slots) if ranges else ",".join(slots)
    )


def _words_of(options: LaunchSpec) -> tuple[str, ...]:
    """Return the options of `cputrain launch` in the order of its --help."""
    values = ((field, getattr(options, name, None)) for name, field in LAUNCH_OPTIONS.items())
    option_words = tuple(
        word
        for field, value in values
        if value is not None and value is not False
        for word in (field.option, "on" if value is True else str(value))
    )
    return (*option_words, "--dry-run") if options.dry_run else option_words


def _command(options: LaunchSpec, *, starts_python: bool) -> tuple[str, ...]:
    """Return the words of the command after the options."""
    words, variables = options.command, options.environment
    if starts_python and not options.no_python:
        plain = not variables and (options.module or words[0].endswith(".py"))
        if plain:
            return (*(("-m",) if options.module else ()), *words)
        words = ("python", *(("-m",) if options.module else ()), *words)
    return ("--", *(("env", *variables) if variables else ()), *words)
