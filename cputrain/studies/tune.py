"""`cputrain tune`: times the plausible plans for a training on this machine and saves the fastest.

In each round, every candidate that may still win is measured once, in random order, so that disturbances affect all of
them. Candidates are compared within rounds by the logarithm of their cost, and those that are significantly slower than
the best are dropped, usually all but a few after two rounds: racing (Maron and Moore 1993, Hoeffding races). A trial
that is far slower than the same candidate's other ones was disturbed, and is repeated before any is dropped.
"""

import json
import logging
import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import fmean, median, median_low

from cputrain.affinity.errors import InputError, RunError, as_recipe_key, describe_error
from cputrain.affinity.planner.layouts import SMALL_HOST_CORES, plausible_workers
from cputrain.affinity.planner.openmp import installed_allocators, target_of
from cputrain.affinity.planner.records import ENGINE, TUNED, Record
from cputrain.affinity.planner.request import tuning_name
from cputrain.affinity.planner.rules import CORES_TO_SPARE_ONE
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.wording import plural
from cputrain.measurements import new_record
from cputrain.native_build import compiler
from cputrain.rows import Column, Rows
from cputrain.studies.bench.model import Spec, measure_training, precisions
from cputrain.training.ipex import has_ipex
from cputrain.training.local import PlannedTraining, replanned

CHANGING = ("batch", "precision")  # axes that change what is trained
KEYS = {
    "workers": "plan.ppn",
    "comm": "plan.comm_cores",
    "loader": "plan.loader_cores",
    "allocator": "plan.allocator",
    "engine": "engine",
    "batch": "batch.local",
    "precision": "precision",
}
AXES = tuple(KEYS)
MAX_RESERVED_CORES = 2

Values = tuple[tuple[str, str], ...]
"""(axis, value) pairs."""

# The noise is the relative standard deviation of a measurement, assumed to be equal for all candidates. Nothing is
# dropped until it is estimated with MIN_FREEDOM degrees of freedom: two rounds of 5 or more candidates, or five of 2.
# The estimate starts from a typical noise with PRIOR_WEIGHT degrees of freedom, so that a few measurements that happen
# to be equal do not suggest zero noise.
MIN_FREEDOM = 4
PRIOR_NOISE, PRIOR_WEIGHT = 0.03, 2
NORMAL = 1.4826  # a normal distribution's standard deviation relative to its median absolute deviation
# In standard errors of a difference: ELIMINATE_SIGMAS makes a candidate significantly slower, even as one of a few
# dozen; INTERVAL_SIGMAS is half of an interval that contains the true ratio nine times in ten, even after a few rounds.
ELIMINATE_SIGMAS, INTERVAL_SIGMAS = 3.0, 2.3
MAX_ROUNDS = 64  # trials of a candidate
# Times the robust noise that a disturbed cost exceeds its candidate's median, relative to the others of its round.
DISTURBED = 5.0

Cost = Callable[[int], float | None]
"""Measures a candidate by its index: seconds per image, None if it fails."""

SHOWN = 20  # plans in the table; the others are counted
logger = logging.getLogger(__name__)
WARM_UP = 2  # steps before timing: they allocate memory and generate oneDNN's code


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """A plan to try: its values by axis, and the resulting training. Its name contains the values of `named` axes."""

    values: Values
    named: tuple[str, ...]
    planned: PlannedTraining

    @property
    def name(self) -> str:
        """Workers x threads and the distinguishing values: "2 x 1, tcmalloc, native"."""
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
        """The values as recipe settings."""
        return tuple(f"{KEYS[axis]}={value}" for axis, value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values of each axis that this machine offers, the current plan's first; `cores` of the host."""

    cores: int
    values: Mapping[str, Sequence[str]]

    def all(self, axes: Sequence[str]) -> list[Values]:
        """Return every sensible combination of values of these axes, the current plan's first."""
        offered = [[(axis, value) for value in self.values[axis]] for axis in axes if self.values.get(axis)]
        first, *rest_of = product(*offered)
        return [first, *(values for values in rest_of if self._matters(dict(values)))]

    def _matters(self, values: Mapping[str, str]) -> bool:
        """Whether workers can spare the reserved cores, and communicate at all."""
        workers = int(values.get("workers", "1"))
        reserved = [values.get(axis, "0") for axis in ("comm", "loader")]
        if any(count != "0" for count in reserved) and self.cores // workers < CORES_TO_SPARE_ONE:
            return False
        return workers > 1 or reserved[0] == "0"


def choices_of(
    current: PlannedTraining, *, allocators: Sequence[str], engines: Sequence[str], has_bf16: bool
) -> Choices:
    """Return the values worth trying for the training `current`.

    Values that the recipe sets are fixed. Comm and loader cores are varied if workers have cores to spare, loader cores
    only if images are read, as generated ones need no decoding.
    """
    recipe, section, cores = current.recipe, current.recipe.plan, len(current.plan.machine.allowed_cores)
    decodes = not recipe.data.generated
    comm, loader = (str(len(_cores(current, role))) for role in ("comm_pus", "loader_pus"))
    workers = worker_counts(current.plan.machine, current.ppn) if section.ppn == "auto" else [current.ppn]
    max_cores = cores // min(workers)
    reserved = [str(count) for count in range(MAX_RESERVED_CORES + 1)] if max_cores >= CORES_TO_SPARE_ONE else ["0"]
    batches = [recipe.batch.local, 2 * recipe.batch.local, recipe.batch.local // 2]
    precisions = ["float32", "bf16"] if recipe.precision == "float32" and has_bf16 else [recipe.precision]
    return Choices(
        cores=cores,
        values={
            "workers": [str(count) for count in workers],
            "comm": _first(comm, reserved) if section.comm_cores == "auto" else [comm],
            "loader": _first(loader, reserved) if section.loader_cores == "auto" and decodes else [loader],
            "allocator": _first(current.plan.runtime.allocator, allocators) if section.allocator == "auto" else [],
            "engine": list(engines) if recipe.engine == "auto" else [],
            "batch": [str(batch) for batch in batches if batch],
            "precision": precisions,
        },
    )


def _first(current: str, others: Sequence[str]) -> list[str]:
    return [current, *(other for other in others if other != current)]


def _cores(current: PlannedTraining, role: str) -> list[object]:
    """Return the first worker's cores for communication ("comm_pus") or loading ("loader_pus")."""
    pus = getattr(current.plan.workers[0], role)
    return [core for core in current.plan.machine.cores if not set(core.pus).isdisjoint(pus)]


def worker_counts(machine: Machine, current: int) -> list[int]:
    """Return plausible numbers of workers, the current plan's first; on a host of at most SMALL_HOST_CORES cores every
    number."""
    cores = machine.allowed_cores
    few = range(1, len(cores) + 1) if len(cores) <= SMALL_HOST_CORES else ()
    numbers = plausible_workers(cores) | {*few}
    return [current, *sorted(number for number in numbers if 1 <= number <= len(cores) and number != current)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates of a race, the current plan first, and those that this host cannot run, with the reason."""

    tried: Sequence[PlanCandidate]
    refused: Sequence[tuple[Values, str]]


def plan_candidates(current: PlannedTraining, values: Sequence[Values], env: Mapping[str, str]) -> Candidates:
    """Return candidates with these values for the training `current`, without duplicate plans."""
    every: dict[str, set[str]] = {}
    for axis, value in (pair for settings in values for pair in settings):
        every.setdefault(axis, set()).add(value)
    named = tuple(axis for axis, different in every.items() if len(different) > 1)
    candidates: list[PlanCandidate] = []
    refused: list[tuple[Values, str]] = []
    seen: set[object] = set()
    for settings in values:
        try:
            planned = replanned(current, [f"{KEYS[axis]}={value}" for axis, value in settings], env)
        except InputError as error:
            refused.append((settings, describe_error(error, as_recipe_key)))
            continue
        if (same := _what_runs(planned)) not in seen:
            seen.add(same)
            candidates.append(PlanCandidate(values=settings, named=named, planned=planned))
    return Candidates(tried=candidates, refused=refused)


def _what_runs(planned: PlannedTraining) -> tuple[object, ...]:
    """Return a key that is equal for candidates that run the same training in the same workers."""
    recipe, plan = planned.recipe, planned.plan
    layout = tuple((worker.compute_pus, worker.comm_pus, worker.loader_pus) for worker in plan.workers)
    return layout, plan.runtime.allocator, recipe.engine, recipe.precision, recipe.batch.local


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Speedup of one candidate over another, and the interval that likely contains the true ratio."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(slots=True, kw_only=True)
class Race:
    """Measurements of a race so far. `costs[i]` are the logarithms of candidate i's costs, one for each of its rounds.

    `resolution` is the relative difference to ignore: a candidate that could only be faster by less is dropped.
    """

    count: int
    resolution: float
    costs: list[list[float]] = field(init=False)
    running: list[int] = field(init=False)
    failed: list[int] = field(default_factory=list)
    repeated: set[tuple[int, int]] = field(default_factory=set)
    """Candidates and rounds whose costs were measured again."""

    def __post_init__(self) -> None:
        self.costs = [[] for _ in range(self.count)]
        self.running = list(range(self.count))

    @property
    def trials(self) -> int:
        """Number of successful measurements so far."""
        return sum(map(len, self.costs)) + len(self.repeated)

    @property
    def tried(self) -> list[int]:
        """The candidates that were measured and never failed."""
        return [i for i in range(self.count) if self.costs[i] and i not in self.failed]

    @property
    def noise(self) -> float:
        """Relative standard deviation of a measurement."""
        squares, freedom = self._contrasts()
        weight = freedom + PRIOR_WEIGHT
        return math.sqrt((squares + PRIOR_WEIGHT * PRIOR_NOISE**2) / weight)

    @property
    def knows_noise(self) -> bool:
        """Whether there are enough measurements to estimate the noise."""
        return self._contrasts()[1] >= MIN_FREEDOM

    def _contrasts(self) -> tuple[float, int]:
        """Return the sum of squares and the degrees of freedom of how far each candidate is, in each round, from its
        earlier mean, beyond the mean change of all. These contrasts of different rounds are independent (Helmert)."""
        squares, freedom = 0.0, 0
        for done in range(1, max(map(len, self.costs))):
            changes = [costs[done] - fmean(costs[:done]) for costs in self.costs if len(costs) > done]
            common = fmean(changes)
            squares += sum((change - common) ** 2 for change in changes) / (1 + 1 / done)
            freedom += len(changes) - 1
        return squares, freedom

    def mean(self, candidate: int) -> float:
        """Return the mean logarithm of a candidate's costs."""
        return fmean(self.costs[candidate])

    def images_per_s(self, candidate: int) -> float:
        """Return the geometric mean of a candidate's images/s."""
        return math.exp(-self.mean(candidate))

    def gain(self, candidate: int, base: int) -> float:
        """Return the logarithm of a candidate's speedup over another, from the rounds of both."""
        pairs = zip(self.costs[base], self.costs[candidate], strict=False)
        return fmean(slow - fast for slow, fast in pairs)

    def ratio(self, candidate: int, base: int) -> Ratio:
        """Return a candidate's speedup over another."""
        gain, half = self.gain(candidate, base), INTERVAL_SIGMAS * self._error(candidate, base)
        return Ratio(value=math.exp(gain), low=math.exp(gain - half), high=math.exp(gain + half))

    def _error(self, candidate: int, base: int) -> float:
        """Return the standard error of a gain."""
        return self.noise * math.sqrt(2 / min(len(self.costs[candidate]), len(self.costs[base])))

    def add_round(self, measured: dict[int, float | None]) -> None:
        """Add a cost for each running candidate."""
        for candidate, cost in measured.items():
            if cost is None:
                self.failed.append(candidate)
                self.running.remove(candidate)
            else:
                self.costs[candidate].append(math.log(cost))

    def disturbed(self) -> list[tuple[int, int]]:
        """Return the running candidates and rounds whose costs were disturbed and not yet repeated: DISTURBED times the
        noise above the candidate's median, without the changes of all. As most changes are not disturbed, the noise is
        estimated from their median."""
        common = self._common()
        if len(common) < 2:
            return []
        residuals = {
            i: [cost - of_all for cost, of_all in zip(self.costs[i], common, strict=True)] for i in self.running
        }
        changes = [abs(after - before) for values in residuals.values() for before, after in pairwise(values)]
        limit = DISTURBED * max(NORMAL * median(changes) / math.sqrt(2), PRIOR_NOISE)
        return [
            (candidate, number)
            for candidate, values in residuals.items()
            for number, cost in enumerate(values)
            if cost - median_low(values) > limit and (candidate, number) not in self.repeated
        ]

    def _common(self) -> list[float]:
        """Return by how much the running candidates' costs have changed in each round since the first: sums of medians,
        which a few disturbed costs do not move."""
        rounds = zip(*(self.costs[i] for i in self.running), strict=True)
        changes = (median(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(rounds))
        return [*accumulate(changes, initial=0.0)] if self.running else []

    def repeat(self, candidate: int, number: int, cost: float | None) -> None:
        """Replace a cost of round `number` by one measured after the last round, without the others' change since."""
        if cost is None:
            self.failed.append(candidate)
            self.running.remove(candidate)
            return
        changes = [self.costs[i][-1] - self.costs[i][number] for i in self.running if i != candidate]
        self.costs[candidate][number] = math.log(cost) - (median(changes) if changes else 0.0)
        self.repeated.add((candidate, number))

    def drop_slower(self) -> None:
        """Drop the candidates that cannot be faster than the leader by more than the resolution."""
        if self.running and self.knows_noise:
            leader = min(self.running, key=self.mean)
            self.running = [
                candidate
                for candidate in self.running
                if candidate == leader
                or self.gain(candidate, leader) + ELIMINATE_SIGMAS * self._error(candidate, leader) > self.resolution
            ]

    def winner(self) -> int:
        """Return the first candidate that is as fast as the best one within the resolution."""
        best = min(self.running, key=self.mean)
        return next(candidate for candidate in self.tried if self.gain(best, candidate) <= self.resolution)


def run_race(
    count: int,
    cost: Cost,
    *,
    seed: int,
    resolution: float,
    stop: Callable[[], bool] = lambda: False,
    watch: Callable[[Race], None] = lambda race: None,
) -> Race:
    """Measure candidates 0 to count - 1 until one is left, MAX_ROUNDS are done, or `stop` returns True.

    `stop` is called before each measurement; an interrupted round does not count, and while disturbed costs are not
    repeated nothing is dropped. `watch` is called with the race after each round.
    """
    race, rng = Race(count=count, resolution=resolution), random.Random(seed)
    for _ in range(MAX_ROUNDS):
        order = rng.sample(race.running, len(race.running))
        measured: dict[int, float | None] = {}
        for candidate in order:
            if stop():
                return race
            measured[candidate] = cost(candidate)
        race.add_round(measured)
        for candidate, number in race.disturbed():
            if stop():
                return race
            if candidate in race.running:
                race.repeat(candidate, number, cost(candidate))
        race.drop_slower()
        watch(race)
        if len(race.running) < 2:
            break
    return race


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A race over candidates, the first of which is the current plan."""

    candidates: Sequence[PlanCandidate]
    race: Race

    @property
    def winner(self) -> PlanCandidate:
        """The fastest plan."""
        return self.candidates[self.race.winner()]

    @property
    def decided(self) -> bool:
        """Whether no other candidate can still win."""
        return len(self.race.running) == 1

    @property
    def sure(self) -> bool:
        """Whether no other candidate can still win, based on enough measurements."""
        return self.decided and self.race.knows_noise

    @property
    def rival(self) -> int | None:
        """The candidate to compare the winner with: the current plan, or, if that has won, the best one with another
        number of workers, or else the best other plan; None if there is none. Another engine is not another plan."""
        race, winner = self.race, self.race.winner()
        winning = plan_values(self.winner)
        rivals = [i for i in race.tried if plan_values(self.candidates[i]) != winning]
        if 0 in rivals:
            return 0
        workers = self.winner.planned.ppn
        rivals = [i for i in rivals if self.candidates[i].planned.ppn != workers] or rivals
        return min(rivals, key=lambda i: -race.ratio(i, winner).value, default=None)

    @property
    def why(self) -> str:
        """The winner's speedup: "measured: 2 x 1 is 1.31 (1.27-1.36) times as fast as 1 x 2"."""
        rival = self.rival
        if rival is None:
            return "measured: no other plan ran"
        name, runner_up = distinct_names(self.winner.name, self.candidates[rival].name)
        return f"measured: {name} is {self.race.ratio(self.race.winner(), rival)} times as fast as {runner_up}"


def plan_values(candidate: PlanCandidate) -> Values:
    """Return a candidate's values except the engine, which is not part of a plan."""
    return tuple((axis, value) for axis, value in candidate.values if axis != "engine")


def distinct_names(name: str, base: str) -> tuple[str, str]:
    """Return two candidates' names without the parts they share, except workers x threads."""
    parts, base_parts = name.split(", "), base.split(", ")
    distinct = [part for i, part in enumerate(parts) if i == 0 or part not in base_parts]
    distinct_base = [part for i, part in enumerate(base_parts) if i == 0 or part not in parts]
    return ", ".join(distinct), ", ".join(distinct_base)


def result_text(result: Result) -> str:
    """Format the candidates, fastest first, relative to the current plan."""
    race, current, has_current = result.race, 0, 0 in result.race.tried
    tried = sorted(race.tried, key=(lambda i: -race.gain(i, current)) if has_current else race.mean)
    notes = {current: ["the current plan"]}
    notes.setdefault(race.winner(), []).append("fastest")
    columns = (
        Column("plan", lambda i: result.candidates[i].name),
        Column("images/s", race.images_per_s, ",.4g"),
        Column(
            "times the current plan", lambda i: race.ratio(i, current) if has_current and i != current else None, str
        ),
        Column("trials", lambda i: len(race.costs[i])),
        Column("", lambda i: ", ".join(notes.get(i, ()))),
    )
    more = [f"({len(tried) - SHOWN} slower ones)"] if len(tried) > SHOWN else []
    failed = [f"failed: {result.candidates[i].name}" for i in race.failed]
    return "\n".join([Rows(columns, tried[:SHOWN]).text(numbers=False), *more, *failed])


def outcome_text(result: Result) -> str:
    """Return a line about the certainty of the result."""
    race = result.race
    trials = plural(race.trials, "trial")
    if not race.knows_noise:
        return f"{trials}: not decided, too few to estimate the noise: give more --time"
    noise = f"a trial varies by {100 * race.noise:.1f} %"
    if result.decided:
        return f"{trials}: no other plan can be faster by more than {100 * race.resolution:g} %; {noise}"
    others = plural(len(race.running) - 1, "other plan")
    return f"{trials}: not decided, {others} may still be faster; {noise}: give more --time, or a quieter machine"


def tuned_record(result: Result, command: str) -> Record | None:
    """Return the record that plan and train use; None for a network of unknown size."""
    winner = result.winner
    plan = winner.planned.plan
    name = tuning_name(plan.request)
    if name is None:
        return None
    values = {
        "ppn": len(plan.workers),
        "comm_cores": plan.request.comm_cores or 0,
        "loader_cores": plan.request.loader_cores or 0,
        "allocator": plan.runtime.allocator,
        "why": result.why,
        "settings": list(winner.settings),
        "decided": result.decided,
        "trials": result.race.trials,
    }
    return new_record(plan.machine, TUNED, name, values, command=command)


def suggestions(changes: Result | None) -> list[str]:
    """Return settings that are faster but change what is trained."""
    if changes is None or (best := changes.race.winner()) == 0:
        return []
    current, winner = changes.candidates[0], changes.winner
    changed = [setting for setting in winner.settings if setting not in current.settings]
    batch, before = (candidate.planned.sizes.global_batch for candidate in (winner, current))
    more = "" if batch == before else f", with a global batch of {batch:,} instead of {before:,}"
    return [
        f"{' '.join(changed)} has {changes.race.ratio(best, 0)} times the images/s{more}; this changes the training: "
        "it is used only if you set it"
    ]


def result_json(result: Result, changes: Result | None) -> str:
    """Format as JSON: {"plans": [...], "changes": [...], "why", "decided", "settings", "suggestions"}.

    Ratios are to the first plan.
    """
    return json.dumps(
        {
            "plans": _rows(result),
            "changes": _rows(changes) if changes else [],
            "why": result.why,
            "decided": result.decided,
            "settings": list(result.winner.settings),
            "trials": result.race.trials + (changes.race.trials if changes else 0),
            "noise": result.race.noise,
            "suggestions": suggestions(changes),
        },
        indent=1,
    )


def _rows(result: Result) -> list[dict[str, object]]:
    """Return each candidate's name, settings, speed and trials; null and 0 for failed ones."""
    race, tried = result.race, {*result.race.tried}
    return [
        {
            "name": candidate.name,
            "settings": list(candidate.settings),
            "images_per_s": race.images_per_s(i) if i in tried else None,
            "times": asdict(race.ratio(i, 0)) if {0, i} <= tried else None,
            "trials": len(race.costs[i]),
            "won": i == race.winner(),
        }
        for i, candidate in enumerate(result.candidates)
    ]


def engines_here(precision: str, axes: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the engines to try, native first if available; torch.compile only if no other axis is varied, as it
    compiles for a minute in each trial."""
    can_compile = compiler(env) is not None
    usable_by_name = {
        "native": can_compile and precision != "float64",
        "eager": True,
        "compile": can_compile and tuple(axes) == ("engine",),
        "ipex": has_ipex() and precision != "float64",
    }
    return tuple(name for name, usable in usable_by_name.items() if usable)


def engine_record(result: Result, command: str) -> Record | None:
    """Return the engine of the fastest plan and its speedup over the first one with this plan; None if engines were not
    compared, or the network's size is unknown."""
    winner = result.winner
    plan = winner.planned.plan
    name, winning = tuning_name(plan.request), plan_values(winner)
    alike = [i for i in result.race.tried if plan_values(result.candidates[i]) == winning]  # except their engine
    tried = {engine: i for i in alike if (engine := dict(result.candidates[i].values).get("engine"))}
    if name is None or len(tried) < 2:
        return None
    first, best = next(iter(tried.items())), dict(winner.values)["engine"]
    why = f"measured: {best} is the fastest of {', '.join(tried)}"
    if first[0] != best:
        why = f"measured: {best} is {result.race.ratio(result.race.winner(), first[1])} times as fast as {first[0]}"
    return new_record(plan.machine, ENGINE, name, {"engine": best, "why": why}, command=command)


def trial_cost(candidate: PlanCandidate, steps: int, env: Mapping[str, str]) -> float | None:
    """Return a candidate's cost, the median step's seconds per image; None after logging a failure.

    Raises KeyboardInterrupt if SIGINT or SIGTERM has stopped the trial.
    """
    spec = Spec(warm_up=WARM_UP, steps=steps, profiled=0, limits=(), quick=False)
    with tempfile.TemporaryDirectory() as folder:
        recipe = candidate.planned.recipe.model_copy(update={"output": str(Path(folder) / "run")})
        planned = replace(candidate.planned, recipe=recipe)
        try:
            first, *_ = measure_training(planned, spec, env, what=candidate.name)
        except (InputError, RunError) as error:
            logger.warning("%s", error)
            return None
    return float(median(step["seconds"] for step in first["steps"]) / first["images"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a tuning run: timed steps per trial, relative difference to ignore, seed of the order, and the
    monotonic time of its end, None for no limit."""

    steps: int
    resolution: float
    seed: int
    deadline: float | None


def available_choices(current: PlannedTraining, axes: Sequence[str], env: Mapping[str, str]) -> Choices:
    """Return the values that this machine offers for a training if these axes are varied."""
    return choices_of(
        current,
        allocators=installed_allocators(target_of(())),
        engines=engines_here(current.recipe.precision, axes, env),
        has_bf16="bf16" in precisions(current.plan.machine.isa),
    )


def plans(current: PlannedTraining, choices: Choices, axes: Sequence[str], env: Mapping[str, str]) -> Candidates:
    """Return the candidates that train exactly the recipe, with other plans."""
    return plan_candidates(current, choices.all([axis for axis in axes if axis not in CHANGING]), env)


def changes(winner: PlanCandidate, choices: Choices, axes: Sequence[str], env: Mapping[str, str]) -> Candidates:
    """Return a plan and candidates with other local batches and precisions, which change what is trained."""
    changing = choices.all([axis for axis in axes if axis in CHANGING])
    return plan_candidates(winner.planned, [(*winner.values, *values) for values in changing], env)


def race_here(
    candidates: Candidates, settings: Settings, env: Mapping[str, str], progress: Callable[[int, int], None]
) -> Result:
    """Measure the candidates. `progress` is called with the trials done and the estimated trials left.

    Raises RunError if no round was completed, or no candidate runs.
    """
    done, remaining, longest_s = 0, len(candidates.tried), 0.0

    def cost(index: int) -> float | None:
        nonlocal done, remaining, longest_s
        started = time.monotonic()
        seconds = trial_cost(candidates.tried[index], settings.steps, env)
        longest_s = max(longest_s, time.monotonic() - started)
        done, remaining = done + 1, max(remaining - 1, 0)
        progress(done, remaining)
        return seconds

    def is_over() -> bool:
        """Whether another trial, if as long as the longest so far, would end too late."""
        return settings.deadline is not None and time.monotonic() + longest_s > settings.deadline

    def watch(race: Race) -> None:
        nonlocal remaining
        remaining = len(race.running) if len(race.running) > 1 else 0  # at least one more round
        progress(done, remaining)

    race = run_race(
        len(candidates.tried), cost, seed=settings.seed, resolution=settings.resolution, stop=is_over, watch=watch
    )
    if not race.running:
        raise RunError("no plan runs: see the reasons above")
    if not race.trials:
        raise RunError(
            f"the time was over before {plural(len(candidates.tried), 'plan')} were tried once: a trial takes up to "
            f"{longest_s:.0f} s, so give more --time or fewer --axes"
        )
    return Result(candidates=candidates.tried, race=race)
