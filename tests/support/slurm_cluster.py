"""A real Slurm on this host: one controller, two daemons that each act as a host, and 256 hosts that are only names."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import HANGS_S

CONF = """ClusterName=made
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdTimeout=10
KillWait=2
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=-1
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cores} CoresPerSocket={cores}
NodeName=c[001-256] NodeAddr=127.0.0.1 Sockets=2 CoresPerSocket=24 ThreadsPerCore=2 RealMemory=190000 State=CLOUD \\
    Feature=skx,opa
PartitionName=real Nodes=n[1-2] Default=YES MaxTime=INFINITE OverSubscribe=NO
PartitionName=fake Nodes=c[001-256] MaxTime=INFINITE
"""
READY_S = 120.0
# Makes the hosts' names resolve to this host, only in this process.
KNOWING = ("unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A running cluster; `env` connects Slurm's commands to it, `hosts` is its /etc/hosts."""

    env: dict[str, str]
    hosts: Path

    def run(self, *argv: str, cwd: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands."""
        command = (*KNOWING, str(self.hosts), *argv)
        return subprocess.run(
            command, cwd=cwd, env=self.env, input=text, capture_output=True, text=True, timeout=HANGS_S
        )

    def state(self, job: str, cwd: Path) -> str:
        """Return a job's state, as scontrol names it."""
        shown = self.run("scontrol", "show", "job", job, cwd=cwd).stdout
        return next((word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")), "GONE")

    def finish(self, script: str, cwd: Path, limit_s: float = HANGS_S) -> str:
        """Submit a script, wait for its end, and return its final state."""
        submitted = self.run("sbatch", "--parsable", cwd=cwd, text=script)
        assert submitted.returncode == 0, submitted.stderr
        deadline = time.monotonic() + limit_s
        while (state := self.state(submitted.stdout.strip(), cwd)) in (
            "PENDING",
            "CONFIGURING",
            "RUNNING",
            "COMPLETING",
        ):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        return state


@contextmanager
def slurm_cluster(folder: Path, cores: int) -> Iterator[Slurm]:
    """Start a controller and two daemons with `cores` cores each; end them by pid."""
    if os.geteuid() != 0:
        pytest.skip(reason="needs root (slurmd)")
    for program in ("slurmctld", "slurmd", "sbatch"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(reason=f"needs the system package slurm-wlm ({program})")
    (folder / "state").mkdir(parents=True)
    ports = _free_ports(3)
    conf = folder / "slurm.conf"
    host = socket.gethostname()
    conf.write_text(CONF.format(host=host, folder=folder, port=ports, first=ports + 1, last=ports + 2, cores=cores))
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    argvs = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"n{i}"] for i in (1, 2))]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    hosts = folder / "hosts"
    hosts.write_text(f"{Path('/etc/hosts').read_text(encoding='utf-8')}\n127.0.0.1 n1 n2\n")
    daemons = [subprocess.Popen([*KNOWING, str(hosts), *argv], env=env, **quiet) for argv in argvs]
    try:
        slurm = Slurm(env=env, hosts=hosts)
        deadline = time.monotonic() + READY_S
        while slurm.run("sinfo", "-h", "-p", "real", "-t", "idle", "-o", "%D", cwd=folder).stdout.strip() != "2":
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-3000:]
            time.sleep(0.2)
        yield slurm
        slurm.run("scancel", "--full", "--user", "root", cwd=folder)  # ends jobs that a failed test has left
        deadline = time.monotonic() + 10
        while slurm.run("squeue", "-h", cwd=folder).stdout.strip() and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        for daemon in reversed(daemons):  # slurmd first
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive TCP ports that are free now."""
    for first in range(26_000 + os.getpid() % 1000 * 4, 32_000, count):
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        finally:
            for opened in sockets:
                opened.close()
        if len(sockets) == count:
            return first
    raise RuntimeError("no free ports")
