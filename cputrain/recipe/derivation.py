"""Derive phases, steps, batches and the learning rate of each step from a recipe, with explanations."""

from dataclasses import dataclass
from math import ceil

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.request import Reason
from cputrain.affinity.planner.rules import most_per_pass, passes_of
from cputrain.affinity.wording import plural
from cputrain.optim_settings import OptimSettings
from cputrain.recipe.schema import BatchSection, PhaseSection, Recipe, ScheduleSection
from cputrain.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """Scaling rule: rate = base_rate x (batch / base_batch) ^ power, with global batches in images."""

    base_rate: float
    base_batch: int
    power: float
    source: str

    @property
    def title(self) -> str:
        """The rule's usual name, with its source."""
        return f"{'linear' if self.power == 1 else 'square-root'} scaling ({self.source})"

    def scale(self, rate: float, batch: float, reference: int) -> float:
        """Scale a rate for a global batch of `reference` images to one of `batch` images."""
        return rate * float((batch / reference) ** self.power)

    def formula(self, rate: str, ratio: str) -> str:
        """Return the scaling as text: "0.1 x 512 / 256", "0.001 x sqrt(512 / 256)"."""
        return f"{rate} x {ratio}" if self.power == 1 else f"{rate} x sqrt({ratio})"


GOYAL = ScalingRule(base_rate=0.1, base_batch=256, power=1, source="Goyal et al. 2017, 2.1")
# The papers of Adam, AdamW and RMSprop give 0.001 without a batch size; 256 is the base batch of the other rules.
ADAM = ScalingRule(base_rate=0.001, base_batch=256, power=0.5, source="Malladi et al. 2022")
# Untuned LAMB for ResNet-50 by You et al.: 4 / 100 at 32,768, and sqrt(2) less each time the batch is halved.
LAMB = ScalingRule(base_rate=0.04, base_batch=32_768, power=0.5, source="You et al. 2020")

RULES = {"sgd": GOYAL, "momentum": GOYAL, "adam": ADAM, "adamw": ADAM, "rmsprop": ADAM, "lamb": LAMB}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRate:
    """Learning rate at the end of the warm-up, and its derivation as text."""

    rate: float
    why: str


def peak_rate(schedule: ScheduleSection, optim: OptimSettings, *, global_batch: int, workers: int) -> PeakRate:
    """Return the peak rate of a job. Raises InputError if the optimizer lacks the scaling rule it needs."""
    rate, scaling = schedule.peak_rate, optim.scale_rate_by
    if rate == "auto":
        return _auto_rate(schedule.auto_rate_factor, optim, global_batch, workers)
    reference = schedule.reference_batch
    if scaling == "workers":
        why = f"{rate:g} x {plural(workers, 'worker')} (optim.scale_rate_by=workers)"
        return PeakRate(rate=rate * workers, why=why)
    if scaling == "batch":
        return _rate_by_batch(rate, reference, optim.name, global_batch)
    return PeakRate(rate=rate, why="set in the recipe" + (f" for a global batch of {reference:,}" if reference else ""))


def rate_warning(schedule: ScheduleSection, optim: OptimSettings, global_batch: int) -> str:
    """Return a warning if the learning rate was tuned for another global batch than the job's, else ""."""
    rate, reference = schedule.peak_rate, schedule.reference_batch
    if reference in (None, global_batch) or optim.scale_rate_by in ("batch", "workers"):
        return ""
    other = "optim.scale_rate_by=batch" if optim.name in RULES else f"tune schedule.peak_rate for {global_batch:,}"
    return (
        f"schedule.peak_rate={rate:g} was tuned for a global batch of {plural(reference, 'image')}, but this job's is "
        f"{global_batch:,}: set batch.global={reference}, or {other}"
    )


def _auto_rate(factor: float, optim: OptimSettings, global_batch: int, workers: int) -> PeakRate:
    """Return the learning rate for peak_rate=auto, multiplied by `factor`."""
    rule, scaling = _rule(optim.name, "schedule.peak_rate=auto"), optim.scale_rate_by
    base, base_text = rule.base_rate, f"{rule.base_rate:g}"
    if optim.name == "rmsprop" and optim.momentum:
        # A momentum of m multiplies the updates by 1 / (1 - m); the rule is for RMSprop without momentum.
        base, base_text = base * (1 - optim.momentum), f"{base:g} x (1 - {optim.momentum:g})"
    if scaling == "none":
        rate, why = base, f"{base_text}, not scaled (optim.scale_rate_by=none)"
    else:
        batch = global_batch / workers if scaling == "workers" else global_batch
        ratio = f"{batch:,.6g} / {rule.base_batch:,}" if batch % 1 else f"{int(batch):,} / {rule.base_batch}"
        rate = rule.scale(base, batch, rule.base_batch)
        why = f"{rule.title}: {rule.formula(base_text, ratio)}"
        if scaling == "workers":
            rate, why = rate * workers, f"{why} x {plural(workers, 'worker')}"
    if factor != 1:
        why += f" = {rate:.4g}, x {factor:g} = {factor * rate:g} (schedule.auto_rate_factor={factor:g})"
    return PeakRate(rate=factor * rate, why=why)


def _rate_by_batch(rate: float, reference: int | None, optimizer: str, global_batch: int) -> PeakRate:
    """Scale a numeric rate from its reference batch to the job's global batch."""
    rule = _rule(optimizer, "optim.scale_rate_by=batch")
    if reference is None:
        raise InputError(
            f"optim.scale_rate_by=batch needs the global batch that schedule.peak_rate={rate:g} was tuned for: set "
            "schedule.reference_batch to it"
        )
    return PeakRate(
        rate=rule.scale(rate, global_batch, reference),
        why=f"{rule.title}: {rule.formula(f'{rate:g}', f'{global_batch:,} / {reference:,}')}",
    )


def _rule(optimizer: str, setting: str) -> ScalingRule:
    if optimizer not in RULES:
        raise InputError(
            f"{setting} needs a scaling rule for the learning rate, but optim.name={optimizer} has none, "
            f"unlike {', '.join(RULES)}: set schedule.peak_rate to a rate for this batch"
        )
    return RULES[optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSizes:
    """Images per step, steps per epoch, steps of the warm-up and of the whole training, and the peak learning rate.

    An epoch counts `images_per_epoch` images, of which its steps use `used_images_per_epoch`. Each worker makes
    `accumulation_steps` backward passes per step. `rate_warning` is not empty if the rate was tuned for another global
    batch.
    """

    global_batch: int
    images_per_epoch: int
    used_images_per_epoch: int
    steps_per_epoch: int
    warmup_steps: int
    total_steps: int
    peak_rate: float
    accumulation_steps: int = 1
    rate_warning: str = ""

    def last_step(self, max_steps: int | None) -> int:
        """Return the step at which the training ends if it is limited to `max_steps` steps."""
        return min(self.total_steps, max_steps or self.total_steps)

    def images_until(self, step: int) -> int:
        """Return the number of images in all steps before this one."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return epochs * self.used_images_per_epoch + self.used_images_per_epoch * rest // self.steps_per_epoch


def derive(recipe: Recipe, *, ppn: int, nodes: int, images: int) -> TrainingSizes:
    """Return the sizes of a recipe's training on nodes x ppn workers with this number of training images.

    An epoch consists of whole global batches, or with data.last_batch=spread of one more step, all slightly smaller.
    Raises InputError if an epoch needs more images than there are, or they do not fill one global batch, or a worker
    has no image for one of its backward passes, or the optimizer has no rule for peak_rate=auto.
    """
    workers = ppn * nodes
    epoch_images = recipe.data.images_per_epoch or images
    if epoch_images > images:
        raise InputError(
            f"data.images_per_epoch={epoch_images:,} is more than the {plural(images, 'image')} in train/: lower it, "
            "or remove it"
        )
    if images < workers:
        hosts = f"use {plural(images, 'host')} or fewer"
        fewer = f"set plan.ppn to {images // nodes} or less" if nodes <= images else hosts
        raise InputError(
            f"{plural(workers, 'worker')} need at least {plural(workers, 'image')}, but train/ has {images}: {fewer}"
        )
    global_batch, accumulation_steps = _step(recipe.batch, workers)
    steps = epoch_images // global_batch
    if steps == 0:
        raise InputError(_too_large(recipe.batch, global_batch, workers, epoch_images))
    used = steps * global_batch
    if recipe.data.last_batch == "spread" and used < epoch_images:
        steps, used = steps + 1, epoch_images
        if used // steps < workers * accumulation_steps:
            raise InputError(
                f"data.last_batch=spread leaves {plural(used // steps, 'image')} per step, too few for "
                f"{plural(workers, 'worker')} with {plural(accumulation_steps, 'accumulation step')}: set "
                "data.last_batch=drop"
            )
    return TrainingSizes(
        global_batch=global_batch,
        images_per_epoch=epoch_images,
        used_images_per_epoch=used,
        steps_per_epoch=steps,
        warmup_steps=round(recipe.schedule.warmup_epochs * steps),
        total_steps=recipe.epochs * steps,
        peak_rate=peak_rate(recipe.schedule, recipe.optim, global_batch=global_batch, workers=workers).rate,
        accumulation_steps=accumulation_steps,
        rate_warning=rate_warning(recipe.schedule, recipe.optim, global_batch),
    )


def images_per_step(batch: BatchSection, workers: int) -> int:
    """Return the global batch with this number of workers."""
    return _step(batch, workers)[0]


def _step(batch: BatchSection, workers: int) -> tuple[int, int]:
    """Return the images per step, and the gradient accumulation steps."""
    if batch.global_ is None:
        return batch.local * workers * batch.accumulation, batch.accumulation
    if batch.global_ < workers:
        raise InputError(
            f"batch.global={batch.global_} leaves some of {workers} workers without an image: set batch.global to "
            f"{workers} or more, or use fewer workers"
        )
    accumulation_steps = passes_per_step(batch, workers)
    if batch.global_ // workers < accumulation_steps:  # only possible if batch.local is 1
        raise InputError(
            f"batch.global={batch.global_} does not divide into backward passes of batch.local=1 image on {workers} "
            "workers: set batch.local to 2 or more"
        )
    return batch.global_, accumulation_steps


def passes_per_step(batch: BatchSection, workers: int) -> int:
    """Return the backward passes per worker in a step with this number of workers."""
    return batch.accumulation if batch.global_ is None else passes_of(batch.local, batch.global_, workers)


def largest_local_batch(batch: BatchSection, workers: int) -> int:
    """Return the images in the largest backward pass of a worker with this number of workers."""
    return most_per_pass(batch.local, batch.global_, workers)


def _too_large(batch: BatchSection, global_batch: int, workers: int, epoch_images: int) -> str:
    """Return the error for an epoch with fewer images than a step."""
    if batch.global_ is not None:
        return (
            f"batch.global={global_batch:,} is more than the {plural(epoch_images, 'image')} of an epoch: set "
            f"batch.global to {epoch_images} or less"
        )
    fitting = max(epoch_images // (workers * batch.accumulation), 1)
    return (
        f"batch.local={batch.local} on {plural(workers, 'worker')} needs {global_batch:,} images per step, but an "
        f"epoch has {epoch_images:,}: set batch.local to {fitting} or less"
    )


def schedule_of(schedule: ScheduleSection, phases: tuple[PhaseSection, ...], sizes: TrainingSizes) -> Schedule:
    """Return the schedule in steps, with the restarts of the phases."""
    return Schedule(
        total_steps=sizes.total_steps,
        peak_lr=sizes.peak_rate,
        warmup_steps=sizes.warmup_steps,
        start_lr=schedule.start_rate,
        end_lr=schedule.end_rate,
        decay=schedule.name,
        power=schedule.power,
        milestones=tuple(round(epoch * sizes.steps_per_epoch) for epoch in schedule.milestones),
        milestone_factor=schedule.milestone_factor,
        restarts=tuple(
            (phase.from_epoch * sizes.steps_per_epoch, phase.restart_rate, phase.restart_power)
            for phase in phases
            if phase.restart_rate is not None
        ),
    )


def explain(recipe: Recipe, sizes: TrainingSizes, *, ppn: int, nodes: int) -> list[Reason]:
    """Return every size with its value and its derivation, one line each."""
    rate = peak_rate(recipe.schedule, recipe.optim, global_batch=sizes.global_batch, workers=ppn * nodes)
    return [
        _global_batch(recipe.batch, recipe.data.unit, sizes, ppn=ppn, nodes=nodes),
        _steps_per_epoch(recipe.data.unit, sizes),
        Reason(
            what="warm-up steps",
            value=f"{sizes.warmup_steps:,}",
            why=f"{_epochs(recipe.schedule.warmup_epochs)} x {plural(sizes.steps_per_epoch, 'step')}",
        ),
        Reason(
            what="total steps",
            value=f"{sizes.total_steps:,}",
            why=f"{_epochs(recipe.epochs)} x {plural(sizes.steps_per_epoch, 'step')}",
        ),
        Reason(what="peak rate", value=f"{sizes.peak_rate:g}", why=rate.why),
        Reason(
            what="learning rate",
            value=_rates(recipe.schedule, sizes),
            why=(f"linear warm-up in steps 0-{sizes.warmup_steps:,}, then " if sizes.warmup_steps else "")
            + _decay(recipe.schedule, sizes),
        ),
        *(_phase(phase, sizes) for phase in recipe.phases),
    ]


def _global_batch(batch: BatchSection, unit: str, sizes: TrainingSizes, *, ppn: int, nodes: int) -> Reason:
    workers = ppn * nodes
    if batch.global_ is None:
        accumulated = f" x {batch.accumulation} accumulation steps" if batch.accumulation > 1 else ""
        return Reason(
            what="global batch",
            value=f"{batch.local * ppn * batch.accumulation} x {nodes} = {sizes.global_batch:,}",
            why=f"{batch.local} {unit} x {plural(ppn, 'worker')}{accumulated} per host, {plural(nodes, 'host')}",
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


def _steps_per_epoch(unit: str, sizes: TrainingSizes) -> Reason:
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
        why=f"{unit} / global batch{rounding}",
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
    """Return the learning rates at the turning points of the schedule as text."""
    first = [schedule.start_rate] if sizes.warmup_steps else []
    last = [] if schedule.name in ("constant", "steps") else [schedule.end_rate]
    return " -> ".join(f"{rate:g}" for rate in (*first, sizes.peak_rate, *last))


def _decay(schedule: ScheduleSection, sizes: TrainingSizes) -> str:
    """Return the decay after the warm-up as text."""
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
