"""The hosts of a job: hostfiles of any launcher <-> tuple of Host."""

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError
from affinity.units import MIB
from mpi.hosts.nodelist import expand

# Names reach shells, ssh and files: nothing else is let through.
NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
MAX_NAME = 255  # characters: POSIX's HOST_NAME_MAX, and a name in DNS
MAX_SLOTS = 1 << 16
MAX_BYTES = 64 << 20
NUMBER = re.compile("[0-9]{1,9}")
WITH_SLOTS = re.compile("(.+):([0-9]+)")
SLOTS_KEYS = ("slots", "max_slots", "max-slots")
FORMATS = {
    "openmpi": "Open MPI's format (h1 slots=4)",
    "hydra": "Intel MPI's and MPICH's format (h1:4)",
    "plain": "no launcher's format (h1)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host by name, and its number of ranks; None where its list has none."""

    name: str
    slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostList:
    """Hosts in order, each once, and the format of their list, a key of FORMATS."""

    hosts: tuple[Host, ...]
    format: str


def read_hostfile(path: Path) -> HostList:
    """The hosts of a file in any launcher's format. Raises InputError naming file and line."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise InputError(f"hostfile {path}: {error.strerror}: give a file with one host per line") from None
    except UnicodeDecodeError as error:
        raise InputError(f"hostfile {path} is not text: {error}: give a file with one host per line") from None
    if len(data) > MAX_BYTES:
        raise InputError(f"hostfile {path} is larger than {MAX_BYTES // MIB} MiB: name a file with one host per line")
    return parse_hosts(text, str(path))


def parse_hosts(text: str, source: str) -> HostList:
    """Hosts of a text from a source: one per line, comments after #; repeated lines count as slots (PBS's node file).

    Raises InputError naming a line that is wrong, or that has another format than those before it.
    """
    formats: dict[str, int] = {}
    slots: dict[str, int | None] = {}
    repeats: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        names, line_format, count = _parse_line(words, f"{source}:{number}")
        formats.setdefault(line_format, number)
        for name in names:
            repeats[name] += 1
            if repeats[name] > 1 and count is not None:
                raise InputError(
                    f"{source}:{number}: the file contains {name} twice, with slots: remove one of the two lines"
                )
            slots[name] = count
    if not slots:
        raise InputError(f"{source} contains no hosts: write one host per line")
    if "openmpi" in formats and "hydra" in formats:
        raise InputError(
            f"{source} mixes two formats: line {formats['openmpi']} is in {FORMATS['openmpi']}, line "
            f"{formats['hydra']} in {FORMATS['hydra']}: use one of them"
        )
    several = any(count > 1 for count in repeats.values())
    hosts = (Host(name=n, slots=repeats[n] if several and count is None else count) for n, count in slots.items())
    found = next((name for name in ("openmpi", "hydra") if name in formats), "plain")
    return HostList(hosts=tuple(hosts), format=found)


def _parse_line(words: list[str], place: str) -> tuple[tuple[str, ...], str, int | None]:
    """Host names, format and slots of a line."""
    first, settings = words[0], dict(word.partition("=")[::2] for word in words[1:])
    line_format, slots = "plain", None
    match = WITH_SLOTS.fullmatch(first)
    if match and not _is_ip(first):
        line_format, first, slots = "hydra", match[1], _slots(match[2], place)
    for key, value in settings.items():
        if key in SLOTS_KEYS and line_format != "hydra" and NUMBER.fullmatch(value):
            line_format, slots = "openmpi", _slots(value, place) if key == "slots" else slots
        elif key == "binding" and line_format != "openmpi":
            line_format = "hydra"
        else:
            word = next(word for word in words[1:] if word.partition("=")[0] == key)
            raise InputError(f"{place}: {word[:60]!r} is not slots=N, max_slots=N or binding=...: remove or correct it")
    names = expand(first) if "[" in first and not first.startswith("[") else (first,)
    return tuple(check_name(name, place) for name in names), line_format, slots


def _slots(text: str, place: str) -> int:
    if not NUMBER.fullmatch(text) or not 1 <= int(text) <= MAX_SLOTS:
        raise InputError(f"{place}: {text[:30]} slots: set slots to 1 to {MAX_SLOTS:,}, or remove the line")
    return int(text)


def check_name(name: str, source: str) -> str:
    """The name, if it is a valid name of a host. Raises InputError otherwise."""
    if len(name) > MAX_NAME:
        raise InputError(f"{source}: the host name {name[:30]!r}... has more than {MAX_NAME} characters: correct it")
    if not NAME.fullmatch(name) and not _is_ip(name.rpartition("@")[2]):
        raise InputError(f"{source}: {name[:60]!r} is not a host name or address: use only letters, digits and . - _")
    return name


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


def format_hosts(hosts: Iterable[Host], file_format: str) -> str:
    """A hostfile in a format of FORMATS; the inverse of `parse_hosts` where slots are given."""
    if file_format == "openmpi":
        lines = [host.name if host.slots is None else f"{host.name} slots={host.slots}" for host in hosts]
    elif file_format == "hydra":
        lines = [_name_in_hydra(host.name) + ("" if host.slots is None else f":{host.slots}") for host in hosts]
    else:
        lines = [host.name for host in hosts for _ in range(host.slots or 1)]
    return "\n".join(lines) + "\n"


def hosts_with_slots(hosts: Iterable[Host]) -> str:
    """h1:2,h2:2, as the command lines of Open MPI and MPICH take hosts and their ranks."""
    return ",".join(format_hosts(hosts, "hydra").split())


def _name_in_hydra(name: str) -> str:
    return f"[{name}]" if ":" in name and not name.startswith("[") else name
