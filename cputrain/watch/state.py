"""What the events of a run have told so far."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cputrain.report.tables import column, thin
from cputrain.runs.events import seconds_between

LAST_RECORDS, LAST_WARNINGS = 60, 5
RECENT_S = 60.0  # of the speed that the time left is computed from

MOST_POINTS = 20_000  # of a curve; beyond, a quarter is kept, with the lowest and highest

Curve = list[tuple[float, float]]


def thinned(curve: Curve) -> Curve:
    """A quarter of the points of a long curve."""
    table = thin({"step": column(x for x, _ in curve), "y": column(y for _, y in curve)}, MOST_POINTS // 4)
    return list(zip(table["step"].tolist(), table["y"].tolist(), strict=True))


@dataclass(slots=True, kw_only=True)
class WatchState:
    """A run's state: the last events of each kind, and the curves so far as (step, value)."""

    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    step: dict[str, Any] = field(default_factory=dict)
    last_time: float | None = None
    starts: int = 0
    losses: Curve = field(default_factory=list)
    speeds: Curve = field(default_factory=list)
    scores: Curve = field(default_factory=list)
    recent: deque[dict[str, Any]] = field(default_factory=deque)
    ranks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=LAST_RECORDS))
    warnings: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=LAST_WARNINGS))

    def add(self, events: Iterable[dict[str, Any]]) -> None:
        """Take in further events."""
        for event in events:
            self.last_time = event["time"]
            match event["event"]:
                case "start":
                    self.start, self.end = event, None
                    self.starts += 1
                    self.recent.clear()
                    self.ranks.clear()
                case "step":
                    self._add_step(event)
                case "epoch" if event["val_top1"] is not None:
                    self.scores.append((event["step"], event["val_top1"]))
                case "ranks":
                    self._add_ranks(event)
                case "warning":
                    self.warnings.append(event)
                case "end":
                    self.end = event

    def _add_step(self, event: dict[str, Any]) -> None:
        step = event["step"]
        for curve in (self.losses, self.speeds, self.scores):
            while curve and curve[-1][0] >= step:  # a resumed run does these steps again
                curve.pop()
        self.step = event
        for curve in (self.losses, self.speeds):
            if len(curve) > MOST_POINTS:
                curve[:] = thinned(curve)
        if event["loss"] is not None:
            self.losses.append((step, event["loss"]))
        self.speeds.append((step, event["images_per_s"]))
        self.recent.append(event)
        while len(self.recent) > 2 and seconds_between(self.recent[0], event) > RECENT_S:
            self.recent.popleft()

    def _add_ranks(self, event: dict[str, Any]) -> None:
        if self.ranks and len(self.ranks[-1]["seconds"]) != len(event["seconds"]):
            self.ranks.clear()
        self.ranks.append(event)

    @property
    def part(self) -> float | None:
        """The share of the steps that is done; None where the log does not say how many there are."""
        total = self.start.get("last_step")
        return min(self.step.get("step", 0) / total, 1.0) if total else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the speed of the last minute, evaluations in between included; None where that
        is not known yet."""
        total = self.start.get("last_step")
        if not total or len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        steps = last["step"] - first["step"]
        return (total - last["step"]) * seconds_between(first, last) / steps if steps > 0 else None
