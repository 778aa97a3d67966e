"""A run in figures: the few that matter, and the rows of what it ran on."""

import shlex
from collections.abc import Iterable
from datetime import datetime, timezone
from statistics import median
from typing import Any

from affinity.units import GIB
from affinity.wording import counted, first_named
from cputrain.report.run import DONE, INTERRUPTED, NOT_STARTED, RUNNING, STOPPED, Run, unit_of

Rows = list[tuple[str, str]]
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def duration(seconds: float) -> str:
    """ "0.4 s", "52 s", "3 min 20 s", "5 h 07 min", "2 d 03 h"."""
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S:02} s"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S:02} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S:02} h"


def date(time: float) -> str:
    """A Unix time as "2026-11-22 18:24 UTC"."""
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def best_of(run: Run) -> tuple[str, str, dict[str, Any]] | None:
    """The best evaluation: what is measured, its value, and its epoch's event; None without any."""
    epochs = run.of("epoch")
    if scored := [event for event in epochs if event["val_top1"] is not None]:
        best = max(scored, key=lambda event: event["val_top1"])
        return "top-1", f"{best['val_top1']:.2f} %", best
    if losses := [event for event in epochs if event["val_loss"] is not None]:
        best = min(losses, key=lambda event: event["val_loss"])
        return "validation loss", f"{best['val_loss']:.4f}", best
    return None


def status_text(run: Run, status: str) -> str:
    """A sentence about how the run stands, and what can be done."""
    last, total = _last_step(run), run.start.get("last_step")
    at = f"step {last:,}" + (f" of {total:,}" if total else "")
    seen = f", last event {date(run.log.written[-1]['time'])}" if run.log.written else ""
    resume = f"cputrain train {shlex.quote(str(run.folder))} --resume"
    return {
        DONE: f"all {counted(last, 'step')} done",
        STOPPED: f"stopped after {at}: {resume} continues",
        RUNNING: f"running, at {at}{seen}",
        INTERRUPTED: f"interrupted after {at}{seen}: {resume} continues",
        NOT_STARTED: "no event has been written yet",
    }[status]


def _last_step(run: Run) -> int:
    steps = (event["step"] for event in reversed(run.events) if event["event"] in ("step", "epoch"))
    return int(next(steps, (run.end or {}).get("steps", 0)))


def figures(run: Run) -> Rows:
    """The figures at the top of the page: what, value."""
    rows: Rows = []
    end, best = run.end or {}, best_of(run)
    if best is not None:
        rows.append((f"best {best[0]}, epoch {best[2]['epoch']:g}", best[1]))
    last = next((event for event in reversed(run.of("epoch")) if event["val_top1"] is not None), None)
    final = end.get("top1") if end.get("top1") is not None else last and last["val_top1"]
    if final is not None:
        rows.append(("final top-1" if run.end else "latest top-1", f"{final:.2f} %"))
    for label, key in (("top-5", "top5"), ("test top-1", "test_top1"), ("test top-5", "test_top5")):
        if end.get(key) is not None:
            rows.append((label, f"{end[key]:.2f} %"))
    spent = run.log.spent
    if spent.starts:
        over = f" over {spent.starts} starts" if spent.starts > 1 else ""
        rows.append(("time to train" if run.end else "trained for", duration(spent.training_s) + over))
    speeds = [event["images_per_s"] for event in run.of("epoch")] or [e["images_per_s"] for e in run.of("step")]
    if speeds:
        rows.append((f"{unit_of(run.start)}/s", f"{median(speeds):,.1f}"))
    if run.start.get("workers"):
        hosts = len({binding["host"] for binding in run.start["bindings"]})
        rows.append(("workers", f"{run.start['workers']:,} on {counted(hosts, 'host')}"))
    if run.start.get("global_batch"):
        rows.append(("global batch", f"{run.start['global_batch']:,}"))
    return rows


def particulars(run: Run) -> Rows:
    """What the run ran on and with: one row for each thing that is known."""
    start, environment, spent = run.start, run.environment, run.log.spent
    written = run.log.written
    hosts = sorted({binding["host"] for binding in start.get("bindings", ())})
    end = run.end or {}
    values: list[tuple[str, Any]] = [
        ("started", date(written[0]["time"]) if written else ""),
        ("wall time", duration(spent.wall_s) if spent.starts > 1 else ""),
        ("hosts", first_named(hosts)),
        ("CPU", "; ".join(dict.fromkeys(_cpu(plan) for _, plan in run.plans))),
        ("steps", f"{end['steps']:,}" if "steps" in end else ""),
        (unit_of(run.start), f"{end['images']:,}" if "images" in end else ""),
        ("data", _data(run)),
        ("validation loss", f"{end['val_loss']:.4f}" if end.get("val_loss") is not None else ""),
        ("backend", _because(environment.get("backend") or start.get("backend"), environment.get("backend_why"))),
        ("engine", _because(environment.get("engine"), environment.get("engine_why"))),
        ("decoder", environment.get("decoder")),
        ("allocator", environment.get("allocator")),
        ("instructions", environment.get("cpu_capability")),
        ("torch", environment.get("torch")),
        ("cputrain", environment.get("cputrain")),
        ("Python", environment.get("python")),
        ("kernel", environment.get("kernel")),
        ("last checkpoint", _checkpoint(run)),
    ]
    return [(name, str(value)) for name, value in values if value]


def _cpu(plan: Any) -> str:
    machine = plan.machine
    cores, packages = len(machine.cores), len(machine.packages)
    memory = sum(node.memory_bytes or 0 for node in machine.numa_nodes) / GIB
    size = f", {memory:.0f} GiB" if memory else ""
    return f"{machine.model}: {counted(packages, 'package')}, {counted(cores, 'core')}{size}"


def _data(run: Run) -> str:
    kind, count, classes = (run.start.get(key) for key in ("data", "train_images", "classes"))
    parts: Iterable[str] = (
        f"{count:,} training {unit_of(run.start)}" if count else "",
        f"of {counted(classes, 'class').replace('classs', 'classes')}" if classes and kind != "points" else "",
        f"({kind})" if kind and kind not in ("images", "points", "samples") else "",
    )
    return " ".join(filter(None, parts))


def _because(value: Any, why: Any) -> str:
    return f"{value} ({why})" if value and why else str(value or "")


def _checkpoint(run: Run) -> str:
    last = next((event for event in reversed(run.events) if event["event"] == "checkpoint"), None)
    return f"step {last['step']:,}, {date(last['time'])}" if last else ""
