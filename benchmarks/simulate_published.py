"""Predictions compared to published trainings on CPU clusters.

    python -m benchmarks.simulate_published [--markdown | --commands]

Each family of runs (processor, framework, fabric) starts from its run on the fewest hosts, the row with 0.0 %. "left
out" is the error if the speed comes from the other runs of the family instead, preferably those of the same network
(geometric mean, without runs that the model cannot reach at any speed). A second table has runs of which only the
efficiency is published. Each run's plan is the planner's for the published number of workers, as in
`cputrain simulate`; --commands prints the commands.
"""

import argparse
import shlex
from dataclasses import dataclass, replace
from math import exp, log
from statistics import mean

import yaml

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import shipped_folder
from cputrain.affinity.terminal import align_columns, markdown_table
from cputrain.affinity.topology.catalog import named_machine
from cputrain.predict.assumptions import CONSTANTS, PublishedRun, link_of, published_runs
from cputrain.predict.step_time import seconds_at
from cputrain.studies.simulate.predict import (
    Row,
    Scenario,
    core_flops_of,
    published_reference,
    rows_of,
    run_recipe,
    speed_at,
)

HEAD = ("family", "network", "hosts", "workers", "batch", "published", "predicted", "error", "left out", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedEfficiency:
    """A published efficiency of a training on many hosts without its images/s; `start` names the run that sets the
    processor's speed. `comm_cores` is per worker."""

    source: str
    start: str
    network: str
    machine: str
    fabric: str
    hosts: int
    workers: int
    local_batch: int
    comm_cores: int
    efficiency: float


def published_efficiencies() -> tuple[PublishedEfficiency, ...]:
    """Return all published efficiencies without a rate."""
    text = (shipped_folder("published") / "speeds.yaml").read_text(encoding="utf-8")
    return tuple(PublishedEfficiency(**each) for each in yaml.safe_load(text)["efficiencies"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--commands", action="store_true", help="print the command that predicts each run")
    options = parser.parse_args()
    if options.commands:
        for runs in families().values():
            for run in runs:
                print(shlex.join(("cputrain", *command_of(run, first_of(runs)))))
        return
    shown = markdown_table if options.markdown else align_columns
    print(shown(table()))
    print()
    print(shown(efficiencies()))


def table() -> list[tuple[str, ...]]:
    """Return a row for each run."""
    rows: list[tuple[str, ...]] = [HEAD]
    for runs in families().values():
        first = first_of(runs)
        for run in runs:
            others = others_of(run, runs)
            predicted = predicted_rate(run, [first])
            left_out = f"{error(predicted_rate(run, others), run):+.1f} %" if others else "alone"
            rows.append(
                (
                    run.family,
                    run.network,
                    f"{run.hosts:,}",
                    str(run.workers),
                    str(run.local_batch),
                    f"{run.images_per_s:,.0f}",
                    f"{predicted:,.0f}",
                    f"{error(predicted, run):+.1f} %" + (" contradicted" if run.contradicts else ""),
                    left_out,
                    run.source,
                )
            )
    return rows


def efficiencies() -> list[tuple[str, ...]]:
    """Return a row for each published efficiency, with the range of the prediction."""
    rows: list[tuple[str, ...]] = [
        ("network", "hosts", "workers", "batch", "published", "predicted", "range", "source")
    ]
    for known in published_efficiencies():
        row = predicted_row(known)
        single = row.images_per_s / row.efficiency
        rows.append(
            (
                known.network,
                str(known.hosts),
                str(known.workers),
                str(known.local_batch),
                f"{100 * known.efficiency:.0f} %",
                f"{100 * row.efficiency:.0f} %",
                f"{100 * row.low / single:.0f}-{100 * row.high / single:.0f} %",
                known.source,
            )
        )
    return rows


def predicted_row(known: PublishedEfficiency) -> Row:
    """Predict a published efficiency."""
    (start,) = (run for run in published_runs() if run.name == known.start)
    run = replace(start, network=known.network, workers=known.workers, local_batch=known.local_batch)
    recipe = run_recipe(run)
    plan = recipe.plan.model_copy(update={"comm_cores": known.comm_cores})
    scenario = Scenario(
        recipe=recipe.model_copy(update={"plan": plan}),
        machine=named_machine(known.machine),
        link=link_of(known.fabric),
        reference=published_reference(start),
    )
    (row,) = rows_of(scenario, (known.hosts,))
    return row


def families() -> dict[str, list[PublishedRun]]:
    """Return the runs of each family."""
    found: dict[str, list[PublishedRun]] = {}
    for run in published_runs():
        found.setdefault(run.family, []).append(run)
    return found


def first_of(runs: list[PublishedRun]) -> PublishedRun:
    """Return the run on the fewest hosts, which sets the family's speed."""
    return min(runs, key=lambda run: run.hosts)


def command_of(run: PublishedRun, start: PublishedRun) -> tuple[str, ...]:
    """Return the arguments of `cputrain` that predict a run from another one."""
    gbit = () if run.gbit is None else ("--bandwidth", f"{run.gbit:g}")
    return (
        *(
            "simulate",
            "imagefolder",
            "schedule.peak_rate=1.0",
            "model.zero_gamma=none",
            "--machine",
            run.machine,
            "--nodes",
            str(run.hosts),
        ),
        *("--from", start.name, "--fabric", run.fabric, *gbit),
        *(f"model.name={run.network}", f"data.crop={run.crop}", "data.train_images=1281167"),
        *(f"batch.local={run.local_batch}", f"plan.ppn={run.workers}"),
        *(f"optim.name={run.optimizer}", f"precision={run.precision}"),
        *(() if run.comm_cores is None else (f"plan.comm_cores={run.comm_cores}",)),
    )


def others_of(run: PublishedRun, runs: list[PublishedRun]) -> list[PublishedRun]:
    """Return the other runs of a family, preferably those of the same network."""
    others = [other for other in runs if other is not run and other.contradicts is None]
    return [other for other in others if other.network == run.network] or others


def predicted_rate(run: PublishedRun, known: list[PublishedRun]) -> float:
    """Return images/s of a run if the processor's speed is the geometric mean of what other runs imply."""
    found = [flops for flops in map(_core_flops, known) if flops is not None]
    flops = exp(mean(map(log, found)))
    setup = published_reference(run).setup
    speed = speed_at(flops, machine=named_machine(run.machine), precision=run.precision)
    return setup.global_batch / seconds_at(setup, CONSTANTS)(speed)


def _core_flops(run: PublishedRun) -> float | None:
    try:
        return core_flops_of(published_reference(run), CONSTANTS)
    except InputError:
        return None


def error(predicted: float, run: PublishedRun) -> float:
    """Return a percentage of the published rate."""
    return 100 * (predicted / run.images_per_s - 1)


if __name__ == "__main__":
    main()
