"""Processes that are killed, by a person or by the kernel."""

import os
import signal
import sys
import time
from pathlib import Path

from cputrain.affinity.wording import MIB
from cputrain.mpi.supervise.processes import descendants
from tests.faults.causes.moments import (
    MAX_LOST_STEPS,
    Moment,
    Victims,
    after,
    at_the_end,
    evaluating,
    everything,
    launcher,
    rank,
    saving,
    signaled,
    starting,
)
from tests.faults.fault import KILLED, Fault, Seen
from tests.faults.place import SETTINGS, Place, alive, cputrain
from tests.support.control_group import inside, memory_group

KILL = "kill -9"
EVALUATED = ("evaluate.every_epochs=1", "checkpoint.every_steps=null")
SHORT = ("max_steps=20",)


def killed(
    name: str,
    who: Victims,
    moment: Moment,
    says: str,
    *settings: str,
    loses: int = MAX_LOST_STEPS,
    real: bool = False,
    nightly: bool = False,
) -> Fault:
    cause = signaled(signal.SIGKILL, who, moment, *settings, real=real)
    return Fault(kind=KILL, name=name, cause=cause, status=1, says=(says,), loses=loses, within_s=20, nightly=nightly)


GRANDCHILD = ("sh", "-c", "sleep 4000 & python3 -c 'import time; time.sleep(4000)'; true")


def orphaned_grandchildren(place: Place) -> Seen:
    """What the ranks of a killed launcher have started ends with them."""
    argv = (sys.executable, "-m", "cputrain", "launch", "--ppn", "2", "--output", "out", "--")
    with place.running(*argv, *GRANDCHILD) as run:
        run.wait_for(lambda: len(descendants(run.process.pid)) >= 6)
        below = descendants(run.process.pid)
        run.begun = time.monotonic()
        run.process.kill()
        run.process.wait()
        while (left := [pid for pid in below if alive(pid)]) and run.seconds < 30:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return Seen(status=run.process.returncode, text="", seconds=run.seconds)


LAUNCH = ("launch", "--ppn", "2", "--output", "out", "--", *cputrain())


def out_of_memory(place: Place, launch: tuple[str, ...] = (), word: str = "--prepared") -> Seen:
    """Another process of the job's control group takes all of its memory; the kernel is told to prefer rank 1."""
    limit = 1_600 * MIB
    with memory_group(limit) as group:
        words = cputrain(*launch, "train", *SETTINGS, "plan.ppn=2")
        hog = [sys.executable, "-c", f"x = bytearray({limit})"]
        with place.running(*inside(group, *words)) as run:
            after(33)(place, run)
            pid = run.ranks(word)[1]
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000", encoding="utf-8")
            with place.running(*inside(group, *hog)) as other:
                run.wait_for(lambda: not alive(pid))
                run.begun = time.monotonic()
                status = run.end()
                other.end()
            return Seen(status=status, text=run.text, seconds=run.seconds, lost=place.lost)


def restarted(place: Place) -> Seen:
    """A rank of `train --restarts 2` is killed: the training ends as if it had not been."""
    with place.training("--restarts", "2", "max_steps=80") as run:
        after(33)(place, run)
        run.begun = time.monotonic()
        os.kill(run.ranks()[1], signal.SIGKILL)
        status = run.end()
        steps = [event["step"] for event in place.logged if event["event"] == "step"]
        return Seen(status=status, text=run.text, seconds=run.seconds, lost=len(steps) - len(set(steps)))


def shared_memory_left(place: Place) -> Seen:
    """kill -9 of a training over ccl leaves its shared memory behind; the next one removes it at its start."""
    shm = Path("/dev/shm")
    before = set(shm.iterdir())
    over_ccl = ("comm.backend=ccl",)
    with place.training(*over_ccl, CCL_ATL_SHM="1", FI_PROVIDER="shm") as run:
        after(5)(place, run)
        pids = everything(run)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        run.end()
        while any(Path("/proc", str(pid)).exists() for pid in pids):  # a zombie still owns its segment
            time.sleep(0.05)
        left = set(shm.iterdir()) - before
        assert left, "nothing was left behind to remove"
    with place.training(*over_ccl, "--resume", f"max_steps={place.step + 10}") as again:
        status = again.end()
        text = f"{len(left)} segments were left, {len(left & set(shm.iterdir()))} after the next start"
        return Seen(status=status, text=f"{again.text}\n{text}", seconds=again.seconds)


FAULTS = (
    killed("a rank while it starts", rank(1), starting, "rank 1 on", loses=0, real=True),
    killed("a rank after the first step", rank(1), after(1), "was ended by SIGKILL", nightly=True),
    killed("rank 0, which serves the store, in mid-epoch", rank(0), after(33), "rank 0 on", real=True),
    killed("a rank in mid-epoch", rank(1), after(33), "rank 1 on", nightly=True),
    killed("a rank while a checkpoint is written", rank(0), saving, "rank 0 on", nightly=True),
    killed("a rank during an evaluation", rank(1), evaluating, "rank 1 on", *EVALUATED, loses=4, nightly=True),
    killed("a rank after the last step", rank(1), at_the_end, "rank 1 on", *SHORT, nightly=True),
    killed("a rank over ccl", rank(1), after(33), "rank 1 on", "comm.backend=ccl"),
    Fault(
        kind=KILL,
        name="the process that has started the ranks",
        cause=signaled(signal.SIGKILL, launcher, after(33)),
        status=KILLED,
        loses=MAX_LOST_STEPS,
        within_s=20,
    ),
    Fault(
        kind=KILL,
        name="all processes at once",
        cause=signaled(signal.SIGKILL, everything, after(33)),
        status=KILLED,
        loses=MAX_LOST_STEPS,
        within_s=20,
        nightly=True,
    ),
    Fault(
        kind=KILL,
        name="a launcher whose ranks have started others (sh -c)",
        cause=orphaned_grandchildren,
        status=KILLED,
        within_s=10,
    ),
    Fault(
        kind=KILL,
        name="a rank of train --restarts 2",
        cause=restarted,
        status=0,
        says=("rank 1 on", "was ended by SIGKILL", "restart 1 of 2"),
        loses=MAX_LOST_STEPS,
    ),
    Fault(
        kind=KILL,
        name="a rank, by the kernel, as memory is short",
        cause=out_of_memory,
        status=1,
        says=("rank 1 on", "was ended by SIGKILL, out of memory:", "GiB of its control group", "set batch.local="),
        loses=MAX_LOST_STEPS,
        within_s=20,
    ),
    Fault(
        kind=KILL,
        name="a rank of launch -- cputrain train, by the kernel, as memory is short",
        cause=lambda place: out_of_memory(place, LAUNCH, word="imagefolder"),
        status=1,
        says=("rank 1 on", "was ended by SIGKILL, out of memory:", "GiB of its control group", "set batch.local="),
        loses=MAX_LOST_STEPS,
        within_s=20,
        nightly=True,
    ),
    Fault(
        kind=KILL,
        name="a training over ccl, whose shared memory is left, then --resume",
        cause=shared_memory_left,
        status=0,
        says=("0 after the next start",),
    ),
)
