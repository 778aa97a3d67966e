"""Live terminal screen of a run."""

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.machine import format_list
from cputrain.affinity.wording import plural
from cputrain.report.charts import as_column, thin_table
from cputrain.report.run import date_text, duration_text, unit_of
from cputrain.runs.events import read_event, seconds_between

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of U+2800, by row and column
BLANK = 0x2800

LAST_RECORDS, LAST_WARNINGS = 60, 5
RECENT_S = 60.0  # window of the speed from which the remaining time is estimated

MAX_POINTS = 20_000  # of a curve; longer ones are thinned to a quarter, keeping the extremes

Curve = list[tuple[float, float]]

MAX_RANKS, MAX_BINDINGS = 16, 8
CURVE_HEIGHT, HALF = 7, 100  # lines; width from which on two curves are side by side
LEVELS = "·░▒▓█"
HEAT = ("#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
SILENT_S = 60.0


def braille_curve(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """Draw points as lines of braille text, 2 x 4 dots per character, with the highest and lowest value at the left; x
    may go back after a restart."""
    if not points:
        return []
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    labels = [f"{high:.4g}", *("" for _ in range(height - 2)), f"{low:.4g}"]
    margin = max(map(len, labels))
    columns, rows = 2 * max(width - margin - 2, 4), 4 * height
    cells = [[0] * (columns // 2) for _ in range(height)]
    before = None
    for x, y in points:
        column = round((x - first) / (last - first or 1) * (columns - 1))
        row = round((high - y) / (high - low or 1) * (rows - 1))
        for cell in _between(before, (column, row)):
            cells[cell[1] // 4][cell[0] // 2] |= DOTS[cell[1] % 4][cell[0] % 2]
        before = column, row
    return [
        f"{label:>{margin}} │{''.join(chr(BLANK + dots) for dots in line)}"
        for label, line in zip(labels, cells, strict=True)
    ]


def _between(before: tuple[int, int] | None, target: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the places on a straight line from one point to the next, without its start."""
    if before is None:
        return [target]
    (a, b), (c, d) = before, target
    count = max(abs(c - a), abs(d - b), 1)
    return [(round(a + (c - a) * i / count), round(b + (d - b) * i / count)) for i in range(1, count + 1)]


def thin_curve(curve: Curve) -> Curve:
    """Thin a long curve to a quarter of its points."""
    table = thin_table({"step": as_column(x for x, _ in curve), "y": as_column(y for _, y in curve)}, MAX_POINTS // 4)
    return list(zip(table["step"].tolist(), table["y"].tolist(), strict=True))


@dataclass(slots=True, kw_only=True)
class WatchState:
    """State of a run: the latest events of each kind, and the curves so far as (step, value)."""

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
        """Add new events."""
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
            while curve and curve[-1][0] >= step:  # a resumed run repeats these steps
                curve.pop()
        self.step = event
        for curve in (self.losses, self.speeds):
            if len(curve) > MAX_POINTS:
                curve[:] = thin_curve(curve)
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
        """Fraction of the steps that are done; None if the log does not contain their number."""
        total = self.start.get("last_step")
        return min(self.step.get("step", 0) / total, 1.0) if total else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the speed of the last minute, including evaluations; None if not known yet."""
        total = self.start.get("last_step")
        if not total or len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        steps = last["step"] - first["step"]
        return (total - last["step"]) * seconds_between(first, last) / steps if steps > 0 else None


class EventTail:
    """Reads the new lines of a file of events; starts over if the file was replaced by a new run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        self.damaged = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new events, none if there is no file yet; and whether they are from a file that replaced another.

        Raises InputError if the file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                replaced = self._offset > 0 and (status.st_ino != self._inode or status.st_size < self._offset)
                if replaced:
                    self._offset, self.damaged = 0, 0
                self._inode = status.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return [], False
        except OSError as error:
            raise InputError(f"cannot read {self._path}: {error.strerror}; name the folder of a training") from None
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = [read_event(line) for line in whole.splitlines()]
        self.damaged += sum(event is None for event in events)
        return [event for event in events if event is not None], replaced


@contextmanager
def keys_pressed() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to the given seconds and returns the keys that were pressed, "" if none.

    Keys are read immediately and not echoed. If stdin is no terminal, or belongs to another program (a background job),
    the function only waits. The terminal is restored at the end.
    """
    number = sys.stdin.fileno() if sys.stdin.isatty() else None
    if number is None or os.tcgetpgrp(number) != os.getpgrp():
        yield _only_wait
        return
    before = termios.tcgetattr(number)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([number], [], [], seconds)
        return os.read(number, 100).decode(errors="replace") if ready else ""

    tty.setcbreak(number, termios.TCSANOW)  # Ctrl-C still sends a signal
    try:
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def watch_screen(
    name: str, state: WatchState, *, width: int, damaged: int = 0, now: float | None = None
) -> RenderableType:
    """Return the screen of a run called `name`, `width` columns wide, at a Unix time (None: now)."""
    parts: list[RenderableType] = [_head(name, state, time.time() if now is None else now, width)]
    if state.part is not None:
        done = round(width * state.part)
        parts.append(Text("━" * done, style="green").append("─" * (width - done), style="dim"))
    parts += _curves(state, width)
    if state.ranks:
        parts.append(_heat(state, width))
    if state.start.get("bindings"):
        parts.append(_bindings(state))
    if state.warnings:
        lines = (
            Text(f"step {warning.get('step', 0):,}: {terminal_text(warning['what'])}") for warning in state.warnings
        )
        parts.append(Panel(Group(*lines), title="last warnings", title_align="left", border_style="yellow"))
    if damaged:
        parts.append(Text(f"{plural(damaged, 'damaged line')} of the log omitted", style="yellow"))
    return Group(*parts)


def terminal_text(text: str) -> str:
    """Replace characters that a terminal would interpret."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _head(name: str, state: WatchState, now: float, width: int) -> Text:
    start, step = state.start, state.step
    head = Text(terminal_text(name), style="bold")
    head.append(f"  {_status(state, now)}", style="not bold")
    if step:
        epoch, total = step["epoch"], start.get("last_step")
        per_epoch = start.get("steps_per_epoch")
        epochs = f" of {total / per_epoch:g}" if total and per_epoch else ""
        facts = [f"epoch {epoch:.2f}{epochs}", f"step {step['step']:,}" + (f" of {total:,}" if total else "")]
        facts += [f"{step['images_per_s']:,.1f} {unit_of(state.start)}/s", f"lr {step['rate']:.4g}"]
        facts += [f"rank 0's loss {step['loss']:.4f}"] if step["loss"] is not None else []
        facts += [f"best top-1 {max(value for _, value in state.scores):.2f} %"] if state.scores else []
        seconds = start.get("global_batch", 0) / step["images_per_s"] if step["images_per_s"] > 0 else 0
        if seconds:
            waits = (("data", "data_wait_s"), ("comm", "comm_wait_s"))
            facts += [f"{what} wait {100 * step.get(key, 0) / seconds:.0f} %" for what, key in waits]
        head.append("\n" + "\n".join(_packed(facts, width)), style="not bold")
    return head


def _packed(facts: list[str], width: int) -> list[str]:
    """Wrap the facts into lines of this width, breaking only between them."""
    lines = [facts[0]]
    for fact in facts[1:]:
        line = f"{lines[-1]}  {fact}"
        lines = [*lines[:-1], line] if len(line) <= width else [*lines, fact]
    return lines


def _status(state: WatchState, now: float) -> str:
    if state.end is not None:
        return f"{terminal_text(state.end['status'])}, {duration_text(state.end['time_to_train_s'])} to train"
    if state.last_time is None:
        return "no event yet, the ranks are starting"
    if not state.step:
        return "before the first step"
    silent = now - state.last_time
    remaining = f"{duration_text(state.left_s)} left" if state.left_s is not None else ""
    starts = f"start {state.starts}" if state.starts > 1 else ""
    quiet = f"no event for {duration_text(silent)} (last {date_text(state.last_time)})" if silent > SILENT_S else ""
    return ", ".join(filter(None, (starts, quiet or remaining)))


def _curves(state: WatchState, width: int) -> list[RenderableType]:
    second: tuple[str, Curve] = (
        ("validation top-1, %", state.scores) if state.scores else (f"{unit_of(state.start)}/s", state.speeds)
    )
    shown = [(title, points) for title, points in (("rank 0's loss", state.losses), second) if len(points) > 1]
    column_width = (width - 2) // 2 if width >= HALF and len(shown) > 1 else width
    panels = [
        Panel(
            Text("\n".join(braille_curve(points, column_width - 4, CURVE_HEIGHT))),
            title=title,
            title_align="left",
            width=column_width,
        )
        for title, points in shown
    ]
    return [Columns(panels, padding=(0, 1))] if panels else []


def _heat(state: WatchState, width: int) -> RenderableType:
    """Draw each rank's compute time in the last records, brighter for more; of many ranks only the slowest."""
    records = list(state.ranks)[-max(width - 52, 10) :]
    computing = [
        [
            whole - comm - data
            for whole, comm, data in zip(*(r[k] for k in ("seconds", "comm_wait_s", "data_wait_s")), strict=True)
        ]
        for r in records
    ]
    low, high = min(map(min, computing)), max(map(max, computing))
    last = records[-1]
    ranks = sorted(range(len(last["seconds"])), key=lambda rank: -computing[-1][rank])[:MAX_RANKS]
    table = Table(box=None, pad_edge=False, expand=False)
    for head in ("rank", f"compute of a step, {low:.3g} to {high:.3g} s", "s", "comm wait", "data wait"):
        table.add_column(head, justify="left" if head.startswith("compute") else "right", no_wrap=True)
    for rank in sorted(ranks):
        cells = Text()
        for record in computing:
            level = min(int((record[rank] - low) / (high - low or 1) * len(LEVELS)), len(LEVELS) - 1)
            cells.append(LEVELS[level], style=HEAT[level])
        whole = last["seconds"][rank] or 1.0
        waits = (f"{100 * last[key][rank] / whole:.0f} %" for key in ("comm_wait_s", "data_wait_s"))
        table.add_row(str(rank), cells, f"{computing[-1][rank]:.3g}", *waits)
    total = len(last["seconds"])
    title = plural(total, "rank") + (f", the {MAX_RANKS} slowest" if total > MAX_RANKS else "")
    return Panel(table, title=title, title_align="left")


def _bindings(state: WatchState) -> RenderableType:
    bindings = state.start["bindings"]
    moved = [binding for binding in bindings if binding["pus"] != binding["planned_pus"]]
    table = Table(box=None, pad_edge=False)
    for head in ("rank", "host", "CPUs", "memory"):
        table.add_column(head, no_wrap=True)
    for binding in (*moved, *(binding for binding in bindings if binding not in moved))[:MAX_BINDINGS]:
        cpus = format_list(binding["pus"]) + (
            f" (planned {format_list(binding['planned_pus'])})" if binding in moved else ""
        )
        table.add_row(
            *(
                Text(terminal_text(text))
                for text in (str(binding["rank"]), binding["host"], cpus, binding["memory_policy"])
            )
        )
    hidden = len(bindings) - MAX_BINDINGS
    more = f", {hidden} more" if hidden > 0 else ""
    title = "binding: " + (f"{plural(len(moved), 'rank')} not as planned" if moved else "as planned") + more
    return Panel(table, title=title, title_align="left", border_style="red" if moved else "none")
