"""Checkpoints in anybody's training loop: saved by a thread, restored bit for bit, in one process or on many ranks.

Every rank makes the same calls. Before anything is written or loaded, the ranks exchange what they found, so that a
problem of one is raised on all.
"""

import atexit
import logging
import operator
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.optim import Optimizer

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import filesystem_refusal
from cputrain.affinity.wording import plural
from cputrain.checkpoint.files import list_checkpoints, load_newest_intact, quarantine, remove_partial, step_of
from cputrain.checkpoint.loop_state import (
    RANDOM,
    LoopState,
    apply_state,
    check_objects_fit,
    differing_state,
    load_state,
    set_random_state,
    unwrapped,
)
from cputrain.checkpoint.writer import CheckpointWriter

LEAVING_S = 60.0  # longest wait for another rank's file when a training has failed

logger = logging.getLogger("cputrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `AsyncCheckpoint.restore` has loaded.

    step: the steps done. values: the plain values that were saved by keyword. path: the folder of this checkpoint.
    """

    step: int
    values: dict[str, Any]
    path: Path


class AsyncCheckpoint:
    """Checkpoints of a training loop, written by a thread: each is complete and verified, or not there at all.

    folder: on a file system that all hosts share; one job at a time saves there.
    keep: the number of newest checkpoints that are kept.
    With torch.distributed, all ranks make the same calls, after init_process_group, and hold replicas of the model
    (DistributedDataParallel). Use it in a `with` block, or call close(), before the group is destroyed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        if keep < 1:
            raise InputError(f"keep={keep} would keep no checkpoint: set keep to 1 or more")
        self.folder, self.keep = Path(folder), keep
        self._writer: CheckpointWriter | None = None

    def save(self, step: int, model: nn.Module, optimizer: Optimizer | None = None, **objects: Any) -> None:
        """Save the state after `step` steps: copy it in memory, return, and let a thread write it.

        model: saved without the wrappers of DDP and torch.compile. objects: by keyword, what has state_dict and
        load_state_dict (a learning rate scheduler, a loader, a second model), a torch.Generator, or plain values
        (epoch=3): numbers, texts, lists, dicts, arrays, tensors. The random states of torch (CPU), NumPy and Python are
        saved, too. A checkpoint of the same step is replaced.
        Waits while the checkpoint before is still being written.
        Raises RunError if that write has failed, InputError if the state cannot be stored; on all ranks.
        """
        if (step := operator.index(step)) < 0:
            raise InputError(f"step={step} is not a number of steps that are done: count from 0")
        rank, ranks = _rank_of_ranks()
        token, state, sums = secrets.token_hex(8), None, {}
        problem: Exception | None = self._take_error()
        if problem is None:
            try:
                if rank == 0:
                    self._prepare_folder(step)
                state = LoopState(unwrapped(model), optimizer, objects)
                sums = {"step": step, **state.sums()} if ranks > 1 else {}
            except InputError as error:
                problem = error
            except OSError as error:
                problem = RunError(filesystem_refusal(error) or str(error))
        try:
            gathered = _gather_or_raise(problem, (token, sums))
        except RunError:
            if rank == 0:  # every rank has stopped writing
                with suppress(OSError):
                    remove_partial(self.folder)
            raise
        assert state is not None
        differing = differing_state([sums_of_rank for _, sums_of_rank in gathered])
        if self._writer is None:
            keys = _StoreKeys(gathered[0][0]) if ranks > 1 else None
            self._writer = CheckpointWriter(
                folder=self.folder, keys=keys, rank=rank, world_size=ranks, keep=self.keep, enter=use_all_cpus
            )
            atexit.register(self._end)
        files, metadata = state.copied(rank, {RANDOM, *differing})
        content = state.content(step, ranks, {RANDOM, *differing}) if rank == 0 else None
        self._writer.begin(step, files, metadata, content)

    def restore(self, model: nn.Module, optimizer: Optimizer | None = None, **objects: Any) -> Restored | None:
        """Load the newest intact checkpoint into these objects; return its step and values, or None if there is none.

        The loop continues bit for bit with the same number of ranks. With another number, the generators stay as they
        are, and a warning says so. Without the optimizer that was saved, only the model and the objects given are
        loaded, to evaluate it.
        Damaged checkpoints are skipped with a warning, and renamed. Nothing is loaded unless everything fits.
        Raises InputError if the checkpoint is of another model, optimizer or set of objects, or if all are damaged;
        RunError if a write before has failed; on all ranks.
        """
        rank, ranks = _rank_of_ranks()
        network = unwrapped(model)
        problem: Exception | None = self._take_error()
        _gather_or_raise(problem, None)
        newest = load_newest_intact(
            self.folder,
            lambda path: load_state(path, rank, ranks, wants_optimizer=optimizer is not None),
            _gather,
            "move them away to start again",
        )
        if newest is None:
            return None
        loaded, damaged = newest
        try:
            check_objects_fit(loaded, network, optimizer, objects)
        except InputError as error:
            problem = error
        _gather_or_raise(problem, None)
        whole = loaded.is_whole(optimizer)
        for name, why in damaged.items() if rank == 0 else ():
            if whole:  # this loop will save here; others only read
                quarantine(self.folder / name)
            renamed = f"renamed to {name}.damaged, " if whole else ""
            logger.warning("%s; %susing %s", why, renamed, loaded.path.name)
        apply_state(loaded, network, optimizer, objects)
        if whole and loaded.same_ranks:
            set_random_state(loaded.items[RANDOM])
        elif whole and rank == 0:
            logger.warning(
                "%s was saved by %s, this job has %d: the random generators stay as they are",
                *(loaded.path, plural(loaded.ranks, "rank"), ranks),
            )
        return Restored(step=loaded.step, values=loaded.values(), path=loaded.path)

    def close(self) -> None:
        """Wait until the last checkpoint is written. Raises RunError if it could not be."""
        atexit.unregister(self._end)
        error, self._writer = self._take_error(), None
        if error is not None:
            raise error

    def __enter__(self) -> "AsyncCheckpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            atexit.unregister(self._end)
            self._end()

    def _end(self) -> None:
        """Wait for the last checkpoint when the program ends or fails: others may be gone, and errors are logged."""
        if self._writer is not None:
            self._writer.limit_s = LEAVING_S
        error, self._writer = self._take_error(), None
        if error is not None:
            logger.error("%s", error)

    def _take_error(self) -> RunError | None:
        error = self._writer.take_error() if self._writer is not None else None
        if error is None:
            return None
        text = (filesystem_refusal(error) if isinstance(error, OSError) else None) or str(error)
        failed = RunError(f"the checkpoint was not saved: {text}")
        failed.__cause__ = None if isinstance(error, OSError | RunError) else error  # the line says all
        return failed

    def _prepare_folder(self, step: int) -> None:
        """Remove what an earlier job has not finished. Raises InputError if the folder has a checkpoint that is newer
        than the one to be saved, as the loop would lose it."""
        if self._writer is None:
            remove_partial(self.folder)
        newest = next(reversed(list_checkpoints(self.folder)), None)
        if newest is not None and step_of(newest) > step:
            raise InputError(
                f"{newest} is newer than step {step}, which is to be saved: restore it first, or name another folder"
            )


def use_all_cpus() -> None:
    """Let this thread run on the CPUs of all threads of this process: an OpenMP runtime with OMP_PROC_BIND binds the
    thread that started it to a single one, which it needs for itself."""
    cpus: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            cpus |= os.sched_getaffinity(int(thread.name))
    with suppress(OSError):  # the host has taken some away
        os.sched_setaffinity(0, cpus)


class _StoreKeys:
    """Keys in the store of the default process group, with a connection of the writer's own."""

    def __init__(self, token: str) -> None:
        self._default = dist.distributed_c10d._get_default_store()  # kept: rank 0's may serve the others
        self._store = PrefixStore(f"cputrain-checkpoint/{token}", self._default.clone())  # type: ignore[attr-defined]

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


def _rank_of_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_backend() == dist.Backend.MPI:
            raise InputError("checkpoints need a store, which torch's MPI backend has not: use gloo or ccl")
        return dist.get_rank(), dist.get_world_size()
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise InputError(
            f"WORLD_SIZE is {ranks} and there is no process group, so every rank would write the same files: call "
            "torch.distributed.init_process_group first"
        )
    return 0, 1


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks, ordered by rank."""
    values = [value]
    if dist.is_available() and dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _gather_or_raise(problem: Exception | None, value: Any) -> list[Any]:
    """Return the values of all ranks; if a rank has a problem, RunError or InputError, all raise the first one."""
    text = None if problem is None else (isinstance(problem, RunError), str(problem))
    gathered = _gather((text, value))
    first_problem = next((text for text, _ in gathered if text is not None), None)
    if first_problem is None:
        return [value for _, value in gathered]
    ran, message = first_problem
    if problem is not None and str(problem) == message:
        raise problem
    raise (RunError if ran else InputError)(message)
