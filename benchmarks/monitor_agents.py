"""Simulated agents of benchmarks.monitor_scale: the ranks FIRST to LAST - 1, connected to the monitor at a port.

    python -m benchmarks.monitor_agents PORT RANKS RANKS_OF_A_HOST FIRST LAST

Their heartbeats are spread evenly. Once standard input is closed the last of them sends no more.
"""

import os
import resource
import select
import sys
import time

from cputrain.mpi.supervise import (
    TOKEN_VARIABLE,
    Answer,
    Heartbeat,
    Hello,
    Preempt,
    ShowStack,
    Stop,
    connect,
    heartbeat_interval,
)

FILES = 64  # beside the connections


def main() -> None:
    port, ranks, per_host, first, last = map(int, sys.argv[1:])
    interval_s = heartbeat_interval(ranks)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, last - first + FILES), most))
    connections = []
    for rank in range(first, last):
        connection = connect(f"127.0.0.1:{port}", os.environ[TOKEN_VARIABLE], (Answer, Stop, Preempt, ShowStack))
        connection.send(Hello(rank=rank, host=f"h{rank // per_host}"))
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
            connections[i].send(Heartbeat(idle_s=10.0))
            due[i] = max(at + interval_s, now)
        time.sleep(max(0.0, min(min(due) - time.monotonic(), 0.05)))


if __name__ == "__main__":
    main()
