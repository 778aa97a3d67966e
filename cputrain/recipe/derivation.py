"""A recipe's numbers for a given number of workers and images, and how each comes about."""

from dataclasses import dataclass
from math import ceil

from affinity.errors import InputError
from affinity.planner.reasons import Reason
from cputrain.recipe.rates import peak_of
from cputrain.recipe.schema import BatchSection, PhaseSection, Recipe, ScheduleSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a training comes to: images per step, steps per epoch, of warm-up and in all, and the peak rate.

    `images` count as an epoch, `used` of them are in its steps; `passes` are each worker's backward passes in a step.
    """

    global_batch: int
    images: int
    used: int
    steps_per_epoch: int
    warmup_steps: int
    total_steps: int
    peak_rate: float
    passes: int = 1

    def last_step(self, max_steps: int | None) -> int:
        """The step at which a training ends that has to stop after `max_steps` at the latest."""
        return min(self.total_steps, max_steps or self.total_steps)

    def images_until(self, step: int) -> int:
        """Images of all steps before this one."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return epochs * self.used + self.used * rest // self.steps_per_epoch


def derive(recipe: Recipe, *, ppn: int, nodes: int, images: int) -> Numbers:
    """The numbers of a recipe on nodes x ppn workers with so many training images.

    An epoch is whole global batches, or with data.remainder=spread a step more, all of them smaller. Raises InputError
    when an epoch asks for more images than there are, they do not fill one global batch, a step leaves a worker without
    an image for each of its passes, or the optimizer has no rule for the rate that the recipe leaves open.
    """
    workers = ppn * nodes
    wanted = recipe.data.images_per_epoch or images
    if wanted > images:
        raise InputError(f"data.images_per_epoch={wanted:,} but train/ holds {images:,}: lower it or leave it out")
    if images < workers:
        raise InputError(
            f"{workers} workers need {workers} images; train/ holds {images}: set plan.ppn to {images} or fewer"
        )
    global_batch, passes = _step(recipe.batch, workers)
    steps = wanted // global_batch
    if steps == 0:
        raise InputError(_too_large(recipe.batch, global_batch, workers, wanted))
    used = steps * global_batch
    if recipe.data.remainder == "spread" and used < wanted:
        steps, used = steps + 1, wanted
        if used // steps < workers * passes:
            raise InputError(
                f"data.remainder=spread leaves a step {used // steps} images, too few for {workers} worker(s) x "
                f"{passes} pass(es): set data.remainder=drop"
            )
    return Numbers(
        global_batch=global_batch,
        images=wanted,
        used=used,
        steps_per_epoch=steps,
        warmup_steps=round(recipe.schedule.warmup_epochs * steps),
        total_steps=recipe.epochs * steps,
        peak_rate=peak_of(recipe, global_batch=global_batch, workers=workers).rate,
        passes=passes,
    )


def _step(batch: BatchSection, workers: int) -> tuple[int, int]:
    """Images of a step, and each worker's backward passes in it."""
    if batch.global_ is None:
        return batch.local * workers * batch.accumulation, batch.accumulation
    if batch.global_ < workers:
        raise InputError(
            f"batch.global={batch.global_} leaves some of {workers} workers without an image: set batch.global to "
            f"{workers} or more, or use fewer workers"
        )
    passes = ceil(batch.global_ / (workers * batch.local))
    if batch.global_ // workers < passes:  # only where batch.local is 1
        raise InputError(
            f"batch.global={batch.global_} does not divide into passes of batch.local=1 on {workers} workers: set "
            "batch.local to 2 or more"
        )
    return batch.global_, passes


def pass_batch(batch: BatchSection, workers: int) -> int:
    """The most images that one of so many workers has in a backward pass."""
    if batch.global_ is None:
        return batch.local
    passes = ceil(batch.global_ / (workers * batch.local))
    return ceil(ceil(batch.global_ / workers) / passes)


def _too_large(batch: BatchSection, global_batch: int, workers: int, wanted: int) -> str:
    """What to do where an epoch has fewer images than a step."""
    if batch.global_ is not None:
        return (
            f"batch.global={global_batch:,}, but an epoch has {wanted:,} images: set batch.global to {wanted} or less"
        )
    room = max(wanted // (workers * batch.accumulation), 1)
    return (
        f"batch.local={batch.local} on {workers} worker(s) needs {global_batch:,} images a step; "
        f"an epoch has {wanted:,}: set batch.local to {room} or fewer"
    )


def explain(recipe: Recipe, numbers: Numbers, *, ppn: int, nodes: int) -> list[Reason]:
    """The derivation of every number, one line each."""
    ratio = numbers.images / numbers.global_batch
    spread = numbers.used % numbers.global_batch != 0
    return [
        _explain_batch(recipe, numbers, ppn=ppn, nodes=nodes),
        Reason(
            what="steps per epoch",
            value=f"{numbers.images:,} / {numbers.global_batch:,} = {ratio:.2f} -> {numbers.steps_per_epoch:,}",
            why=f"{recipe.data.unit} / global batch, "
            + ("whole batches only" if numbers.used < numbers.images else "all of them")
            + (f": {numbers.used // numbers.steps_per_epoch:,} a step" if spread else ""),
        ),
        Reason(
            what="warm-up steps",
            value=f"{numbers.warmup_steps:,}",
            why=f"{recipe.schedule.warmup_epochs:g} epochs x {numbers.steps_per_epoch:,}",
        ),
        Reason(
            what="total steps",
            value=f"{numbers.total_steps:,}",
            why=f"{recipe.epochs} epochs x {numbers.steps_per_epoch:,}",
        ),
        Reason(
            what="peak rate",
            value=f"{numbers.peak_rate:g}",
            why=peak_of(recipe, global_batch=numbers.global_batch, workers=ppn * nodes).why,
        ),
        Reason(
            what="learning rate",
            value=_rates(recipe.schedule, numbers),
            why=(f"linear over steps 0-{numbers.warmup_steps:,}, then " if numbers.warmup_steps else "")
            + _way_down(recipe.schedule, numbers),
        ),
        *(_phase(phase, numbers) for phase in recipe.phases),
    ]


def _explain_batch(recipe: Recipe, numbers: Numbers, *, ppn: int, nodes: int) -> Reason:
    batch, unit = recipe.batch, recipe.data.unit
    if batch.global_ is None:
        accumulated = f" x {batch.accumulation} passes" if batch.accumulation > 1 else ""
        return Reason(
            what="global batch",
            value=f"{batch.local * ppn * batch.accumulation} x {nodes} = {numbers.global_batch:,}",
            why=f"{batch.local} {unit} x {ppn} workers{accumulated} a host, {nodes} host(s)",
        )
    workers = ppn * nodes
    fewest, most = numbers.global_batch // workers, ceil(numbers.global_batch / workers)
    each = f"{fewest}" if fewest == most else f"{fewest} or {most}"
    largest = ceil(most / numbers.passes)
    passes = f"in {numbers.passes} passes of at most {largest}" if numbers.passes > 1 else "in one pass"
    return Reason(
        what="global batch",
        value=f"{numbers.global_batch:,}",
        why=f"batch.global: {each} {unit} on each of {workers:,} worker(s), {passes} (batch.local={batch.local})",
    )


def _phase(phase: PhaseSection, numbers: Numbers) -> Reason:
    named = {"crop": phase.crop, "part": phase.part, "weight decay": phase.weight_decay}
    changed = [f"{name} {value}" for name, value in named.items() if value is not None]
    if phase.rate is not None:
        changed.append(f"learning rate {phase.rate:g} -> 0 by the power of {phase.power:g}")
    return Reason(
        what=f"from epoch {phase.from_epoch}",
        value=", ".join(changed) or "as before",
        why=f"steps {phase.from_epoch * numbers.steps_per_epoch:,} and on",
    )


def _rates(schedule: ScheduleSection, numbers: Numbers) -> str:
    """The rates that the schedule runs through."""
    first = [schedule.start_rate] if numbers.warmup_steps else []
    last = [] if schedule.name in ("constant", "steps") else [schedule.end_rate]
    return " -> ".join(f"{rate:g}" for rate in (*first, numbers.peak_rate, *last))


def _way_down(schedule: ScheduleSection, numbers: Numbers) -> str:
    """What happens after the warm-up, in words."""
    end, total = f"{schedule.end_rate:g}", f"{numbers.total_steps:,}"
    return {
        "linear": f"linear to {end} at step {total}",
        "poly": f"to {end} at step {total} by the power of {schedule.power:g}",
        "poly_of_all": f"to {end} at step {total} by the power of {schedule.power:g} of what is left of all steps",
        "steps": f"times {schedule.factor:g} after epochs {', '.join(f'{epoch:g}' for epoch in schedule.milestones)}",
        "cosine": f"half a cosine to {end} at step {total}",
        "constant": "constant",
    }[schedule.name]
