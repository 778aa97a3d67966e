"""A long training that is killed again and again ends with the weights of one that was left alone."""

import os
import random
import signal
import time

import pytest

from cputrain.runs.events import read_events, time_spent
from tests.faults.place import Place, Running, alive
from tests.support.checkpoints import differing, newest

STEPS = 2000
WHOLE = ("epochs=500", "comm.bucket_mib=0.5", "checkpoint.every_steps=20")  # of four steps each


def killed_after(place: Place, run: Running, steps: int, chance: random.Random) -> bool:
    """Kill a rank, all ranks or the launcher after so many more steps; False where the training ends before."""
    stop = place.step + steps
    while place.step < stop:
        if run.process.poll() is not None:
            return False
        time.sleep(0.01)
    ranks = run.ranks()
    victims = chance.choice([[*ranks.values()], [run.process.pid], [chance.choice([*ranks.values()] or [0])]])
    for pid in victims:
        if pid and alive(pid):
            os.kill(pid, signal.SIGKILL)
    run.end()
    while any(map(alive, ranks.values())):
        time.sleep(0.05)
    return bool(ranks)


@pytest.mark.long
def test_two_thousand_steps_with_a_kill_about_every_hundred(place: Place) -> None:
    with place.training(*WHOLE, "output=whole") as run:
        assert run.end(3600) == 0, run.text
    chance, kills = random.Random(1), 0
    while True:
        resume = ("--resume",) if (place.run / "recipe.yaml").is_file() else ()
        with place.training(*WHOLE, *resume) as run:
            if not killed_after(place, run, chance.randrange(60, 141), chance):
                assert run.end(3600) == 0, run.text
                break
            kills += 1

    def losses(folder: str) -> list[tuple[int, float]]:
        events = read_events(place.folder / folder)
        return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]

    done = sum(event["event"] == "step" for event in place.logged)
    print(f"{kills} kills, {done - STEPS} steps done twice, {time_spent(place.run).wall_s:.0f} s")
    assert kills >= 10
    assert losses("run") == losses("whole") and len(losses("run")) == STEPS
    assert differing(newest(place.run), newest(place.folder / "whole")) == []
