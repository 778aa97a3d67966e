"""The only file that starts processes: start a job's workers, show and log their output, watch, tear down."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from affinity.errors import RunError
from affinity.ranks.rank import LOOPBACK
from mpi.launchers.job import Job
from mpi.launchers.start import local
from mpi.supervise.exits import LAST_LINES, SETTLE_S, End, first_cause, obituary
from mpi.supervise.output import Stream
from mpi.supervise.process import signal_group, start_rank
from mpi.supervise.signals import NOTICE, STOPS, InterruptedBySignalError, interruptible
from mpi.usage.file import FOLDER as USAGE
from mpi.usage.sampler import Sampler

POLL_S = 0.05
GRACE_S = 5.0  # between asking a worker to stop and killing it
REAP_S = 2.0  # what a killed worker had started is reaped by init; waited for at most this long


@dataclass(slots=True)
class Worker:
    """A started rank. `ended_at` is the monotonic time at which its end was seen."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    streams: list[Stream] = field(default_factory=list)
    ended_at: float | None = None


def run_local(job: Job, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Run the job's workers on this host to their end; 0 when all ended well, 2 when all refused their input.

    Output is labelled with its rank and also written to log_dir/rank-N.log; what the ranks use, to usage/ beside
    log_dir. When one rank fails the others are stopped. Raises RunError naming the rank, its exit or signal, its log
    and last lines; on SIGINT or SIGTERM stops everything and returns 128 + the signal; SIGUSR1 is passed on. No process
    is left behind in any case.
    """
    job.log_dir.mkdir(parents=True, exist_ok=True)
    port = job.master_port or free_port()
    workers: list[Worker] = []
    with interruptible(lambda: _pass_notice_on(workers)):
        return _run(job, port, workers, out or sys.stdout, err or sys.stderr)


def _run(job: Job, port: int, workers: list[Worker], out: TextIO, err: TextIO) -> int:
    selector = selectors.DefaultSelector()
    sampler: Sampler | None = None
    try:
        for rank, (argv, variables) in enumerate(local(job, port)):
            worker = _start(rank, argv, variables, job)
            workers.append(worker)
            label = "" if rank == job.plain_rank else f"[{rank}] "
            log = worker.log.open("wb", buffering=0)
            for pipe, terminal in ((worker.process.stdout, out), (worker.process.stderr, err)):
                assert pipe is not None
                stream = Stream(label=label, terminal=terminal, log=log, live=terminal.isatty())
                worker.streams.append(stream)
                selector.register(pipe, selectors.EVENT_READ, stream)
        pids = {worker.rank: worker.process.pid for worker in workers}
        sampler = Sampler(job.log_dir.parent / USAGE, pids, whole_host=True)
        return _watch(workers, selector, sampler)
    except InterruptedBySignalError as stop:
        number = stop.args[0]
        print(f"\nstopping {len(workers)} workers ({signal.Signals(number).name})", file=err)
        return 128 + int(number)
    finally:
        _tear_down(workers)
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        if sampler is not None:
            sampler.close()
        _pump(selector, timeout_s=0.0, until_empty=True)
        for worker in workers:
            for stream in worker.streams:
                stream.close()
            worker.streams[0].log.close()
        selector.close()


def _pass_notice_on(workers: list[Worker]) -> None:
    for worker in workers:
        worker.process.send_signal(NOTICE)


def free_port() -> int:
    """A TCP port that is free on this host's loopback now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _start(rank: int, argv: tuple[str, ...], variables: dict[str, str], job: Job) -> Worker:
    process = start_rank(argv, {**os.environ, **variables})
    return Worker(rank=rank, process=process, log=job.log_dir / f"rank-{rank}.log")


def _watch(workers: list[Worker], selector: selectors.BaseSelector, sampler: Sampler) -> int:
    while True:
        _pump(selector, timeout_s=POLL_S)
        _note_ends(workers, sampler)
        sampler.tick()
        if any(_failed(worker) for worker in workers):
            settled = time.monotonic() + SETTLE_S
            while time.monotonic() < settled and not all(worker.ended_at for worker in workers):
                _pump(selector, timeout_s=POLL_S)
                _note_ends(workers, sampler)
            break
        if all(worker.ended_at for worker in workers):
            return 0
    failed = [worker for worker in workers if _failed(worker)]
    if all(worker.process.returncode == 2 for worker in failed):
        return 2  # the ranks have said themselves what is wrong with their input
    _tear_down(workers)
    _pump(selector, timeout_s=0.0, until_empty=True)
    raise RunError(obituary(first_cause(map(_end, failed))))


def _end(worker: Worker) -> End:
    for stream in worker.streams:
        stream.flush()
    assert worker.ended_at is not None
    return End(
        rank=worker.rank,
        host=socket.gethostname(),
        status=worker.process.returncode,
        at=worker.ended_at,
        log=str(worker.log),
        tail=tuple(worker.log.read_text(errors="replace").splitlines()[-LAST_LINES:]),
    )


def _failed(worker: Worker) -> bool:
    return worker.ended_at is not None and worker.process.returncode != 0


def _note_ends(workers: list[Worker], sampler: Sampler) -> None:
    now = time.monotonic()
    for worker in workers:
        if worker.ended_at is None and worker.process.poll() is not None:
            worker.ended_at = now
            sampler.ended(worker.rank)


def _pump(selector: selectors.BaseSelector, timeout_s: float, until_empty: bool = False) -> None:
    """Move what the workers have printed to the terminal and the logs."""
    while selector.get_map():
        ready = selector.select(timeout_s)
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            if data:
                key.data.feed(data)
            else:
                selector.unregister(key.fileobj)
        if not (until_empty and ready):
            return
    if not until_empty:
        time.sleep(timeout_s)


def _tear_down(workers: list[Worker]) -> None:
    """End every worker and everything it started: asked first, killed after GRACE_S or at a second signal."""
    _signal_groups(workers, signal.SIGTERM)
    try:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(worker.process.poll() is None for worker in workers):
            time.sleep(POLL_S)
    except InterruptedBySignalError:
        pass  # a second Ctrl-C: kill now
    finally:
        _signal_groups(workers, signal.SIGKILL)
        for worker in workers:
            worker.process.wait()
        deadline = time.monotonic() + REAP_S
        while time.monotonic() < deadline and _signal_groups(workers, 0):
            time.sleep(POLL_S)


def _signal_groups(workers: list[Worker], number: int) -> bool:
    """Send a signal (0: none) to every worker and what it started; whether any of them is still there."""
    reached = [signal_group(worker.process.pid, number) for worker in workers]
    return any(reached)
