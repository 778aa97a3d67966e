"""Build the network, loss, optimizer and DDP of a training, new or restored from a checkpoint."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import first_named, plural
from cputrain.comm.group import run_on_main_rank
from cputrain.comm.hooks import AllReduceHook
from cputrain.kernels.rewriting import left_to_torch
from cputrain.models.networks import inputs_note
from cputrain.models.weights import HALF, load_initial_weights, normalization_of
from cputrain.optim import build_optimizer
from cputrain.training.engine import convert_weights, optimize_training, plan_network, prepare_model, with_operators_of
from cputrain.training.session import Session
from cputrain.training.snapshot import Loaded, check_learner, lacks_buffers, restore
from cputrain.training.state import (
    Learner,
    TrainState,
    copies_of_buffers,
    make_dense,
    make_train_state,
    restore_buffers,
)
from cputrain.training.task import Task


def build_state(
    session: Session, checkpoint: Loaded | None, all_reduce: AllReduceHook | None = None
) -> tuple[TrainState, list[str]]:
    """Build network and optimizer, or restore them from a checkpoint; also return lines about the initial weights and
    Winograd layers. `all_reduce` replaces the recipe's communication hook."""
    recipe, data, task, notes = session.recipe, session.recipe.data, session.task, []
    network = task.build()
    if not task.traceable:
        notes += prepare_user_network(network, task, recipe.precision)
    if recipe.model.weights is not None and checkpoint is None:
        path = Path(recipe.model.weights)
        # DDP sends rank 0's weights to all ranks
        if line := run_on_main_rank(lambda: load_initial_weights(network, path)):
            notes.append(line)
        if (settings := normalization_of(path)) and (data.mean, data.std) != (HALF, HALF):
            notes.append(f"{path.name} expects images normalized by 0.5, as by transform_input: set {settings}")
    if checkpoint is None and (note := inputs_note(network, recipe.model.name, data.crop, data.mean, data.std)):
        notes.append(note)
    started, stored = session.engine, None
    if checkpoint is not None:
        record = checkpoint.manifest.training
        started, stored = with_operators_of(record, started, session.context.env), record.winograd
        if session.engine.operators and not started.operators:
            notes.append("torch's operators without kernels below them, as in the checkpoint")
        elif record.operators and not started.operators:
            notes.append("torch's operators from now on, without the kernels below them that this run had")
    engine, plan, winograd = plan_network(
        started,
        network,
        task.example,
        session.mean_local_batch,
        recipe.precision,
        session.context.env,
        winograd=recipe.model.winograd,
        stored=stored,
    )
    prepare_model(network, engine, recipe.precision, plan)
    if plan is not None and (left := left_to_torch(network, plan.refused())):
        notes.append(left)
    learner = Learner(network, task.losses, recipe.precision, task.loss_module)
    check_learner(learner)
    if winograd:
        notes.append(f"convolutions by Winograd's algorithm: {plural(len(winograd), 'layer')}")
    optimizer = build_optimizer(network, recipe.optim, task.loss_module)
    learner.network, optimizer = optimize_training(network, optimizer, session.engine)
    measured = None
    if checkpoint is not None and checkpoint.same_ranks and recipe.comm.bucket_mib == "auto":
        measured = checkpoint.manifest.training.bucket_mib
    state = make_train_state(
        learner, optimizer, recipe.comm, ema_decay=recipe.ema_decay, bucket_mib=measured, all_reduce=all_reduce
    )
    state.winograd, state.operators = winograd, started.operators
    if checkpoint is None:
        return state, notes
    if session.rank.world_size > 2 or lacks_buffers(state.network, checkpoint):
        _rebuild_buckets(state, session)
    notes += restore(checkpoint, state, recipe.optim.name)
    return state, notes


def _rebuild_buckets(state: TrainState, session: Session) -> None:
    """Make DDP assign gradients to the buckets it uses from its second step on, so that sums over more than two ranks
    round as in an uninterrupted run; buffers that only a forward pass registers appear. This takes one pass; restore
    the state afterwards."""
    inputs, targets = session.task.example(session.mean_local_batch)
    with ExitStack() as stack:
        _, losses = state.forward(inputs, targets, session.task.label_smoothing, stack, reduces=True)
        losses.sum().backward()  # type: ignore[no-untyped-call]
    state.optimizer.zero_grad()
    state.all_reduce.reset()


def prepare_user_network(network: nn.Module, task: Task, precision: str) -> list[str]:
    """Convert a user's network and loss to the precision of weights, initialize lazy modules by a forward pass of an
    example, and make sparse gradients dense; return lines about changes. Raises InputError if a layer stays lazy."""
    parts = [network] if task.loss_module is None else [network, task.loss_module]
    for part in parts:
        convert_weights(part, precision)
    learner = Learner(network, task.losses, precision, task.loss_module)
    if _lazy_names(learner):
        learner.eval()  # without a change of statistics, and for layers that need more than one sample
        with torch.no_grad():
            learner(*task.example(2), 0.0)
        learner.train()
    if _lazy_names(learner):  # used in training only
        _initialize_in_training(learner, task)
    if names := _lazy_names(learner):
        raise InputError(f"the network's forward pass does not initialize {first_named(names)}: remove these layers")
    if not learner.trained():
        raise InputError("no parameter of the network requires a gradient: set requires_grad of those to train")
    dense = make_dense(learner)
    note = f"gradients of {first_named(dense)} are dense: sparse ones cannot be summed over ranks by every backend"
    return [note] if dense else []


def _initialize_in_training(learner: Learner, task: Task) -> None:
    """Initialize lazy modules by a forward pass in training mode that leaves all buffers as they are."""
    buffers = copies_of_buffers(learner)

    def save(place: str, module: nn.Module, _inputs: Any) -> None:
        """Add a module's buffers once they are initialized."""
        for (inner, name), value in copies_of_buffers(module).items():
            if not inner:
                buffers.setdefault((place, name), value)

    lazy = {place: part for place, part in learner.named_modules() if any(map(is_lazy, part.buffers(recurse=False)))}
    hooks = [part.register_forward_pre_hook(partial(save, place)) for place, part in lazy.items()]
    with torch.no_grad():
        learner(*task.example(2), 0.0)
    for hook in hooks:
        hook.remove()
    restore_buffers(learner, buffers)


def _lazy_names(learner: Learner) -> list[str]:
    return [name for name, value in (learner.weights() | learner.all_buffers()).items() if is_lazy(value)]
