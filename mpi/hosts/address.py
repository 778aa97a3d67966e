"""This host's address, as other hosts reach it."""

import socket

from affinity.errors import InputError
from affinity.ranks.rank import LOOPBACK
from affinity.ranks.route import address_to


def own_address(hosts: tuple[str, ...]) -> str:
    """This host's address on the way to a job's hosts: the one that packets to the first other host leave from."""
    here = socket.gethostname()
    others = [name for host in hosts if (name := host.rpartition("@")[2].strip("[]")) not in (here, "localhost")]
    if not others:
        return LOOPBACK
    try:
        return address_to(others[0])
    except OSError as error:
        raise InputError(f"host {others[0]} cannot be reached from here: {error}: correct its name") from None
