"""Compare host names and addresses, find a host in a list by any of its names, and label hosts uniquely.

Like DNS, names are compared without case (RFC 4343) and without the final dot of an absolute name (RFC 1034, 3.1). A
name is short for longer names that begin with all of its labels: n1 for n1.cluster.
"""

import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.rank import LOOPBACK, local_addresses
from cputrain.affinity.wording import join_or

LOCALHOST = "localhost"
HOSTS = Path("/etc/hosts")
LOOPBACKS = (LOOPBACK, "::1")
NUMBERS = re.compile("[0-9]+")
MAX_CANDIDATES = 4  # listed in a message


def network_name(host: str) -> str:
    """Return a host's name or address for sockets: without user, and without the brackets of an IPv6 address."""
    return host.rpartition("@")[2].strip("[]")


def host_key(host: str) -> str:
    """Normalize a host's spellings: ana@N1. and n1, FE80::1 and [fe80:0::1], 127.0.0.1 and localhost."""
    name = network_name(host).lower()
    address = _address(name)
    key = name.removesuffix(".") if address is None else str(address)
    return LOCALHOST if key in LOOPBACKS else key


def is_address(host: str) -> bool:
    """Whether a host is written as IPv4 or IPv6 address."""
    return _address(network_name(host)) is not None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if ":" not in name and not name.replace(".", "").isdecimal():
        return None  # a shortcut for most names, ten times as fast
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address  # ::ffff:10.0.0.1


def is_loopback(host: str) -> bool:
    """Whether a name or address is a loopback one: localhost, 127.0.0.1, ::1."""
    address = _address(network_name(host))
    return host_key(host) == LOCALHOST if address is None else address.is_loopback


def repeated_host(hosts: Iterable[str]) -> tuple[str, str] | None:
    """Return the first two spellings of the same host in a list; None if all hosts differ."""
    seen: dict[str, str] = {}
    for host in hosts:
        if (key := host_key(host)) in seen:
            return seen[key], host
        seen[key] = host
    return None


def repeated_this_host(hosts: Sequence[str]) -> tuple[str, str] | None:
    """Return the first two names or addresses of this host in a list; None if it is listed once or not at all.

    Does not query the name service. Loopback addresses other than 127.0.0.1 and ::1 count as separate hosts, as people
    test with them.
    """
    if len(hosts) < 2:
        return None
    candidates = _candidates(socket.gethostname(), hosts)
    short = {
        hosts[index]
        for index in candidates
        if len(candidates) == 1 and _is_short_for(socket.gethostname(), hosts[index])
    }
    keys = _local_keys() | {host_key(name) for name in short}
    local = [name for name in hosts if host_key(name) in keys or (not is_loopback(name) and _is_local(name))]
    return (local[0], local[1]) if len(local) > 1 else None


def names_of_one_host(hosts: Sequence[str], *, by_name: bool) -> tuple[str, str] | None:
    """Return the first name in a list and a longer form of it that mean the same host; None if there are none.

    They do if the name service has a common address for them; with `by_name` also if it does not know both of them
    and there is only one longer form. Only such names are looked up.
    """
    by_key = {host_key(host): host for host in hosts if not is_address(host)}
    longer: dict[str, list[str]] = {}
    for key, host in by_key.items():
        for short in _prefixes(key)[:-1]:
            if short in by_key:
                longer.setdefault(by_key[short], []).append(host)
    for short, names in longer.items():
        addresses = {*addresses_of(short)}
        for host in names:
            host_addresses = addresses_of(host)
            if not addresses.isdisjoint(host_addresses) or (
                by_name and len(names) == 1 and not (addresses and host_addresses)
            ):
                return short, host
    return None


def _local_keys() -> set[str]:
    """Return localhost, this host's name, and its aliases in /etc/hosts by name or address."""
    keys = {LOCALHOST, host_key(socket.gethostname())}
    lines = HOSTS.read_text(encoding="utf-8", errors="replace").splitlines() if HOSTS.exists() else ()
    words = [line.partition("#")[0].split() for line in lines]
    local = keys | {host_key(address) for address in local_addresses()}
    return keys.union(*(map(host_key, line[1:]) for line in words if not local.isdisjoint(map(host_key, line))))


def find_host(host: str, listed: Sequence[str]) -> int | None:
    """Find a host's index in a list by name; None if it is not listed.

    In this order: the same full name, the only shorter or longer form, the only name with the same first label in
    another domain. Raises InputError if the name is ambiguous.
    """
    candidates = _candidates(host, listed)
    if len(candidates) > 1:
        names = [listed[index] for index in candidates[:MAX_CANDIDATES]]
        raise InputError(f"host {host} may be {join_or(names)}: use its full name")
    return candidates[0] if candidates else None


def _candidates(host: str, listed: Sequence[str]) -> list[int]:
    """Return the indexes of the hosts that a name may mean; one if the full name is listed."""
    key, keys = host_key(host), [host_key(name) for name in listed]
    if key in keys:
        return [keys.index(key)]
    if is_address(key):
        return []
    label = key.partition(".")[0]
    alike = [
        index
        for index, listed_key in enumerate(keys)
        if listed_key.partition(".")[0] == label and not is_address(listed_key)
    ]
    short = [index for index in alike if f"{key}.".startswith(f"{keys[index]}.") or keys[index].startswith(f"{key}.")]
    # Names that differ only in numbers are different hosts of a series: worker.1.net, worker.2.net.
    series = NUMBERS.sub("0", key)
    return short or [index for index in alike if NUMBERS.sub("0", keys[index]) != series]


def find_this_host(listed: Sequence[str]) -> int | None:
    """Find this host's index in a list by its name, else by its addresses; None if it is not listed.

    Queries the name service only if its name is not in the list. Raises InputError if the name is ambiguous.
    """
    hostname = socket.gethostname()
    candidates = _candidates(hostname, listed)
    if len(candidates) == 1 and _is_short_for(hostname, listed[candidates[0]]):
        return candidates[0]
    this = [index for index, name in enumerate(listed) if _is_local(name)]
    this = this or [index for index in candidates if any(map(is_local_address, addresses_of(listed[index])))]
    if this:
        return this[0]
    unknown = [index for index in candidates if not addresses_of(listed[index])]  # names with addresses are other hosts
    if not unknown:
        names = {host_key(name) for name in _local_names()}
        return next((index for index, name in enumerate(listed) if host_key(name) in names), None)
    position = find_host(hostname, [listed[position] for position in unknown])
    return None if position is None else unknown[position]


def is_this_host(name: str) -> bool:
    """Whether a name is localhost, this host's name in full or short form, or one of its addresses.

    The name service is queried only for longer or shorter forms of this host's name: n1.a.org may be another host than
    this n1.
    """
    hostname = socket.gethostname()
    if _is_local(name) or host_key(name) == host_key(hostname):
        return True
    return _is_short_for(hostname, name) and (
        not (addresses := addresses_of(name)) or any(map(is_local_address, addresses))
    )


def _is_local(name: str) -> bool:
    """Whether a name is localhost or one of this host's addresses."""
    return host_key(name) == LOCALHOST or (is_address(name) and is_local_address(network_name(name)))


def _is_short_for(name: str, full_name: str) -> bool:
    """Whether two names are equal, or one is short for the other."""
    if is_address(name) or is_address(full_name):
        return host_key(name) == host_key(full_name)
    shorter, longer = sorted((f"{host_key(name)}.", f"{host_key(full_name)}."), key=len)
    return longer.startswith(shorter)


def is_local_address(address: str) -> bool:
    """Whether an address belongs to this host, tested by binding a socket to it."""
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(endpoint)
    except OSError:
        return False
    return True


def addresses_of(name: str) -> list[str]:
    """Look up a host's addresses in the name service; empty if it does not know the name."""
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(network_name(name), None, type=socket.SOCK_DGRAM)]
    except (OSError, UnicodeError):
        return []


def _local_names() -> list[str]:
    """Look up this host's names and aliases in the name service, which includes /etc/hosts."""
    names = []
    for address in local_addresses():
        try:
            name, aliases, _ = socket.gethostbyaddr(address)
        except OSError:
            continue
        names += [name, *aliases]
    return names


def share_first_label(hosts: Sequence[str]) -> bool:
    """Whether several host names begin with the same label."""
    labels = [host_key(host).partition(".")[0] for host in hosts if not is_address(host)]
    return len(set(labels)) < len(labels)


def host_labels(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return a unique short name for each host: its first label, or as many as necessary; addresses unchanged."""
    names = [network_name(host).removesuffix(".") for host in hosts]
    shortened = [_prefixes(name) for name in names]
    uses = Counter(text.lower() for texts in shortened for text in texts)
    return tuple(
        next((text for text in texts if uses[text.lower()] == 1), name)
        for name, texts in zip(names, shortened, strict=True)
    )


def _prefixes(name: str) -> list[str]:
    """List a name's prefixes by label: n1, n1.cluster."""
    return [name] if is_address(name) else list(accumulate(name.split("."), "{}.{}".format))
