"""A sweep as data: which trainings, what came of each, and what that says."""

from cputrain.sweep.results import Group, Result, Setup, grouped, result_of
from cputrain.sweep.tables import columns, spread
from cputrain.sweep.variants import SEED, WORKERS, Variant, variants

__all__ = [
    "SEED",
    "WORKERS",
    "Group",
    "Result",
    "Setup",
    "Variant",
    "columns",
    "grouped",
    "result_of",
    "spread",
    "variants",
]
