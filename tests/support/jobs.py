"""Jobs for tests as values and files, their monitors, and agents of their ranks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.mpi.hostfile import HostGroup, job_plan_json
from cputrain.mpi.launch_command import build_launch_command
from cputrain.mpi.launchers import InstalledLauncher, Job, LaunchCommand
from cputrain.mpi.supervise.monitor import Monitor
from cputrain.mpi.supervise.processes import write_files
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE, Answer, Connection, Hello, Preempt, ShowStack, Stop, connect


def plan_here(ppn: int) -> Plan:
    return plan_machine(this_machine(), Request(ppn=ppn), Runtime())


def job_of(
    folder: Path, command: tuple[str, ...], plan: Plan, hosts: tuple[str, ...] = ("localhost",), **changes: Any
) -> Job:
    """Return a job whose files are in the folder."""
    groups = (HostGroup(hosts=hosts, plan=plan),)
    return Job(groups=groups, command=command, plan_path=folder / "plan.json", log_dir=folder / "logs", **changes)


def written(job: Job, launcher: InstalledLauncher, command: tuple[str, ...]) -> LaunchCommand:
    """Return the start of the command as the job's ranks; its files are written beside the plan."""
    made = build_launch_command(job, launcher, command, job.plan_path.parent)
    write_files(((job.plan_path, job_plan_json(job.groups)), *made.files))
    return made


def agent_process(monitor: Monitor, logs: Path, *command: str, **settings: Any) -> subprocess.Popen[str]:
    """Return the agent of rank 0, the only rank, which reports to a monitor with the token "secret"."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", TOKEN_VARIABLE: "secret"}
    report = ("--report-to", f"127.0.0.1:{monitor.port}", "--into", str(logs))
    argv = (sys.executable, "-m", "cputrain.mpi.supervise.agent", *report, "--", *command)
    return subprocess.Popen(argv, env={**os.environ, **world}, text=True, **settings)


def agent(monitor: Monitor, rank: int, host: str | None = None, token: str = "secret") -> Connection:
    """Return the connection of a rank's agent that has said Hello, by default from the host h<rank>."""
    connection = connect(f"127.0.0.1:{monitor.port}", token, (Answer, Stop, Preempt, ShowStack))
    connection.send(Hello(rank=rank, host=host or f"h{rank}"))
    return connection


def printed_lists(result: subprocess.CompletedProcess[str]) -> list[list[Any]]:
    """Return the JSON lists that the ranks of a job that ended well have printed, in order."""
    assert result.returncode == 0, result.stderr
    return sorted(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))


def poll_until(monitor: Monitor, holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Run the monitor until a condition holds, or for a time."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        monitor.poll(0.05)
