"""The start of a training: its network, optimizer and progress, new or from the run's last checkpoint."""

import math
from collections.abc import Mapping
from pathlib import Path

from affinity.errors import InputError
from cputrain.comm.group import all_gather, run_on_main_rank
from cputrain.models.build import build_model
from cputrain.models.weights import load_initial_weights
from cputrain.optim.build import build_optimizer
from cputrain.runs.events import EventLog
from cputrain.runs.folder import CHECKPOINTS, list_checkpoints
from cputrain.training.checkpoint import ResumePoint, load_checkpoint
from cputrain.training.engine import prepare_model
from cputrain.training.log import TrainingLog
from cputrain.training.loop import TrainingLoop
from cputrain.training.preemption import Preemption
from cputrain.training.progress import REDRAW_S, Progress
from cputrain.training.session import Session
from cputrain.training.state import make_train_state


def start_training(session: Session, events: EventLog, env: Mapping[str, str], *, resume: bool) -> TrainingLoop:
    """Build the training; with `resume`, restore the run's last checkpoint if it has one. Raises InputError."""
    recipe, sizes, ranks = session.recipe, session.sizes, session.ranks
    saved = list_checkpoints(recipe.folder / CHECKPOINTS) if resume else []
    network = build_model(recipe.model, len(session.data.dataset.classes), recipe.data.crop, session.data.features)
    from_weights = None
    if recipe.model.weights is not None and not saved:
        path = Path(recipe.model.weights)
        # DDP sends rank 0's weights to all ranks
        from_weights = run_on_main_rank(lambda: _describe_weights(path, load_initial_weights(network, path)))
    prepare_model(network, session.engine, recipe.precision)
    state = make_train_state(recipe, network, build_optimizer(network, recipe.optim))
    point = load_checkpoint(saved[-1], state) if saved else ResumePoint(step=0, best_score=math.nan)
    if len(set(all_gather(point.step))) > 1:
        raise InputError(
            f"--resume: the ranks find different checkpoints in {recipe.folder}: set output to a folder that all "
            "hosts share"
        )
    progress = Progress(
        sizes.images_until(point.step),
        sizes.images_until(sizes.last_step(recipe.max_steps)),
        unit="points" if recipe.data.unit == "points" else "img",
        shown=ranks.is_main_rank,
        redraw_s=float(env.get("TQDM_MININTERVAL", REDRAW_S)),
    )
    if from_weights:
        progress.line(from_weights)
    return TrainingLoop(
        session=session,
        state=state,
        log=TrainingLog(recipe=recipe, progress=progress, events=events),
        preemption=Preemption(ranks.group.keys, is_main_rank=ranks.is_main_rank),
        step=point.step,
        best_score=point.best_score,
    )


def _describe_weights(path: Path, reinitialized: list[str]) -> str:
    return f"weights of {path}" + (f", except {', '.join(reinitialized)}, which are new" if reinitialized else "")
