"""All-reduce between workers: the exchanges of each algorithm, what they cost, and the size of a bucket.

Each algorithm is a list of exchanges; an exchange costs latency + bytes x max(1 / core, concurrent workers / link). The
numbers of messages are from Thakur, Rabenseifner and Gropp 2005 (Optimization of Collective Communication Operations in
MPICH) and, for the ring, from Patarasuk and Yuan 2009.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALGORITHMS = ("ring", "rabenseifner", "recursive-doubling", "two-level")
HOST, LEAF, TOP = "host", "leaf", "top"
MEASURED_BYTES = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # of the all-reduces to which alpha and beta are fitted
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 1 << 20, 100 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A host's network link: bytes/s that messages reach, latency of one message. `taper` is the factor by which the
    bandwidth to hosts on other leaf switches is lower, `leaf_hosts` the number of hosts on one leaf switch."""

    name: str
    nominal_gbit: float
    bytes_per_s: float
    latency_s: float
    latency_range_s: tuple[float, float]
    taper: float
    leaf_hosts: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """`count` consecutive messages of `size` bytes, each of which a worker sends while it receives an equal one.

    `level` is the widest level that they cross: a host, a leaf switch or the top of the network; `at_once` the number
    of a host's workers that send over its link concurrently.
    """

    count: float
    size: float
    level: str
    at_once: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePath:
    """The path of messages: the link (None on one host), a message's latency inside a host, and the bytes/s at which
    the cores of one worker move and add: inside a host, and between hosts if that is less."""

    link: Link | None
    host_latency_s: float
    move_bytes_per_s: float
    wire_move_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of an all-reduce, and the seconds in which a core of the worker is busy with it."""

    seconds: float
    core_s: float


def all_reduce_exchanges(
    algorithm: str, size: float, *, hosts: int, workers: int, leaf_hosts: int
) -> tuple[Exchange, ...]:
    """Return the exchanges of an all-reduce of `size` bytes over hosts x workers ranks, numbered host by host."""
    ranks = hosts * workers
    if ranks == 1:
        return ()
    if algorithm == "ring":  # one message at a time leaves each host, to its neighbor
        return (Exchange(count=2 * (ranks - 1), size=size / ranks, level=HOST if hosts == 1 else LEAF),)
    if algorithm == "two-level":
        inside = Exchange(count=2 * (workers - 1), size=size / workers, level=HOST)
        across = _pairwise(
            size / workers, hosts, lambda distance: LEAF if distance < leaf_hosts else TOP, workers, halved=True
        )
        return ((inside,) if workers > 1 else ()) + across

    def crossed(distance: int) -> str:
        """Return the level between ranks at this distance; hosts of a leaf switch have consecutive numbers."""
        return HOST if distance < workers else LEAF if distance < workers * leaf_hosts else TOP

    return _pairwise(size, ranks, crossed, workers, halved=algorithm == "rabenseifner")


def _pairwise(
    size: float, ranks: int, crossed: Callable[[int], str], workers: int, *, halved: bool
) -> tuple[Exchange, ...]:
    """Return exchanges with the ranks at a distance of 1, 2, 4, ...: of all values (recursive doubling), or with
    `halved` of a half, a quarter, ... of them, and back (Rabenseifner's algorithm).

    Ranks beyond a power of two first send their values to another rank and receive the sums last.
    """
    powers = ranks.bit_length() - 1
    steps = [(1 << k, 2, size / (2 << k)) if halved else (1 << k, 1, size) for k in range(powers)]
    if ranks > 1 << powers:
        steps.append((ranks - 1, 2, size))
    crossings = ((crossed(distance), count, part) for distance, count, part in steps)
    return tuple(
        Exchange(count=count, size=part, level=level, at_once=1 if level == HOST else workers)
        for level, count, part in crossings
    )


def exchange_cost(crossings: tuple[Exchange, ...], path: MessagePath) -> Cost:
    """Return the seconds of exchanges over a path; a core moves one part of a message while the link moves another."""
    seconds = core_s = 0.0
    for exchange in crossings:
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


def fit_alpha_beta(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit t = alpha + beta x bytes to (bytes, seconds): seconds per message and seconds per byte.

    Minimizes the squared relative errors, so that small messages count as much as large ones. Both results are
    positive.
    """
    weights = [1 / (seconds * seconds) for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    variance = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    covariance = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    beta = max(covariance / variance, 1e-15)
    return max(mean_y - beta * mean_x, 1e-9), beta


def bucket_bytes(gradient_bytes: int, alpha_s: float, beta_s: float) -> int:
    """Return the bucket size with the least communication outside the backward pass, 1 MiB to 100 MiB.

    With buckets of b bytes, the latency of G / b messages and the transfer of the last bucket do not overlap with
    computation: alpha G / b + beta b, which is smallest at b = sqrt(alpha G / beta).
    """
    best = math.sqrt(alpha_s * gradient_bytes / beta_s)
    return int(min(max(best, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))
