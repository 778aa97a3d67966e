"""What happened to a run: warnings, and the faults that it survived."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from affinity.wording import counted
from cputrain.report.run import Run
from cputrain.report.summary import date, duration

MOST_WARNINGS, MOST_IMAGES = 200, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """A warning that was given `times` times, at the steps from `first` to `last`, and the images that it names."""

    what: str
    times: int
    first: int
    last: int
    images: tuple[str, ...]
    more_images: int


def warnings_of(run: Run) -> tuple[Warned, ...]:
    """The warnings, equal ones together, in the order of the first."""
    by_text: dict[str, list[Mapping[str, Any]]] = {}
    for event in run.of("warning"):
        by_text.setdefault(event["what"], []).append(event)
    return tuple(_warned(what, events) for what, events in list(by_text.items())[:MOST_WARNINGS])


def _warned(what: str, events: Sequence[Mapping[str, Any]]) -> Warned:
    steps = [event.get("step", 0) for event in events]
    images = list(dict.fromkeys(image for event in events for image in event.get("images", ())))
    return Warned(
        what=what,
        times=len(events),
        first=min(steps),
        last=max(steps),
        images=tuple(images[:MOST_IMAGES]),
        more_images=max(len(images) - MOST_IMAGES, 0),
    )


def faults_of(run: Run) -> tuple[str, ...]:
    """A line about each start after the first: how the one before ended, the pause, and the steps done again."""
    lines: list[str] = []
    done, last, ended = 0, None, False
    for event in run.log.written:
        if event["event"] == "start" and last is not None:
            how = "stopped" if ended else "interrupted"
            pause = duration(max(event["time"] - last["time"], 0.0))
            lines.append(f"{how} after step {done:,}, started again {pause} later ({date(event['time'])})")
        if event["event"] == "step":
            if event["step"] <= done and lines:
                lines[-1] += f"; {counted(done - event['step'] + 1, 'step')} done again"
            done = event["step"]
        last, ended = event, event["event"] == "end"
    return tuple(lines)
