"""events.jsonl: what happened, one JSON object a line."""

import errno
import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FILE = "events.jsonl"


class Events:
    """Appends to a run's events.jsonl; each line is on its way to the disk when `write` returns."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._file = self._path.open("a+b", buffering=0)
        self._file.seek(0)
        text = self._file.read()
        self._file.truncate(text.rfind(b"\n") + 1)  # a line cut short would take the next one with it

    def write(self, event: str, **fields: Any) -> None:
        """Append {"event": event, "time": unix seconds, ...}; JSON has no NaN or infinity, those become null."""
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        line = f"{json.dumps({'event': event, 'time': round(time.time(), 3), **known})}\n".encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the next write would be told so
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """A run's events, oldest first. A last line cut short by a crash is left out, and so are steps, and what came of
    them, that a resumed run has done again."""
    events: list[dict[str, Any]] = []
    last = 0
    for line in (folder / FILE).read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            break
        if event["event"] == "step":
            if event["step"] <= last:
                events = [earlier for earlier in events if earlier.get("step", 0) < event["step"]]
            last = event["step"]
        events.append(event)
    return events
