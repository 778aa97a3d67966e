"""Connections of strangers to a job's ports, and what others on the host can see of it."""

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import psutil

from cputrain.mpi.supervise.processes import descendants
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE, Signer
from tests.faults.fault import GOES_ON, Fault, Seen
from tests.faults.place import Place, Running, command_of, variables_of
from tests.support.commands import mpi_path

KIND = "stranger"
WAITS = """
import os, time
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
print("done", flush=True)
"""
Attack = Callable[[tuple[str, int], str], None]


def attacked(attack: Attack) -> Callable[[Place], Seen]:
    """A launch over Intel MPI, whose monitor's port is attacked while it runs; it then ends by itself.

    An attack gets the port's address and the job's token, which only one of them uses.
    """

    def cause(place: Place) -> Seen:
        (place.folder / "script.py").write_text(WAITS)
        argv = (sys.executable, "-m", "cputrain", "launch", "--launcher", "intelmpi", "--ppn", "2", "--output", "out")
        with place.running(*argv, "--", sys.executable, "script.py", **mpi_path("intelmpi")) as run:
            run.wait_for(lambda: run.text.count("up") == 2)
            pid = run.ranks("script.py")[0]
            run.begun = time.monotonic()
            attack(monitor_of(run), variables_of(pid)[TOKEN_VARIABLE])
            assert run.process.poll() is None, run.text
            (place.folder / "go").touch()
            return Seen(status=run.end(), text=run.text, seconds=run.seconds)

    return cause


FLOOD = """
import socket, sys, time
place, deadline = (sys.argv[1], int(sys.argv[2])), time.monotonic() + float(sys.argv[3])
idle = []
while time.monotonic() < deadline:
    try:
        idle.append(socket.create_connection(place, timeout=1))
    except OSError:
        time.sleep(0.01)
    del idle[:-800]
"""


def flooded_start(place: Place) -> Seen:
    """A launch over Intel MPI whose monitor's port is flooded from before its ranks connect until they all run."""
    (place.folder / "go").touch()
    (place.folder / "script.py").write_text(WAITS)
    argv = (sys.executable, "-m", "cputrain", "launch", "--launcher", "intelmpi", "--ppn", "2", "--output", "out")
    with place.running(*argv, "--", sys.executable, "script.py", **mpi_path("intelmpi")) as run:
        run.wait_for(lambda: agents_of(run))
        host, port = monitor_of(run)
        run.begun = time.monotonic()
        with place.running(sys.executable, "-c", FLOOD, host, str(port), "60") as flood:
            status = run.end()
            assert flood.process.poll() is None
        return Seen(status=status, text=run.text, seconds=run.seconds)


def agents_of(run: Running) -> list[int]:
    """The processes that name the monitor's port: mpirun's first, and agents once they run."""
    return [pid for pid in descendants(run.process.pid) if b"--report-to" in command_of(pid)]


def monitor_of(run: Running) -> tuple[str, int]:
    """Where the agents report to."""
    for pid in descendants(run.process.pid):
        words = command_of(pid).decode().split("\0")
        if "--report-to" in words:
            host, _, port = words[words.index("--report-to") + 1].rpartition(":")
            return host.strip("[]"), int(port)
    raise AssertionError("no agent runs")


def sends(data: bytes) -> Attack:
    """A connection with this data, which stays open for a second."""

    def attack(address: tuple[str, int], _token: str) -> None:
        with socket.create_connection(address, timeout=5) as stranger:
            try:
                stranger.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                return  # closed before all was sent
            time.sleep(1)

    return attack


OPEN_MANY = """
import resource, socket, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
idle = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(3000)]
time.sleep(1)
"""


def idle_connections(address: tuple[str, int], _token: str) -> None:
    subprocess.run([sys.executable, "-c", OPEN_MANY, address[0], str(address[1])], check=True, timeout=200)


def odd_messages(address: tuple[str, int], token: str) -> None:
    """Messages of an insider: rightly signed, with wrong fields."""
    chance = random.Random(3)
    odd = [None, True, -1, 10**30, "x" * 5000, [], {}, [[[]]], "\x1b[2J"]
    for number in range(500):
        nonce = f"{chance.getrandbits(128):032x}".encode()
        signer = Signer(token, nonce, b"connecting")
        fields = {"type": chance.choice(["Hello", "Heartbeat", "Exit", "Stop", ""]), "rank": number % 3, "host": "x"}
        fields[chance.choice(["type", "rank", "host", "status", "extra"])] = chance.choice(odd)
        text = json.dumps(fields).encode()
        with socket.create_connection(address, timeout=5) as insider:
            insider.sendall(nonce + b"\n" + signer.sign(text) + b" " + text + b"\n")


def no_command_line_has_the_token(place: Place) -> Seen:
    """The command lines of all processes of this host, while a job runs."""
    seen: list[str] = []

    def look(_address: tuple[str, int], token: str) -> None:
        lines = [command_of(process) for process in psutil.pids()]
        assert len(lines) > 5
        seen.append(f"command lines with the token: {sum(token.encode() in line for line in lines)}")

    result = attacked(look)(place)
    return Seen(status=result.status, text="\n".join([*seen, result.text]), seconds=result.seconds)


def forged_keys(place: Place) -> Seen:
    """A process of another user of this host sets the keys by which a training is told to stop."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore  # a second: only where it is needed

    with place.training(real=True) as run:
        run.wait_for(lambda: place.step >= 33)
        port = int(variables_of(run.ranks()[0])["MASTER_PORT"])
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
        run.begun = time.monotonic()
        for key in ("after_steps", "saved/1/0", "saved/1/1", "facts/problem"):
            store.set(key, "1 0")
        PrefixStore("watchdog", store).set("lost", "rank 0")
        run.wait_for(lambda: place.step >= 150)
        del store
        return Seen(status=GOES_ON, text=run.text, seconds=run.seconds, lost=0)


def listening_addresses(backend: str) -> Callable[[Place], Seen]:
    """The addresses at which the processes of a training on one host listen."""

    def cause(place: Place) -> Seen:
        with place.training(f"comm.backend={backend}") as run:
            run.wait_for(lambda: place.step >= 10)
            run.begun = time.monotonic()
            found = {
                connection.laddr.ip
                for pid in (run.process.pid, *descendants(run.process.pid))
                for connection in psutil.Process(pid).net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
            text = f"listens on {', '.join(sorted(found))} alone"
            return Seen(status=GOES_ON, text=text, seconds=run.seconds, lost=0)

    return cause


def unimpressed(name: str, attack: Attack, nightly: bool = False) -> Fault:
    return Fault(kind=KIND, name=name, cause=attacked(attack), status=0, says=("done",), nightly=nightly)


FAULTS = (
    unimpressed("30,000 brackets to a launch's port", sends(b"[" * 30_000 + b"\n"), nightly=True),
    unimpressed("10 MB without a line's end", sends(b"x" * 10_000_000), nightly=True),
    unimpressed("a browser", sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), nightly=True),
    unimpressed("a guessed token", sends(b"0" * 32 + b"\n" + b"f" * 64 + b' {"type": "Stop", "grace_s": 0}\n')),
    unimpressed("3,000 idle connections", idle_connections, nightly=True),
    Fault(
        kind=KIND,
        name="800 idle connections at a time, on and on, from before the ranks connect",
        cause=flooded_start,
        status=0,
        says=("done",),
    ),
    unimpressed("500 odd messages behind the right token", odd_messages),
    Fault(
        kind=KIND,
        name="reads all command lines of the host",
        cause=no_command_line_has_the_token,
        status=0,
        says=("command lines with the token: 0", "done"),
    ),
    Fault(
        kind=KIND,
        name="sets the keys of a training's store",
        cause=forged_keys,
        status=GOES_ON,
        loses=0,
    ),
    *(
        Fault(
            kind=KIND,
            name=f"looks for open ports of a training over {backend} on one host",
            cause=listening_addresses(backend),
            status=GOES_ON,
            says=("listens on 127.0.0.1 alone",),
            loses=0,
            nightly=backend == "gloo",
        )
        for backend in ("gloo", "ccl")
    ),
)
