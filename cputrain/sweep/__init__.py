"""Sweeps: which trainings a sweep has, running them one after another, their results, tables and charts.

Also the search for the largest local batch that trains. A repeated sweep continues where the last one stopped.
"""

from cputrain.sweep.results import RunResult, SeedGroup, TrainingSetup, finished_top1s, group_by_seed, result_of
from cputrain.sweep.tables import spread
from cputrain.sweep.variants import SEED, WORKERS, Variant, variants

__all__ = [
    "SEED",
    "WORKERS",
    "RunResult",
    "SeedGroup",
    "TrainingSetup",
    "Variant",
    "finished_top1s",
    "group_by_seed",
    "result_of",
    "spread",
    "variants",
]
