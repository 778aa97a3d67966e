"""Links that are slow, lossy or cut, and clocks that jump."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cputrain.mpi.supervise.run import free_port
from cputrain.runs.events import read_log
from tests.faults.fault import GOES_ON, Fault, Seen
from tests.faults.place import Place, Running
from tests.faults.relay import Relay
from tests.support.commands import mpi_path, need
from tests.support.fake_hosts import fake_hosts

KIND, CLOCK = "network", "clock"
PATIENCE = "comm.timeout_s=25"


@contextmanager
def relayed(
    place: Place,
    *settings: str,
    delay_s: float = 0.0,
    stalls_every: int = 0,
    stall_s: float = 0.0,
    real: bool = False,
) -> Iterator[tuple[list[Running], Relay]]:
    """Two ranks, the second of which reaches the store, in rank 0, through a relay."""
    port = free_port()
    relay = Relay(port, delay_s=delay_s, stalls_every=stalls_every, stall_s=stall_s)
    try:
        with place.ranks(settings, settings, ports=(port, relay.port), real=real) as ranks:
            yield ranks, relay
    finally:
        relay.close()


def slow_link(**how: float) -> Callable[[Place], Seen]:
    """A training of 40 steps over a bad link to the store ends as over a good one."""

    def cause(place: Place) -> Seen:
        with relayed(place, "max_steps=40", **how) as (ranks, _):
            statuses = [rank.end() for rank in ranks]
            text = "\n".join(rank.text for rank in ranks)
            assert statuses == [0, 0], text
            return Seen(status=0, text=text, seconds=ranks[0].seconds, lost=place.lost)

    return cause


def broken_link(cut: Callable[[Relay], None]) -> Callable[[Place], Seen]:
    """The link between rank 1 and the store breaks in mid-epoch: both ranks end."""

    def cause(place: Place) -> Seen:
        with relayed(place, PATIENCE, real=True) as (ranks, relay):
            ranks[0].wait_for(lambda: place.step >= 33)
            begun = time.monotonic()
            cut(relay)
            statuses = [rank.end() for rank in ranks]
            text = "\n".join(rank.text for rank in ranks)
            assert statuses == [1, 1], text
            return Seen(status=1, text=text, seconds=time.monotonic() - begun, lost=place.lost)

    return cause


def host_cut_off(place: Place) -> Seen:
    """The cable of one of two hosts is out while they train."""
    need("openssh-client", "ssh")
    launcher = mpi_path("intelmpi")
    with fake_hosts(place.folder / "hosts", 2) as hosts:
        env = {**hosts.env, **launcher, "PYTHONPATH": str(Path.cwd())}
        words = [word.replace("data.path=images", f"data.path={place.folder}/images") for word in _settings(place)]
        launch = ("launch", "--launcher", "intelmpi", "--hosts", "h1,h2", "--ppn", "1", "--no-preflight")
        folder = ("--output", str(place.folder / "out"), "--")
        train = (sys.executable, "-m", "cputrain", "train", *words)
        argv = hosts.inside("h1", "env", *(f"{key}={value}" for key, value in env.items()), sys.executable, "-m")
        with place.running(*argv, "cputrain", *launch, *folder, *train) as run:
            run.wait_for(lambda: place.step >= 33)
            run.begun = time.monotonic()
            hosts.cut("h2")
            return Seen(status=run.end(), text=run.text, seconds=run.seconds, lost=place.lost)


def _settings(place: Place) -> tuple[str, ...]:
    from tests.faults.place import SETTINGS

    return (*SETTINGS[:-1], f"output={place.run}", "plan.ppn=1")


CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
/* The wall clock jumps by FAULT_JUMP seconds once the file FAULT_JUMP_FILE exists. */
static long jump(void) {
  const char *path = getenv("FAULT_JUMP_FILE"), *by = getenv("FAULT_JUMP");
  return path && by && access(path, F_OK) == 0 ? atol(by) : 0;
}
int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(id, at);
  if (status == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += jump();
  return status;
}
int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  int status = clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return status;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


def clock_jump(by_s: int) -> Callable[[Place], Seen]:
    """The wall clock of all processes of a training jumps while it runs; it trains on for ten seconds, to its end."""

    def cause(place: Place) -> Seen:
        need("gcc", "cc")
        (place.folder / "clock.c").write_text(CLOCK_SOURCE)
        compiler = ("cc", "-shared", "-fPIC", "-O1", "-o", "clock.so", "clock.c", "-ldl")
        subprocess.run(compiler, cwd=place.folder, check=True, timeout=100)
        flag = place.folder / "jump"
        env = {"LD_PRELOAD": f"{place.folder}/clock.so", "FAULT_JUMP": str(by_s), "FAULT_JUMP_FILE": str(flag)}
        with place.training(real=True, **env) as run:
            run.wait_for(lambda: place.step >= 33)
            flag.touch()
            run.begun = time.monotonic()
            before = place.step
            run.wait_for(lambda: place.step >= before + 50 and run.seconds > 18)
            jumped = place.logged[-1]["time"] - place.logged[0]["time"]
            assert abs(jumped - by_s) < 400, f"the clock has jumped by {jumped} s"
            told = read_log(place.run).spent.training_s
            assert 17 < told < 400, f"the run says that it has trained for {told} s"
            return Seen(status=GOES_ON, text=run.text, seconds=run.seconds, lost=0)

    return cause


FAULTS = (
    Fault(
        kind=KIND,
        name="50 ms of delay to the store, each way",
        cause=slow_link(delay_s=0.05),
        status=0,
        loses=0,
        nightly=True,
    ),
    Fault(
        kind=KIND,
        name="a link to the store that loses 2 % of its packets (0.3 s until they are sent again)",
        cause=slow_link(stalls_every=50, stall_s=0.3),
        status=0,
        loses=0,
        nightly=True,
    ),
    Fault(
        kind=KIND,
        name="the link to the store is silent",
        cause=broken_link(Relay.silence),
        status=1,
        says=(
            "rank 0 lost a peer",
            "rank 1",
            "the job's store",
        ),  # found after 25 s, or 15 before rank 0's first heartbeat
        loses=30,
        within_s=60,
    ),
    Fault(
        kind=KIND,
        name="the link to the store is cut",
        cause=broken_link(Relay.close),
        status=1,
        says=("rank 1 cannot reach the job's store", "rank 0 lost a peer"),
        loses=30,
        within_s=60,
        nightly=True,
    ),
    Fault(
        kind=KIND,
        name="one of two hosts is cut off",
        cause=host_cut_off,
        status=1,
        says=("on h2 has been silent for 15 s",),
        loses=30,
        within_s=60,
    ),
    Fault(kind=CLOCK, name="an hour ahead", cause=clock_jump(3600), status=GOES_ON, loses=0),
    Fault(kind=CLOCK, name="an hour back", cause=clock_jump(-3600), status=GOES_ON, loses=0, nightly=True),
)
