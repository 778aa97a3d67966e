"""What a terminal can show: whether lines can be drawn again in their place, and whether there is color."""

from collections.abc import Mapping
from typing import TextIO


def redraws(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether the stream is a terminal that moves its cursor: TERM=dumb (an editor's shell window, a serial console)
    is none."""
    return stream.isatty() and env.get("TERM") != "dumb"


def shows_color(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether to write in color: to such a terminal, unless NO_COLOR is set to anything but nothing (no-color.org)."""
    return redraws(stream, env) and not env.get("NO_COLOR")
