"""The watchers of a training, in the order in which they are called."""

from collections.abc import Callable

from cputrain.files import CHECKPOINTS
from cputrain.runs.trackers import Trackers
from cputrain.training.corrupt_images import CorruptImageCheck
from cputrain.training.session import Session
from cputrain.training.snapshot import TrainProgress
from cputrain.training.state import TrainState
from cputrain.training.watchers.base import Watcher
from cputrain.training.watchers.divergence import DivergenceCheck
from cputrain.training.watchers.log import TrainingLog
from cputrain.training.watchers.non_finite import NonFiniteHandler
from cputrain.training.watchers.rank_times import RankTimes
from cputrain.training.watchers.replicas import ReplicaCheck
from cputrain.training.watchers.stragglers import StragglerWatch
from cputrain.training.watchers.trackers import TrackerCheck
from cputrain.training.watchers.unused_parameters import UnusedParameters


def make_watchers(
    session: Session,
    state: TrainState,
    position: TrainProgress,
    log: TrainingLog,
    corrupt_images: CorruptImageCheck,
    *,
    trackers: Trackers,
    wait: Callable[[], None],
    set_step_time: Callable[[float], None],
) -> list[Watcher]:
    """Return the watchers of a training; they are called in this order. `wait` waits for the pending checkpoint;
    `set_step_time` gets the slowest rank's seconds of a step. All ranks must call this."""
    recipe, warn = session.recipe, log.warn
    replicas = ReplicaCheck(
        network=state.learner,
        optimizer=state.optimizer,
        every=recipe.compare_weights_every_steps,
        warn=warn,
        wait=wait,
        same_after=position.step,
        wording=recipe.wording,
    )
    return [
        UnusedParameters(state=state, warn=warn),
        NonFiniteHandler(
            on_nan=recipe.on_nan,
            folder=recipe.folder / CHECKPOINTS,
            optimizer_name=recipe.optim.name,
            rank=session.rank.rank,
            state=state,
            warn=warn,
            position=position,
            wait=wait,
        ),
        log,
        RankTimes(log=log, position=position, corrupt_images=corrupt_images, set_step_time=set_step_time),
        DivergenceCheck(warn=warn, position=position),
        replicas,
        StragglerWatch(hosts=replicas.hosts, warn=warn, pus=session.context.worker.pus, read_s=lambda: replicas.read_s),
        TrackerCheck(trackers=trackers, warn=warn),
    ]
