"""Signals that stop a training: what ranks agree on, and the preemption signal after a training's end."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from cputrain.comm.store import SignedKeys
from cputrain.training.preemption import Preemption

ENDING = """
import signal
from cputrain.training.preemption import Preemption, ignore_preemption

class AtTheVeryEnd:
    def __del__(self):
        signal.raise_signal(signal.SIGUSR1)

signal.signal(signal.SIGUSR1, lambda number, frame: None)
kept = AtTheVeryEnd()
import sys
sys.modules["kept"] = kept
if "ignore" in sys.argv:
    ignore_preemption()
"""


def made(*, is_main_rank: bool, watched: bool, store: HashStore) -> Preemption:
    return Preemption(SignedKeys(store, "token"), is_main_rank=is_main_rank, watched=watched)


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_ranks_that_nobody_watches_stop_together_after_the_next_step(number: int, handlers: None) -> None:
    store = HashStore()
    other, main = (made(is_main_rank=main, watched=False, store=store) for main in (False, True))
    other.agree(3)
    signal.raise_signal(number)
    signal.raise_signal(signal.SIGTERM)  # which a launcher passes on as well
    main.agree(3)
    assert not main.should_stop_after(3) and not other.should_stop_after(3)
    other.agree(4)
    main.agree(4)
    assert main.should_stop_after(4) and other.should_stop_after(4)


def test_all_ranks_save_after_the_same_step(handlers: None) -> None:
    store = HashStore()
    other, main = (made(is_main_rank=main, watched=True, store=store) for main in (False, True))
    for step in (3, 4, 5, 6):
        main.agree(step, save_due=step in (3, 4))  # due until it is saved
        other.agree(step)
        assert main.should_save_after(step) == other.should_save_after(step) == (step == 4)
        assert not main.should_stop_after(step)


def status(*words: str) -> int:
    return subprocess.run([sys.executable, "-c", ENDING, *words], capture_output=True).returncode


def test_a_signal_at_the_very_end_does_not_end_a_finished_training() -> None:
    assert status() == -signal.SIGUSR1, "the handler is gone by then"
    assert status("ignore") == 0
