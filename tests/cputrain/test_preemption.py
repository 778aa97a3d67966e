"""The preemption signal after a training's end."""

import signal
import subprocess
import sys

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


def status(*words: str) -> int:
    return subprocess.run([sys.executable, "-c", ENDING, *words], capture_output=True).returncode


def test_a_signal_at_the_very_end_does_not_end_a_finished_training() -> None:
    assert status() == -signal.SIGUSR1, "the handler is gone by then"
    assert status("ignore") == 0
