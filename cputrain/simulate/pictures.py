"""Predictions as pictures: scaling over hosts beside published runs, and the timeline of a step."""

from collections.abc import Sequence

from matplotlib import pyplot as plt

from cputrain.affinity.wording import MIB
from cputrain.report.figure import figure_svg
from cputrain.simulate.assumptions import RUNS
from cputrain.simulate.network import Setup
from cputrain.simulate.predict import Scenario
from cputrain.simulate.scaling import Row
from cputrain.simulate.step import Step

MS = 1e3
COLORS = {"forward": "C0", "backward": "C1", "optimizer": "C2", "all-reduce": "C3", "waiting": "0.85"}


def scaling_svg(scenario: Scenario, rows: Sequence[Row]) -> str:
    """Images/s over hosts with its range, the ideal line, and published runs of this processor and network."""
    figure, axes = plt.subplots(figsize=(7.5, 5), layout="constrained")
    nodes = [row.nodes for row in rows]
    ideal = [row.images_per_s / row.efficiency for row in rows]
    axes.plot(nodes, ideal, "--", color="0.5", label="ideal: as many single hosts")
    axes.plot(nodes, [row.images_per_s for row in rows], "o-", color="C0", label="predicted")
    axes.fill_between(
        nodes, [max(row.low, 0.0) for row in rows], [row.high for row in rows], color="C0", alpha=0.2, label="range"
    )
    published = [
        run
        for run in RUNS
        if run.processor in scenario.machine.model
        and run.network == scenario.recipe.model.name
        and run.precision == scenario.recipe.precision
    ]
    for number, family in enumerate(dict.fromkeys(run.family for run in published)):
        points = [(run.hosts, run.images_per_s) for run in published if run.family == family]
        axes.plot(*zip(*points, strict=True), "sDv^"[number % 4], color=f"C{number + 1}", label=f"published: {family}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(nodes, [f"{count:,}" for count in nodes])
    axes.minorticks_off()
    axes.set(
        xlabel="hosts",
        ylabel="images/s",
        title=f"{scenario.recipe.name} on {scenario.machine.name}, {scenario.link.name}",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure_svg(figure)


def timeline_svg(scenario: Scenario, setup: Setup, step: Step) -> str:
    """A step of the slowest worker: computing above, all-reduces below, each layer and each bucket a bar."""
    figure, axes = plt.subplots(figsize=(11, 2.8), layout="constrained")
    starts = (step.forward_end_s, *step.layer_ends_s)
    layers = [(MS * begin, MS * (end - begin)) for begin, end in zip(starts, step.layer_ends_s, strict=False)]
    updated = step.step_s - step.optimizer_s
    axes.broken_barh([(0, MS * step.forward_end_s)], (1.1, 0.8), color=COLORS["forward"], label="forward")
    axes.broken_barh(layers, (1.1, 0.8), color=COLORS["backward"], edgecolor="white", linewidth=0.2, label="backward")
    axes.broken_barh(
        [(MS * step.backward_end_s, MS * max(updated - step.backward_end_s, 0.0))],
        (1.1, 0.8),
        color=COLORS["waiting"],
        label="waiting",
    )
    axes.broken_barh([(MS * updated, MS * step.optimizer_s)], (1.1, 0.8), color=COLORS["optimizer"], label="optimizer")
    buckets = [(MS * each.start_s, MS * (each.end_s - each.start_s)) for each in step.buckets]
    if buckets:
        sizes = [each.size / MIB for each in step.buckets]
        label = f"all-reduce: {len(buckets)} buckets of {min(sizes):.1f}-{max(sizes):.1f} MiB"
        axes.broken_barh(buckets, (0.1, 0.8), color=COLORS["all-reduce"], edgecolor="white", linewidth=0.4, label=label)
    axes.set_yticks([0.5, 1.5], ["network", "cores"])
    axes.set(
        xlim=(0, MS * step.step_s),
        xlabel="ms",
        title=f"{scenario.recipe.name}: a step on {setup.hosts} x {setup.workers} workers, "
        f"{setup.local_batch} images each",
    )
    axes.legend(fontsize="small", ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    return figure_svg(figure)
