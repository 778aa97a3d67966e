"""Hosts as network namespaces of this one, each with a name, an address, processes and an sshd. Needs root."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

NETWORKS = count()  # each set of hosts has its own bridge and addresses
SSHD = """Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
MaxStartups 200
PidFile none
AcceptEnv *
"""
SSH = """Host *
 IdentityFile {folder}/key
 StrictHostKeyChecking no
 UserKnownHostsFile /dev/null
 LogLevel ERROR
 BatchMode yes
 ConnectTimeout 30
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeHosts:
    """Running hosts: the pid of each one's first process by name, and a folder with the `ssh` that reaches them."""

    folder: Path
    network: int
    scratch: str
    pids: dict[str, int]

    @property
    def names(self) -> list[str]:
        """The hosts' names, in order."""
        return list(self.pids)

    @property
    def env(self) -> dict[str, str]:
        """Variables that make every launcher use this ssh."""
        ssh = str(self.folder / "ssh")
        return {
            "I_MPI_HYDRA_BOOTSTRAP_EXEC": ssh,
            "HYDRA_LAUNCHER_EXEC": ssh,
            "OMPI_MCA_plm_rsh_agent": ssh,
            "PRTE_MCA_plm_ssh_agent": ssh,
            "FI_PROVIDER": "tcp",
            # The hosts share /tmp and have equal process ids, so Open MPI's session folders would collide.
            "OMPI_MCA_orte_tmpdir_base": self.scratch,
            "PRTE_MCA_prte_tmpdir_base": self.scratch,
        }

    def inside(self, host: str, *argv: str) -> list[str]:
        """Return the command-line prefix that runs a command on a host, in the caller's working directory."""
        spaces = ("--net", "--uts", "--ipc", "--mount", "--pid")
        return ["nsenter", "-t", str(self.pids[host]), *spaces, f"--wd={Path.cwd()}", "--", *argv]

    def address(self, host: str) -> str:
        """Return a host's address in the network between them."""
        return address(self.network, self.names.index(host) + 1)

    def listening(self, host: str, program: str) -> set[str]:
        """Return a host's addresses at which processes of a program listen for TCP connections, without sockets
        inherited from another program."""
        argv = self.inside(host, "ss", "--no-header", "--listening", "--tcp", "--numeric", "--processes")
        lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
        owners = {line.split()[3]: re.findall(r'"([^"]+)"', line) for line in lines}
        return {
            place.rpartition(":")[0]
            for place, names in owners.items()
            if names and all(name.startswith(program) for name in names)
        }

    def cut(self, host: str) -> None:
        """Disconnect a host from the network."""
        number = self.names.index(host) + 1
        subprocess.run(["ip", "link", "set", cable(self.network, number), "down"], check=True)

    def slow_down(self, host: str, rate: str) -> None:
        """Limit the rate at which a host sends, in the units of tc."""
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        subprocess.run(self.inside(host, "tc", "qdisc", "add", "dev", "eth0", *shape), check=True)

    def processes(self, word: str) -> dict[str, list[str]]:
        """Return the command lines that contain a word, by host."""
        found = {}
        for host in self.names:
            argv = self.inside(host, "ps", "-ewwo", "args")
            lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
            found[host] = [line for line in lines if word in line and "ps -ewwo" not in line]
        return found


def address(network: int, number: int) -> str:
    """Return the address of a host, counted from 1."""
    return f"10.78.{network}.{number}"


def cable(network: int, number: int) -> str:
    """Return the name of this end of a host's link; unique, as the kernel releases earlier test runs' names slowly."""
    return f"c{os.getpid() % 100_000}v{network}n{number}"


def bridge(network: int) -> str:
    """Return the name of the bridge between the hosts, with this pid, as a killed test run leaves its bridge behind."""
    return f"c{os.getpid() % 100_000}b{network}"


@contextmanager
def fake_hosts(folder: Path, hosts: int | tuple[str, ...]) -> Iterator[FakeHosts]:
    """Start hosts, h1 to hN or with given names; at the end, kill them by pid and remove the bridge between them."""
    if os.geteuid() != 0:
        pytest.skip(reason="needs root (network namespaces)")
    for package, program in (("iproute2", "ip"), ("openssh-server", "/usr/sbin/sshd"), ("util-linux", "nsenter")):
        if shutil.which(program) is None:
            pytest.skip(reason=f"needs the system package {package} ({program})")
    names = [f"h{i}" for i in range(1, hosts + 1)] if isinstance(hosts, int) else list(hosts)
    started: list[subprocess.Popen[bytes]] = []
    network = next(NETWORKS)
    write_ssh_files(folder, names, network)
    subprocess.run(["ip", "link", "add", bridge(network), "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "link", "set", bridge(network), "up"], check=True)
        pids = {}
        for number, name in enumerate(names, 1):
            started.append(_start(folder, name))
            pids[name] = _child(started[-1].pid)
            _connect(pids[name], network, number)
        for name in names:
            _wait_for_sshd(folder, pids[names[0]], name)
        with tempfile.TemporaryDirectory(prefix="cp") as scratch:  # a short path, as it contains sockets
            yield FakeHosts(folder=folder, network=network, scratch=scratch, pids=pids)
    finally:
        for process in started:
            process.kill()  # with unshare --kill-child, the host's first process and all its others end too
        for process in started:
            process.wait()
        subprocess.run(["ip", "link", "del", bridge(network)], check=True)


def write_ssh_files(folder: Path, names: list[str], network: int) -> None:
    """Write keys, configurations and addresses of hosts that reach each other by `folder`/ssh."""
    folder.mkdir(parents=True, exist_ok=True)
    addresses = [f"{address(network, i)} {name}" for i, name in enumerate(names, 1)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses, ""]))
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "sshd_config").write_text(SSHD.format(folder=folder))
    (folder / "ssh_config").write_text(SSH.format(folder=folder))
    (folder / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
    (folder / "ssh").chmod(0o755)


def _start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    # A login by ssh runs root's .bashrc, which may take seconds or wait for a lock shared with other hosts.
    startup = Path.home() / ".bashrc"
    inner = (
        (f"mount --bind /dev/null {startup} && " if startup.exists() else "")
        + f"hostname {name} && mount --bind {folder}/hosts /etc/hosts && mount -t tmpfs none /dev/shm && "
        f"ip link set lo up && exec /usr/sbin/sshd -D -e -f {folder}/sshd_config"
    )
    spaces = ("--net", "--uts", "--ipc", "--mount", "--pid")
    return subprocess.Popen(
        ["unshare", *spaces, "--fork", "--kill-child", "--mount-proc", "sh", "-c", inner],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / f"{name}.log").open("wb"),
    )


def _child(pid: int) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        if children:
            return int(children[0])
        time.sleep(0.01)
    raise RuntimeError("a fake host did not start")


def _wait_for_sshd(folder: Path, pid: int, name: str) -> None:
    """Wait until the first host reaches this one by ssh."""
    argv = ["nsenter", "-t", str(pid), "--net", "--uts", "--mount", "--", str(folder / "ssh"), name, "true"]
    deadline = time.monotonic() + 90
    while subprocess.run(argv, capture_output=True).returncode != 0:
        assert time.monotonic() < deadline, f"{name} does not answer: {(folder / f'{name}.log').read_text()}"
        time.sleep(0.1)


def _connect(pid: int, network: int, number: int) -> None:
    host = cable(network, number)
    for argv in (
        ["ip", "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", str(pid)],
        ["ip", "link", "set", host, "master", bridge(network), "up"],
        ["nsenter", "-t", str(pid), "-n", "ip", "addr", "add", f"{address(network, number)}/24", "dev", "eth0"],
        ["nsenter", "-t", str(pid), "-n", "ip", "link", "set", "eth0", "up"],
    ):
        subprocess.run(argv, check=True)
