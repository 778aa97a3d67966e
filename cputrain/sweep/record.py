"""How long a training of a sweep ran and how it ended, recorded in its folder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from affinity.errors import InputError
from cputrain.files import write_text

FILE = "sweep-run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """Seconds that a training was allowed (None: no limit) and used over all its starts, and how the last start ended.

    `status` is "" where the training ended normally or the user stopped it.
    """

    requested_s: float | None
    used_s: float | None
    status: str
    ended_by: str


def read_record(folder: Path) -> TrialRecord | None:
    """The record in a run's folder; None where no start has ended yet. Raises InputError where it is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return TrialRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise InputError(f"{path} is damaged: remove it, and the training's time limit and use are unknown") from None


def write_record(folder: Path, record: TrialRecord) -> None:
    """Write the record into a run's folder."""
    write_text(folder / FILE, json.dumps(asdict(record)))
