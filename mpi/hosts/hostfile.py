"""Which hosts a job has: hostfiles of any launcher, Slurm's and PBS's environment <-> tuple of Host."""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError
from affinity.ranks.rank import tasks_per_node
from mpi.hosts.nodelist import expand

# Names reach shells, ssh and files: nothing else is let through.
NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
WITH_SLOTS = re.compile(r"(.+):(\d+)")
SLOTS_KEYS = ("slots", "max_slots", "max-slots")
FORMATS = {"openmpi": "Open MPI's (h1 slots=4)", "hydra": "Intel MPI's and MPICH's (h1:4)", "plain": "a plain list"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host by name, and how many ranks its list gives it; None where it does not say."""

    name: str
    slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostList:
    """Hosts in order, each once, and the format that they were written in: openmpi, hydra or plain."""

    hosts: tuple[Host, ...]
    form: str


def read_hostfile(path: Path) -> HostList:
    """The hosts of a file in any launcher's format. Raises InputError naming file and line."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the hostfile {path}: {error}") from None
    return parse_hosts(text, str(path))


def parse_hosts(text: str, where: str) -> HostList:
    """Hosts of a text: one a line, comments after #; repeated lines are as many slots (as in PBS's node file).

    Raises InputError naming the line that is wrong, or that is in another format than those before it.
    """
    forms: dict[str, int] = {}
    slots: dict[str, int | None] = {}
    repeats: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        names, form, count = _line(words, f"{where}:{number}")
        forms.setdefault(form, number)
        for name in names:
            repeats[name] += 1
            if repeats[name] > 1 and count is not None:
                raise InputError(f"{where}:{number}: host {name} is there twice with slots: give each host one line")
            slots[name] = count
    if not slots:
        raise InputError(f"{where} names no host: give one a line")
    if "openmpi" in forms and "hydra" in forms:
        raise InputError(
            f"{where} is {FORMATS['openmpi']} at line {forms['openmpi']} and {FORMATS['hydra']} at line "
            f"{forms['hydra']}: write it in one format"
        )
    several = any(count > 1 for count in repeats.values())
    hosts = (Host(name=n, slots=repeats[n] if several and count is None else count) for n, count in slots.items())
    form = next((form for form in ("openmpi", "hydra") if form in forms), "plain")
    return HostList(hosts=tuple(hosts), form=form)


def _line(words: list[str], where: str) -> tuple[tuple[str, ...], str, int | None]:
    """Host names, format and slots of a line."""
    first, settings = words[0], dict(word.partition("=")[::2] for word in words[1:])
    form, slots = "plain", None
    match = WITH_SLOTS.fullmatch(first)
    if match and not _is_ip(first):
        form, first, slots = "hydra", match.group(1), int(match.group(2))
    for key, value in settings.items():
        if key in SLOTS_KEYS and form != "hydra" and value.isdigit():
            form, slots = "openmpi", int(value) if key == "slots" else slots
        elif key == "binding" and form != "openmpi":
            form = "hydra"
        else:
            raise InputError(f"{where}: {key}={value} is not slots=N, max_slots=N or binding=...: mend the line")
    if slots == 0:
        raise InputError(f"{where}: {first} has 0 slots: give it one or take it out")
    names = expand(first) if "[" in first and not first.startswith("[") else (first,)
    return tuple(check_name(name, where) for name in names), form, slots


def check_name(name: str, where: str) -> str:
    """The name, if a host may be called so. Raises InputError otherwise."""
    if not NAME.fullmatch(name) and not _is_ip(name.rpartition("@")[2]):
        raise InputError(f"{where}: {name[:60]!r} is no host name or address: letters, digits, . - _ only")
    return name


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def allocated_hosts(env: Mapping[str, str]) -> HostList | None:
    """The hosts that Slurm or PBS has given to the job that this process is in; None outside one."""
    if nodes := env.get("SLURM_JOB_NODELIST"):
        names = expand(nodes)
        tasks = env.get("SLURM_TASKS_PER_NODE") if "SLURM_NTASKS" in env else None
        counts: tuple[int | None, ...] = tasks_per_node(tasks) if tasks else (None,) * len(names)
        if len(counts) != len(names):
            raise InputError(f"SLURM_TASKS_PER_NODE={tasks} does not match the {len(names)} hosts of {nodes}")
        hosts = tuple(Host(name=check_name(n, nodes), slots=c) for n, c in zip(names, counts, strict=True))
        return HostList(hosts=hosts, form="plain")
    if path := env.get("PBS_NODEFILE"):
        return read_hostfile(Path(path))
    return None


def format_hosts(hosts: Iterable[Host], form: str) -> str:
    """A hostfile in a launcher's format; the inverse of `parse_hosts` where slots are given."""
    if form == "openmpi":
        lines = [host.name if host.slots is None else f"{host.name} slots={host.slots}" for host in hosts]
    elif form == "hydra":
        lines = [_name_in_hydra(host.name) + ("" if host.slots is None else f":{host.slots}") for host in hosts]
    else:
        lines = [host.name for host in hosts for _ in range(host.slots or 1)]
    return "\n".join(lines) + "\n"


def _name_in_hydra(name: str) -> str:
    return f"[{name}]" if ":" in name and not name.startswith("[") else name
