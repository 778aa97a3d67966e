"""Disks that are full or read-only, for each file that a run writes. Needs root: each is a small tmpfs, mounted for the
command alone."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.fault import Fault, Seen
from tests.faults.place import SETTINGS, Place, cputrain

KIND = "disk"
TRAIN = ("train", *SETTINGS, "plan.ppn=1")
RESUME = (*TRAIN, "--resume", "max_steps=60")
FULL = "No space left on device"
READ_ONLY = "Read-only file system"


def on_disk(
    where: str, kib: int, *words: str, options: str = "", ballast: bool = False, before: bool = True
) -> Callable[[Place], Seen]:
    """Run a command with `where`, below the folder, on a disk of its own; `ballast` fills the disk before.

    What is at `where` is copied to the disk first. `before`: the run is a copy of the template.
    """

    def cause(place: Place) -> Seen:
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            pytest.skip(reason="needs root and unshare (mounting a small disk)")
        if before:
            place.copy_of_template()
        target = place.folder / where
        target.mkdir(parents=True, exist_ok=True)
        steps = [
            f"mount -t tmpfs -o size={kib}k none /mnt",
            f"cp -a {target}/. /mnt/ 2>/dev/null",
            "dd if=/dev/zero of=/mnt/ballast bs=4k 2>/dev/null" if ballast else "true",
            f"mount --move /mnt {target}",
            f"mount -o remount,{options} {target}" if options else "true",
            '"$@"; status=$?',
            f"mkdir seen && cp -a {target}/. seen/",
            "exit $status",
        ]
        argv = ("unshare", "-m", "sh", "-c", "\n".join(steps), "sh", *cputrain(*words))
        with place.running(*argv) as run:
            return Seen(status=run.end(), text=run.text, seconds=run.seconds)

    return cause


def events_on_full_disk(place: Place) -> Seen:
    """events.jsonl alone is on a disk of 16 KiB."""
    if os.geteuid() != 0:
        pytest.skip(reason="needs root (mounting a small disk)")
    place.copy_of_template()
    steps = [
        "mount -t tmpfs -o size=16k none /mnt",
        "cp run/events.jsonl /mnt/events.jsonl",
        "mount --bind /mnt/events.jsonl run/events.jsonl",
        'exec "$@"',
    ]
    argv = ("unshare", "-m", "sh", "-c", "\n".join(steps), "sh", *cputrain(*RESUME, "max_steps=400"))
    with place.running(*argv) as run:
        return Seen(status=run.end(), text=run.text, seconds=run.seconds)


def stdout_full(place: Place) -> Seen:
    """Standard output is a full disk."""
    begun = time.monotonic()
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            cputrain(*TRAIN, "max_steps=20"), cwd=place.folder, stdout=full, stderr=subprocess.PIPE, timeout=400
        )
    assert place.step == 20, "it has trained to its end"
    return Seen(status=done.returncode, text=done.stderr.decode(), seconds=time.monotonic() - begun, lost=place.lost)


def both_full(place: Place) -> Seen:
    """Standard output and standard error are one full disk, as a batch job's log."""
    begun = time.monotonic()
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(cputrain(*TRAIN, "max_steps=20"), cwd=place.folder, stdout=full, stderr=full, timeout=400)
    assert place.step == 20, "it has trained to its end"
    return Seen(status=done.returncode, text="", seconds=time.monotonic() - begun, lost=place.lost)


def stdout_closed(place: Place) -> Seen:
    """`cputrain train ... | head -1`."""
    argv = ("bash", "-o", "pipefail", "-c", '"$@" | head -1', "bash", *cputrain(*TRAIN, "max_steps=20"))
    with place.running(*argv) as run:
        status = run.end()
        assert place.step == 20, run.text
        return Seen(status=status, text=run.text, seconds=run.seconds, lost=place.lost)


def fault(name: str, cause: Callable[[Place], Seen], status: int, *says: str, nightly: bool = False) -> Fault:
    return Fault(kind=KIND, name=name, cause=cause, status=status, says=says, nightly=nightly)


FAULTS = (
    fault("full: checkpoints/", on_disk("run/checkpoints", 8_000, *RESUME), 2, "run/checkpoints has", "MB free"),
    fault("full: events.jsonl", events_on_full_disk, 1, FULL, "run/events.jsonl"),
    fault(
        "full: logs/",
        on_disk("run/logs", 4, *RESUME, "max_steps=500"),
        0,
        "run/logs/rank-0.log: No space left on device; the job continues without this log",
        nightly=True,
    ),
    fault(
        "full: usage/",
        on_disk("run/usage", 4, *RESUME, ballast=True),
        0,
        f"{FULL}; the run continues without recording resource use",
    ),
    fault("full: recipe.yaml", on_disk("run", 4, *TRAIN, before=False), 1, FULL, "run/recipe.yaml", nightly=True),
    fault("full: plan.json", on_disk("run", 12, *TRAIN, before=False), 1, FULL, "run/plan.json", nightly=True),
    fault("full: the whole run", on_disk("run", 10_000, *RESUME, ballast=True), 2, "output run", FULL, nightly=True),
    fault(
        "full: report.html",
        on_disk("run", 10_000, "report", "run", ballast=True),
        1,
        FULL,
        "run/report.html",
        nightly=True,
    ),
    fault("read-only: a new run's folder", on_disk("run", 100, *TRAIN, options="ro", before=False), 2, "run"),
    fault(
        "read-only: checkpoints/", on_disk("run/checkpoints", 20_000, *RESUME, options="ro"), 2, READ_ONLY, nightly=True
    ),
    fault("read-only: report.html", on_disk("run", 10_000, "report", "run", options="ro"), 1, READ_ONLY, nightly=True),
    Fault(kind=KIND, name="full: standard output", cause=stdout_full, status=0, loses=0),
    Fault(kind=KIND, name="full: standard output and standard error", cause=both_full, status=0, loses=0, nightly=True),
    Fault(kind=KIND, name="closed: standard output (| head -1)", cause=stdout_closed, status=0, loses=0),
)
