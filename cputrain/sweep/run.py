"""Run a sweep's variants one after another, within a time."""

import logging
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.terminal import ExitStatus, status_of_signal
from cputrain.launch.local import PlannedTraining, train_here
from cputrain.mpi.supervise.signals import PREEMPTION_SIGNAL
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import LOGS, RECIPE, check_folder, differences
from cputrain.sweep.results import (
    DONE,
    INVALID,
    STOPPED,
    TIME_LIMIT,
    RunResult,
    TrialRecord,
    Variant,
    invalid_result,
    outcome_of,
    result_of,
    setup_of,
    write_record,
)

AGAIN_S = 5.0  # the signal is repeated, as one sent while the workers are being started reaches none of them
CLOCK = re.compile(r"(?:([0-9]{1,3})-)?([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])")


def parse_clock(text: str) -> int:
    """ "1:30:00" or "2-00:00:00" -> seconds. Raises InputError."""
    found = CLOCK.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise InputError(f"--time {text!r} is not a time limit: give HH:MM:SS or D-HH:MM:SS")
    return total


def clock(seconds: float) -> str:
    """436 -> "0:07:16"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class Limit:
    """Whether the time limit was reached."""

    reached = False


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Limit]:
    """Send this process the preemption signal (SIGUSR1) after so many seconds, as job scripts do near a job's limit.

    By a timer's signal, not a thread: processes are forked from here. The signal is repeated every AGAIN_S seconds, and
    withheld while no handler is installed, as it would end this process.
    """
    limit = Limit()

    def notify(_number: int, _frame: FrameType | None) -> None:
        limit.reached = True
        if callable(signal.getsignal(PREEMPTION_SIGNAL)):
            os.kill(os.getpid(), PREEMPTION_SIGNAL)

    before = signal.signal(signal.SIGALRM, notify)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0, AGAIN_S)
    try:
        yield limit
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidTraining:
    """A training that cannot be started here, and why: status "does not fit" (memory) or "invalid"."""

    recipe: Recipe
    status: str
    why: str


def train_all(
    planned: Sequence[tuple[Variant, PlannedTraining | InvalidTraining]],
    env: Mapping[str, str],
    limit_s: float | None = None,
) -> list[RunResult]:
    """Train everything that is not done yet, one after another, each for at most `limit_s` seconds over all its starts.

    `env` is the environment that the workers inherit. Raises InputError where a folder contains another training,
    RunError where the user stopped one, KeyboardInterrupt where a signal did.
    """
    results = []
    for number, (variant, one) in enumerate(planned, 1):
        if isinstance(one, InvalidTraining):
            results.append(invalid_result(variant, one.recipe, one.status, one.why))
            continue
        folder = one.recipe.folder
        known = (folder / RECIPE).is_file()
        if known and differences(load_recipe(str(folder / RECIPE)), one.recipe):
            raise InputError(
                f"{folder} contains a run of another recipe: name another folder with --output, or remove this one"
            )
        setup = setup_of(one)
        result = result_of(variant, setup, folder)
        used_s = result.wall_s or 0.0
        if result.status != DONE and (limit_s is None or used_s < limit_s):
            logger.info("\n%d/%d  %s", number, len(planned), " ".join(variant.arguments))
            _train(one, env, resume=known, limit_s=limit_s, used_s=used_s)
            result = result_of(variant, setup, folder)
        if result.status == STOPPED:
            raise RunError(f"stopped in {folder}: run the same command again to continue")
        results.append(result)
    return results


def _train(one: PlannedTraining, env: Mapping[str, str], *, resume: bool, limit_s: float | None, used_s: float) -> None:
    """Train, and record how long it took and how it ended. Raises InputError where the folder may not be written to."""
    check_folder(one.recipe, one.scale, resume=resume, overwrite=False)
    started, message = time.monotonic(), ""
    with time_limit(None if limit_s is None else limit_s - used_s) as limit:
        try:
            status = train_here(one, env, resume=resume, overwrite=False, verify=True, quiet=False)
        except RunError as error:
            message, status = str(error), ExitStatus.FAILED
    if status == ExitStatus.FAILED:
        logger.error("cputrain: %s", message)
        outcome, why = outcome_of(message)
    elif status == ExitStatus.WRONG_INPUT:
        outcome, why = INVALID, _last_line(one.recipe.folder / LOGS / "rank-0.log")
    elif limit.reached:
        outcome, why = TIME_LIMIT, f"stopped by SIGUSR1 after --time {limit_s:g} s"
    else:
        outcome, why = "", ""
    used = used_s + time.monotonic() - started
    write_record(one.recipe.folder, TrialRecord(requested_s=limit_s, used_s=used, status=outcome, ended_by=why))
    if status >= status_of_signal(0):
        raise KeyboardInterrupt  # a signal ends the sweep too


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="backslashreplace").splitlines() if log.is_file() else []
    return lines[-1].removeprefix("cputrain: ") if lines else ""
