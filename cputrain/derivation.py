"""A recipe's numbers for a given number of workers and images, and how each comes about."""

from dataclasses import dataclass

from affinity.errors import InputError
from affinity.rules import Reason
from cputrain.schema import PhaseSection, Recipe, ScheduleSection

BASE_RATE, BASE_BATCH = 0.1, 256  # linear-scaling rule, Goyal et al. 2017, section 2.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a training comes to: images per step, steps per epoch, of warm-up and in all, and the peak rate.

    `images` count as an epoch, `used` of them are in its steps.
    """

    global_batch: int
    images: int
    used: int
    steps_per_epoch: int
    warmup_steps: int
    total_steps: int
    peak_rate: float

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
    when an epoch asks for more images than there are, or they do not fill one global batch.
    """
    workers = ppn * nodes
    wanted = recipe.data.images_per_epoch or images
    if wanted > images:
        raise InputError(f"data.images_per_epoch={wanted:,} but train/ holds {images:,}: lower it or leave it out")
    global_batch = recipe.batch.local * workers * recipe.batch.accumulation
    steps = wanted // global_batch
    if images < workers:
        raise InputError(
            f"{workers} workers need {workers} images; train/ holds {images}: set plan.ppn to {images} or fewer"
        )
    if steps == 0:
        room = max(wanted // (workers * recipe.batch.accumulation), 1)
        raise InputError(
            f"batch.local={recipe.batch.local} on {workers} worker(s) needs {global_batch:,} images a step; "
            f"an epoch has {wanted:,}: set batch.local to {room} or fewer"
        )
    used = steps * global_batch
    if recipe.data.remainder == "spread" and used < wanted:
        steps, used = steps + 1, wanted
        if used // steps < workers * recipe.batch.accumulation:
            raise InputError(
                f"data.remainder=spread leaves a step {used // steps} images, too few for {workers} worker(s) x "
                f"{recipe.batch.accumulation} pass(es): set data.remainder=drop"
            )
    linear = recipe.schedule.rate_factor * BASE_RATE * global_batch / BASE_BATCH
    peak = recipe.schedule.peak_rate
    return Numbers(
        global_batch=global_batch,
        images=wanted,
        used=used,
        steps_per_epoch=steps,
        warmup_steps=round(recipe.schedule.warmup_epochs * steps),
        total_steps=recipe.epochs * steps,
        peak_rate=linear if peak == "auto" else peak,
    )


def explain(recipe: Recipe, numbers: Numbers, *, ppn: int, nodes: int) -> list[Reason]:
    """The derivation of every number, one line each."""
    per_host = recipe.batch.local * ppn * recipe.batch.accumulation
    accumulated = f" x {recipe.batch.accumulation} passes" if recipe.batch.accumulation > 1 else ""
    ratio = numbers.images / numbers.global_batch
    linear = BASE_RATE * numbers.global_batch / BASE_BATCH
    spread = numbers.used % numbers.global_batch != 0
    return [
        Reason(
            what="global batch",
            value=f"{per_host} x {nodes} = {numbers.global_batch:,}",
            why=f"{recipe.batch.local} images x {ppn} workers{accumulated} a host, {nodes} host(s)",
        ),
        Reason(
            what="steps per epoch",
            value=f"{numbers.images:,} / {numbers.global_batch:,} = {ratio:.2f} -> {numbers.steps_per_epoch:,}",
            why="images / global batch, "
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
            why=f"linear scaling: {BASE_RATE} x {numbers.global_batch:,} / {BASE_BATCH} = {linear:g}"
            + _scaled(numbers.peak_rate, linear),
        ),
        Reason(
            what="learning rate",
            value=_rates(recipe.schedule, numbers),
            why=(f"linear over steps 0-{numbers.warmup_steps:,}, then " if numbers.warmup_steps else "")
            + _way_down(recipe.schedule, numbers),
        ),
        *(_phase(phase, numbers) for phase in recipe.phases),
    ]


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


def _scaled(peak: float, linear: float) -> str:
    """What the recipe makes of the rule's rate."""
    factor = peak / linear
    if abs(factor - 1) < 1e-9:
        return ""
    return f", {'halved' if abs(factor - 0.5) < 1e-9 else f'times {factor:.3g}'} to {peak:g} in the recipe"


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
