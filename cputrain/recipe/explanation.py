"""The derivation of a training's sizes in words, as `cputrain plan RECIPE` and the recipes' comments show it."""

from math import ceil

from affinity.planner.reasons import Reason
from affinity.wording import counted
from cputrain.recipe.derivation import TrainingSizes
from cputrain.recipe.rates import peak_rate
from cputrain.recipe.schema import PhaseSection, Recipe, ScheduleSection


def explain(recipe: Recipe, sizes: TrainingSizes, *, ppn: int, nodes: int) -> list[Reason]:
    """Every size with its value and its derivation, one line each."""
    return [
        _global_batch(recipe, sizes, ppn=ppn, nodes=nodes),
        _steps_per_epoch(recipe, sizes),
        Reason(
            what="warm-up steps",
            value=f"{sizes.warmup_steps:,}",
            why=f"{_epochs(recipe.schedule.warmup_epochs)} x {counted(sizes.steps_per_epoch, 'step')}",
        ),
        Reason(
            what="total steps",
            value=f"{sizes.total_steps:,}",
            why=f"{_epochs(recipe.epochs)} x {counted(sizes.steps_per_epoch, 'step')}",
        ),
        Reason(
            what="peak rate",
            value=f"{sizes.peak_rate:g}",
            why=peak_rate(recipe, global_batch=sizes.global_batch, workers=ppn * nodes).why,
        ),
        Reason(
            what="learning rate",
            value=_rates(recipe.schedule, sizes),
            why=(f"linear warm-up in steps 0-{sizes.warmup_steps:,}, then " if sizes.warmup_steps else "")
            + _decay(recipe.schedule, sizes),
        ),
        *(_phase(phase, sizes) for phase in recipe.phases),
    ]


def _global_batch(recipe: Recipe, sizes: TrainingSizes, *, ppn: int, nodes: int) -> Reason:
    batch, unit, workers = recipe.batch, recipe.data.unit, ppn * nodes
    if batch.global_ is None:
        accumulated = f" x {batch.accumulation} accumulation steps" if batch.accumulation > 1 else ""
        return Reason(
            what="global batch",
            value=f"{batch.local * ppn * batch.accumulation} x {nodes} = {sizes.global_batch:,}",
            why=f"{batch.local} {unit} x {counted(ppn, 'worker')}{accumulated} per host, {counted(nodes, 'host')}",
        )
    fewest, most = sizes.global_batch // workers, ceil(sizes.global_batch / workers)
    each = f"{fewest}" if fewest == most else f"{fewest} or {most}"
    steps, largest = sizes.accumulation_steps, ceil(most / sizes.accumulation_steps)
    passes = f"{steps} accumulation steps of at most {largest} {unit}" if steps > 1 else "1 backward pass"
    where = f"each of {workers:,} workers" if workers > 1 else "1 worker"
    return Reason(
        what="global batch",
        value=f"{sizes.global_batch:,}",
        why=f"batch.global: {each} {unit} on {where}, in {passes} (batch.local={batch.local})",
    )


def _steps_per_epoch(recipe: Recipe, sizes: TrainingSizes) -> Reason:
    ratio = sizes.images_per_epoch / sizes.global_batch
    if sizes.used_images_per_epoch < sizes.images_per_epoch:
        rounding = ", the partial last batch is dropped"
    elif sizes.used_images_per_epoch % sizes.global_batch:
        rounding = f", spread over one step more: {sizes.used_images_per_epoch // sizes.steps_per_epoch:,} per step"
    else:
        rounding = ", without remainder"
    return Reason(
        what="steps per epoch",
        value=f"{sizes.images_per_epoch:,} / {sizes.global_batch:,} = {ratio:.2f} -> {sizes.steps_per_epoch:,}",
        why=f"{recipe.data.unit} / global batch{rounding}",
    )


def _phase(phase: PhaseSection, sizes: TrainingSizes) -> Reason:
    values = {"crop": phase.crop, "train_crop": phase.train_crop, "weight_decay": phase.weight_decay}
    changes = [f"{key}={value}" for key, value in values.items() if value is not None]
    if phase.restart_rate is not None:
        changes.append(f"learning rate {phase.restart_rate:g} -> 0, polynomial decay (power {phase.restart_power:g})")
    return Reason(
        what=f"from epoch {phase.from_epoch}",
        value=", ".join(changes) or "no change",
        why=f"from step {phase.from_epoch * sizes.steps_per_epoch:,} on",
    )


def _rates(schedule: ScheduleSection, sizes: TrainingSizes) -> str:
    """The learning rates at the turning points of the schedule."""
    first = [schedule.start_rate] if sizes.warmup_steps else []
    last = [] if schedule.name in ("constant", "steps") else [schedule.end_rate]
    return " -> ".join(f"{rate:g}" for rate in (*first, sizes.peak_rate, *last))


def _decay(schedule: ScheduleSection, sizes: TrainingSizes) -> str:
    """The decay after the warm-up in words."""
    milestones = ", ".join(f"{epoch:g}" for epoch in schedule.milestones)
    end = f"to {schedule.end_rate:g} at step {sizes.total_steps:,}"
    return {
        "linear": f"linear decay {end}",
        "poly": f"polynomial decay (power {schedule.power:g}) {end}",
        "poly_from_start": f"polynomial decay (power {schedule.power:g}, counted from step 0) {end}",
        "steps": f"multiplied by {schedule.milestone_factor:g} after epochs {milestones}",
        "cosine": f"cosine decay {end}",
        "constant": "constant",
    }[schedule.name]


def _epochs(number: float) -> str:
    return f"{number:g} epoch" if number == 1 else f"{number:g} epochs"
