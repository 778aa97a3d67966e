"""Run the pre-flight on every host of a job, through the job's own launcher, and collect what the hosts say."""

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from affinity.errors import RunError
from affinity.planner.plan import Plan
from mpi.hosts.groups import Kind
from mpi.launchers.detect import Launcher
from mpi.launchers.job import Job
from mpi.launchers.start import start
from mpi.preflight.checks import RING_S, Report, Verdict, judge
from mpi.supervise.connection import TOKEN_VARIABLE, Line
from mpi.supervise.reaper import adopt_orphans, end_descendants
from mpi.supervise.remote import own_address
from mpi.supervise.signals import interruptible

ANSWER_S = 15.0
ANSWER_S_PER_HOST = 0.02
POLL_S = 0.1
ENDS_S = 5.0
SSH_PORT, KNOCK_S, KNOCKS_AT_ONCE = 22, 3.0, 64


def run_preflight(job: Job, launcher: Launcher, folder: Path) -> Verdict:
    """Ask every host. Raises RunError naming those that do not answer within 15 s (0.02 s more for each host)."""
    token = secrets.token_hex(8)
    # os.path's: a word may be too long for a path, at which Path.is_file raises.
    files = tuple(str(Path(word).resolve()) for word in job.command if os.path.isfile(word))  # noqa: PTH113
    with socket.create_server(("", 0), backlog=4096) as server, interruptible():
        where = f"{own_address(job.hosts)}:{server.getsockname()[1]}"
        alone = replace(
            job,
            kinds=tuple(Kind(hosts=kind.hosts, plan=_one_worker(kind.plan)) for kind in job.kinds),
            binder="self",
            variables=(*job.variables, (TOKEN_VARIABLE, token)),
        )
        probe = (sys.executable, "-m", "mpi.preflight.checks", "--monitor", where, "--", *files)
        made = start(alone, launcher, probe, folder.resolve())
        for path, text in made.files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        adopt_orphans()
        process = subprocess.Popen(
            made.argv, env={**os.environ, **dict(made.variables)}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            reports = _collect(server, token, job.hosts, process)
            _let_end(process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            end_descendants(2.0)
    # Hosts that plan themselves are held to no plan of ours.
    plans = {
        host: replace(kind.plan, workers=()) if job.plan_on_host else kind.plan
        for kind in job.kinds
        for host in kind.hosts
    }
    return judge(reports, plans)


def _let_end(process: subprocess.Popen[bytes]) -> None:
    """Give the launcher time to end on all hosts: cut short, it may be in the way of the job that is started next."""
    try:
        process.wait(ENDS_S)
    except subprocess.TimeoutExpired:
        return


def _one_worker(plan: Plan) -> Plan:
    return replace(plan, workers=plan.workers[:1])


def _collect(
    server: socket.socket, token: str, hosts: tuple[str, ...], process: subprocess.Popen[bytes]
) -> list[Report]:
    """Hello, report, ring and speed of every host, by the hosts' names in the job."""
    lines: dict[int, Line] = {}
    ranks: dict[Line, int] = {}
    reports: dict[int, dict[str, Any]] = {}
    speeds: dict[int, float | None] = {}
    deadline = time.monotonic() + ANSWER_S + ANSWER_S_PER_HOST * len(hosts)
    with selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ, None)
        while len(speeds) < len(hosts):
            for key, _ in selector.select(POLL_S):
                if key.data is None:
                    line = Line(server.accept()[0])
                    selector.register(line.connection, selectors.EVENT_READ, line)
                    continue
                messages = key.data.receive()
                if messages is None:
                    selector.unregister(key.fileobj)
                for message in messages or ():
                    _take(message, key.data, token, lines, ranks, reports, speeds)
            if len(reports) == len(hosts) and not speeds and all("sent" not in report for report in reports.values()):
                _start_ring(lines, reports)
                deadline = time.monotonic() + RING_S + ANSWER_S
            if time.monotonic() > deadline or (process.poll() is not None and len(speeds) < len(hosts)):
                answered = speeds if len(reports) == len(hosts) else reports
                silent = [host for i, host in enumerate(hosts) if i not in answered]
                silent = unreachable(silent) or silent  # a launcher starts nothing where one host is missing
                named = ", ".join(silent[:5]) + (f" and {len(silent) - 5} more" if len(silent) > 5 else "")
                raise RunError(f"pre-flight: no answer from {named}: look at these hosts, or leave them out")
    for line in lines.values():
        line.send(what="stop")
    return [
        Report(**{**{k: _tuple(v) for k, v in reports[i]["report"].items()}, "host": host, "link_gbit": speeds[i]})
        for i, host in enumerate(hosts)
    ]


def unreachable(hosts: list[str]) -> list[str]:
    """Those whose name has no address, or whose address is silent; a refused connection is an answer, too."""

    def is_silent(host: str) -> bool:
        try:
            socket.create_connection((host.rpartition("@")[2].strip("[]"), SSH_PORT), timeout=KNOCK_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return False

    with ThreadPoolExecutor(KNOCKS_AT_ONCE) as pool:
        return [host for host, silent in zip(hosts, pool.map(is_silent, hosts), strict=True) if silent]


def _take(
    message: dict[str, Any],
    line: Line,
    token: str,
    lines: dict[int, Line],
    ranks: dict[Line, int],
    reports: dict[int, dict[str, Any]],
    speeds: dict[int, float | None],
) -> None:
    """What a host has said, noted under its rank."""
    rank = ranks.get(line)
    match message.get("what"):
        case "hello" if message.get("token") == token:
            lines[int(message["rank"])] = line
            ranks[line] = int(message["rank"])
            line.send(what="clock", now_s=time.time())
        case "report" if rank is not None:
            reports[rank] = message
        case "speed" if rank is not None:
            speeds[rank] = message.get("gbit")


def _start_ring(lines: dict[int, Line], reports: dict[int, dict[str, Any]]) -> None:
    """Tell each host the next one's address; a ring of one host sends nothing."""
    ranks = sorted(lines)
    for i, rank in enumerate(ranks):
        after = reports[ranks[(i + 1) % len(ranks)]]
        alone = len(ranks) == 1
        lines[rank].send(what="ring", address="" if alone else after["address"], port=after["port"])
        reports[rank]["sent"] = True


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
