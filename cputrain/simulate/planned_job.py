"""The predicted speed of a planned job, in one line."""

from collections.abc import Mapping

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.records import read_records
from cputrain.affinity.wording import counted
from cputrain.launch.options import PlanningOptions, network_of
from cputrain.recipe.schema import Recipe
from cputrain.simulate.assumptions import LINKED, link_of, starting_run
from cputrain.simulate.network import NETWORKS, find, unreadable
from cputrain.simulate.predict import Scenario, reference_of, scenario_setup
from cputrain.simulate.scaling import Row, check_global_batch, model_of, rows_of
from cputrain.simulate.tables import rough_duration

WORTHWHILE = 0.5  # of a host: what one more should add at least


def predicted(recipe: Recipe, plan: Plan, options: PlanningOptions, env: Mapping[str, str]) -> list[str]:
    """Images/s, efficiency and time to train of a job of several equal hosts, and a warning where one more host would
    add less than half of its own speed; or why there is no prediction, and what to do."""
    fabric, hosts = network_of(options).name, plan.request.nodes
    if hosts == 1 or fabric not in LINKED:
        return []
    if recipe.model.name not in NETWORKS:
        return [f"no prediction: the layers of {recipe.model.name} are not known to `cputrain simulate`"]
    records = read_records(plan.machine, env)
    measured, notes = find(records, recipe), [f"warning: {note}" for note in unreadable(records)]
    if measured is None and starting_run(plan.machine.model, recipe.precision) is None:
        unknown = f"no training rate of {plan.machine.name} is known in {recipe.precision}"
        return [*notes, f"no prediction: {unknown}: run `cputrain bench model precision={recipe.precision}` there"]
    try:
        reference = reference_of(plan.machine, recipe, measured=measured, rates=plan.measured)
    except InputError as error:  # another network's rate that does not compare
        return [*notes, f"no prediction: {error}"]
    scenario = Scenario(
        recipe=recipe,
        machine=plan.machine,
        link=link_of(fabric, gbit=plan.request.link_gbit),
        reference=reference,
        request=plan.request,
        measured=plan.measured,
    )
    try:
        check_global_batch(scenario, (hosts,))
    except InputError as error:  # a training may share it out unequally, a prediction is of equal workers
        return [*notes, f"no prediction: {error}"]
    (row,) = rows_of(scenario, (hosts,))
    model = model_of(scenario)
    single, more = (model.images_per_s(scenario_setup(scenario, count)) for count in (1, hosts + 1))
    lines = [*notes, _line(row, recipe.epochs)]
    if more - row.images_per_s < WORTHWHILE * single:
        gained = max(0.0, (more - row.images_per_s) / single)
        lines.append(f"warning: one more host would add {100 * gained:.0f} % of its speed: see `cputrain simulate`")
    return lines


def _line(row: Row, epochs: int) -> str:
    time = "" if row.time_to_train_s is None else f"; {epochs} epochs in {rough_duration(row.time_to_train_s)}"
    return (
        f"predicted: {row.images_per_s:,.0f} images/s ({row.low:,.0f} to {row.high:,.0f}), "
        f"{100 * row.efficiency:.0f} % of {counted(row.nodes, 'single host')}{time} (cputrain simulate)"
    )
