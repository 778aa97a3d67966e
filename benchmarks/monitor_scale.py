"""The monitor of a job with 4,096 ranks: its share of a core, its memory, and the delay until it reports a silent rank.

    python -m benchmarks.monitor_scale [--ranks 4096] [--seconds 30]

The ranks are simulated agents: loopback connections from a few processes, each with the heartbeats of a real rank. The
monitor does what a launching process does: it answers, judges ranks and looks for stalls.
"""

import argparse
import os
import resource
import select
import subprocess
import sys
import time
from itertools import pairwise

from cputrain.affinity.terminal import align_columns
from cputrain.mpi.supervise.monitor import Monitor
from cputrain.mpi.supervise.run import REMOTE_POLL_S, STALL_CHECK_S
from cputrain.mpi.supervise.stalls import StallWatch
from cputrain.mpi.supervise.wire import (
    TOKEN_VARIABLE,
    Activity,
    Answer,
    Hello,
    Preempt,
    ShowStack,
    Stop,
    connect,
    heartbeat_interval,
)

PROCESSES, PER_HOST = 4, 2
START_S, LONGEST_S = 120.0, 60.0
FILES = 64  # of an agents' process, in addition to the connections
TOKEN = "of a simulated job"
HEAD = ("ranks", "connected after", "share of a core", "KiB a rank", "silent rank after", "message")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--agents", type=int, nargs=4, help=argparse.SUPPRESS)  # for the processes of simulated agents
    options = parser.parse_args()
    if options.agents:
        be_agents(*options.agents)
        return
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monitor, started = Monitor(TOKEN, tuple(f"h{rank // PER_HOST}" for rank in range(options.ranks))), time.monotonic()
    agents = start_agents(monitor.port, options.ranks)
    try:
        while len(monitor.ranks) < options.ranks and time.monotonic() < started + START_S:
            monitor.poll(REMOTE_POLL_S)
        connected_s, used, stalls = time.monotonic() - started, time.process_time(), StallWatch()
        watched_s = watch(monitor, stalls, options.seconds)
        share = (time.process_time() - used) / watched_s
        assert len(monitor.ranks) == options.ranks and not monitor.failed(), "agents are missing"
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        agents[-1].stdin.close()  # type: ignore[union-attr]  # makes the last of its ranks silent
        silent_s = watch(monitor, stalls, LONGEST_S)
        cells = (
            *(f"{options.ranks:,}", f"{connected_s:.1f} s", f"{100 * share:.1f} %", f"{grown_kib / options.ranks:.1f}"),
            *(f"{silent_s:.1f} s", monitor.cause() if monitor.failed() else "not named"),
        )
        print(align_columns([HEAD, cells]))
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        monitor.close()


def watch(monitor: Monitor, stalls: StallWatch, seconds: float) -> float:
    """Watch a job as a launching process does, until a rank has failed or the time is over; return the seconds."""
    started = judged = time.monotonic()
    while not monitor.failed() and time.monotonic() < started + seconds:
        monitor.poll(REMOTE_POLL_S)
        if time.monotonic() - judged >= STALL_CHECK_S:
            judged = time.monotonic()
            stalls.check(monitor.rank_states(), judged, lambda _: {})  # simulated ranks have no stacks
    return time.monotonic() - started


def be_agents(port: int, ranks: int, first: int, last: int) -> None:
    """Simulate agents of the ranks `first` to `last` - 1, connected to the monitor's port, with evenly spread
    heartbeats. Once standard input is closed, the last of them stops sending."""
    interval_s = heartbeat_interval(ranks)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, last - first + FILES), most))
    connections = []
    for rank in range(first, last):
        connection = connect(f"127.0.0.1:{port}", os.environ[TOKEN_VARIABLE], (Answer, Stop, Preempt, ShowStack))
        connection.send(Hello(rank=rank, host=f"h{rank // PER_HOST}"))
        connections.append(connection)
    due = [time.monotonic() + interval_s * i / len(connections) for i in range(len(connections))]
    while True:
        if len(due) == len(connections) and select.select([sys.stdin], [], [], 0)[0]:
            due.pop()
        for i, at in enumerate(due):
            now = time.monotonic()
            if at > now:
                continue
            assert connections[i].receive() is not None, "the monitor has closed a connection"
            connections[i].send(Activity(idle_s=10.0))
            due[i] = max(at + interval_s, now)
        time.sleep(max(0.0, min(min(due) - time.monotonic(), 0.05)))


def start_agents(port: int, ranks: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that simulate the agents of all ranks."""
    cuts = [ranks * i // PROCESSES for i in range(PROCESSES + 1)]
    argv = (sys.executable, "-m", "benchmarks.monitor_scale", "--agents", str(port), str(ranks))
    env = {**os.environ, TOKEN_VARIABLE: TOKEN}
    return [
        subprocess.Popen((*argv, str(first), str(last)), stdin=subprocess.PIPE, env=env)
        for first, last in pairwise(cuts)
    ]


if __name__ == "__main__":
    main()
