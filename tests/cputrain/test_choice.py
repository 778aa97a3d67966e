"""All ranks choose the same backend, and none waits for one that has failed."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.rank import Rank
from cputrain.comm import ccl
from cputrain.comm.ccl.environment import Transport
from cputrain.comm.group import choose_backend, convert_lost_peer_errors
from cputrain.comm.store import SignedKeys

RANKS = [Rank(rank=i, world_size=3, local_rank=i, local_world_size=3, convention="env") for i in range(3)]


def chosen(requested: str) -> list[tuple[str, str] | str]:
    """The choice of each of three ranks, or its error."""
    keys = SignedKeys(dist.HashStore(), "token")

    def choose(rank: Rank) -> tuple[str, str] | str:
        try:
            return choose_backend(requested, rank, keys)
        except (InputError, RunError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(choose, RANKS))


def test_all_ranks_choose_oneccl_if_all_can_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ccl, "extension", lambda _rank, _transport: None)
    assert chosen("auto") == [("ccl", "over libfabric (not started by a PMI process manager)")] * 3
    assert chosen("gloo") == [("gloo", "comm.backend=gloo")] * 3


def test_a_rank_that_cannot_use_oneccl_is_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def extension(rank: Rank, _transport: Transport) -> None:
        if rank.rank == 1:
            raise InputError("comm.backend=ccl: no C++ compiler: install one")

    monkeypatch.setattr(ccl, "extension", extension)
    assert chosen("auto") == [("gloo", "rank 1: no C++ compiler: install one")] * 3
    others = "RunError: comm.backend=ccl: rank 1: no C++ compiler: install one"
    assert chosen("ccl") == [others, "InputError: comm.backend=ccl: no C++ compiler: install one", others]


@pytest.mark.parametrize(
    "message",
    [
        "ccl: rank 1 on n2 has gone\nmore",
        "Got the following error when running the callback: RuntimeError: ccl: rank 1 on n2 has gone\n\nAt: hooks.py",
    ],
)
def test_a_lost_peer_is_an_error_of_one_line_wherever_it_is_raised(message: str) -> None:
    with pytest.raises(RunError, match=r"^rank 0: rank 1 on n2 has gone$"), convert_lost_peer_errors(0):
        raise RuntimeError(message)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4321", "Connection closed by peer"),
        ("[gloo/transport/tcp/pair.cc:532] writev [::1]:4321: Broken pipe", "Broken pipe"),
        (
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 25000ms for recv operation to complete",
            "Timed out waiting 25000ms",
        ),
        # What gloo says of the operations after one that timed out, without its name.
        (
            "Got the following error when running the callback: RuntimeError: Application timeout caused pair closure",
            "Application timeout caused pair closure",
        ),
    ],
)
def test_a_peer_that_gloo_has_lost_is_an_error_of_one_line(message: str, cause: str) -> None:
    expected = f"rank 0 lost a peer ({cause}): see the rank that ended first"
    with pytest.raises(RunError, match=f"^{re.escape(expected)}$"), convert_lost_peer_errors(0):
        raise RuntimeError(message)


@pytest.mark.parametrize("kind", [dist.DistNetworkError, dist.DistStoreError])
def test_a_lost_store_is_an_error_of_one_line(kind: type[RuntimeError]) -> None:
    message = r"^rank 1 cannot reach the job's store, which rank 0 serves \(Failed to recv, got 0 bytes\)$"
    with pytest.raises(RunError, match=message), convert_lost_peer_errors(1):
        raise kind("Failed to recv, got 0 bytes\nframe #0: c10::Error")


@pytest.mark.parametrize("message", ["shape mismatch", "my own protocol: Connection closed by peer"])
def test_other_errors_are_not_converted(message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as caught, convert_lost_peer_errors(0):
        raise RuntimeError(message)
    assert not isinstance(caught.value, RunError)
