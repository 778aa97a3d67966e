"""Peak learning rates: each optimizer's scaling rule, and the rate that it gives a recipe."""

from dataclasses import dataclass

from affinity.errors import InputError
from affinity.wording import counted
from cputrain.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """rate = base_rate x (batch / base_batch) ^ power, batches in images over all workers."""

    base_rate: float
    base_batch: int
    power: float
    source: str

    @property
    def title(self) -> str:
        """The rule's usual name, with its source."""
        return f"{'linear' if self.power == 1 else 'square-root'} scaling ({self.source})"

    def scale(self, rate: float, batch: float, reference: int) -> float:
        """The rate for `batch` images, from one for `reference` images."""
        return rate * float((batch / reference) ** self.power)

    def formula(self, rate: str, ratio: str) -> str:
        """The scaling as text: "0.1 x 512 / 256", "0.001 x sqrt(512 / 256)"."""
        return f"{rate} x {ratio}" if self.power == 1 else f"{rate} x sqrt({ratio})"


GOYAL = ScalingRule(base_rate=0.1, base_batch=256, power=1, source="Goyal et al. 2017, 2.1")
# The papers of Adam, AdamW and RMSprop give 0.001 without a batch; 256 is that of the other rules.
ADAM = ScalingRule(base_rate=0.001, base_batch=256, power=0.5, source="Malladi et al. 2022")
# 4 / 100 at 32,768, a factor of sqrt(2) less at each half of it: You et al.'s untuned LAMB for ResNet-50.
LAMB = ScalingRule(base_rate=0.04, base_batch=32_768, power=0.5, source="You et al. 2020")

RULES = {"sgd": GOYAL, "momentum": GOYAL, "adam": ADAM, "adamw": ADAM, "rmsprop": ADAM, "lamb": LAMB}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRate:
    """The learning rate at the end of the warm-up, and its derivation in words."""

    rate: float
    why: str


def peak_rate(recipe: Recipe, *, global_batch: int, workers: int) -> PeakRate:
    """The recipe's peak rate for a job. Raises InputError where that needs a rule which its optimizer does not have."""
    rate, scaling = recipe.schedule.peak_rate, recipe.optim.scale_rate_by
    if rate == "auto":
        return _auto_rate(recipe, global_batch, workers)
    reference = recipe.schedule.reference_batch
    if scaling == "workers":
        why = f"{rate:g} x {counted(workers, 'worker')} (optim.scale_rate_by=workers)"
        return PeakRate(rate=rate * workers, why=why)
    if scaling == "batch":
        return _rate_by_batch(recipe, rate, global_batch)
    return PeakRate(rate=rate, why="set in the recipe" + (f" for a global batch of {reference:,}" if reference else ""))


def rate_warning(recipe: Recipe, *, global_batch: int) -> str:
    """A warning where the job's global batch is not the one that the rate was tuned for; "" where it is."""
    rate, reference = recipe.schedule.peak_rate, recipe.schedule.reference_batch
    if reference in (None, global_batch) or recipe.optim.scale_rate_by in ("batch", "workers"):
        return ""
    has_rule = recipe.optim.name in RULES
    other = "optim.scale_rate_by=batch" if has_rule else f"tune schedule.peak_rate for {global_batch:,}"
    return (
        f"schedule.peak_rate={rate:g} was tuned for a global batch of {reference:,} images, but this job's is "
        f"{global_batch:,}: set batch.global={reference}, or {other}"
    )


def _auto_rate(recipe: Recipe, global_batch: int, workers: int) -> PeakRate:
    """The rate of peak_rate=auto."""
    rule, scaling = _rule(recipe, "schedule.peak_rate=auto"), recipe.optim.scale_rate_by
    base, base_text = rule.base_rate, f"{rule.base_rate:g}"
    if recipe.optim.name == "rmsprop" and recipe.optim.momentum:
        # a momentum of m adds up 1 / (1 - m) updates; the rule is for RMSprop without
        base, base_text = base * (1 - recipe.optim.momentum), f"{base:g} x (1 - {recipe.optim.momentum:g})"
    if scaling == "none":
        rate, why = base, f"{base_text}, not scaled (optim.scale_rate_by=none)"
    else:
        batch = global_batch / workers if scaling == "workers" else global_batch
        ratio = f"{batch:,.6g} / {rule.base_batch:,}" if batch % 1 else f"{int(batch):,} / {rule.base_batch}"
        rate = rule.scale(base, batch, rule.base_batch)
        why = f"{rule.title}: {rule.formula(base_text, ratio)}"
        if scaling == "workers":
            rate, why = rate * workers, f"{why} x {counted(workers, 'worker')}"
    factor = recipe.schedule.auto_rate_factor
    if factor != 1:
        why += f" = {rate:.4g}, x {factor:g} = {factor * rate:g} (schedule.auto_rate_factor={factor:g})"
    return PeakRate(rate=factor * rate, why=why)


def _rate_by_batch(recipe: Recipe, rate: float, global_batch: int) -> PeakRate:
    """A numeric rate, scaled from its reference batch to the job's global batch."""
    rule, reference = _rule(recipe, "optim.scale_rate_by=batch"), recipe.schedule.reference_batch
    if reference is None:
        raise InputError(
            f"optim.scale_rate_by=batch needs the global batch that schedule.peak_rate={rate:g} was tuned for: set "
            "schedule.reference_batch to it"
        )
    return PeakRate(
        rate=rule.scale(rate, global_batch, reference),
        why=f"{rule.title}: {rule.formula(f'{rate:g}', f'{global_batch:,} / {reference:,}')}",
    )


def _rule(recipe: Recipe, setting: str) -> ScalingRule:
    if recipe.optim.name not in RULES:
        raise InputError(
            f"{setting} needs a scaling rule for the learning rate, but there is none for optim.name="
            f"{recipe.optim.name}, only for {', '.join(RULES)}: set schedule.peak_rate to a rate for this batch"
        )
    return RULES[recipe.optim.name]
