"""Messages between a job's hosts: frozen dataclasses <-> JSON. Other fields, types and sizes are refused."""

import json
import math
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from affinity.terminal_text import printable

MAX_TEXT = 4096  # characters of a text: a path has no more
MAX_ITEMS = 1 << 16  # entries of a list
MAX_INTEGER = 1 << 60


class ProtocolError(Exception):
    """The other end of a connection has sent something that is no message of this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank's first message: its number and its host's name."""

    rank: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A rank's process is there: for how long it has been stopped, idle or busy without a break."""

    stopped_s: float = 0.0
    idle_s: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A rank's exit: its status (negative where a signal ended it), its log and the last lines of it. `by_job`: the job
    has ended it. `shortage`: the bytes that it had and those that there are, and whose, where memory was short."""

    status: int
    tail: tuple[str, ...]
    log: str
    by_job: bool
    shortage: tuple[int, int, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The lines of a rank's Python stack, innermost first; none where it has none to show."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signaled:
    """A stop signal has reached the rank's agent, which ends its rank."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The launching host's answer to a Hello or a heartbeat; to a Hello, with the label of the rank's host."""

    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The job ends; the ranks have so many seconds until they are killed."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Each rank gets the preemption signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowStack:
    """The rank's Python stack is wanted."""


def encode(message: Any) -> bytes:
    """A message as JSON; "type" is the name of its class."""
    kind: type = type(message)
    fields = {name: getattr(message, name) for name in _hints(kind)}
    return json.dumps({"type": kind.__name__, **fields}).encode()


def decode(data: bytes, types: tuple[type, ...]) -> Any:
    """The message of one of these types. Raises ProtocolError on anything else."""
    try:
        fields = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise ProtocolError("not JSON") from None
    if not isinstance(fields, dict):
        raise ProtocolError("no message")
    name = fields.pop("type", None)
    found = next((one for one in types if one.__name__ == name), None)
    if found is None:
        raise ProtocolError("a message of another type")
    hints = _hints(found)
    if fields.keys() != hints.keys():
        raise ProtocolError(f"{name} has other fields")
    return found(**{field: _value(fields[field], hint) for field, hint in hints.items()})


@cache
def _hints(message_type: type) -> dict[str, Any]:
    return get_type_hints(message_type)


def _value(value: Any, hint: Any) -> Any:
    """The value as a field's type has it. Raises ProtocolError where it is of another type or too large."""
    if hint is float and type(value) in (int, float) and abs(value) <= MAX_INTEGER and not math.isnan(value):
        return float(value)
    if hint is str and isinstance(value, str) and len(value) <= MAX_TEXT:
        return printable(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and type(value) is int and abs(value) <= MAX_INTEGER:
        return value
    if get_origin(hint) is UnionType:  # X | None
        (inner,) = (one for one in get_args(hint) if one is not NoneType)
        return None if value is None else _value(value, inner)
    if get_origin(hint) is tuple:
        return _items(value, get_args(hint))
    raise ProtocolError("a value of another type or size")


def _items(value: Any, hints: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise ProtocolError("no list, or too long a list")
    each = (hints[0],) * len(value) if hints[1:] == (Ellipsis,) else hints
    if len(each) != len(value):
        raise ProtocolError("a list of another length")
    return tuple(_value(item, hint) for item, hint in zip(value, each, strict=True))
