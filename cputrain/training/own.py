"""`cputrain.train`: a user's own network, loss and samples, trained as a recipe's are."""

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

from cputrain.affinity.errors import InputError
from cputrain.affinity.kernel.binding import bind_process, observe, verify
from cputrain.affinity.kernel.bound_plan import (
    PLAN_VARIABLE,
    WORKER_VARIABLE,
    bound_worker,
    plan_for_rank,
    plan_in_memory,
)
from cputrain.affinity.ranks.rank import Rank, discover
from cputrain.affinity.terminal import CODES
from cputrain.data.formats.dataset import Collate, Dataset, OwnSamples
from cputrain.launch.local import request_of
from cputrain.launch.rank_process import RankContext, StartOptions, run_rank, startup_of
from cputrain.mpi.supervise.run import free_port
from cputrain.recipe.loading import load_recipe, recipe_of
from cputrain.recipe.schema import OWN_SAMPLES, DataSection, ModelSection, Recipe
from cputrain.runs.folder import continues_run, with_same_global_batch
from cputrain.training.entry import train_rank
from cputrain.training.signals import handlers_restored
from cputrain.training.step import Loss, OwnTask, TrainResult

ALONE = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="alone")
OWN_SECTIONS = ("model.", "data.", "loss", "label_smoothing")  # keys that are of no use here, but these:
USED_KEYS = ("data.last_batch", "data.images_per_epoch")


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
    """Train a network of your own, with the plan, DDP, optimizers, schedules, checkpoints and report of a recipe.

    The same script works in one process and on many ranks: `cputrain launch -- python mine.py`, torchrun, mpirun, srun.
    Every rank calls this with the same arguments, from its main thread.

    network: trained in place; called with the inputs of a batch. Rank 0's initial weights count: call
        torch.manual_seed before you make it, for the same ones in every run.
    loss: called with the outputs and the targets of N samples; returns their losses, shape (N,), or the mean, ().
    train_data, val_data, test_data: objects with a length whose items are pairs (input, target), such as map-style
        torch Datasets, the same on all ranks. Samples are read in a thread, in the order of a permutation by seed and
        epoch. Let random changes depend on sample and epoch (`set_epoch(epoch)` is called where it exists), or a
        resumed training sees other ones. Without val_data nothing is evaluated.
    settings: keys of a recipe, {"epochs": 3, "optim.name": "lars"} or ["epochs=3"]; `output` is the run's folder.
        Those of model and of images, loss and label_smoothing are your code's and cannot be set.
    recipe: a recipe's file or shipped name, whose optimizer, schedule and sizes are used beneath the settings.
    classes: names of the classes where targets are class numbers (N,) int64 and outputs logits (N, len(classes)):
        top-1 and top-5 are counted then.
    collate: makes the inputs and targets of a batch from a list of samples; torch's default stacks them.
    resume: continue from the newest checkpoint of the run in `output`. A rank that torchrun or cputrain launch has
        restarted does so in any case.
    overwrite: delete the run in `output` first. quiet: print warnings and the summary only.

    Returns the result, the same on all ranks: `step`, `accuracy.loss`, `accuracy.top1` in percent (None without
    classes), `test`; `accuracy` is None where a signal has stopped the training.
    Raises InputError where arguments do not fit, RunError where the training fails. On several ranks the process that
    fails prints its error and ends, with status 2 or 1, so that the launcher ends the others.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError("train is called in a thread, where signals cannot stop it: call it in the main thread")
    training = _recipe(recipe, settings)
    own = OwnTask(
        network=network,
        loss=loss,
        dataset=_dataset(train_data, val_data, test_data, classes, collate),
        classifies=classes is not None,
    )
    env = os.environ  # of the launcher for this rank; torch reads there, too, what is set for a process alone
    with handlers_restored(), _restored(env):
        return _train(training, own, env, StartOptions(resume=resume, overwrite=overwrite, quiet=quiet))


def _dataset(train: Any, val: Any, test: Any, classes: Sequence[str] | None, collate: Collate) -> Dataset:
    return Dataset(
        classes=tuple(map(str, classes or ())),
        train=OwnSamples(train, collate, "training"),
        val=OwnSamples(val, collate, "validation"),
        test=None if test is None else OwnSamples(test, collate, "test"),
    )


def _train(training: Recipe, own: OwnTask, env: MutableMapping[str, str], options: StartOptions) -> TrainResult:
    """Train as the rank that this process is, or alone."""
    rank = discover(env)
    if rank is None:
        rank = ALONE
        env["MASTER_PORT"] = str(free_port())
    if continues_run(training.folder, env, overwrite=options.overwrite):
        options = replace(options, resume=True, overwrite=False)
        training = with_same_global_batch(training, rank.world_size)
    context = _bind(training, rank, env, shown=not options.quiet)
    found: list[TrainResult] = []

    def work() -> None:
        result = train_rank(context, training, options, own)
        assert result is not None, "only a recipe's run is left alone when it is finished"
        found.append(result)

    if rank.world_size > 1:
        run_rank(rank, work)
        return found[0]
    try:
        work()
    finally:
        if dist.is_initialized():  # where it has failed: a notebook may try again
            dist.destroy_process_group()
    return found[0]


def _recipe(base: str | None, settings: Mapping[str, Any] | Sequence[str]) -> Recipe:
    """The recipe of the settings; of a `base`, which has a network and images of its own, the rest. Raises InputError
    for a setting that own code replaces."""
    if isinstance(settings, Mapping):
        settings = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    for setting in settings:
        key = setting.partition("=")[0]
        if key.startswith(OWN_SECTIONS) and key not in USED_KEYS:
            raise InputError(f"setting {key}: your own network, loss and data decide it: remove it")
    settings = (*settings, f"data.path={OWN_SAMPLES}")
    recipe = load_recipe(base, settings) if base else recipe_of({}, Path("settings"), settings=settings)
    data = {key.removeprefix("data."): getattr(recipe.data, key.removeprefix("data.")) for key in USED_KEYS}
    without_images = {"crop": None, "train_crop": None}
    return recipe.model_copy(
        update={
            "model": ModelSection(),
            "data": DataSection().model_copy(update={"path": OWN_SAMPLES, **data}),
            "phases": tuple(phase.model_copy(update=without_images) for phase in recipe.phases),
            "loss": "cross_entropy",
            "label_smoothing": 0.0,
        }
    )


def _bind(recipe: Recipe, rank: Rank, env: MutableMapping[str, str], *, shown: bool) -> RankContext:
    """This process as a rank that is bound; its threads can be checked where a plan had bound it.

    A process that no plan has bound is bound here, as one of this host's ranks. Its libraries are loaded already: the
    plan's allocator and the pinning of each thread need `cputrain launch`.
    """
    worker = bound_worker(env)
    check = worker is not None
    if worker is not None:
        verify(worker)
    else:
        request = replace(request_of(recipe), workload=None, allocator="glibc")
        plan, index = plan_for_rank(request, rank, (), env)
        worker = plan.workers[index]
        bind_process(worker)
        env[PLAN_VARIABLE], env[WORKER_VARIABLE] = str(plan_in_memory(plan)), str(worker.local_rank)
    startup = startup_of(rank, env, shown=shown)
    return RankContext(rank=rank, worker=worker, observed=observe(), env=env, check=check, startup=startup)


@contextmanager
def _restored(env: MutableMapping[str, str]) -> Iterator[None]:
    """Afterwards environment and streams are as before, and the process may go on for as long as it
    likes."""
    variables = dict(env)
    streams = [(each, each.errors) for each in (sys.stdout, sys.stderr) if isinstance(each, TextIOWrapper)]
    for stream, _ in streams:
        stream.reconfigure(errors=CODES)  # a name that the locale cannot show is no reason to end
    try:
        yield
    finally:
        for stream, errors in streams:
            stream.reconfigure(errors=errors)
        faulthandler.cancel_dump_traceback_later()
        env.clear()
        env.update(variables)
