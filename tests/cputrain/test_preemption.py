"""Signals that stop a training: what ranks agree on, and the preemption signal after a training's end."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from cputrain.comm.store import SignedKeys
from cputrain.training.signals import Preemption
from tests.support.ccl_jobs import ran
from tests.support.forked import Ended, ended, forked, printed

ENDING = """
import signal
from cputrain.training.signals import Preemption, ignore_preemption

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

EARLY = """
import os, sys, time
from cputrain.training.signals import signals_blocked

prepared = "prepared" in sys.argv
with signals_blocked(os.environ, prepared=prepared):
    print("held", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    from torch._C._distributed_c10d import HashStore
    from cputrain.comm.store import SignedKeys
    from cputrain.training.signals import Preemption

    preemption = Preemption(SignedKeys(HashStore(), ""), is_main_rank=True, prepared=prepared)
    preemption.agree(0)
    print("stops", preemption.should_stop_after(1), flush=True)
"""
INTERRUPTED = """
import atexit, signal
from cputrain.affinity.rank import Rank
from cputrain.launch.rank_process import run_rank

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs do not have
atexit.register(print, "cleaned up, as its connections would be")
rank = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="env")
run_rank(rank, lambda: signal.raise_signal(signal.SIGINT))
"""
MISPLACED = """
from types import SimpleNamespace
from cputrain.affinity.binding import raise_binding_error
from cputrain.affinity.rank import Rank
from cputrain.launch.rank_process import run_rank

rank = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="env")
run_rank(rank, lambda: raise_binding_error(SimpleNamespace(local_rank=0), ["2 OpenMP threads may leave CPUs 0-1"]))
"""
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class CountingStore(HashStore):
    """A store that counts how often it is asked."""

    reads = 0

    def check(self, keys: list[str]) -> bool:
        self.reads += 1
        return super().check(keys)


def made(*, is_main_rank: bool, prepared: bool, store: HashStore) -> Preemption:
    return Preemption(SignedKeys(store, "token"), is_main_rank=is_main_rank, prepared=prepared)


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    kept = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_ranks_that_nobody_watches_stop_together_after_the_next_step(number: int, handlers: None) -> None:
    store = HashStore()
    other, main = (made(is_main_rank=main, prepared=False, store=store) for main in (False, True))
    other.agree(3)
    signal.raise_signal(number)
    signal.raise_signal(signal.SIGTERM)  # which a launcher passes on as well
    main.agree(3)
    assert not main.should_stop_after(3) and not other.should_stop_after(3)
    other.agree(4)
    main.agree(4)
    assert main.should_stop_after(4) and other.should_stop_after(4)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_signal_at_another_rank_than_0_stops_all(prepared: bool, handlers: None) -> None:
    """That of a host which is preempted alone."""
    store = HashStore()
    main, other = (made(is_main_rank=main, prepared=prepared, store=store) for main in (True, False))
    signal.raise_signal(signal.SIGUSR1)  # the handler is that of the last one
    stops = []
    for step in range(1, 8):
        main.agree(step)
        other.agree(step)
        assert main.should_stop_after(step) == other.should_stop_after(step)
        stops += [step] * main.should_stop_after(step)
    assert stops[0] == 3


def test_a_prepared_rank_saves_at_sigterm_and_ends_by_it(handlers: None) -> None:
    """A scheduler's signal reaches all processes of a job: the launcher's and each rank's own."""
    store = HashStore()
    other, main = (made(is_main_rank=main, prepared=True, store=store) for main in (False, True))
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1)  # from the launcher
    signal.raise_signal(signal.SIGHUP)
    other.agree(3)
    main.agree(3)
    other.agree(4)
    assert main.should_stop_after(4) and other.should_stop_after(4)
    assert (main.ends_by, other.ends_by) == (signal.SIGTERM, 0)
    assert signal.getsignal(signal.SIGINT) is not signal.getsignal(signal.SIGTERM)
    assert made(is_main_rank=True, prepared=False, store=store).ends_by == 0


def test_a_stranger_cannot_request_a_stop(handlers: None) -> None:
    store = HashStore()
    main = made(is_main_rank=True, prepared=True, store=store)
    store.set("stop_requested", "yes")
    SignedKeys(store, "another token").set("stop_requested", "yes")
    for step in range(1, 8):
        main.agree(step)
        assert not main.should_stop_after(step)


def test_all_ranks_save_after_the_same_step(handlers: None) -> None:
    store = HashStore()
    other, main = (made(is_main_rank=main, prepared=True, store=store) for main in (False, True))
    for step in (3, 4, 5, 6):
        main.agree(step, save_due=step in (3, 4))  # due until it is saved
        other.agree(step)
        assert main.should_save_after(step) == other.should_save_after(step) == (step == 4)
        assert not main.should_stop_after(step)


def test_quick_steps_look_into_the_store_now_and_then_and_still_agree(handlers: None) -> None:
    """The signal comes at any step of a cycle, and epochs end within cycles."""
    for signaled in range(5, 20):
        store = CountingStore()
        other, main = (made(is_main_rank=main, prepared=True, store=store) for main in (False, True))
        stops = []
        for step in range(1, 60):
            for rank in (other, main):
                rank.set_step_time(0.0125)  # eight steps in a tenth of a second
                rank.agree(step, save_due=step >= signaled + 1)
                if step % 13 == 0:
                    rank.agree(step, ends_epoch=True)
            if step == signaled:
                signal.raise_signal(signal.SIGUSR1)
            assert main.should_save_after(step) == other.should_save_after(step)
            assert main.should_stop_after(step) == other.should_stop_after(step)
            stops += [step] * main.should_stop_after(step)
        assert signaled < stops[0] <= signaled + 16
        assert store.reads < 30


@pytest.fixture
def early(tmp_path: Path) -> Callable[..., Ended]:
    """What becomes of a process that gets a signal long before it can stop a training."""

    def signaled(number: int, *words: str, **env: str) -> Ended:
        with forked("-c", EARLY, str(tmp_path / "sent"), *words, **env) as process:
            while printed(process)[0] != "held\n":
                assert process.poll() is None, printed(process)
                time.sleep(0.01)
            process.send_signal(number)
            time.sleep(0.1)
            (tmp_path / "sent").touch()
            return ended(process)

    return signaled


@pytest.mark.parametrize(("number", "words"), [(signal.SIGUSR1, ["prepared"]), (signal.SIGTERM, [])])
def test_a_signal_in_a_rank_s_first_seconds_is_remembered(
    number: int, words: list[str], early: Callable[..., Ended]
) -> None:
    result = early(number, *words, **ONE_RANK)
    assert (result.status, result.out) == (0, "held\nstops True\n"), result.err


def test_sigterm_before_anything_is_started_ends_with_a_line(early: Callable[..., Ended]) -> None:
    result = early(signal.SIGTERM)
    assert result.status == 143
    assert result.err == "cputrain: SIGTERM before the training began: nothing was started\n"


def test_a_rank_of_a_prepared_run_can_be_ended_at_any_time(early: Callable[..., Ended]) -> None:
    assert early(signal.SIGTERM, "prepared", **ONE_RANK).status == -signal.SIGTERM


def status(*words: str) -> int:
    return subprocess.run([sys.executable, "-c", ENDING, *words], capture_output=True).returncode


def test_a_signal_at_the_very_end_does_not_end_a_finished_training() -> None:
    assert status() == -signal.SIGUSR1, "the handler is gone by then"
    assert status("ignore") == 0


def test_a_rank_that_is_interrupted_ends_by_the_signal_before_its_connections() -> None:
    """Others, which lose their connections to it, would otherwise end first and be named."""
    result = ran(INTERRUPTED)
    assert (result.status, result.out, result.err) == (-signal.SIGINT, "", "")


def test_a_rank_that_is_not_bound_as_planned_names_the_option_of_its_command() -> None:
    result = ran(MISPLACED)
    assert (result.status, result.out) == (1, "")
    assert result.err.endswith("may leave CPUs 0-1; plan again on this host, or continue with --no-verify\n")
