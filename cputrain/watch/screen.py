"""A run's state as a screen: progress, curves, the ranks' times as heat, binding, warnings."""

import time

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from affinity.topology.cpuset import format_list
from affinity.wording import counted
from cputrain.report.run import unit_of
from cputrain.report.summary import date, duration
from cputrain.watch.curve import braille_curve
from cputrain.watch.state import Curve, WatchState

MOST_RANKS, MOST_BINDINGS = 16, 8
CURVE_HEIGHT, HALF = 7, 100  # lines; columns from which on two curves stand side by side
LEVELS = "·░▒▓█"
HEAT = ("#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
SILENT_S = 60.0


def screen(name: str, state: WatchState, *, width: int, damaged: int = 0, now: float | None = None) -> RenderableType:
    """The screen of a run with this name, `width` columns wide, at a Unix time (without one now)."""
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
        lines = (Text(f"step {each.get('step', 0):,}: {plain(each['what'])}") for each in state.warnings)
        parts.append(Panel(Group(*lines), title="last warnings", title_align="left", border_style="yellow"))
    if damaged:
        parts.append(Text(f"{counted(damaged, 'damaged line')} of the log, left out", style="yellow"))
    return Group(*parts)


def plain(text: str) -> str:
    """Text without characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _head(name: str, state: WatchState, now: float, width: int) -> Text:
    start, step = state.start, state.step
    head = Text(plain(name), style="bold")
    head.append(f"  {_status(state, now)}", style="not bold")
    if step:
        epoch, total = step["epoch"], start.get("last_step")
        per_epoch = start.get("steps_per_epoch")
        epochs = f" of {total / per_epoch:g}" if total and per_epoch else ""
        facts = [f"epoch {epoch:.2f}{epochs}", f"step {step['step']:,}" + (f" of {total:,}" if total else "")]
        facts += [f"{step['images_per_s']:,.1f} {unit_of(state.start)}/s", f"lr {step['rate']:.4g}"]
        facts += [f"loss {step['loss']:.4f}"] if step["loss"] is not None else []
        facts += [f"best top-1 {max(value for _, value in state.scores):.2f} %"] if state.scores else []
        seconds = start.get("global_batch", 0) / step["images_per_s"] if step["images_per_s"] > 0 else 0
        if seconds:
            waits = (("data", "data_wait_s"), ("comm", "comm_wait_s"))
            facts += [f"{what} wait {100 * step.get(key, 0) / seconds:.0f} %" for what, key in waits]
        head.append("\n" + "\n".join(_packed(facts, width)), style="not bold")
    return head


def _packed(facts: list[str], width: int) -> list[str]:
    """The facts in lines of this width, none of them broken."""
    lines = [facts[0]]
    for fact in facts[1:]:
        line = f"{lines[-1]}  {fact}"
        lines = [*lines[:-1], line] if len(line) <= width else [*lines, fact]
    return lines


def _status(state: WatchState, now: float) -> str:
    if state.end is not None:
        return f"{plain(state.end['status'])}, {duration(state.end['time_to_train_s'])} to train"
    if state.last_time is None:
        return "no event yet: the ranks are starting"
    if not state.step:
        return "before the first step"
    silent = now - state.last_time
    left = f"{duration(state.left_s)} left" if state.left_s is not None else ""
    starts = f"start {state.starts}" if state.starts > 1 else ""
    quiet = f"no event for {duration(silent)} (last {date(state.last_time)})" if silent > SILENT_S else ""
    return ", ".join(filter(None, (starts, quiet or left)))


def _curves(state: WatchState, width: int) -> list[RenderableType]:
    second: tuple[str, Curve] = (
        ("validation top-1, %", state.scores) if state.scores else (f"{unit_of(state.start)}/s", state.speeds)
    )
    shown = [(title, points) for title, points in (("loss", state.losses), second) if len(points) > 1]
    each = (width - 2) // 2 if width >= HALF and len(shown) > 1 else width
    panels = [
        Panel(
            Text("\n".join(braille_curve(points, each - 4, CURVE_HEIGHT))), title=title, title_align="left", width=each
        )
        for title, points in shown
    ]
    return [Columns(panels, padding=(0, 1))] if panels else []


def _heat(state: WatchState, width: int) -> RenderableType:
    """Each rank's seconds of computing in the last records, brighter where more; of many ranks the slowest."""
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
    ranks = sorted(range(len(last["seconds"])), key=lambda rank: -computing[-1][rank])[:MOST_RANKS]
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
    title = counted(total, "rank") + (f", the {MOST_RANKS} slowest" if total > MOST_RANKS else "")
    return Panel(table, title=title, title_align="left")


def _bindings(state: WatchState) -> RenderableType:
    bindings = state.start["bindings"]
    moved = [each for each in bindings if each["pus"] != each["planned_pus"]]
    table = Table(box=None, pad_edge=False)
    for head in ("rank", "host", "CPUs", "memory"):
        table.add_column(head, no_wrap=True)
    for each in (*moved, *(other for other in bindings if other not in moved))[:MOST_BINDINGS]:
        cpus = format_list(each["pus"]) + (f" (planned {format_list(each['planned_pus'])})" if each in moved else "")
        table.add_row(*(Text(plain(text)) for text in (str(each["rank"]), each["host"], cpus, each["memory_policy"])))
    rest = len(bindings) - MOST_BINDINGS
    more = f", {rest} more" if rest > 0 else ""
    title = "binding: " + (f"{counted(len(moved), 'rank')} not as planned" if moved else "as planned") + more
    return Panel(table, title=title, title_align="left", border_style="red" if moved else "none")
