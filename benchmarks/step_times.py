"""The times of a training's steps as a script measures its own: from the end of one to the end of the next."""

from itertools import pairwise
from pathlib import Path
from statistics import median

from cputrain.runs import read_events


def median_step_s(run: Path) -> float:
    """The median seconds between the step events of a run, which has at least two.

    Everything that the trainer does between steps is in it, which the events' own images_per_s leaves out.
    """
    times = [event["time"] for event in read_events(run) if event["event"] == "step"]
    return median(after - before for before, after in pairwise(times))
