"""events.jsonl: what happened, one JSON object a line."""

import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

FILE = "events.jsonl"


class Events:
    """Appends to a run's events.jsonl; each line is on its way to the disk when `write` returns."""

    def __init__(self, folder: Path) -> None:
        self._file: TextIO = (folder / FILE).open("a", buffering=1)

    def write(self, event: str, **fields: Any) -> None:
        """Append {"event": event, "time": unix seconds, ...}; JSON has no NaN or infinity, those become null."""
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        self._file.write(json.dumps({"event": event, "time": round(time.time(), 3), **known}) + "\n")

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """A run's events, oldest first; a last line cut short by a crash is left out."""
    events = []
    for line in (folder / FILE).read_text().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            break
    return events
