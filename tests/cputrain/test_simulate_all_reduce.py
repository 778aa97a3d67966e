"""The cost of all-reduces, stragglers and links."""

import random
from dataclasses import replace
from math import exp
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.predict.assumptions import LINKED, link_of
from cputrain.predict.collectives import ALGORITHMS, MessagePath, all_reduce_exchanges, exchange_cost
from cputrain.predict.step_time import expected_maximum, slowest

PATH = MessagePath(link=link_of("opa"), host_latency_s=1e-6, move_bytes_per_s=3e9)
SIZE = 1e8


def seconds(algorithm: str, hosts: int, workers: int, size: float = SIZE, path: MessagePath = PATH) -> float:
    link = path.link or link_of("opa")
    found = all_reduce_exchanges(algorithm, size, hosts=hosts, workers=workers, leaf_hosts=link.leaf_hosts)
    return exchange_cost(found, replace(path, link=path.link if hosts > 1 else None)).seconds


def over(fabric: str, **link: float) -> MessagePath:
    """A fabric whose messages cost the cores nothing."""
    return replace(PATH, link=link_of(fabric, **link), move_bytes_per_s=1e30)


@pytest.mark.parametrize(
    ("algorithm", "fabric", "hosts", "workers", "messages", "volume"),
    [
        ("ring", "opa", 8, 4, 2 * 31, 2 * 31 / 32),  # Patarasuk and Yuan 2009
        ("recursive-doubling", "ib", 64, 1, 6, 6),
        ("rabenseifner", "ib", 32, 1, 2 * 5, 2 * (1 - 1 / 32)),
    ],
)
def test_algorithms_cost_what_their_formulas_say(
    algorithm: str, fabric: str, hosts: int, workers: int, messages: int, volume: float
) -> None:
    """`messages` latencies, and `volume` times the size over the link."""
    link = link_of(fabric)
    expected = messages * link.latency_s + volume * SIZE / link.bytes_per_s
    assert seconds(algorithm, hosts, workers, path=over(fabric)) == pytest.approx(expected)


@given(hosts=st.integers(1, 300), workers=st.integers(1, 16), size=st.floats(1e3, 1e9))
def test_no_algorithm_beats_the_least_traffic(hosts: int, workers: int, size: float) -> None:
    """Every rank must move 2 n (p - 1) / p bytes, and every host's link carry as much of each host's sum."""
    ranks = hosts * workers
    least = 2 * size * (ranks - 1) / ranks / PATH.move_bytes_per_s if ranks > 1 else 0.0
    link = PATH.link
    assert link is not None
    wire = 2 * size * (hosts - 1) / hosts / link.bytes_per_s if hosts > 1 else 0.0
    for algorithm in ALGORITHMS:
        found = seconds(algorithm, hosts, workers, size)
        assert found >= max(least, wire) * 0.999
        assert found == 0 or ranks > 1


@given(
    hosts=st.integers(2, 300),
    workers=st.integers(1, 16),
    factor=st.floats(1.1, 10),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_a_faster_link_is_never_slower(hosts: int, workers: int, factor: float, algorithm: str) -> None:
    slow, fast = (
        seconds(algorithm, hosts, workers, path=replace(PATH, link=link_of("ethernet", gbit=gbit)))
        for gbit in (10, 10 * factor)
    )
    assert fast <= slow


def test_ranks_beyond_a_power_of_two_cost_two_more_messages() -> None:
    assert seconds("rabenseifner", 33, 1) > seconds("rabenseifner", 32, 1) + SIZE / 3e9


def test_workers_of_a_host_share_its_link_only_where_they_cross_it() -> None:
    wide = over("ethernet", gbit=1)
    ring, doubling = (seconds(name, 4, 8, path=wide) for name in ("ring", "recursive-doubling"))
    assert ring == pytest.approx(2 * SIZE * 31 / 32 / wide.link.bytes_per_s, rel=0.02)  # type: ignore[union-attr]
    assert doubling == pytest.approx(2 * 8 * SIZE / wide.link.bytes_per_s, rel=0.02)  # type: ignore[union-attr]


def test_messages_over_tcp_cost_cores_more_than_inside_a_host() -> None:
    free = replace(PATH, link=link_of("ethernet", gbit=1000))
    copied = replace(free, wire_move_bytes_per_s=1.5e9)
    across = all_reduce_exchanges("ring", SIZE, hosts=8, workers=1, leaf_hosts=40)
    assert exchange_cost(across, copied).core_s == pytest.approx(2 * exchange_cost(across, free).core_s)
    assert exchange_cost(across, copied).seconds == pytest.approx(2 * exchange_cost(across, free).seconds, rel=0.02)
    inside = all_reduce_exchanges("ring", SIZE, hosts=1, workers=8, leaf_hosts=40)
    assert exchange_cost(inside, copied) == exchange_cost(inside, free)


def test_the_top_of_the_network_is_narrower() -> None:
    link, path = link_of("opa"), over("opa")
    inside, across = seconds("recursive-doubling", 16, 1, path=path), seconds("recursive-doubling", 64, 1, path=path)
    assert link.leaf_hosts == 28
    assert across - inside == pytest.approx(2 * link.latency_s + (1 + link.taper) * SIZE / link.bytes_per_s)


@pytest.mark.parametrize(
    ("draws", "known"), [(1, 0.0), (2, 0.5642), (4, 1.0294), (10, 1.5388), (100, 2.5076), (1000, 3.2414)]
)
def test_the_largest_of_normal_values_has_the_tabulated_mean(draws: int, known: float) -> None:
    """Harter 1961, Expected values of normal order statistics."""
    assert expected_maximum(draws) == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize(("hosts", "workers"), [(1, 4), (64, 1), (64, 4)])
def test_the_slowest_worker_is_as_slow_as_in_draws(hosts: int, workers: int) -> None:
    """Hosts that stay slow or fast, workers that are so in one step; medians of one."""
    draw, lasting, passing = random.Random(1), 0.06 if hosts > 1 else 0.0, 0.01

    def step() -> float:
        speeds = [draw.gauss(0, lasting) for _ in range(hosts)]
        return exp(max(speed + draw.gauss(0, passing) for speed in speeds for _ in range(workers)))

    found = mean(step() for _ in range(1000))
    assert slowest(hosts, workers, lasting=lasting, passing=passing) == pytest.approx(found, rel=0.01)


def test_links_are_the_fabrics_and_take_other_speeds() -> None:
    assert set(LINKED) >= {"opa", "psm3", "ib", "ethernet"}
    assert all(link_of(name).source for name in LINKED)
    assert link_of("ethernet", gbit=10).bytes_per_s == pytest.approx(0.94 * 1.25e9)
    assert link_of("opa", latency_us=7).latency_s == pytest.approx(7e-6)
    with pytest.raises(InputError, match="does not connect hosts"):
        link_of("shm")
