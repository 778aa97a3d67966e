"""A training's rank: bind it to its plan, start it, and print its first lines."""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from cputrain.affinity.binding import Observed, observe_binding, verify_binding
from cputrain.affinity.bound_plan import bound_worker, exec_bound, plan_for_rank, plan_in_memory
from cputrain.affinity.errors import InputError, RunError, Wording, as_option
from cputrain.affinity.planner.plan import Plan, WorkerPlan
from cputrain.affinity.planner.request import Request
from cputrain.affinity.rank import Rank, rank_from_env
from cputrain.affinity.start import isolated_command
from cputrain.affinity.terminal import ExitStatus, exit_status, one_line, redraws, use_utf8
from cputrain.files import LOGS
from cputrain.launch.local import local_job
from cputrain.mpi.supervise.processes import JobFailedError, in_one_line
from cputrain.mpi.supervise.run import run_local
from cputrain.mpi.supervise.signals import end_by
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE

WORTH_TELLING_S = 0.1  # of a phase of the start
SPEC = "spec.json"
OWN = "cputrain: "  # how messages of a rank about its failure begin
SIGNALED = 128  # exit status of a shell's child that a signal ended, plus the signal


def bind_rank(
    request: Request, rank: Rank, env: Mapping[str, str], *, share: bool, check: bool, shown: bool = False
) -> "RankContext":
    """Make this process a bound rank; rank 0 reports the start if `shown`.

    Call this before any library can rebind a thread. A rank that no plan has bound (one that mpirun, srun or torchrun
    started directly) plans this host for the request and restarts itself, bound; it cannot `share` the host. Raises
    RunError if `check` finds a difference.
    """
    worker = bound_worker(env)
    if worker is None:
        _bind_and_restart(request, rank, env, share=share, check=check)
    assert worker is not None
    return rank_context(rank, worker, env, check=check, shown=shown)


def rank_context(
    rank: Rank, worker: WorkerPlan, env: Mapping[str, str], *, check: bool, shown: bool = False
) -> "RankContext":
    """Describe this process, bound as a worker of a plan, as a rank; rank 0 reports the start if `shown`.

    Raises RunError if `check` finds that the kernel bound it differently.
    """
    if check:
        verify_binding(worker)
    # If a connection is lost, torch warns with C++ stacks, several per rank; the error itself is reported anyway.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it at import
    startup = startup_of(rank, env, shown=shown)
    return RankContext(rank=rank, worker=worker, observed=observe_binding(), env=env, check=check, startup=startup)


def run_rank(rank: Rank, work: Callable[[], object], wording: Wording = as_option) -> None:
    """Do a rank's work; if it fails, exit immediately. `wording` spells the settings that its message names.

    There is no cleanup: library threads may hang in a collective forever, and other ranks, which lose their connections
    to this one, would be blamed for the failure if they exited first.
    """
    from cputrain.comm.group import convert_lost_peer_errors  # imports torch: after the binding has been read back

    try:
        with convert_lost_peer_errors(rank.rank):
            work()
    except KeyboardInterrupt:  # a rank has its own session, so the signal was sent to this rank
        end_by(signal.SIGINT)
    except Exception as error:  # noqa: BLE001  every error is printed and ends the rank
        if one_line(error) is None:
            sys.excepthook(type(error), error, error.__traceback__)
            status: int = ExitStatus.FAILED
        else:
            status = exit_status(error, "cputrain", wording)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _bind_and_restart(request: Request, rank: Rank, env: Mapping[str, str], *, share: bool, check: bool) -> None:
    """Plan this host for its ranks and exec the same command, bound."""
    if share:
        raise InputError(
            "plan.share=true, but this rank was started by a launcher and cannot tell its job from others: start "
            "cputrain train by itself or with cputrain launch --share"
        )
    from cputrain.predict.next_best import compare_plan  # bound ranks need no model

    plan, index = plan_for_rank(request, rank, (), env, compare=compare_plan)
    command = (*isolated_command("cputrain"), *sys.argv[1:])
    exec_bound(plan.workers[index], plan_in_memory(plan), command, env, rank=rank, check=check)


@dataclass(slots=True, kw_only=True)
class Startup:
    """Time the phases of a start and show the current one if `shown`. The line is redrawn in place; if `redrawn` is
    False, each phase is printed on a new line."""

    shown: bool
    redrawn: bool = True
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    file: TextIO = field(default_factory=lambda: sys.stderr)
    _phase: str = ""
    _since: float = 0.0
    _begun: float = 0.0
    _width: int = 0

    def __post_init__(self) -> None:
        self._begun = self.clock()

    def phase(self, name: str) -> None:
        """Begin a phase and end the previous one."""
        self._end()
        self._phase, self._since = name, self.clock()
        self._draw(f"starting: {name}")

    def done(self) -> str:
        """End the last phase and erase the line; return the times of the phases."""
        self._end()
        self._draw("")
        parts = ", ".join(
            f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items() if seconds >= WORTH_TELLING_S
        )
        return f"ready after {self.clock() - self._begun:.1f} s" + (f": {parts}" if parts else "")

    def _end(self) -> None:
        if self._phase:
            taken = self.clock() - self._since
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + taken
            self._phase = ""

    def _draw(self, text: str) -> None:
        """Redraw the line like a progress bar and return the cursor to its start, so that whatever is printed next,
        even an error, starts a line."""
        if self.shown and (self.redrawn or text):
            self.file.write(f"\r{text.ljust(self._width)}\r" if self.redrawn else f"{text}\n")
            self.file.flush()
        self._width = len(text)


def startup_of(rank: Rank, env: Mapping[str, str], *, shown: bool) -> Startup:
    """Return the start's timer, shown on rank 0 if `shown`: redrawn on a terminal or under cputrain's launcher, as log
    lines under other launchers."""
    redrawn = redraws(sys.stderr, env) or TOKEN_VARIABLE in env
    return Startup(shown=shown and rank.rank == 0, redrawn=redrawn, file=sys.stderr if redrawn else sys.stdout)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """This process as a rank: its place in the job, its worker of the plan, and what the kernel gave it at its start
    (`observed`: PUs and memory). With `check` its threads and memory are compared with the plan; `startup` times what
    happens before the first step."""

    rank: Rank
    worker: WorkerPlan
    observed: Observed
    env: Mapping[str, str]
    check: bool = True
    startup: Startup = field(default_factory=lambda: Startup(shown=False))

    @property
    def loader_pus(self) -> tuple[int, ...]:
        """The PUs that decode images, set even if they are the compute PUs: OpenMP has bound this thread to one PU."""
        return self.worker.loader_pus or self.worker.compute_pus

    @property
    def loader_threads(self) -> int:
        """The number of threads that decode images: one per loader PU, else one on the compute PUs."""
        return len(self.worker.loader_pus) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """How a training starts. `resume` continues from the newest checkpoint in the recipe's folder, if there is one;
    `overwrite` deletes the run there; `quiet` limits the output to warnings and the summary.

    With `prepared`, a launcher has created the run folder, samples the ranks' resource use and tells them when to stop;
    otherwise rank 0 checks and creates the folder, and each rank samples itself and handles signals.
    """

    resume: bool = False
    overwrite: bool = False
    prepared: bool = False
    quiet: bool = False


def run_on_ranks(
    plan: Plan, target: str, spec: Any, folder: Path, env: Mapping[str, str], *, what: str | None = None
) -> list[Any]:
    """Call a function "module:name" in each worker of the plan with `spec` and its RankContext; return results by rank.

    `spec` and the results are plain JSON values. `folder` receives the plan and the ranks' logs.

    Raises JobFailedError naming the rank that failed, InputError if ranks reject their input, KeyboardInterrupt if
    SIGINT or SIGTERM stopped them. If `what` names the work, RunError with the failed rank's message replaces
    JobFailedError.
    """
    with tempfile.TemporaryDirectory() as name, Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        results = Path(name)
        (results / SPEC).write_text(json.dumps(spec), encoding="utf-8")
        command = (*isolated_command("cputrain.launch.rank_process"), target, name)
        try:
            status = run_local(local_job(plan, command, folder), env, nowhere, nowhere)
        except RunError as error:
            if what is None:
                raise
            tail = error.tail if isinstance(error, JobFailedError) else ()
            why = own_line(tail) or in_one_line(error)
            raise RunError(f"{what} failed: {why}") from None
        if status >= SIGNALED:
            raise KeyboardInterrupt
        if status:
            raise InputError(f"{what or 'the task'} cannot run: {rejection(folder / LOGS) or 'no message'}")
        return [json.loads(result_file(results, rank).read_text(encoding="utf-8")) for rank in range(len(plan.workers))]


def result_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's result."""
    return folder / f"rank-{rank}.json"


def rejection(logs: Path) -> str:
    """Return the last line of the first rank that rejected its input and said why, "" if there is none."""
    texts = (log.read_text(encoding="utf-8", errors="backslashreplace") for log in sorted(logs.glob("rank-*.log")))
    last = [line.strip() for text in texts for line in text.splitlines()[-1:]]  # ranks that others ended have none
    return own_line(last) or next(iter(last), "")


def own_line(lines: Iterable[str]) -> str:
    """Return the first line that cputrain printed about a failure, "" if there is none."""
    return next((line[len(OWN) :].rstrip() for line in lines if line.startswith(OWN)), "")


def main() -> None:
    """Run one rank."""
    (module, _, name), folder = sys.argv[1].partition(":"), Path(sys.argv[2])
    env = os.environ
    rank, worker = rank_from_env(env), bound_worker(env)
    assert rank is not None and worker is not None, "a rank of a task is started by run_on_ranks"
    context = rank_context(rank, worker, env, check=True)
    spec = json.loads((folder / SPEC).read_text(encoding="utf-8"))

    def work() -> None:
        result = getattr(importlib.import_module(module), name)(spec, context)
        result_file(folder, rank.rank).write_text(json.dumps(result), encoding="utf-8")

    run_rank(rank, work)


if __name__ == "__main__":
    use_utf8()
    main()
