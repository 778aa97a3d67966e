"""Stand in for `python WORDS` where a launcher starts it: python -I -S fork_client.py SERVER WORDS...

The interpreter of tests/support/fork_server.py forks the program with this process's files, variables, binding and
working directory; it gets this process's signals and ends with it, and its exit status is this process's.
"""

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def inherited() -> list[int]:
    """The open files that this process has inherited, such as a connection to the launcher."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            if os.get_inheritable(int(path.name)):
                found.append(int(path.name))
        except OSError:  # that of the listing itself
            continue
    return found


def main(name: str, words: list[str]) -> int:
    files = inherited()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(f"\0{name}")
    pus = sorted(os.sched_getaffinity(0))
    request = {"words": words, "env": dict(os.environ), "cwd": str(Path.cwd()), "files": files, "pus": pus}
    socket.send_fds(server, [json.dumps(request).encode()], files)
    pid = int(server.recv(100))
    descriptor = os.pidfd_open(pid)

    def forward(number: int, _: FrameType | None) -> None:
        signal.pidfd_send_signal(descriptor, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    select.select([descriptor], [], [])
    server.send(json.dumps({"ended": pid}).encode())
    return int(server.recv(100))


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2:])
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
