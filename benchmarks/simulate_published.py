"""Predictions beside published trainings on CPU clusters.

    python -m benchmarks.simulate_published [--markdown]

Each family of runs (processor, framework, fabric) starts from its run on the fewest hosts, the row with 0.0 %. "left
out" is the error where the speed is taken from all other runs of the family instead (geometric mean; without runs that
the model cannot reach at any speed). The plan of each run is the planner's own for the published number of workers:
`cputrain simulate` predicts the same.
"""

import argparse
from math import exp, log
from statistics import mean

from affinity.errors import InputError
from affinity.text_table import align_columns, markdown_table
from affinity.topology.catalog import named_machine
from cputrain.simulate.assumptions import CONSTANTS
from cputrain.simulate.predict import core_flops_of, published_reference, speed_at
from cputrain.simulate.rates import RUNS, Run
from cputrain.simulate.timeline import seconds_at

HEAD = ("family", "network", "hosts", "workers", "batch", "published", "predicted", "error", "left out", "source")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args()
    rows = table()
    print(markdown_table(rows) if options.markdown else align_columns(rows))


def table() -> list[tuple[str, ...]]:
    """A row for each run."""
    families: dict[str, list[Run]] = {}
    for run in RUNS:
        families.setdefault(run.family, []).append(run)
    rows = [HEAD]
    for runs in families.values():
        first = min(runs, key=lambda run: run.hosts)
        for run in runs:
            others = [other for other in runs if other is not run]
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
                    f"{error(predicted, run):+.1f} %",
                    left_out,
                    run.source,
                )
            )
    return rows


def predicted_rate(run: Run, known: list[Run]) -> float:
    """Images/s of a run where the speed of the processor is the geometric mean of what other runs say."""
    found = [flops for flops in map(_core_flops, known) if flops is not None]
    flops = exp(mean(map(log, found)))
    setup = published_reference(run).setup
    speed = speed_at(flops, machine=named_machine(run.machine))
    return setup.global_batch / seconds_at(setup, CONSTANTS)(speed)


def _core_flops(run: Run) -> float | None:
    try:
        return core_flops_of(published_reference(run), CONSTANTS)
    except InputError:
        return None


def error(predicted: float, run: Run) -> float:
    """Percent of the published rate."""
    return 100 * (predicted / run.images_per_s - 1)


if __name__ == "__main__":
    main()
