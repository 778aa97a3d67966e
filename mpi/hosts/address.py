"""This host's address, as other hosts reach it."""

from affinity.errors import InputError
from affinity.ranks.host_names import is_loopback, is_this_host, network_name
from affinity.ranks.rank import LOOPBACK
from affinity.ranks.route import address_to


def own_address(hosts: tuple[str, ...]) -> str:
    """This host's address on the way to a job's hosts: the one that packets to the first other host leave from."""
    for host in hosts:
        if is_this_host(host):
            continue
        try:
            address = address_to(network_name(host))
        except OSError as error:
            raise InputError(f"host {host} cannot be reached from here: {error}: correct its name") from None
        if not is_loopback(address):  # else it is another name of this host
            return address
    return LOOPBACK
