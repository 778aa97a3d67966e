"""All ranks take the same backend, and none waits for one that has failed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from affinity.errors import InputError, RunError
from affinity.ranks.rank import Rank
from cputrain.comm import ccl
from cputrain.comm.choice import choose
from cputrain.comm.group import naming_lost_peers

RANKS = [Rank(rank=i, world_size=3, local_rank=i, local_world_size=3, launcher="env") for i in range(3)]


def chosen(asked: str) -> list[tuple[str, str] | str]:
    """What each of three ranks takes, or its error."""
    store = dist.HashStore()

    def take(rank: Rank) -> tuple[str, str] | str:
        try:
            return choose(asked, rank, store)
        except (InputError, RunError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(take, RANKS))


def test_all_take_oneccl_where_all_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ccl, "extension", lambda _rank: None)
    assert chosen("auto") == [("ccl", "every rank can use oneCCL")] * 3
    assert chosen("gloo") == [("gloo", "comm.backend=gloo")] * 3


def test_one_that_cannot_is_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def extension(rank: Rank) -> None:
        if rank.rank == 1:
            raise InputError("comm.backend=ccl: no C++ compiler: install one")

    monkeypatch.setattr(ccl, "extension", extension)
    assert chosen("auto") == [("gloo", "rank 1: no C++ compiler: install one")] * 3
    others = "RunError: comm.backend=ccl: rank 1: no C++ compiler: install one"
    assert chosen("ccl") == [others, "InputError: comm.backend=ccl: no C++ compiler: install one", others]


@pytest.mark.parametrize(
    "said",
    [
        "ccl: rank 1 on n2 has gone\nmore",
        "Got the following error when running the callback: RuntimeError: ccl: rank 1 on n2 has gone\n\nAt: hooks.py",
    ],
)
def test_the_end_of_a_group_is_one_line_wherever_it_is_met(said: str) -> None:
    with pytest.raises(RunError, match=r"^rank 0: rank 1 on n2 has gone$"), naming_lost_peers(0):
        raise RuntimeError(said)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape") as caught, naming_lost_peers(0):
        raise RuntimeError("shape mismatch")
    assert not isinstance(caught.value, RunError)
