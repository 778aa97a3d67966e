"""The start of a training: its network, optimizer and progress, new or from the run's last checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import torch

from cputrain.checkpoints.folder import remove_partial, set_aside
from cputrain.comm.group import run_on_main_rank
from cputrain.models.build import build_model
from cputrain.models.weights import load_initial_weights
from cputrain.optim.build import build_optimizer
from cputrain.runs.events import EventLog
from cputrain.runs.folder import CHECKPOINTS
from cputrain.training.engine import autocast, network_input, prepare_model
from cputrain.training.environment import mean_local_batch
from cputrain.training.log import TrainingLog
from cputrain.training.loop import TrainingLoop
from cputrain.training.preemption import Preemption
from cputrain.training.progress import REDRAW_S, Progress
from cputrain.training.saving.position import Position
from cputrain.training.saving.restore import Loaded, find_newest, put_back
from cputrain.training.session import Session
from cputrain.training.state import TrainState, make_train_state


def start_training(
    session: Session, events: EventLog, env: Mapping[str, str], *, resume: bool, watched: bool
) -> TrainingLoop:
    """Build the training; with `resume`, restore the run's newest good checkpoint if it has one. `watched`: `cputrain
    train` has started the ranks, and sends them the preemption signal when it has to stop. Raises InputError."""
    recipe, sizes, ranks = session.recipe, session.sizes, session.ranks
    folder = recipe.folder / CHECKPOINTS
    if ranks.is_main_rank:
        remove_partial(folder)
    found = find_newest(folder, ranks.this.rank) if resume else None
    state, notes = _build(session, found.loaded if found else None)
    position = found.loaded.position if found else Position()
    progress = Progress(
        sizes.images_until(position.step),
        sizes.images_until(sizes.last_step(recipe.max_steps)),
        unit="points" if recipe.data.unit == "points" else "img",
        shown=ranks.is_main_rank,
        redraw_s=float(env.get("TQDM_MININTERVAL", REDRAW_S)),
    )
    log = TrainingLog(recipe=recipe, progress=progress, events=events)
    for note in notes:
        progress.line(note)
    for name, problem in found.damaged.items() if found else ():
        if ranks.is_main_rank:
            set_aside(folder / name)
        log.warn(position.step, f"{problem}: it is now {name}.damaged, and {found.name} is used")  # type: ignore[union-attr]
    return TrainingLoop(
        session=session,
        state=state,
        log=log,
        preemption=Preemption(ranks.group.keys, is_main_rank=ranks.is_main_rank, watched=watched),
        position=position,
    )


def _build(session: Session, loaded: Loaded | None) -> tuple[TrainState, list[str]]:
    """The network and its optimizer, new or as in a checkpoint; and lines about where the weights are from."""
    recipe, data, notes = session.recipe, session.data, []
    network = build_model(recipe.model, len(data.dataset.classes), recipe.data.crop, data.features)
    if recipe.model.weights is not None and loaded is None:
        path = Path(recipe.model.weights)
        # DDP sends rank 0's weights to all ranks
        if line := run_on_main_rank(lambda: _describe_weights(path, load_initial_weights(network, path))):
            notes.append(line)
    prepare_model(network, session.engine, recipe.precision)
    optimizer = build_optimizer(network, recipe.optim)
    if loaded is None:
        return make_train_state(recipe, network, optimizer), notes
    measured = loaded.manifest.training.bucket_mib if loaded.same_ranks and recipe.comm.bucket_mib == "auto" else None
    state = make_train_state(recipe, network, optimizer, measured)
    if session.ranks.this.world_size > 2:
        _rebuild_buckets(state, session)
    put_back(loaded, state, recipe.optim.name)
    return state, notes


def _rebuild_buckets(state: TrainState, session: Session) -> None:
    """Make DDP put gradients into the buckets that it has from its second step on: sums of more than two ranks are
    rounded differently in others. It takes a backward pass, after which everything is restored."""
    data = session.data
    shape = (data.features,) if data.features is not None else (3, session.recipe.data.crop, session.recipe.data.crop)
    inputs = network_input(torch.zeros(mean_local_batch(session), *shape), session.recipe.precision)
    with autocast(session.recipe.precision):
        outputs = state.ddp(inputs)
    outputs.float().sum().backward()
    state.optimizer.zero_grad()
    state.all_reduce.reset()


def _describe_weights(path: Path, reinitialized: list[str]) -> str:
    return f"weights of {path}" + (f", except {', '.join(reinitialized)}, which are new" if reinitialized else "")
