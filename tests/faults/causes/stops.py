"""Processes that are stopped, suspended, told to end, or that leave or loop by themselves."""

import os
import signal
import sys
import time

from tests.faults.causes.moments import MAX_LOST_STEPS, after, everything, launcher, rank, signaled, starting
from tests.faults.fault import GOES_ON, Fault, Seen
from tests.faults.place import SAVED_EVERY, Place, cputrain

END, STOP = "end", "stop"


def signaled_twice(place: Place) -> Seen:
    """A second SIGTERM while the first one's checkpoint is being made."""
    with place.training() as run:
        after(SAVED_EVERY)(place, run)
        for pid in run.ranks().values():
            os.kill(pid, signal.SIGSTOP)  # so that the first one cannot be obeyed
        run.process.send_signal(signal.SIGTERM)
        run.wait_for(lambda: "repeat the signal to stop at once" in run.text)
        run.begun = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        return Seen(status=run.end(), text=run.text, seconds=run.seconds, lost=place.lost)


def session_ended(place: Place) -> Seen:
    """SIGTERM, and then SIGHUP."""
    with place.training() as run:
        after(33)(place, run)
        run.begun = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        run.wait_for(lambda: "repeat the signal to stop at once" in run.text)
        run.process.send_signal(signal.SIGHUP)
        return Seen(status=run.end(), text=run.text, seconds=run.seconds, lost=place.lost)


def suspended(place: Place) -> Seen:
    """All processes of a job stopped for 22 s, then continued: it trains on."""
    with place.training() as run:
        after(SAVED_EVERY)(place, run)
        pids = everything(run)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(22)
        stopped_at = place.step
        run.begun = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        run.wait_for(lambda: place.step > stopped_at + 100)
        time.sleep(3)  # whoever counts the silence of others has had its turn
        assert run.process.poll() is None, run.text
        return Seen(status=GOES_ON, text=run.text, seconds=run.seconds, lost=0)


LEAVES_EARLY = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    os._exit(0)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    raise SystemExit(str(error)[:200])
"""
LOOPS = """
import os, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
def lost_in_a_loop():
    while True:
        pass
dist.barrier()
print("up", flush=True)
if os.environ["RANK"] == "1":
    lost_in_a_loop()
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    raise SystemExit(str(error)[:200])
"""


def launched(place: Place, script: str, *python: str, begins: str = "") -> Seen:
    """A script by `cputrain launch`, to its end; the fault begins when both ranks have said `begins`. Words of Python
    that name the script's module fork its ranks."""
    (place.folder / "script.py").write_text(script)
    argv = (*cputrain("launch"), "--ppn", "2", "--output", "out", "--", sys.executable, *(python or ("script.py",)))
    with place.running(*argv, forked=True) as run:
        if begins:
            run.wait_for(lambda: run.text.count(begins) == 2)
        run.begun = time.monotonic()
        return Seen(status=run.end(), text=run.text, seconds=run.seconds)


def stopped_rank_of_a_launch(place: Place) -> Seen:
    (place.folder / "script.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)")
    argv = (*cputrain("launch"), "--ppn", "2", "--output", "out", "--", sys.executable, "script.py")
    with place.running(*argv) as run:
        run.wait_for(lambda: run.text.count("up") == 2)
        run.begun = time.monotonic()
        os.kill(run.ranks("script.py")[1], signal.SIGSTOP)
        return Seen(status=run.end(), text=run.text, seconds=run.seconds)


FAULTS = (
    Fault(
        kind=END,
        name="SIGUSR1 (preemption)",
        cause=signaled(signal.SIGUSR1, launcher, after(33)),
        status=0,
        says=("stopped by a signal after step", "checkpoint saved: continue with --resume"),
        loses=0,
        nightly=True,
    ),
    Fault(
        kind=END,
        name="SIGUSR1 in the first second",
        cause=signaled(signal.SIGUSR1, launcher, starting, real=True),
        status=0,
        says=("stopped by a signal after step",),
        loses=0,
        within_s=120,
    ),
    Fault(
        kind=END,
        name="SIGTERM (scancel)",
        cause=signaled(signal.SIGTERM, launcher, after(33)),
        status=143,
        says=("SIGTERM: 2 workers save and stop after the next step", "stopped by a signal after step"),
        loses=0,
        nightly=True,
    ),
    Fault(
        kind=END,
        name="SIGTERM at all processes at once (a scheduler, systemd)",
        cause=signaled(signal.SIGTERM, everything, after(33)),
        status=143,
        says=("SIGTERM: 2 workers save and stop after the next step", "stopped by a signal after step"),
        loses=0,
    ),
    Fault(
        kind=END,
        name="SIGTERM at one rank alone",
        cause=signaled(signal.SIGTERM, rank(1), after(33)),
        status=1,
        says=("stopped by a signal after step", "rank 1 on", "was ended by SIGTERM"),
        loses=0,
        nightly=True,
    ),
    Fault(
        kind=END,
        name="SIGTERM and then SIGHUP (a session's end by systemd)",
        cause=session_ended,
        status=143,
        says=("SIGTERM: 2 workers save and stop after the next step", "stopped by a signal after step"),
        loses=0,
        nightly=True,
    ),
    Fault(
        kind=END,
        name="Ctrl-C once",
        cause=signaled(signal.SIGINT, launcher, after(33)),
        status=130,
        says=("stopped by a signal after step",),
        loses=0,
        nightly=True,
    ),
    Fault(
        kind=END,
        name="SIGTERM twice, and ranks that do not answer",
        cause=signaled_twice,
        status=143,
        says=("repeat the signal to stop at once",),
        loses=MAX_LOST_STEPS,
        within_s=20,
    ),
    Fault(
        kind=END,
        name="a rank that exits with status 0 while others wait for it",
        cause=lambda place: launched(place, LEAVES_EARLY, "-m", "script"),
        status=1,
        says=("rank 1 on", "exited with status 0"),
    ),
    Fault(
        kind=STOP,
        name="rank 1 of a training (SIGSTOP)",
        cause=signaled(signal.SIGSTOP, rank(1), after(33)),
        status=1,
        says=("rank 1 on", "has been stopped"),
        loses=MAX_LOST_STEPS,
        within_s=15,
        nightly=True,
    ),
    Fault(
        kind=STOP,
        name="rank 0 of a training (SIGSTOP)",
        cause=signaled(signal.SIGSTOP, rank(0), after(33)),
        status=1,
        says=("rank 0 on", "has been stopped"),
        loses=MAX_LOST_STEPS,
        within_s=15,
        nightly=True,
    ),
    Fault(
        kind=STOP,
        name="a rank of a launch on one host (SIGSTOP)",
        cause=stopped_rank_of_a_launch,
        status=1,
        says=("rank 1 on", "has been stopped"),
        within_s=15,
    ),
    Fault(
        kind=STOP,
        name="the whole job for 22 s, then on (scontrol suspend)",
        cause=suspended,
        status=GOES_ON,
        loses=0,
    ),
    Fault(
        kind=STOP,
        name="an endless loop in a gloo rank, whose timeout is 30 s",
        cause=lambda place: launched(place, LOOPS, begins="up"),
        status=1,
        says=(
            "rank 0 has waited",
            ", which computes (rank 1 is at",
            "Python stack of rank 1, innermost first:",
            "in lost_in_a_loop",
        ),
        within_s=60,
        nightly=True,
    ),
)
