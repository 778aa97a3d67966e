"""The address and the interface by which this host reaches another, from the kernel's routes."""

import fcntl
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915  # linux/sockios.h
LOOPBACK_INTERFACE = "lo"
IPV6 = Path("/proc/net/if_inet6")


def address_to(peer: str) -> str:
    """This host's own address on its way to a peer. Raises OSError where the peer has no address or no route."""
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only chooses the route
        return str(probe.getsockname()[0])


def interface_to(peer: str) -> str | None:
    """The network interface over which this host reaches a peer; None where it has none."""
    try:
        own = address_to(peer)
    except OSError:
        return None
    if ":" in own:
        wanted = socket.inet_pton(socket.AF_INET6, own.partition("%")[0]).hex()
        lines = (line.split() for line in IPV6.read_text(encoding="utf-8").splitlines())
        return next((words[-1] for words in lines if words[0] == wanted), None)
    return next((name for _, name in socket.if_nameindex() if _address(name) == own), None)


def own_addresses() -> list[str]:
    """This host's addresses, one of IPv4 and all of IPv6 for each interface but loopback."""
    names = [name for _, name in socket.if_nameindex() if name != LOOPBACK_INTERFACE]
    listed = (line.split() for line in IPV6.read_text(encoding="utf-8").splitlines()) if IPV6.exists() else ()
    six = [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])) for words in listed if words[-1] in names]
    return [*filter(None, map(_address, names)), *six]


def _address(interface: str) -> str | None:
    """An interface's IPv4 address, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
