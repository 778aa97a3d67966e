"""The run that a prediction starts from, as named on the command line."""

import re

from affinity.errors import InputError
from affinity.planner.measured import Measured
from affinity.planner.plan import NOTHING_MEASURED
from affinity.topology.machine import Machine
from cputrain.recipe.schema import BatchSection, Recipe
from cputrain.simulate.links import Link
from cputrain.simulate.predict import Reference, planned, published_reference, reference_at
from cputrain.simulate.published import runs_on
from cputrain.simulate.setup import setup_of

RATED = re.compile(r"(?P<rate>\d{1,9}(\.\d{1,9})?)@(?P<hosts>\d{1,5})x(?P<workers>\d{1,4})x(?P<batch>\d{1,6})")


def started_from(
    text: str, machine: Machine, recipe: Recipe, link: Link, rates: Measured = NOTHING_MEASURED
) -> Reference:
    """The reference of --from: the name of a published run of the machine's processor in the recipe's precision, or
    "IMG/S@HOSTSxWORKERSxBATCH", a run of the recipe's network on such machines over the link.

    Raises InputError where the text is neither, or the run does not fit the machine.
    """
    found = RATED.fullmatch(text)
    if found is None:
        runs = runs_on(machine.model, recipe.precision)
        for run in runs:
            if run.name == text:
                return published_reference(run)
        known = (
            f"known on {machine.name} in {recipe.precision}: {', '.join(run.name for run in runs)}; " if runs else ""
        )
        raise InputError(
            f"--from {text}: {known}or give a rate with hosts, workers per host and local batch, as in 6303@64x2x32"
        )
    rate, (hosts, workers, batch) = float(found["rate"]), (int(found[key]) for key in ("hosts", "workers", "batch"))
    if not (rate and hosts and workers and batch):
        raise InputError(f"--from {text}: rate, hosts, workers and local batch are above 0")
    ran = recipe.model_copy(
        update={
            "batch": BatchSection(local=batch),
            "plan": recipe.plan.model_copy(update={"ppn": workers}),
        }
    )
    setup = setup_of(ran, planned(ran, machine, hosts, link, measured=rates), link)
    return reference_at(setup, machine, rate, "given with --from", rates)
