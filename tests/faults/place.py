"""A folder in which a fault happens: images, small trainings, and what is seen of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cputrain.checkpoint.files import list_checkpoints, step_of
from cputrain.mpi.supervise.processes import descendants
from cputrain.mpi.supervise.run import free_port
from tests.support.commands import children_of
from tests.support.forked import Forked, Process, in_fork
from tests.support.trainings import LENET

ROOT = Path(__file__).parents[2]
SAVED_EVERY = 10
NETWORK = (*LENET, "batch.local=4")
ENDLESS = ("epochs=5000", "schedule.warmup_epochs=0", "schedule.peak_rate=0.001")
SAVING = ("checkpoint.every_epochs=null", f"checkpoint.every_steps={SAVED_EVERY}", "evaluate.every_epochs=null")
SETTINGS = ("imagefolder", "data.path=images", *NETWORK, *ENDLESS, *SAVING, "comm.backend=gloo", "output=run")
"""A training of tiny steps that does not end by itself, and is saved every ten steps."""
LIMIT_S = 400.0  # far beyond what any of them takes, even on a machine that others use
POLL_S = 0.005
FORKS = b"tests.support.fork_server"


@dataclass(slots=True)
class Running:
    """A command that runs, with its output in a file; `begun` is when the fault began, for `seconds`."""

    process: Process
    output: Path
    begun: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        """What it has printed so far, on both streams."""
        return self.output.read_text(errors="replace")

    @property
    def seconds(self) -> float:
        """Seconds since the fault."""
        return time.monotonic() - self.begun

    def ranks(self, word: str = "--prepared") -> dict[int, int]:
        """The pid of each rank: the processes below that have RANK, and the word in their command.

        /proc shows a forked rank with the command and the variables of the interpreter that has forked it. Forked ranks
        are children of their supervisor, which starts them in order: ask while all of them run.
        """
        forked = [pid for pid in children_of(self.process.pid) if FORKS in command_of(pid)]
        found = dict(enumerate(forked)) if isinstance(self.process, Forked) else {}
        for pid in descendants(self.process.pid):
            with suppress(OSError):
                command = command_of(pid).decode(errors="replace")
                rank = variables_of(pid).get("RANK")
                if rank is not None and word in command and "cputrain.mpi.supervise" not in command:
                    found[int(rank)] = pid
        return found

    def wait_for(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Wait until something is the case, while the command runs."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, f"it has ended: {self.text}"
            assert time.monotonic() < deadline, f"it does not come to it: {self.text}"
            time.sleep(POLL_S)

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its end; the exit status."""
        return self.process.wait(limit_s)


def command_of(pid: int) -> bytes:
    """The command line of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def variables_of(pid: int) -> dict[str, str]:
    """The environment in which a process was started."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Place:
    """An empty folder with `images`; `template` is a finished training that can be copied."""

    folder: Path
    template: Callable[[], Path]

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder / "run"

    @property
    def step(self) -> int:
        """The steps that the run has logged."""
        try:
            text = (self.run / "events.jsonl").read_bytes()[-20_000:].decode(errors="replace")
        except FileNotFoundError:
            return 0
        return max((int(line["step"]) for line in _events(text) if line.get("event") == "step"), default=0)

    @property
    def events(self) -> list[str]:
        """The names of the run's last events."""
        path = self.run / "events.jsonl"
        return [line["event"] for line in _events(path.read_text(errors="replace")[-20_000:])] if path.is_file() else []

    @property
    def logged(self) -> list[dict]:
        """All events of the run, those of repeated steps as well."""
        return list(_events((self.run / "events.jsonl").read_text()))

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        found = list_checkpoints(self.run / "checkpoints")
        return step_of(found[-1]) if found else 0

    @property
    def lost(self) -> int:
        """The steps that the run would do again if it were resumed now."""
        return self.step - self.saved

    @contextmanager
    def running(self, *argv: str, forked: bool = False, **env: str) -> Iterator[Running]:
        """A command in this folder; neither it nor anything that it has started outlives the block.

        `forked`: one of cputrain's is forked with its ranks, in a quarter of the time (tests/support/forked.py).
        """
        output = self.folder / f"output-{time.monotonic_ns()}"
        with output.open("wb") as file:
            process = (
                Forked(argv[1:], _env(env), file, file, self.folder)
                if forked
                else subprocess.Popen(argv, cwd=self.folder, env=_env(env), stdout=file, stderr=subprocess.STDOUT)
            )
        try:
            yield Running(process, output)
        finally:
            for pid in (process.pid, *descendants(process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    @contextmanager
    def training(self, *settings: str, ppn: int = 2, real: bool = False, **env: str) -> Iterator[Running]:
        """`cputrain train` with SETTINGS and these on top.

        `real`: its processes are executed as a user's are. This is for faults while they start, for what is injected
        into them as they start, for strangers who read their commands and variables, and for what torch writes when it
        loses a peer: forked ones have a quieter torch.
        """
        argv = cputrain("train", *SETTINGS, f"plan.ppn={ppn}", *settings)
        with self.running(*argv, forked=not real, **env) as run:
            yield run

    @contextmanager
    def ranks(
        self, *settings: tuple[str, ...], ports: tuple[int, ...] = (), real: bool = False
    ) -> Iterator[list[Running]]:
        """A training whose ranks are started one by one, as mpirun does, each with settings of its own on top of
        SETTINGS; `ports` are those at which each looks for rank 0, and `real` is as that of `training`."""
        ports = ports or (free_port(),) * len(settings)
        size = str(len(settings))
        common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    self.running(
                        *cputrain("train", *SETTINGS, f"plan.ppn={size}", *own),
                        forked=not real,
                        **{**common, "RANK": str(i), "LOCAL_RANK": str(i), "MASTER_PORT": str(port)},
                    )
                )
                for i, (own, port) in enumerate(zip(settings, ports, strict=True))
            ]

    def command(self, *words: str) -> tuple[int, str]:
        """A cputrain command to its end: status and output."""
        done = in_fork(*words, cwd=self.folder, **_env({}))
        return done.returncode, done.stdout + done.stderr

    def copy_of_template(self) -> Path:
        """The finished training as this folder's run."""
        return shutil.copytree(self.template(), self.run, symlinks=True)


def cputrain(*words: str) -> list[str]:
    """The tokens of a command."""
    return [sys.executable, "-m", "cputrain", *words]


def _env(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def _events(text: str) -> Iterator[dict]:
    for line in text.splitlines():
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and "event" in value:
                yield value
