import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.topology.machine import format_list, format_mask, name_cpus, parse_list, parse_mask

IDS = st.sets(st.integers(0, 400)).map(lambda ids: tuple(sorted(ids)))


@given(IDS)
def test_list_round_trip(ids: tuple[int, ...]) -> None:
    assert parse_list(format_list(ids)) == ids


@given(IDS.filter(bool))
def test_mask_round_trip(ids: tuple[int, ...]) -> None:
    assert parse_mask(format_mask(ids)) == ids


def test_formats_of_the_kernel() -> None:
    assert parse_list("0-3,8\n") == (0, 1, 2, 3, 8)
    assert parse_list("\n") == ()
    assert parse_mask("00000001,00000003\n") == (0, 1, 32)
    assert parse_mask("1,3") == (0, 1, 32)
    assert parse_mask("0x00000003,,0x00fc0000") == (18, 19, 20, 21, 22, 23, 64, 65)
    assert format_list((0, 1, 2, 5)) == "0-2,5"
    assert [name_cpus(ids) for ids in ((7,), (7, 8), (0, 2))] == ["CPU 7", "CPUs 7-8", "CPUs 0,2"]


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "-2"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_list(text)
