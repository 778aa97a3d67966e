"""`cputrain.train`: train a user's own network, loss and samples in this process, bound as its rank."""

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from cputrain.affinity.binding import bind_process
from cputrain.affinity.bound_plan import PLAN_VARIABLE, WORKER_VARIABLE, bound_worker, plan_for_rank, plan_in_memory
from cputrain.affinity.errors import InputError, SettingsError, as_argument
from cputrain.affinity.planner.request import Request
from cputrain.affinity.rank import Rank, rank_from_env
from cputrain.affinity.terminal import CODES
from cputrain.affinity.wording import plural
from cputrain.comm.group import abandon_group
from cputrain.data.formats.dataset import Collate, Dataset, UserSamples
from cputrain.data.settings import USER_SAMPLES
from cputrain.kernels.evidence import restore as restore_layers
from cputrain.kernels.operators import registration_restored
from cputrain.launch.rank_process import RankContext, StartOptions, rank_context, run_rank
from cputrain.mpi.supervise.run import free_port
from cputrain.recipe.loading import load_recipe, recipe_of
from cputrain.recipe.request import request_of
from cputrain.recipe.resume import with_same_global_batch
from cputrain.recipe.schema import DataSection, ModelSection, Recipe
from cputrain.runs.events import check_log_formats
from cputrain.runs.folder import continues_run
from cputrain.training.session import start_session
from cputrain.training.signals import handlers_restored
from cputrain.training.step import TrainResult
from cputrain.training.task import Loss, UserTask
from cputrain.training.trainer import train_rank

SINGLE_PROCESS = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="alone")
REPLACED_KEYS = ("model.", "data.", "loss", "label_smoothing")  # keys that the user's code replaces
KEPT_KEYS = ("data.last_batch", "data.images_per_epoch")  # exceptions, which still apply


def train(
    network: nn.Module,
    loss: Loss,
    train_data: Any,
    val_data: Any = (),
    *,
    test_data: Any = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    recipe: str | None = None,
    classes: Sequence[str] | None = None,
    collate: Collate = default_collate,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train your own network with the plan, DDP, optimizers, schedules, checkpoints and report of a recipe.

    The same script works in one process and on many ranks: `cputrain launch -- python mine.py`, torchrun, mpirun, srun.
    Every rank calls this with the same arguments, from its main thread.

    network: trained in place; called with the inputs of a batch. All ranks start from rank 0's initial weights; call
        torch.manual_seed before you build it to get the same weights in every run.
    loss: called with the outputs and targets of N samples; returns their losses, shape (N,), or the mean, shape ().
        Parameters and buffers of a loss that is a module, or a method or functools.partial of one, are trained, summed
        and saved like the network's.
    train_data, val_data, test_data: map-style datasets, such as torch Datasets, that return (input, target) pairs, the
        same on all ranks. A thread reads the samples in an order that is shuffled by seed and epoch. Random
        augmentation must depend on sample and epoch only (`set_epoch(epoch)` is called if it exists); otherwise a
        resumed training differs. Without val_data nothing is evaluated.
    settings: recipe keys, {"epochs": 3, "optim.name": "lars"} or ["epochs=3"]; `output` is the run folder. Keys of
        model, images, loss and label_smoothing cannot be set, because your code replaces them.
    recipe: a recipe file or the name of a shipped recipe: its optimizer, schedule and sizes are used for keys that are
        not in settings, its network, data and loss are not.
    classes: class names, if targets are class indices (N,) int64 and outputs are logits (N, len(classes)); top-1 and
        top-5 are then computed.
    collate: makes the inputs and targets of a batch from a list of samples; torch's default stacks them.
    resume: continue from the newest checkpoint of the run in `output`. A rank that torchrun or cputrain launch has
        restarted always does.
    overwrite: delete the run in `output` first. quiet: print only warnings and the summary.

    Returns the result, the same on all ranks: `step`, `accuracy.loss`, `accuracy.top1` in percent (None without
    classes), `test`; `accuracy` is None if a signal stopped the training.
    Raises InputError if arguments do not fit, RunError if the training fails. With several ranks, the failing process
    prints its error and exits with status 2 or 1, so that the launcher ends the other ranks.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError("train was called in a thread, where signals cannot stop it: call it in the main thread")
    if dist.is_initialized():
        raise InputError(
            "train was called with a process group, but makes its own: call destroy_process_group() before"
        )
    training = _user_recipe(recipe, settings)
    env = os.environ  # of the launcher for this rank; torch reads there, too, what is set for a process alone
    check_log_formats(training.log, env)
    user_task = UserTask(
        network=network,
        loss=loss,
        dataset=_user_dataset(train_data, val_data, test_data, classes, collate),
        classifies=classes is not None,
    )
    try:
        with handlers_restored(), environment_restored(env), registration_restored():
            return _train_user_code(
                training, user_task, env, StartOptions(resume=resume, overwrite=overwrite, quiet=quiet)
            )
    except SettingsError as error:
        error.wording = as_argument
        raise
    finally:
        restore_layers(network)


def _user_dataset(train: Any, val: Any, test: Any, classes: Sequence[str] | None, collate: Collate) -> Dataset:
    return Dataset(
        classes=tuple(map(str, classes or ())),
        train=UserSamples(train, collate, "training"),
        val=UserSamples(val, collate, "validation"),
        test=None if test is None else UserSamples(test, collate, "test"),
    )


def _train_user_code(
    training: Recipe, user_task: UserTask, env: MutableMapping[str, str], options: StartOptions
) -> TrainResult:
    """Train as this process's rank, or as the only process if it was not launched as a rank."""
    rank = rank_from_env(env)
    if rank is None:
        rank = SINGLE_PROCESS
        env["MASTER_PORT"] = str(free_port())
    if continues_run(training.folder, env, overwrite=options.overwrite):
        options = replace(options, resume=True, overwrite=False)
        training = with_same_global_batch(training, rank.world_size)
    if rank.rank == 0 and (note := note_on_ppn(training.plan.ppn, rank)):
        print(note, flush=True)
    context = _bind(request_of(training), rank, env, shown=not options.quiet)
    results: list[TrainResult] = []

    def work() -> None:
        session = start_session(context, training, user_task=user_task, resume=options.resume)
        result = train_rank(session, options, restores_finished=True)
        assert result is not None, "only a recipe's finished run returns None"
        results.append(result)

    if rank.world_size > 1:
        run_rank(rank, work, as_argument)
        return results[0]
    try:
        work()
    finally:
        abandon_group()  # left over if the training failed; a notebook may try again
    return results[0]


def note_on_ppn(ppn: int | str, rank: Rank) -> str:
    """Return a line if the setting plan.ppn differs from the number of ranks that were started, "" if not."""
    if ppn in ("auto", rank.local_world_size):
        return ""
    started = f"this script was started with {plural(rank.local_world_size, 'rank')} on this host"
    return f"plan.ppn={ppn} has no effect, because {started}: start it with cputrain launch --ppn {ppn}"


def _user_recipe(base: str | None, settings: Mapping[str, Any] | Sequence[str]) -> Recipe:
    """Build the recipe for own code from settings, and from `base` without its model, data and loss. Raises InputError
    for a setting that own code replaces."""
    if isinstance(settings, Mapping):
        settings = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    for setting in settings:
        key = setting.partition("=")[0]
        if key in ("resume", "overwrite", "quiet"):
            raise InputError(f"setting {key} is no recipe key: give train the argument {key}=True")
        if key.startswith(REPLACED_KEYS) and key not in KEPT_KEYS:
            raise InputError(f"setting {key} has no effect with your own network, loss and data: remove it")
    settings = (*settings, f"data.path={USER_SAMPLES}")
    recipe = load_recipe(base, settings) if base else recipe_of({}, Path("settings"), settings=settings)
    data = {key.removeprefix("data."): getattr(recipe.data, key.removeprefix("data.")) for key in KEPT_KEYS}
    without_images = {"crop": None, "train_crop": None}
    return recipe.model_copy(
        update={
            "model": ModelSection(),
            "data": DataSection().model_copy(update={"path": USER_SAMPLES, **data}),
            "phases": tuple(phase.model_copy(update=without_images) for phase in recipe.phases),
            "loss": "cross_entropy",
            "label_smoothing": 0.0,
        }
    )


def _bind(request: Request, rank: Rank, env: MutableMapping[str, str], *, shown: bool) -> RankContext:
    """Bind this process as a rank, or verify its binding if `cputrain launch` or affinity.bind has bound it.

    The threads of a process that is bound here are not checked: its libraries are loaded already, so that the plan's
    allocator and the pinning of each thread need `cputrain launch`.
    """
    worker = bound_worker(env)
    check = worker is not None
    if worker is None:
        request = replace(request, workload=None, allocator="glibc")
        from cputrain.predict.next_best import compare_plan  # bound ranks need no model

        plan, index = plan_for_rank(request, rank, (), env, compare=compare_plan)
        worker = plan.workers[index]
        bind_process(worker)
        env[PLAN_VARIABLE], env[WORKER_VARIABLE] = str(plan_in_memory(plan)), str(worker.local_rank)
    return rank_context(rank, worker, env, check=check, shown=shown)


@contextmanager
def environment_restored(env: MutableMapping[str, str]) -> Iterator[None]:
    """Restore environment variables, streams and the hook for uncaught errors, which a process group replaces by one
    that names the rank, on exit, and cancel the limit on the time until the process exits."""
    variables, hook = dict(env), sys.excepthook
    streams = [(stream, stream.errors) for stream in (sys.stdout, sys.stderr) if isinstance(stream, TextIOWrapper)]
    for stream, _ in streams:
        stream.reconfigure(errors=CODES)  # a name that the locale cannot encode must not end the training
    try:
        yield
    finally:
        for stream, errors in streams:
            stream.reconfigure(errors=errors)
        sys.excepthook = hook
        faulthandler.cancel_dump_traceback_later()
        env.clear()
        env.update(variables)
