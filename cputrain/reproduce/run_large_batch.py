"""The trainings of the large-batch study, their result files and picture."""

from collections.abc import Callable, Mapping
from pathlib import Path

from affinity.errors import RunError
from affinity.wording import counted
from cputrain.files import write_text
from cputrain.launch.local import PlannedTraining, plan_training
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import SweepSection
from cputrain.reproduce.large_batch import BatchResults, by_batch, check_study, with_all_seeds, with_seed
from cputrain.sweep import Variant, variants
from cputrain.sweep.result_files import write_results
from cputrain.sweep.run import train_all

PICTURE = "large-batch.svg"


def run_large_batch(
    scale: str,
    settings: tuple[str, ...],
    seeds: int,
    folder: Path,
    env: Mapping[str, str],
    report: Callable[[str], None],
) -> list[BatchResults]:
    """Train the recipe large-batch-SCALE: every learning rate with the first seed, then the best rate of each optimizer
    and batch with the other seeds.

    `folder` gets the trainings, tables and PICTURE; what is finished there is not repeated. `report` shows a line to
    the user. Raises InputError, and RunError where the baseline does not finish.
    """
    name = f"large-batch-{scale}"

    def planned(variant: Variant) -> tuple[Variant, PlannedTraining]:
        recipe = load_recipe(name, (*settings, *variant.arguments, f"output={folder / variant.folder}"))
        return variant, plan_training(recipe.model_copy(update={"sweep": SweepSection()}), env)

    sweep = load_recipe(name, settings).sweep
    first = [planned(with_seed(variant.settings, 1)) for variant in variants(sweep, (), ())]
    check_study((one.sizes.global_batch, one.recipe.optim.name) for _, one in first)
    report(f"{len(first)} trainings with the first seed, then the best rates with {counted(seeds - 1, 'more seed')}")
    tried = train_all(first, env)
    found = by_batch((one.sizes.global_batch, result) for (_, one), result in zip(first, tried, strict=True))
    if not found[0].best.top1:
        raise RunError(f"the baseline with global batch {found[0].batch} did not finish: see its logs in {folder}")
    full = []
    for entry in found:
        finished = entry.best.top1 is not None
        others = [with_seed(entry.best.settings, seed) for seed in range(2, seeds + 1)] if finished else []
        full.append(with_all_seeds(entry, train_all([planned(variant) for variant in others], env)))
    write_results(folder, name, [result for entry in full for result in (*entry.tried, *entry.results[1:])])

    from cputrain.reproduce.chart import large_batch_chart  # matplotlib: a second that only the end needs

    write_text(folder / PICTURE, large_batch_chart(name, full))
    return full
