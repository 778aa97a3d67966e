"""The time of an all-reduce by algorithm, over two levels: a host's shared memory, then the fabric.

Each algorithm is a list of exchanges; an exchange costs latency + bytes x max(1 / core, workers at once / link). The
counts are those of Thakur, Rabenseifner and Gropp 2005 (Optimization of Collective Communication Operations in MPICH)
and, for the ring, of Patarasuk and Yuan 2009.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from cputrain.simulate.links import Link

ALGORITHMS = ("ring", "rabenseifner", "recursive-doubling", "two-level")
HOST, LEAF, TOP = "host", "leaf", "top"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """`count` messages in a row, each of `size` bytes that a worker sends while it receives as many.

    `level` is the widest level that they cross: a host, a leaf switch or the top of the network; `at_once` the number
    of a host's workers that send over its link at the same time.
    """

    count: float
    size: float
    level: str
    at_once: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What messages go through: the link (None on one host), a message's latency inside a host, and the bytes/s that
    the cores of one worker move, sums included: inside a host, and between hosts where that is less."""

    link: Link | None
    host_latency_s: float
    move_bytes_per_s: float
    wire_move_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of an all-reduce, and those of them in which a core of the worker is busy."""

    seconds: float
    core_s: float


def exchanges(algorithm: str, size: float, *, hosts: int, workers: int, leaf_hosts: int) -> tuple[Exchange, ...]:
    """The exchanges of an all-reduce of `size` bytes over hosts x workers ranks, numbered host by host."""
    ranks = hosts * workers
    if ranks == 1:
        return ()
    level = HOST if hosts == 1 else LEAF if hosts <= leaf_hosts else TOP
    if algorithm == "ring":  # one message leaves each host at a time, to its neighbor
        return (Exchange(count=2 * (ranks - 1), size=size / ranks, level=HOST if hosts == 1 else LEAF),)
    if algorithm == "two-level":
        inside = Exchange(count=2 * (workers - 1), size=size / workers, level=HOST)
        across = _halving(size / workers, hosts, lambda distance: LEAF if distance < leaf_hosts else TOP, workers)
        return ((inside,) if workers > 1 else ()) + across

    def crossed(distance: int) -> str:
        """The level between ranks this far apart; hosts of one leaf switch have consecutive numbers."""
        return HOST if distance < workers else LEAF if distance < workers * leaf_hosts else TOP

    if algorithm == "rabenseifner":
        return _halving(size, ranks, crossed, workers)
    powers = int(math.log2(ranks))
    steps = tuple(
        Exchange(count=1, size=size, level=crossed(1 << k), at_once=_senders(crossed(1 << k), workers))
        for k in range(powers)
    )
    return steps + _fold(size, ranks, level, workers)


def _halving(size: float, ranks: int, crossed: Callable[[int], str], workers: int) -> tuple[Exchange, ...]:
    """Recursive halving, nearest ranks first, and doubling back: Rabenseifner's algorithm."""
    if ranks == 1:
        return ()
    powers = int(math.log2(ranks))
    steps = tuple(
        Exchange(count=2, size=size / (2 << k), level=crossed(1 << k), at_once=_senders(crossed(1 << k), workers))
        for k in range(powers)
    )
    return steps + _fold(size, ranks, crossed(ranks - 1), workers)


def _fold(size: float, ranks: int, level: str, workers: int) -> tuple[Exchange, ...]:
    """Ranks beyond a power of two give their values to another rank first and get the sums last."""
    if ranks & (ranks - 1) == 0:
        return ()
    return (Exchange(count=2, size=size, level=level, at_once=_senders(level, workers)),)


def _senders(level: str, workers: int) -> int:
    return 1 if level == HOST else workers


def cost(found: tuple[Exchange, ...], path: Path) -> Cost:
    """Seconds of these exchanges over a path; a core moves one part of a message while the link carries another."""
    seconds = core_s = 0.0
    for exchange in found:
        inside = exchange.level == HOST or path.link is None
        moved = exchange.size / (
            path.move_bytes_per_s if inside else min(path.move_bytes_per_s, path.wire_move_bytes_per_s)
        )
        core_s += exchange.count * moved
        if inside or path.link is None:
            seconds += exchange.count * (path.host_latency_s + moved)
            continue
        narrow = path.link.taper if exchange.level == TOP else 1.0
        carried = exchange.size * exchange.at_once * narrow / path.link.bytes_per_s
        seconds += exchange.count * (path.link.latency_s + max(moved, carried))
    return Cost(seconds=seconds, core_s=core_s)
