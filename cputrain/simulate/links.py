"""The network between hosts: speed and latency of a link, and how much narrower the top of the network is."""

from dataclasses import dataclass

from affinity.errors import InputError
from mpi.fabric import FABRICS

US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A host's link: bytes/s that messages reach, the latency of one; `taper` is how much less bandwidth a host has to
    hosts on other leaf switches, `leaf_hosts` how many share one."""

    name: str
    nominal_gbit: float
    bytes_per_s: float
    latency_s: float
    latency_range_s: tuple[float, float]
    taper: float
    leaf_hosts: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What a fabric adds to its nominal speed (mpi/fabric.py): the share of it that messages reach, and the rest."""

    reached: float
    latency_us: tuple[float, float, float]
    taper: float
    leaf_hosts: int
    source: str


_OPA = (
    "12.3 of 12.5 GB/s and 1 to 2 us between MPI ranks (Intel's Omni-Path figures); switches of 48 ports with 28 hosts \
and 20 links up, as TACC's Stampede2"
)
_KINDS = {
    "opa": _Kind(reached=0.98, latency_us=(1.0, 1.5, 3.0), taper=1.4, leaf_hosts=28, source=_OPA),
    "psm3": _Kind(
        reached=0.95, latency_us=(2.0, 3.0, 6.0), taper=1.0, leaf_hosts=32,
        source="usual for RoCE: 95 % of the nominal speed, 3 us; one switch",
    ),
    "ib": _Kind(
        reached=0.97, latency_us=(0.8, 1.3, 3.0), taper=1.0, leaf_hosts=40,
        source="usual for InfiniBand HDR: 97 % of the nominal speed, 1.3 us; a full fat tree",
    ),
    "ethernet": _Kind(
        reached=0.94, latency_us=(15.0, 30.0, 60.0), taper=2.0, leaf_hosts=40,
        source="TCP: 94 % of the nominal speed after headers, 30 us; uplinks usually have half of the hosts' bandwidth",
    ),
    "efa": _Kind(
        reached=0.9, latency_us=(10.0, 16.0, 30.0), taper=1.0, leaf_hosts=40,
        source="AWS: 15 to 20 us between MPI ranks; full bandwidth inside a placement group",
    ),
    "slingshot": _Kind(
        reached=0.95, latency_us=(1.5, 2.0, 4.0), taper=1.0, leaf_hosts=32,
        source="usual for Slingshot: 95 % of the nominal speed, 2 us; a dragonfly with full bandwidth",
    ),
}  # fmt: skip
LINKED = tuple(_KINDS)
"""Names of the fabrics that connect hosts."""


def link_of(fabric: str, *, gbit: float | None = None, latency_us: float | None = None) -> Link:
    """The link of a fabric, with another speed in Gbit/s or latency in microseconds where they are given.

    Raises InputError for a fabric that does not connect hosts.
    """
    kind = _KINDS.get(fabric)
    if kind is None:
        raise InputError(f"--fabric {fabric} does not connect hosts: name one of {', '.join(_KINDS)}")
    nominal = gbit or FABRICS[fabric].link_gbit
    low, usual, high = kind.latency_us
    if latency_us is not None:
        low = usual = high = latency_us
    return Link(
        name=fabric,
        nominal_gbit=nominal,
        bytes_per_s=nominal * 1e9 / 8 * kind.reached,
        latency_s=usual * US,
        latency_range_s=(low * US, high * US),
        taper=kind.taper,
        leaf_hosts=kind.leaf_hosts,
        source=kind.source,
    )
