"""Peak learning rates: each optimizer's rule for the global batch, and what a recipe makes of it."""

from dataclasses import dataclass

from affinity.errors import InputError
from cputrain.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """rate = base_rate x (batch / base_batch) ^ power, batches in images over all workers."""

    base_rate: float
    base_batch: int
    power: float
    source: str

    @property
    def name(self) -> str:
        """As papers call it."""
        return "linear scaling" if self.power == 1 else "square-root scaling"

    def scaled(self, rate: float, batch: float, reference: int) -> float:
        """A rate for `reference` images as the rule has it for `batch` images."""
        return rate * float((batch / reference) ** self.power)


GOYAL = Rule(base_rate=0.1, base_batch=256, power=1, source="Goyal et al. 2017, 2.1")
# The papers of Adam, AdamW and RMSprop give 0.001 without a batch; 256 is that of the other rules.
ADAM = Rule(base_rate=0.001, base_batch=256, power=0.5, source="Malladi et al. 2022")
# 4 / 100 at 32,768, a factor of sqrt(2) less at each half of it: You et al.'s untuned LAMB for ResNet-50.
LAMB = Rule(base_rate=0.04, base_batch=32_768, power=0.5, source="You et al. 2020")

RULES = {"sgd": GOYAL, "momentum": GOYAL, "adam": ADAM, "adamw": ADAM, "rmsprop": ADAM, "lamb": LAMB}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The learning rate at the end of the warm-up, and how it comes about."""

    rate: float
    why: str


def peak_of(recipe: Recipe, *, global_batch: int, workers: int) -> Peak:
    """The recipe's peak rate for a job. Raises InputError where it asks for a rule that its optimizer does not have."""
    rate, by = recipe.schedule.peak_rate, recipe.optim.scale_rate_by
    if rate == "auto":
        return _by_rule(recipe, by, global_batch, workers)
    reference = recipe.schedule.reference_batch
    if by == "workers":
        return Peak(rate=rate * workers, why=f"{rate:g} x {workers:,} worker(s) (optim.scale_rate_by=workers)")
    if by == "batch":
        return _by_batch(recipe, rate, global_batch)
    return Peak(rate=rate, why="set in the recipe" + (f" for a global batch of {reference:,}" if reference else ""))


def rate_warning(recipe: Recipe, *, global_batch: int) -> str:
    """What is wrong where a rate that is tuned for one global batch is used for another; "" where nothing is."""
    rate, reference = recipe.schedule.peak_rate, recipe.schedule.reference_batch
    if reference in (None, global_batch) or recipe.optim.scale_rate_by in ("batch", "workers"):
        return ""
    other = "optim.scale_rate_by=batch" if recipe.optim.name in RULES else f"schedule.peak_rate for {global_batch:,}"
    return (
        f"schedule.peak_rate={rate:g} was tuned for a global batch of {reference:,} images, this job's is "
        f"{global_batch:,}: set batch.global={reference}, or {other}"
    )


def _by_rule(recipe: Recipe, by: str, global_batch: int, workers: int) -> Peak:
    """peak_rate=auto."""
    rule = _rule(recipe, "schedule.peak_rate=auto")
    base, told = rule.base_rate, f"{rule.base_rate:g}"
    if recipe.optim.name == "rmsprop" and recipe.optim.momentum:
        # a momentum of m adds up 1 / (1 - m) updates; the rule is for RMSprop without
        base, told = base * (1 - recipe.optim.momentum), f"{base:g} x (1 - {recipe.optim.momentum:g})"
    if by == "none":
        rate, why = base, f"{told}, not scaled (optim.scale_rate_by=none)"
    else:
        batch = global_batch / workers if by == "workers" else global_batch
        ratio = f"{batch:,.6g} / {rule.base_batch:,}" if batch % 1 else f"{int(batch):,} / {rule.base_batch}"
        rate = rule.scaled(base, batch, rule.base_batch)
        why = f"{rule.name} ({rule.source}): {told} x " + (ratio if rule.power == 1 else f"sqrt({ratio})")
        if by == "workers":
            rate, why = rate * workers, f"{why} x {workers:,} worker(s)"
    factor = recipe.schedule.rate_factor
    if factor != 1:
        why += f" = {rate:.4g}, {'halved' if factor == 0.5 else f'times {factor:g}'} to {factor * rate:g} in the recipe"
    return Peak(rate=factor * rate, why=why)


def _by_batch(recipe: Recipe, rate: float, global_batch: int) -> Peak:
    """A rate that is given, scaled from its own global batch to the job's."""
    rule, reference = _rule(recipe, "optim.scale_rate_by=batch"), recipe.schedule.reference_batch
    if reference is None:
        raise InputError(
            f"optim.scale_rate_by=batch does not know which global batch schedule.peak_rate={rate:g} is for: "
            "set schedule.reference_batch to it"
        )
    ratio = f"{global_batch:,} / {reference:,}"
    return Peak(
        rate=rule.scaled(rate, global_batch, reference),
        why=f"{rule.name} ({rule.source}): {rate:g} x " + (ratio if rule.power == 1 else f"sqrt({ratio})"),
    )


def _rule(recipe: Recipe, asked: str) -> Rule:
    if recipe.optim.name not in RULES:
        raise InputError(
            f"{asked} needs a rule for the learning rate; there is none for optim.name={recipe.optim.name}, only for "
            f"{', '.join(RULES)}: set schedule.peak_rate to a rate for this batch"
        )
    return RULES[recipe.optim.name]
