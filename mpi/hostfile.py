"""Hosts of a job: Slurm's host lists, the hostfiles of Open MPI, Intel MPI, MPICH and schedulers, groups of equal hosts
with one plan each, and the address at which the hosts reach this one."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.host_names import host_key, is_address, is_loopback, is_this_host, network_name, repeated_host
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Chosen, Compare, Plan, Request, plan_machine
from cputrain.affinity.planner.plan_file import SCHEMA_VERSION, plan_json, plan_to_dict, plan_to_json
from cputrain.affinity.rank import LOOPBACK, address_to
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.wording import MIB

ADDRESS = r"\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]"  # IPv6
NAMES = re.compile(rf"(?:[^\[\],\s]|\[[0-9,-]+\]|{ADDRESS})*")
SEPARATORS = re.compile(r"[,\s]")
RANGES = re.compile(r"\[([0-9,-]+)\]")
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
NUMBERED = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)", re.DOTALL)
MAX_HOSTS = 200_000  # more than any cluster has
MAX_DIGITS = 9

# Names reach shells, ssh and file names, hence this whitelist. Labels are not empty; absolute names end with a dot.
NAME = re.compile(r"(?!.*\.\.)(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
# Never a name: sockets parse one to four numbers as an address, 28 as 0.0.0.28 (inet_aton(3)).
NUMERIC = re.compile(r"(?:0[xX][0-9A-Fa-f]+|[0-9]+)(?:\.(?:0[xX][0-9A-Fa-f]+|[0-9]+)){0,3}\.?")
MAX_NAME = 255  # characters: POSIX's HOST_NAME_MAX, and the limit of DNS
MAX_SLOTS = 1 << 16
MAX_BYTES = 64 << 20
SSH_PORT = "22"
NUMBER = re.compile("[0-9]{1,9}")
WITH_SLOTS = re.compile("(.+):([0-9]+)")
COMMENT = re.compile(r"#[^\n]*|//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
END_OF_LINE = "\0"  # stands for a block comment, which ends a line for Open MPI
EQUALS = re.compile(r"[ \t]*=[ \t]*")
FORMATS = {
    "openmpi": "Open MPI's format (h1 slots=4)",
    "hydra": "Intel MPI's and MPICH's format (h1:4)",
    "sge": "Grid Engine's format (h1 4 all.q@h1 UNDEFINED)",
    "lsf": "the format of LSF's affinity file (h1 0,1 0 2)",
    "plain": "the plain format (h1)",
}
# Settings of a line, as in Open MPI's lexer (hostfile_lex.l) and Hydra's parser -> their meaning here.
SLOT_LIMIT_KEYS = {
    word for key in ("slots", "cpu", "count") for word in (f"{key}-max", f"{key}_max", f"max-{key}", f"max_{key}")
}
OPEN_MPI = {
    **dict.fromkeys(("slots", "cpu", "count"), "slots"),
    **dict.fromkeys(SLOT_LIMIT_KEYS, "most"),
    **dict.fromkeys(("username", "user-name", "user_name"), "user"),
    "port": "port",
}
GRID_ENGINE_WORDS = (3, 4)  # host, slots, queue, and optionally processors
# The words after the host: the CPUs of a task, and, if memory is bound, its NUMA nodes and the policy.
AFFINITY = re.compile("[0-9]+[,-][0-9,-]+|[0-9][0-9,-]*( [0-9][0-9,-]*){2}")
SETTINGS = {"openmpi": OPEN_MPI, "hydra": {"binding": "binding", "user": "user"}}
VALUES = {
    **dict.fromkeys(("slots", "most", "port"), NUMBER),
    "user": re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]*"),
    "binding": re.compile(".+"),
}
KNOWN = {
    "openmpi": "slots=N, max_slots=N, username=NAME or port=N",
    "hydra": "binding=... or user=NAME",
    "plain": "slots=N, max_slots=N, username=NAME, port=N, binding=... or user=NAME",
}


def expand_hosts(text: str, source: str = "") -> tuple[str, ...]:
    """Return the host names of a list in order; commas or blanks separate them. Raises InputError, which names
    `source`, if the list is empty or contains a bad range or the same host twice."""
    listed = f"{source}: hosts {text[:60]!r}" if source else f"hosts {text[:60]!r}"
    hosts: list[str] = []
    position = 0
    while position < len(text):
        match = NAMES.match(text, position)
        assert match is not None  # NAMES matches the empty text
        position = match.end()
        if position < len(text) and not SEPARATORS.match(text, position):
            raise InputError(
                f"{listed} contain {text[position:][:20]!r}, which is neither a name nor a range: write names like "
                "n1,n2 or n[001-128,130]"
            )
        position += 1
        hosts += _names(match[0], listed)
        if len(hosts) > MAX_HOSTS:
            raise _too_many(listed)
    if not hosts:
        raise InputError(f"{listed} are an empty list: give HOST,HOST,...")
    twice = repeated_host(hosts)
    if twice is not None:
        what = f"{twice[0]} twice" if twice[0] == twice[1] else f"{twice[0]} and {twice[1]}, the same host"
        raise InputError(f"{listed} contain {what}: remove one of the two")
    return tuple(hosts)


def _names(item: str, listed: str) -> list[str]:
    """Return the names of one list item with any number of ranges, in Slurm's order: the last range varies fastest,
    then the first, the second and so on."""
    words, ranges = RANGES.split(item)[::2], RANGES.split(item)[1::2]
    if not ranges:
        return [item] if item else []
    *before, last = [_numbers(item, listed) for item in ranges]
    if len(last) * prod(map(len, before)) > MAX_HOSTS:
        raise _too_many(listed)
    return [
        "".join(word + number for word, number in zip(words, (*reversed(slow), fast, ""), strict=True))
        for *slow, fast in product(*reversed(before), last)
    ]


def _numbers(ranges: str, listed: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = RANGE.fullmatch(part)
        if any(len(number) > MAX_DIGITS for number in part.split("-")):
            raise InputError(f"{listed} contain {part[:30]!r}, which has more than {MAX_DIGITS} digits: correct it")
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise InputError(f"{listed} contain {part[:30]!r}, which is not a range: write ranges like n[001-128,130]")
        first, last = match[1], match[2] or match[1]
        if len(numbers) + int(last) - int(first) >= MAX_HOSTS:
            raise _too_many(listed)
        numbers += [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    return numbers


def _too_many(listed: str) -> InputError:
    return InputError(f"{listed} expand to more than {MAX_HOSTS:,} hosts: correct the range")


def fold_hosts(hosts: Iterable[str]) -> str:
    """Return the shortest list that `expand_hosts` turns into these hosts in this order, with ranges."""
    parts: list[str] = []
    runs: list[tuple[int, int, int]] = []  # first, last, digits of the first
    around: tuple[str, str] | None = None

    def close() -> None:
        if around is not None:
            shown = [f"{a:0{d}}" if a == b else f"{a:0{d}}-{b:0{d}}" for a, b, d in runs]
            single = len(runs) == 1 and runs[0][0] == runs[0][1]
            parts.append(around[0] + (shown[0] if single else f"[{','.join(shown)}]") + around[1])

    for host in hosts:
        match = NUMBERED.fullmatch(host)
        if match is None or any(sign in host for sign in "[],"):
            close()
            around = None
            parts.append(host)
            continue
        prefix, digits, suffix = match.groups()
        number = int(digits)
        if around == (prefix, suffix):
            first, last, width = runs[-1]
            if digits == f"{last + 1:0{width}}":
                runs[-1] = (first, number, width)
            else:
                runs.append((number, number, len(digits)))
        else:
            close()
            around, runs = (prefix, suffix), [(number, number, len(digits))]
    close()
    return ",".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host name and its number of ranks, None if its list has none."""

    name: str
    slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostList:
    """Distinct hosts in order, and the format of their list, a key of FORMATS."""

    hosts: tuple[Host, ...]
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Parsed hostfile line: host names, slots, and the line's format, a key of FORMATS."""

    names: tuple[str, ...]
    slots: int | None
    format: str


@dataclass(slots=True, kw_only=True)
class _Listed:
    """A host in the lines read so far: its first line, its slots, and the number of lines without slots."""

    name: str
    line: int
    slots: int | None = None
    repeats: int = 0


def read_hostfile(path: Path, title: str = "hostfile", *, any_spelling: bool = False) -> HostList:
    """Read a hostfile in any launcher's format. Raises InputError naming file and line, with `title` before the path.
    `any_spelling`: see `parse_hosts`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")  # Windows editors write a byte-order mark
    except OSError as error:
        raise InputError(f"{title} {path}: {error.strerror}: give a file with one host per line") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{title} {path} is not UTF-8 ({error}): save it as UTF-8 text, one host per line") from None
    if len(data) > MAX_BYTES:
        raise InputError(f"{title} {path} is larger than {MAX_BYTES // MIB} MiB: give a file with one host per line")
    return parse_hosts(text, str(path), any_spelling=any_spelling)


def parse_hosts(text: str, source: str, *, any_spelling: bool = False) -> HostList:
    """Parse hosts, one per line, in the format of any launcher or scheduler.

    Comments begin with #; in Open MPI's format also with //, or they are between /* and */. If a host is on several
    lines, each line without slots adds one slot (PBS's and LSF's node files), also after a line with slots. Hydra's
    slots add up, as do Grid Engine's over queues and the tasks of LSF's affinity file. A host must be spelled the same
    everywhere; with `any_spelling`, for files that no user writes, the first spelling is used. Raises InputError naming
    the first line that is wrong or in another format than the lines before.
    """
    if END_OF_LINE in text:
        raise InputError(f"{source} contains null characters, perhaps because it is UTF-16: save it as UTF-8 text")
    formats: dict[str, int] = {}
    hosts: dict[str, _Listed] = {}
    for number, line in _lines(text, source, formats):
        where = f"{source}:{number}"
        read = _parse_line(EQUALS.sub("=", line).split(), where, next(iter(formats), "plain"))
        if read.format != "plain":
            formats.setdefault(read.format, number)
        for name in read.names:
            host = hosts.setdefault(host_key(name), _Listed(name=name, line=number))
            _add(host, host.name if any_spelling else name, read, where)
    if not hosts:
        raise InputError(f"{source} contains no hosts: write one host per line")
    if len(formats) > 1:
        (first, line_of_first), (second, line_of_second) = sorted(formats.items(), key=lambda item: item[1])[:2]
        raise InputError(
            f"{source} mixes two formats, {FORMATS[first]} in line {line_of_first} and {FORMATS[second]} in line "
            f"{line_of_second}: use one format"
        )
    several = any(host.slots is None and host.repeats > 1 for host in hosts.values())
    return HostList(
        hosts=tuple(
            Host(name=host.name, slots=host.repeats if several and host.slots is None else host.slots)
            for host in hosts.values()
        ),
        format=next(iter(formats), "plain"),
    )


def _lines(text: str, source: str, formats: dict[str, int]) -> Iterator[tuple[int, str]]:
    """Yield non-empty lines without comments, and their numbers; record the format of comments in `formats`."""

    def blank(match: re.Match[str]) -> str:
        comment, line = match[0], text.count("\n", 0, match.start()) + 1
        if comment.startswith("/*") and not (comment.endswith("*/") and len(comment) > len("/*/")):
            raise InputError(f"{source}:{line}: the comment after /* is not closed: add */")
        if not comment.startswith("#"):
            formats.setdefault("openmpi", line)
        return END_OF_LINE + "\n" * comment.count("\n") if comment.startswith("/*") else ""

    for number, line in enumerate(COMMENT.sub(blank, text).split("\n"), 1):
        for part in line.split(END_OF_LINE):
            if part.strip():
                yield number, part


def _add(host: _Listed, name: str, line: _Line, where: str) -> None:
    """Add a line that names a host to the host's record."""
    if name != host.name:
        raise InputError(f"{where}: {name} is spelled {host.name} in line {host.line}: use one spelling")
    if line.slots is None:
        host.slots = None if host.slots is None else host.slots + 1
        host.repeats += 1
    elif (
        line.format in ("hydra", "lsf")
        or (host.slots is None and not host.repeats)
        or (line.format == "sge" and not host.repeats)
    ):
        host.slots = line.slots + (host.slots or host.repeats)
    else:
        raise InputError(
            f"{where}: {name} is listed again, with slots, which {FORMATS[line.format]} does not allow: remove this "
            f"line or line {host.line}"
        )
    if (slots := host.slots or host.repeats) > MAX_SLOTS:
        raise InputError(f"{where}: {name} has {slots:,} slots in total, more than {MAX_SLOTS:,}: correct its lines")


def _parse_line(words: list[str], where: str, file_format: str) -> _Line:
    """Parse a line of a file whose earlier lines have this format."""
    first = words[0]
    if AFFINITY.fullmatch(" ".join(words[1:])) or (file_format == "lsf" and NUMBER.fullmatch("".join(words[1:]))):
        return _Line(names=(check_name(first, where),), slots=1, format="lsf")
    if len(words) in GRID_ENGINE_WORDS and NUMBER.fullmatch(words[1]) and "=" not in "".join(words):
        return _Line(names=(check_name(first, where),), slots=_slots(words[1], where), format="sge")
    name, digits = split_slots(first)
    line_format = "plain" if digits is None else "hydra"
    values: dict[str, str] = {}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if line_format == "plain":
            line_format = next((format_name for format_name, settings in SETTINGS.items() if key in settings), "plain")
        meaning = SETTINGS.get(line_format, {}).get(key, "")
        if meaning not in VALUES or not VALUES[meaning].fullmatch(value):
            if NUMBER.fullmatch(word):
                raise InputError(
                    f"{where}: {word} alone is not a number of slots and could be a CPU of LSF's affinity file: write "
                    f"slots={word} if it is meant as slots"
                )
            effective = file_format if line_format == "plain" else line_format
            raise InputError(
                f"{where}: {word[:60]!r} is not {KNOWN.get(effective, KNOWN['plain'])}; the line is in "
                f"{FORMATS[effective]}: remove or correct it"
            )
        if meaning in values:
            raise InputError(
                f"{where}: {word[:60]!r} repeats a setting of this line, which {FORMATS[line_format]} does not allow: "
                "remove one of the two"
            )
        values[meaning] = value
    if values.get("port", SSH_PORT) != SSH_PORT:
        raise InputError(
            f"{where}: port={values['port']} is a setting of {FORMATS[line_format]} that not every launcher knows: "
            f"write 'Port {values['port']}' under 'Host {network_name(name)}' into ~/.ssh/config and remove it here"
        )
    text = digits or values.get("slots") or values.get("most")
    slots = None if text is None else _slots(text, where)
    if slots is not None and int(values.get("most", slots)) < slots:
        raise InputError(f"{where}: max_slots={values['most']} is less than slots={slots}: correct one of the two")
    names = expand_hosts(name, where) if "[" in name else (name,)
    if "user" in values:
        names = tuple(f"{values['user']}@{name.rpartition('@')[2]}" for name in names)
    return _Line(names=tuple(check_name(name, where) for name in names), slots=slots, format=line_format)


def split_slots(text: str) -> tuple[str, str | None]:
    """Split "h1:4" or "[fe80::1]:4" into the host's name and the digits of its slots, None without slots."""
    match = None if is_address(text) else WITH_SLOTS.fullmatch(text)
    return (text, None) if match is None else (match[1], match[2])


def host_with_slots(text: str, source: str) -> Host:
    """Parse a host as in mpirun's and horovodrun's lists: NAME or NAME:SLOTS. Raises InputError on anything else."""
    name, digits = split_slots(text)
    return Host(name=check_name(name, source), slots=None if digits is None else _slots(digits, source))


def _slots(text: str, where: str) -> int:
    if not NUMBER.fullmatch(text) or not 1 <= int(text) <= MAX_SLOTS:
        raise InputError(f"{where}: {text[:30]} slots are out of range: set 1 to {MAX_SLOTS:,} slots, or drop the line")
    return int(text)


def check_name(name: str, source: str) -> str:
    """Return the name if it is a valid host name. Raises InputError otherwise."""
    if len(name) > MAX_NAME:
        raise InputError(f"{source}: host name {name[:30]!r}... has more than {MAX_NAME} characters: correct it")
    if not NAME.fullmatch(name) and not is_address(name):
        raise InputError(f"{source}: {name[:60]!r} is not a host name or address: use only letters, digits and . - _")
    if NUMERIC.fullmatch(network_name(name)) and not is_address(name):
        raise InputError(
            f"{source}: {name[:60]!r} looks like an address but is not one: write four numbers from 0 to 255 without "
            "leading zeros, or the host's name"
        )
    return name


def format_hosts(hosts: Iterable[Host], file_format: str) -> str:
    """Write a hostfile in a format of FORMATS; the inverse of `parse_hosts` for hosts with slots."""
    if file_format == "openmpi":
        lines = [_unbracketed(host.name) + ("" if host.slots is None else f" slots={host.slots}") for host in hosts]
    elif file_format == "hydra":
        lines = [_in_hydra(host.name) + ("" if host.slots is None else f":{host.slots}") for host in hosts]
    else:
        lines = [host.name for host in hosts for _ in range(host.slots or 1)]
    return "\n".join(lines) + "\n"


def hosts_with_slots(hosts: Iterable[Host]) -> str:
    """Return h1:2,h2:2, the host list with ranks for the command lines of Open MPI and MPICH."""
    return ",".join(format_hosts(hosts, "hydra").split())


def _unbracketed(name: str) -> str:
    """Return the name with an IPv6 address in ssh's form, without brackets."""
    user, at, host = name.rpartition("@")
    return f"{user}{at}{network_name(host)}"


def _in_hydra(name: str) -> str:
    if ":" in name:
        raise InputError(
            f"host {name} is an IPv6 address, which Intel MPI, MPICH and Open MPI's --host do not take in lists: give "
            "its name"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Names of equal hosts, and the plan that each of them uses."""

    hosts: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The host groups of a job in rank order, and warnings about their differences."""

    groups: tuple[HostGroup, ...]
    warnings: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return sum(len(group.hosts) * len(group.plan.workers) for group in self.groups)


def plan_cluster(
    groups: Sequence[tuple[tuple[str, ...], Machine]], request: Request, *, compare: Compare | None = None
) -> Cluster:
    """Plan each group of hosts once, as part of one job; `compare` as in `plan_machine`.

    Raises InputError if a host is in two groups.
    """
    hosts = [host for names, _ in groups for host in names]
    if (twice := repeated_host(hosts)) is not None:
        same = "" if twice[0] == twice[1] else f", as {twice[0]}"
        raise InputError(f"host {twice[1]} is in two groups{same}: name each host once")
    whole = replace(request, nodes=len(hosts))
    plans = [plan_machine(machine, whole, Runtime(), compare=compare) for _, machine in groups]
    comm = {_ccl_threads(plan) for plan in plans}
    limited = len(comm) > 1 and (whole.workload is None or whole.workload.backend == "ccl")
    if limited:
        fewest = min(comm)
        plans = [
            plan
            if _ccl_threads(plan) == fewest
            else plan_machine(
                machine, whole, Runtime(), chosen=_with_ccl_threads(machine, whole, fewest), compare=compare
            )
            for plan, (_, machine) in zip(plans, groups, strict=True)
        ]
    planned = tuple(HostGroup(hosts=names, plan=plan) for (names, _), plan in zip(groups, plans, strict=True))
    threads = sorted({worker.intra_op for group in planned for worker in group.plan.workers})
    uneven = (
        (f"workers have {threads[0]} to {threads[-1]} threads: the smallest sets the pace of each step on all hosts",)
        if len(threads) > 1 and request.balance == "equal"
        else ()
    )
    differ = (
        (f"workers have {min(comm)} to {max(comm)} oneCCL threads: all are planned with {min(comm)}, as oneCCL needs",)
        if limited
        else ()
    )
    return Cluster(groups=planned, warnings=uneven + differ)


def _ccl_threads(plan: Plan) -> int:
    """Return the number of oneCCL's threads, or queues, of a worker: one without comm cores, which runs no thread."""
    return int(plan.workers[0].env.get("CCL_WORKER_COUNT", "1"))


def _with_ccl_threads(machine: Machine, request: Request, threads: int) -> Chosen:
    """Return the numbers that give a worker this number of oneCCL threads, and no more comm cores than they need unless
    the request or a profile sets these."""
    chosen = {"comm_threads": (threads, "the most that all hosts can have, as oneCCL connects equal numbers")}
    if request.profile == "auto" and request.comm_cores is None:
        threads_per_core = max(len(core.pus) for core in machine.allowed_cores)
        chosen["comm_cores"] = ceil(threads / threads_per_core), "enough for the oneCCL threads that all hosts can have"
    return chosen


def one_group(hosts: tuple[str, ...], plan: Plan) -> Cluster:
    """Return a cluster of equal hosts."""
    return Cluster(groups=(HostGroup(hosts=hosts, plan=plan),), warnings=())


def job_plan_json(groups: Sequence[HostGroup]) -> str:
    """Return the plan file for a job's ranks: one plan if all hosts share it, else each group's hosts and plan."""
    if all(group.plan == groups[0].plan for group in groups):
        return plan_to_json(groups[0].plan)
    return plan_json(
        {"host_groups": [{"hosts": list(group.hosts), "plan": plan_to_dict(group.plan)} for group in groups]}
    )


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Convert a cluster's plans to JSON data: for each group its folded host names and one plan."""
    return {
        "schema_version": SCHEMA_VERSION,
        "world_size": cluster.world_size,
        "host_groups": [
            {"hosts": fold_hosts(group.hosts), "count": len(group.hosts), "plan": plan_to_dict(group.plan)}
            for group in cluster.groups
        ],
        "warnings": list(cluster.warnings),
    }


def own_address(hosts: tuple[str, ...]) -> str:
    """Return this host's address as other hosts see it: the source address of packets to the first other host."""
    for host in hosts:
        if is_this_host(host):
            continue
        try:
            address = address_to(network_name(host))
        except OSError as error:
            raise InputError(f"host {host} cannot be reached from here ({error}): correct its name") from None
        if not is_loopback(address):  # a loopback address means another name of this host
            return address
    return LOOPBACK
