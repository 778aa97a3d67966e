"""The predicted speed of a planned job, in one line."""

import os

from affinity.planner.plan import Plan
from affinity.wording import counted
from cputrain.launch.options import PlanningOptions, network_of
from cputrain.recipe.schema import Recipe
from cputrain.simulate.layers import NETWORKS
from cputrain.simulate.links import LINKED, link_of
from cputrain.simulate.measured import find
from cputrain.simulate.predict import Job, job_setup, reference_of
from cputrain.simulate.rates import starting_run
from cputrain.simulate.scaling import Row, model_of, rows_of
from cputrain.simulate.tables import duration

WORTHWHILE = 0.5  # of a host: what one more should add at least


def predicted(recipe: Recipe, plan: Plan, options: PlanningOptions) -> list[str]:
    """Images/s, efficiency and time to train of a job of several equal hosts, and a warning where one more host would
    add less than half of its own speed. Empty where the machine's rate or the network's layers are unknown."""
    fabric, hosts = network_of(options).name, plan.request.nodes
    measured, _ = find(plan.machine, recipe, os.environ)
    known = measured is not None or starting_run(plan.machine.model, recipe.precision) is not None
    if recipe.model.name not in NETWORKS or not known:
        return []
    if hosts == 1 or fabric not in LINKED:
        return []
    job = Job(
        recipe=recipe,
        machine=plan.machine,
        link=link_of(fabric, gbit=plan.request.link_gbit),
        reference=reference_of(plan.machine, recipe, measured=measured),
        request=plan.request,
    )
    (row,) = rows_of(job, (hosts,))
    model = model_of(job)
    single, more = (model.images_per_s(job_setup(job, count)) for count in (1, hosts + 1))
    lines = [_line(row, recipe.epochs)]
    if more - row.images_per_s < WORTHWHILE * single:
        gained = max(0.0, (more - row.images_per_s) / single)
        lines.append(f"warning: one more host would add {100 * gained:.0f} % of its speed: see `cputrain simulate`")
    return lines


def _line(row: Row, epochs: int) -> str:
    time = "" if row.time_to_train_s is None else f"; {epochs} epochs in {duration(row.time_to_train_s)}"
    return (
        f"predicted: {row.images_per_s:,.0f} images/s ({row.low:,.0f} to {row.high:,.0f}), "
        f"{100 * row.efficiency:.0f} % of {counted(row.nodes, 'single host')}{time} (cputrain simulate)"
    )
