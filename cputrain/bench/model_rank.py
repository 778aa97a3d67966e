"""python -m cputrain.bench.model_rank RECIPE: one rank that trains a few steps and writes how long their parts took.

It is started by `cputrain bench model` and `cputrain tune`, in the workers of the recipe's plan. The recipe's folder
contains spec.json, what to measure, and gets rank-N.json.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from cputrain.affinity.kernel.observe import Observed
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.ranks.rank import Rank, discover
from cputrain.affinity.terminal import use_utf8
from cputrain.launch.rank_process import bind_rank, run_rank
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import Recipe

if TYPE_CHECKING:
    from cputrain.bench.recorder import LayerRecorder, StepRecorder
    from cputrain.data.loader import Batch
    from cputrain.training.session import Session
    from cputrain.training.step import TrainState

SPEC = "spec.json"
PARTS = ("data wait", "forward", "backward", "exposed communication", "optimizer", "other")
"""Of a step, in their order; "other" is what lies between them."""
LIMIT_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a rank measures: steps before those that count, steps that count, steps with a record of every layer, and
    the precisions of the processor's limits, which are measured after them."""

    warm_up: int
    steps: int
    profiled: int
    limits: tuple[str, ...]
    quick: bool


def precisions(isa: tuple[str, ...]) -> tuple[str, ...]:
    """The precisions that a processor has instructions for: without them oneDNN converts bfloat16, which is slow."""
    return ("float32", "bf16") if any("bf16" in flag for flag in isa) else ("float32",)


def result_file(folder: Path, rank: int) -> Path:
    """What a rank has measured."""
    return folder / f"rank-{rank}.json"


def measure(
    recipe: Recipe, rank: Rank, worker: WorkerPlan, observed: Observed, spec: Spec, env: Mapping[str, str]
) -> None:
    """Train as one rank, and write what was measured."""
    from cputrain.bench.recorder import LayerRecorder, StepRecorder
    from cputrain.comm.group import end_group
    from cputrain.training.session import start_session, with_measured_engine

    session = start_session(recipe, rank, worker, observed, env, check=True, phase=lambda _what: None)
    session = with_measured_engine(session, env)
    state = _state(session)
    recorder, layers, batches = StepRecorder(state=state), LayerRecorder(), _batches(session)
    gc.freeze()  # as in a training
    for _ in range(spec.warm_up):
        _step(session, state, batches, recorder)
    steps = [_step(session, state, batches, recorder) for _ in range(spec.steps)]
    profiled = []
    for _ in range(spec.profiled):
        with layers.attached(state.network):
            profiled.append(_profiled_step(session, state, batches, recorder, layers))
    found = {
        "rank": rank.rank,
        "pus": list(worker.pus),
        "backend": session.ranks.group.backend,
        "engine": session.engine.name,
        "images": session.sizes.global_batch,
        "local_batch": max(session.ranks.local_batches),
        "bucket_mib": state.bucket_mib,
        "steps": steps,
        "profiled": profiled,
        "limits": _limits(session, spec),
    }
    result_file(recipe.folder, rank.rank).write_text(json.dumps(found), encoding="utf-8")
    end_group(session.ranks.group)


def _state(session: "Session") -> "TrainState":
    """The training as `cputrain train` begins it."""
    from cputrain.bench.recorder import ObservedAllReduce
    from cputrain.comm.buckets import HOOKS
    from cputrain.optim.build import build_optimizer
    from cputrain.training.engine import optimize_training, prepare_model
    from cputrain.training.step import make_train_state

    recipe, network = session.recipe, session.task.build()
    prepare_model(network, session.engine, recipe.precision)
    observed = ObservedAllReduce(inner=HOOKS[recipe.comm.compression]())
    optimizer = build_optimizer(network, recipe.optim)
    network, optimizer = optimize_training(network, optimizer, session.engine)
    return make_train_state(recipe, network, optimizer, all_reduce=observed)


def _batches(session: "Session") -> "Iterator[Batch]":
    """This rank's batches, epoch after epoch."""
    from cputrain.training.feed import feed_of, training_batches

    feed, steps = feed_of(session), session.sizes.steps_per_epoch
    for epoch in count():
        yield from training_batches(feed, epoch % session.recipe.epochs, 0, steps)


def _step(
    session: "Session", state: "TrainState", batches: "Iterator[Batch]", recorder: "StepRecorder"
) -> dict[str, Any]:
    """Train one step; its seconds and those of its parts."""
    from cputrain.optim.schedules import lr_at
    from cputrain.training.step import StepSettings, train_step

    recorder.clear()
    recipe, sizes = session.recipe, session.sizes
    settings = StepSettings(
        images=sizes.global_batch,
        passes=sizes.accumulation_steps,
        lr=lr_at(0, recipe, sizes),
        weight_decay=recipe.optim.weight_decay,
    )
    start = time.perf_counter()
    result = train_step(state, batches, settings, recipe, session.task)
    end = time.perf_counter()
    spans = recorder.parts(result, start, end, alone=session.ranks.this.world_size == 1)
    parts = dict.fromkeys(PARTS, 0.0)
    for name, began, done in spans:
        parts[name] += done - began
    parts["other"] = end - start - sum(parts.values())
    return {"seconds": end - start, "start": start, "end": end, "parts": parts, "spans": spans}


def _profiled_step(
    session: "Session",
    state: "TrainState",
    batches: "Iterator[Batch]",
    recorder: "StepRecorder",
    layers: "LayerRecorder",
) -> dict[str, Any]:
    """Train one step with a record of its layers and gradient buckets."""
    from cputrain.bench.recorder import ObservedAllReduce

    observed = state.all_reduce
    assert isinstance(observed, ObservedAllReduce)
    layers.clear()
    observed.buckets.clear()
    step = _step(session, state, batches, recorder)
    end = observed.last_ready_s
    backwards = layers.backwards(end)
    return {
        **step,
        "layers": [asdict(layer) for layer in layers.times(end)],
        "layer_spans": [[name, "forward", *span] for name, *span in layers.forwards]
        + [[name, "backward", *span] for name, *span in backwards],
        # a backend's thread may have added the last bucket of the step before after the clearing
        "buckets": [[size, ready, done] for size, ready, done in observed.buckets if ready >= step["start"]],
    }


def _limits(session: "Session", spec: Spec) -> list[dict[str, Any]]:
    """FLOP/s of this worker in each kernel and precision, while all ranks compute the same."""
    import torch.distributed as dist

    from cputrain.bench.recorder import kernels

    found = []
    for precision in spec.limits:
        for kernel in kernels(precision, session.recipe.batch.local, quick=spec.quick):
            kernel.flops()
            values = []
            for _ in range(LIMIT_ROUNDS):
                dist.barrier()
                values.append(kernel.flops())
            found.append({"name": kernel.name, "precision": precision, "flops": values, "median": median(values)})
    return found


def main() -> None:
    """Run one rank."""
    env = os.environ
    recipe, rank = load_recipe(sys.argv[1]), discover(env)
    assert rank is not None, "started by `cputrain bench model` or `cputrain tune`"
    spec = Spec(**json.loads((recipe.folder / SPEC).read_text(encoding="utf-8")))
    worker, observed = bind_rank(recipe, rank, env, check=True)
    run_rank(rank, lambda: measure(recipe, rank, worker, observed, spec, env))


if __name__ == "__main__":
    use_utf8()
    main()
