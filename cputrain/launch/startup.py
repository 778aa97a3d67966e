"""What a command does before its first step, told in a line that is redrawn, and in the end how long it took."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from affinity.ranks.rank import Rank
from affinity.terminal import redraws
from mpi.supervise.connection import TOKEN_VARIABLE

WORTH_TELLING_S = 0.1


@dataclass(slots=True, kw_only=True)
class Startup:
    """The phases of a start, and their seconds; silent unless `shown`. The line is redrawn in its place, or where that
    cannot be (`redrawn` is False) each phase is a line of its own."""

    shown: bool
    redrawn: bool = True
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    file: TextIO = field(default_factory=lambda: sys.stderr)
    _phase: str = ""
    _since: float = 0.0
    _begun: float = 0.0
    _width: int = 0

    def __post_init__(self) -> None:
        self._begun = self.clock()

    def phase(self, name: str) -> None:
        """Begin a phase, which ends the one before."""
        self._end()
        self._phase, self._since = name, self.clock()
        self._draw(f"starting: {name}")

    def done(self) -> str:
        """End the last phase and take the line away; returns what took how long."""
        self._end()
        self._draw("")
        parts = ", ".join(
            f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items() if seconds >= WORTH_TELLING_S
        )
        return f"ready after {self.clock() - self._begun:.1f} s" + (f": {parts}" if parts else "")

    def _end(self) -> None:
        if self._phase:
            taken = self.clock() - self._since
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + taken
            self._phase = ""

    def _draw(self, text: str) -> None:
        """Over the line before, as a progress bar is drawn, with the cursor back at its begin: whatever is printed
        next, an error as well, is a line of its own."""
        if self.shown and (self.redrawn or text):
            self.file.write(f"\r{text.ljust(self._width)}\r" if self.redrawn else f"{text}\n")
            self.file.flush()
        self._width = len(text)


def startup_of(rank: Rank, env: Mapping[str, str], *, shown: bool) -> Startup:
    """The start of a rank, which rank 0 tells if `shown`: drawn on a terminal, or for the process that has started it;
    as lines of a log where another launcher writes that."""
    redrawn = redraws(sys.stderr, env) or TOKEN_VARIABLE in env
    return Startup(shown=shown and rank.rank == 0, redrawn=redrawn, file=sys.stderr if redrawn else sys.stdout)
