"""An event log read as it grows."""

from pathlib import Path
from typing import Any

from affinity.errors import InputError
from cputrain.runs.event_types import read_event


class EventTail:
    """Reads the lines that are new in a file of events; from its begin again where a new run has replaced it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        self.damaged = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The new events, none where there is no file yet; and whether they begin a file that replaces another.

        Raises InputError where the file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                found = self._path.stat()
                replaced = self._offset > 0 and (found.st_ino != self._inode or found.st_size < self._offset)
                if replaced:
                    self._offset, self.damaged = 0, 0
                self._inode = found.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return [], False
        except OSError as error:
            raise InputError(f"cannot read {self._path}: {error.strerror}: give the folder of a training") from None
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = [read_event(line) for line in whole.splitlines()]
        self.damaged += sum(event is None for event in events)
        return [event for event in events if event is not None], replaced
