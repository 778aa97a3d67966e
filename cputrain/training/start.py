"""The start of a training: its network, optimizer and progress, new or from the run's last checkpoint."""

import sys
from collections.abc import Mapping
from pathlib import Path

from affinity.terminal import redraws
from cputrain.checkpoints.folder import remove_partial
from cputrain.comm.group import run_on_main_rank
from cputrain.models.weights import load_initial_weights
from cputrain.optim.build import build_optimizer
from cputrain.runs.events import EventLog
from cputrain.runs.folder import CHECKPOINTS
from cputrain.training.engine import autocast, optimize_training, prepare_model
from cputrain.training.environment import mean_local_batch
from cputrain.training.log import TrainingLog
from cputrain.training.loop import TrainingLoop
from cputrain.training.preemption import Preemption
from cputrain.training.progress import REDRAW_S, Progress
from cputrain.training.saving.position import Position
from cputrain.training.saving.restore import Loaded, find_newest, put_back, set_damaged_aside
from cputrain.training.saving.snapshot import check_savable
from cputrain.training.session import Session
from cputrain.training.state import TrainState, make_train_state
from cputrain.training.task import sum_of


def start_training(
    session: Session, events: EventLog, env: Mapping[str, str], *, resume: bool, prepared: bool, quiet: bool
) -> TrainingLoop:
    """Build the training; with `resume`, restore the run's newest good checkpoint if it has one. `prepared`: a
    launcher has made the run's folder, and sends the ranks the preemption signal when they have to stop. Raises
    InputError."""
    recipe, sizes, ranks = session.recipe, session.sizes, session.ranks
    folder = recipe.folder / CHECKPOINTS
    if ranks.is_main_rank:
        remove_partial(folder)
    found = find_newest(folder, ranks.this.rank) if resume else None
    state, notes = build_state(session, found.loaded if found else None)
    check_savable(state.network)
    position = found.loaded.position if found else Position()
    progress = Progress(
        sizes.images_until(position.step),
        sizes.images_until(sizes.last_step(recipe.max_steps)),
        unit=" img" if recipe.data.unit == "images" else f" {recipe.data.unit}",
        shown=ranks.is_main_rank,
        bar=not quiet and (redraws(sys.stderr, env) or not sys.stderr.isatty()),
        redraw_s=float(env.get("TQDM_MININTERVAL", REDRAW_S)),
    )
    last_step = sizes.last_step(recipe.max_steps)
    log = TrainingLog(recipe=recipe, progress=progress, events=events, last_step=last_step, quiet=quiet)
    for note in notes:
        progress.line(note)
    if found:
        set_damaged_aside(found, log.warn, position.step, ranks.this.rank)
    loop = TrainingLoop(
        session=session,
        state=state,
        log=log,
        preemption=Preemption(ranks.group.keys, is_main_rank=ranks.is_main_rank, prepared=prepared),
        position=position,
    )
    loop.saver.try_out(position)
    return loop


def build_state(session: Session, loaded: Loaded | None) -> tuple[TrainState, list[str]]:
    """The network and its optimizer, new or as in a checkpoint; and lines about where the weights are from."""
    recipe, notes = session.recipe, []
    network = session.task.build()
    if recipe.model.weights is not None and loaded is None:
        path = Path(recipe.model.weights)
        # DDP sends rank 0's weights to all ranks
        if line := run_on_main_rank(lambda: load_initial_weights(network, path)):
            notes.append(line)
    prepare_model(network, session.engine, recipe.precision)
    optimizer = build_optimizer(network, recipe.optim)
    network, optimizer = optimize_training(network, optimizer, session.engine)
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
    with autocast(session.recipe.precision):
        outputs = state.ddp(session.task.example(mean_local_batch(session)))
    sum_of(outputs).backward()  # type: ignore[no-untyped-call]
    state.optimizer.zero_grad()
    state.all_reduce.reset()
