"""The pre-flight of one host, started on each host of a job: its report, then traffic to the next host of the ring.

python -m mpi.preflight.checks --report-to HOST:PORT --packages NAME,... -- FILE...
"""

import argparse
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from affinity.exit_status import ExitStatus
from affinity.packages import installed_version
from affinity.ranks.rank import discover
from affinity.topology.machine import Machine
from affinity.topology.sysfs import this_machine
from affinity.utf8 import use_utf8
from mpi.preflight.reports import Clock, HostReport, LinkPeer, LinkSpeed, Listening
from mpi.supervise.connection import TOKEN_VARIABLE, Connection, connect, join
from mpi.supervise.messages import Hello, Stop

M = TypeVar("M")
LONGEST_S = 3600.0  # for a message of the launching host, which may be gone without a word
RING_S = 1.0
RING_TIMEOUT_S = 5.0  # to connect to the next host, and for each send
STRANGERS, HELLO_TIMEOUT_S = 8, 1.0  # connections that a host refuses before its neighbor's, and their time
CHUNK = bytes(1 << 20)
MAX_BYTES = 16 << 20  # of a file whose content is compared: programs and settings, not data


def inspect_host(
    files: tuple[str, ...],
    packages: tuple[str, ...],
    scratch: str,
    machine: Machine,
    now_s: float,
    provider: str | None,
) -> HostReport:
    """This host's report; `now_s` is the launching host's clock, `provider` the libfabric provider of the job."""
    memory = Path("/proc/meminfo").read_text(encoding="utf-8")
    free_kib = next(int(line.split()[1]) for line in memory.splitlines() if line.startswith("MemAvailable:"))
    space = os.statvfs(scratch)
    return HostReport(
        host=socket.gethostname(),
        python=sys.version.split()[0],
        packages=tuple((name, version) for name in packages if (version := installed_version(name))),
        files=tuple((path, _digest(Path(path))) for path in files),
        clock_s=round(time.time() - now_s, 3),
        memory_bytes=free_kib * 1024,
        scratch_bytes=space.f_bavail * space.f_frsize,
        allowed_pus=machine.allowed_pus,
        no_provider=missing_provider(provider),
    )


def missing_provider(wanted: str | None) -> str | None:
    """The first of the wanted libfabric providers ("psm3", "tcp;ofi_rxm") that fi_info does not list; None without it.

    "^" excludes providers: nothing is wanted then.
    """
    program = shutil.which("fi_info")
    if wanted is None or wanted.startswith("^") or program is None:
        return None
    listed = subprocess.run(
        [program, "-l"], capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout
    offered = {line.removesuffix(":") for line in listed.splitlines() if line.endswith(":")}
    return next((name for name in wanted.replace(",", ";").split(";") if offered and name not in offered), None)


def _digest(path: Path) -> str:
    """The start of a file's SHA-256, of a large one its size; "absent" where it is not there."""
    if not path.is_file():
        return "absent"
    size = path.stat().st_size
    return f"{size:,} bytes" if size > MAX_BYTES else hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def main(arguments: list[str], env: Mapping[str, str]) -> int:
    """Check one host: report, then send to the next host of the ring for RING_S; the one before sends here before or
    after it."""
    parser = argparse.ArgumentParser(prog="python -m mpi.preflight.checks", description=__doc__)
    parser.add_argument("--report-to", required=True, metavar="HOST:PORT")
    parser.add_argument("--scratch", default=tempfile.gettempdir())
    parser.add_argument("--packages", default="", metavar="NAME,...", help="whose versions are reported")
    parser.add_argument("files", nargs="*")
    options = parser.parse_args(arguments)
    token, rank = env.get(TOKEN_VARIABLE, ""), discover(env)
    hello = Hello(rank=rank.rank if rank else 0, host=socket.gethostname())
    connection, answer = join(options.report_to, token, (Clock, LinkPeer, Stop), hello)
    if not isinstance(answer[0], Clock):  # this host does not fit the job
        return ExitStatus.FAILED
    clock = answer[0]
    address = connection.socket.getsockname()[0]
    server = socket.create_server((address, 0), family=connection.socket.family)
    threading.Thread(target=_receive_all, args=(server, token), daemon=True).start()
    files, packages = tuple(options.files), tuple(filter(None, options.packages.split(",")))
    report = inspect_host(files, packages, options.scratch, this_machine(), clock.now_s, env.get("FI_PROVIDER"))
    connection.send(report)
    connection.send(Listening(address=address, port=server.getsockname()[1]))
    neighbor = _next(connection, LinkPeer)
    speed = _measure_link(f"{neighbor.address}:{neighbor.port}", token, hello) if neighbor.address else None
    connection.send(LinkSpeed(gbit=speed))
    _next(connection, Stop)
    return 0


def _next(connection: Connection, message_type: type[M]) -> M:
    """The next message of that type; ends this process when the launching host has closed the connection, or is silent
    for LONGEST_S."""
    deadline = time.monotonic() + LONGEST_S
    while True:
        messages = connection.receive()
        if messages is None or time.monotonic() > deadline:
            sys.exit(ExitStatus.FAILED)
        found = next((message for message in messages if isinstance(message, message_type)), None)
        if found is not None:
            return found
        time.sleep(0.01)


def _receive_all(server: socket.socket, token: str) -> None:
    """Receive all that the host before sends; nobody else's."""
    for _ in range(STRANGERS + 1):
        accepted, _ = server.accept()
        connection = Connection(accepted, token, (Hello,), None)
        if _says_hello(connection):
            accepted.setblocking(True)
            while accepted.recv(1 << 20):
                pass
            return
        connection.close()


def _says_hello(connection: Connection) -> bool:
    deadline = time.monotonic() + HELLO_TIMEOUT_S
    while time.monotonic() < deadline:
        messages = connection.receive()
        if messages is None or messages:
            return bool(messages)
        time.sleep(0.01)
    return False


def _measure_link(neighbor: str, token: str, hello: Hello) -> float | None:
    """Gbit/s that were sent to HOST:PORT in RING_S; None where it cannot be reached."""
    try:
        connection = connect(neighbor, token, (), RING_TIMEOUT_S)
        with connection.socket as connected:
            connection.send(hello)
            connected.settimeout(RING_TIMEOUT_S)
            started, sent = time.monotonic(), 0
            while (took := time.monotonic() - started) < RING_S:
                sent += connected.send(CHUNK)
            return round(sent * 8 / took / 1e9, 3)
    except OSError:
        return None


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:], os.environ))
