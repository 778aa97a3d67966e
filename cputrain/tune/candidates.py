"""The plans that matter for a training on a machine: what a tuning tries, and why some are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.domains import SMALL_HOST_CORES
from cputrain.affinity.planner.rules import CORES_TO_SPARE_ONE
from cputrain.affinity.topology.machine import Machine
from cputrain.launch.local import PlannedTraining, plan_recipe
from cputrain.recipe.derivation import derive
from cputrain.recipe.schema import Recipe

AXES = ("workers", "comm", "loader", "allocator", "engine", "batch", "precision")
CHANGING = ("batch", "precision")  # they change what is trained
KEYS = {
    "workers": "plan.ppn",
    "comm": "plan.comm_cores",
    "loader": "plan.loader_cores",
    "allocator": "plan.allocator",
    "engine": "engine",
    "batch": "batch.local",
    "precision": "precision",
}
MOST_RESERVED = 2

Values = tuple[tuple[str, str], ...]
"""(axis, value) of each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """A plan to try: its values by axis, and the training that it gives. Its name tells those of axes in `named`."""

    values: Values
    named: tuple[str, ...]
    planned: PlannedTraining

    @property
    def name(self) -> str:
        """Workers x threads, and what else sets it apart: "2 x 1, tcmalloc, native"."""
        values = {axis: value for axis, value in self.values if axis in self.named}
        workers = self.planned.plan.workers
        threads = sorted({worker.intra_op for worker in workers})
        parts = [f"{len(workers)} x {'-'.join(map(str, dict.fromkeys((threads[0], threads[-1]))))}"]
        parts += [f"{values[axis]} {axis}" for axis in ("comm", "loader") if values.get(axis, "0") != "0"]
        parts += [values[axis] for axis in ("allocator", "engine", "precision") if axis in values]
        parts += [f"batch {values['batch']}"] if "batch" in values else []
        return ", ".join(parts)

    @property
    def settings(self) -> tuple[str, ...]:
        """Its values as settings of the recipe."""
        return tuple(f"{KEYS[axis]}={value}" for axis, value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What this machine offers: values of each axis, the planner's own first; `cores` of the host."""

    cores: int
    values: Mapping[str, Sequence[str]]

    def all(self, axes: Sequence[str]) -> list[Values]:
        """Every combination of the values of these axes that matters, the planner's own first."""
        offered = [[(axis, value) for value in self.values[axis]] for axis in axes if self.values.get(axis)]
        first, *others = product(*offered)
        return [first, *(each for each in others if self._matters(dict(each)))]

    def _matters(self, values: Mapping[str, str]) -> bool:
        """Whether workers have the cores to spare that are reserved, and communicate at all."""
        workers = int(values.get("workers", "1"))
        reserved = [values.get(axis, "0") for axis in ("comm", "loader")]
        if any(count != "0" for count in reserved) and self.cores // workers < CORES_TO_SPARE_ONE:
            return False
        return workers > 1 or reserved[0] == "0"


def choices_of(
    machine: Machine,
    recipe: Recipe,
    own: PlannedTraining,
    *,
    allocators: Sequence[str],
    engines: Sequence[str],
    has_bf16: bool,
) -> Choices:
    """The values worth trying for a recipe whose plan is `own`.

    Values that the recipe sets itself stay. Comm and loader cores are tried where workers have cores to spare, loader
    cores only with images that are read: generated ones need no decoding.
    """
    section, cores, decodes = recipe.plan, len(machine.allowed_cores), not recipe.data.generated
    comm, loader = (str(len(_cores(own, role))) for role in ("comm_pus", "loader_pus"))
    workers = worker_counts(machine, own.ppn) if section.ppn == "auto" else [own.ppn]
    most = cores // min(workers)
    reserved = [str(count) for count in range(MOST_RESERVED + 1)] if most >= CORES_TO_SPARE_ONE else ["0"]
    batches = [recipe.batch.local, 2 * recipe.batch.local, recipe.batch.local // 2]
    precisions = ["float32", "bf16"] if recipe.precision == "float32" and has_bf16 else [recipe.precision]
    return Choices(
        cores=cores,
        values={
            "workers": [str(count) for count in workers],
            "comm": _first(comm, reserved) if section.comm_cores == "auto" else [comm],
            "loader": _first(loader, reserved) if section.loader_cores == "auto" and decodes else [loader],
            "allocator": _first(own.plan.runtime.allocator, allocators) if section.allocator == "auto" else [],
            "engine": list(engines) if recipe.engine == "auto" else [],
            "batch": [str(batch) for batch in batches if batch],
            "precision": precisions,
        },
    )


def _first(own: str, others: Sequence[str]) -> list[str]:
    return [own, *(other for other in others if other != own)]


def _cores(own: PlannedTraining, role: str) -> list[object]:
    """The cores of the first worker that communicate ("comm_pus") or load ("loader_pus")."""
    pus = getattr(own.plan.workers[0], role)
    return [core for core in own.plan.machine.cores if not set(core.pus).isdisjoint(pus)]


def worker_counts(machine: Machine, own: int) -> list[int]:
    """Plausible numbers of workers, the planner's own first: one for each host, package, NUMA node or cache, and twice
    as many; on a host of four cores or fewer every number."""
    cores = machine.allowed_cores
    packages = len({core.package for core in cores})
    nodes = len({core.numa_node for core in cores})
    caches = len({(core.package, core.l3) for core in cores if core.l3 is not None})
    few = range(1, len(cores) + 1) if len(cores) <= SMALL_HOST_CORES else ()
    numbers = {1, packages, 2 * packages, nodes, 2 * nodes, caches, *few}
    return [own, *sorted(number for number in numbers if 1 <= number <= len(cores) and number != own)]


def plan_candidates(
    own: PlannedTraining, values: Sequence[Values], env: Mapping[str, str]
) -> tuple[list[PlanCandidate], list[tuple[Values, str]]]:
    """The candidates that this host can run, and the others with the reason; equal plans once. `own`: the training
    that their values change."""
    every: dict[str, set[str]] = {}
    for axis, value in (pair for each in values for pair in each):
        every.setdefault(axis, set()).add(value)
    named = tuple(axis for axis, different in every.items() if len(different) > 1)
    found: list[PlanCandidate] = []
    refused: list[tuple[Values, str]] = []
    seen: set[object] = set()
    for each in values:
        try:
            planned = _planned(own, dict(each), env)
        except InputError as error:
            refused.append((each, str(error)))
            continue
        if (same := _what_runs(planned)) not in seen:
            seen.add(same)
            found.append(PlanCandidate(values=each, named=named, planned=planned))
    return found, refused


def _what_runs(planned: PlannedTraining) -> tuple[object, ...]:
    """What two candidates have in common if they are the same training in the same workers."""
    recipe, plan = planned.recipe, planned.plan
    layout = tuple((worker.compute_pus, worker.comm_pus, worker.loader_pus) for worker in plan.workers)
    return layout, plan.runtime.allocator, recipe.engine, recipe.precision, recipe.batch.local


def _planned(own: PlannedTraining, values: Mapping[str, str], env: Mapping[str, str]) -> PlannedTraining:
    """A candidate's training. Raises InputError where it does not fit."""
    recipe, images = _with(own.recipe, values), own.survey.train
    plan = plan_recipe(recipe, env, images=images)
    sizes = derive(recipe, ppn=len(plan.workers), nodes=1, images=images)
    return replace(own, recipe=recipe, plan=plan, sizes=sizes)


def _with(recipe: Recipe, values: Mapping[str, str]) -> Recipe:
    """The recipe with a candidate's values."""
    plan = {
        KEYS[axis].removeprefix("plan."): int(values[axis]) if values[axis].isdecimal() else values[axis]
        for axis in ("workers", "comm", "loader", "allocator")
        if axis in values
    }
    changes: dict[str, object] = {"plan": recipe.plan.model_copy(update=plan)}
    changes |= {axis: values[axis] for axis in ("engine", "precision") if axis in values}
    if "batch" in values:
        changes["batch"] = recipe.batch.model_copy(update={"local": int(values["batch"])})
    return recipe.model_copy(update=changes)


def with_output(candidate: PlanCandidate, folder: str) -> PlannedTraining:
    """A candidate's training in a folder of its own."""
    recipe = candidate.planned.recipe.model_copy(update={"output": folder})
    return replace(candidate.planned, recipe=recipe)
