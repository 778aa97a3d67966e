"""A plan compared with others by the predicted step time: what the next best numbers cost, and faster ones where a rule
loses.

The model is that of `cputrain simulate` (step_time.py): the same layers, constants, links and speed of the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.domains import usable_cores
from cputrain.affinity.planner.layouts import MAX_CORES_PER_WORKER, SMALL_HOST_CORES, uniform_groups
from cputrain.affinity.planner.plan import NOTHING_CHOSEN, Chosen, NextBest, Plan, plan_machine
from cputrain.affinity.planner.request import COMM_CORES, LOADER_CORES, WORKERS_PER_HOST, Reason, Request, with_defaults
from cputrain.affinity.planner.rules import MAX_COMM_CORES
from cputrain.affinity.wording import plural
from cputrain.predict.host import HostModel, host_model, slowest_part

LOSES = 0.03  # a rule's number stays if it is predicted to lose no more, which is below what the model can tell
PUBLISHED = "not taken: published trainings reserve at least one comm core"
# A Xeon Phi's core moves messages so slowly that one for them pays for certain; of others the model is not sure.
ONE_HOST = "not taken: the model was not measured with comm cores on one host"
COMPUTING = "computing cores per host"
NOUNS = {WORKERS_PER_HOST: "worker", COMM_CORES: "comm core", LOADER_CORES: "loader core", COMPUTING: "computing core"}
FIELDS = {WORKERS_PER_HOST: "ppn", COMM_CORES: "comm_cores", LOADER_CORES: "loader_cores"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedChoice:
    """A decision: what it is, its value, and the predicted images/s of a host by value.

    `refused` are values that published practice speaks against, with the reason: they are shown, but not taken. `kept`
    is the reason for which no other value is taken; "" if the best one is.
    """

    what: str
    value: int
    rates: Mapping[int, float]
    refused: Mapping[int, str] = field(default_factory=dict)
    kept: str = ""

    @property
    def best(self) -> int:
        """The value with the most images/s that is not refused, this one among equals."""
        return max(self.rates.keys() - self.refused.keys(), key=lambda value: (self.rates[value], value == self.value))

    @property
    def loss(self) -> float:
        """The part of the best value's images/s that this one loses."""
        return 1 - self.rates[self.value] / self.rates[self.best]

    @property
    def next_best(self) -> NextBest | None:
        """The best other value, and how much slower it is, in percent; negative if it is faster."""
        alternatives = [value for value in self.rates if value != self.value]
        if not alternatives:
            return None
        runner_up = max(alternatives, key=lambda value: self.rates[value])
        slower = 100 * (1 - self.rates[runner_up] / self.rates[self.value])
        return NextBest(
            what=self.what, value=self.value, other=runner_up, slower_percent=round(slower, 1) + 0.0
        )  # not -0

    @property
    def shown(self) -> str:
        """The next best in words, with the reason for which it is not taken if it is clearly faster; "" if none is."""
        if (best := self.next_best) is None:
            return ""
        why = self.refused.get(best.other, self.kept) if best.slower_percent < -100 * LOSES else ""
        return f"{plural(best.other, NOUNS[self.what])} {_slower(best.slower_percent)}{f' ({why})' if why else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan with the model of its host, compared with plans that differ in one number; `chosen` as in plan_machine."""

    plan: Plan
    model: HostModel
    chosen: Chosen

    @property
    def images_per_s(self) -> float:
        """Images/s of a host under the plan."""
        return self.model.images_per_s(self.model.of(self.plan))

    def choices(self) -> tuple[ComparedChoice, ...]:
        """Compare the plan's numbers of workers, comm, loader and computing cores with others, each alone."""
        cores = (LOADER_CORES,) if self._full.comm_siblings else (COMM_CORES, LOADER_CORES)
        choices = (self._workers(), *map(self._cores, cores), self._computing())
        return tuple(replace(choice, kept=self._kept(choice.what)) for choice in choices if choice is not None)

    @property
    def _full(self) -> Request:
        return with_defaults(self.plan.machine, self.plan.request, self.plan.measured)[0]

    def _kept(self, what: str) -> str:
        """Return why a number of the rules stays however slow it is; "" if it does not."""
        request = self.plan.request
        if request.workload is None or request.workload.assumed:
            return "not taken: the network is assumed"
        if what == COMPUTING:
            return "not taken: {e_cores=off} takes it"
        if getattr(self._full, FIELDS[what]) is not None or FIELDS[what] in self.chosen:
            return "not taken: the number is set, tuned or limited by other hosts"
        if what == WORKERS_PER_HOST and request.global_batch is None:
            return "not taken: other workers change the images of a step unless batch.global sets them"
        return ""

    def _plan_with(self, *, e_cores: str | None = None, **numbers: int) -> Plan | None:
        """Return the plan with other numbers; None if it does not fit the host or its memory."""
        plan, workload = self.plan, self.plan.request.workload
        counted = workload and replace(workload, assumed=False)  # refused if it does not fit
        requested: dict[str, Any] = {
            field: number for field, number in numbers.items() if getattr(plan.request, field) is not None
        }
        request = replace(plan.request, workload=counted, e_cores=e_cores or plan.request.e_cores, **requested)
        chosen = {
            **self.chosen,
            **{field: (number, "compared") for field, number in numbers.items() if field not in requested},
        }
        try:
            return plan_machine(plan.machine, request, plan.runtime, plan.measured, chosen)
        except InputError:
            return None

    def _workers(self) -> ComparedChoice:
        """Compare the number of workers with half, twice, one per package, and one fewer and more, if they fit and
        workers stay equal; with a global batch, those that divide it if the plan's number does.

        Each has its comm and loader cores by the rules, or no loader cores if that is faster and nothing sets them.
        """
        plan, request = self.plan, self.plan.request
        current, cores = len(plan.workers), usable_cores(plan.machine, request).machine.allowed_cores
        near = {current // 2, 2 * current, len({core.package for core in cores})}
        if len(uniform_groups(cores)) == 1:
            near |= {count for count in (current - 1, current + 1) if count and len(cores) % count == 0}
        limit = request.most_per_host or len(cores)
        images = request.global_batch
        if images is not None and images % (request.nodes * current) == 0:
            near = {count for count in near if count and images % (request.nodes * count) == 0}
        rates, refused = {current: self._best_rate(plan)}, {}
        for count in sorted(count for count in near - {current} if 1 <= count <= min(len(cores), limit)):
            alternative = self._plan_with(ppn=count)
            if alternative is not None and len(alternative.workers) == count:
                rates[count] = self._best_rate(alternative)
                if slowest_part(alternative)["comm_cores"] < min(1, slowest_part(plan)["comm_cores"]):
                    refused[count] = PUBLISHED
                elif count < current and len(cores) > MAX_CORES_PER_WORKER * count:
                    refused[count] = "not taken: more threads in a worker were slower than the model has them"
        return ComparedChoice(what=WORKERS_PER_HOST, value=current, rates=rates, refused=refused)

    def _best_rate(self, plan: Plan) -> float:
        """Return the images/s of a plan with its loader cores, or with none if these are free and that is faster."""
        plans = [plan]
        if not self._kept(LOADER_CORES) and slowest_part(plan)["loader_cores"]:
            plans.append(self._plan_with(ppn=len(plan.workers), loader_cores=0) or plan)
        return max(self.model.images_per_s(self.model.of(plan)) for plan in plans)

    def _cores(self, what: str) -> ComparedChoice:
        """Compare the number of comm or loader cores with smaller ones and larger ones."""
        setup = self.model.of(self.plan)
        current, limit = (
            (setup.comm_cores, MAX_COMM_CORES) if what == COMM_CORES else (setup.loader_cores, setup.loader_cores + 1)
        )
        rates = {current: self.images_per_s}
        for count in range(max(current, limit) + 1) if setup.ranks > 1 or what == LOADER_CORES else ():
            numbers: dict[str, Any] = {"ppn": len(self.plan.workers), FIELDS[what]: count}
            alternative = self._plan_with(**numbers) if count != current else None
            planned = None if alternative is None else self.model.of(alternative)
            if planned is not None and count == (planned.comm_cores if what == COMM_CORES else planned.loader_cores):
                rates[count] = self.model.images_per_s(planned)
        refused = {0: PUBLISHED} if what == COMM_CORES and current else {}
        if what == COMM_CORES and setup.hosts == 1 and not setup.phi:
            refused = dict.fromkeys((count for count in rates if count > current), ONE_HOST)
        return ComparedChoice(what=what, value=current, rates=rates, refused=refused)

    def _computing(self) -> ComparedChoice | None:
        """Compare the cores that compute with those of the fastest type alone; None if the plan uses no others."""
        if len({core.speed for core in self.plan.machine.allowed_cores}) == 1:
            return None
        fast = self._plan_with(e_cores="off")
        current = self.plan.computing_cores
        if fast is None or fast.computing_cores == current:
            return None
        rates = {current: self.images_per_s, fast.computing_cores: self.model.images_per_s(self.model.of(fast))}
        return ComparedChoice(what=COMPUTING, value=current, rates=rates)


def compare_plan(plan: Plan, chosen: Chosen = NOTHING_CHOSEN) -> Plan:
    """Let a number that is predicted to be clearly faster replace the rule's in a plan of `plan_machine`, of which this
    is the argument `compare`. The plan has the predicted cost of the next best numbers.

    A number stays if the request, a profile, a measurement or `chosen` sets it, if the network is assumed, and the
    number of workers also without a global batch. On one host only a Xeon Phi gets comm cores.
    """
    plan, choices = compared_plan(plan, chosen)
    return replace(plan, next_best=tuple(choice.next_best for choice in choices if choice.next_best is not None))


def compared_plan(plan: Plan, chosen: Chosen = NOTHING_CHOSEN) -> tuple[Plan, tuple[ComparedChoice, ...]]:
    """Return the plan of `compare_plan` without its next best numbers, and the choices that they are from; no choices
    where the model does not apply."""
    # On a few cores a worker for each was measured to be the fastest, which the model does not have.
    if plan.oversubscribed or len(usable_cores(plan.machine, plan.request).machine.allowed_cores) <= SMALL_HOST_CORES:
        return plan, ()
    rules = Comparison(plan=plan, model=host_model(plan), chosen=chosen)
    by_rules = rules.choices()
    comparison, choices = _faster(rules, by_rules)
    # A sum of numbers that each gain enough can gain less.
    if comparison is not rules and comparison.images_per_s * (1 - LOSES) <= rules.images_per_s:
        comparison, choices = rules, by_rules
    reasons = _reasons(comparison, choices)
    return replace(comparison.plan, reasons=(*comparison.plan.reasons, *reasons)), choices


def _faster(rules: Comparison, choices: tuple[ComparedChoice, ...]) -> tuple[Comparison, tuple[ComparedChoice, ...]]:
    """Replace the numbers of rules that lose more than LOSES, with reasons: the largest loss first, as each changes
    what the others lose. Return the plan that loses no more, and its choices."""
    comparison = rules
    while losing := [choice for choice in choices if not choice.kept and choice.loss > LOSES]:
        lost = max(losing, key=lambda choice: choice.loss)
        rule, best = lost.rates[lost.value], lost.rates[lost.best]
        why = (
            f"the rule's {lost.value} is predicted to be {lost.loss:.1%} slower: {rule:.3g} against {best:.3g} "
            "images/s a host, by the model of `cputrain simulate`"
        )
        plan, chosen = comparison.plan, {**comparison.chosen, FIELDS[lost.what]: (lost.best, why)}
        plan = plan_machine(plan.machine, plan.request, plan.runtime, plan.measured, chosen)
        comparison = replace(comparison, plan=plan, chosen=chosen)
        choices = comparison.choices()
    return comparison, choices


def _reasons(comparison: Comparison, choices: tuple[ComparedChoice, ...]) -> list[Reason]:
    """Explain the predicted cost of the next best values, and of a profile."""
    plan, model = comparison.plan, comparison.model
    source = f"predicted by the model of `cputrain simulate` for the same images per step; the speed is {model.source}"
    reasons = []
    if value := ", ".join(filter(None, (choice.shown for choice in choices))):
        reasons.append(Reason(what="next best", value=value, why=source))
    if plan.request.profile != "auto":
        alone = replace(plan.request, profile="auto")
        try:
            compared, _ = compared_plan(plan_machine(plan.machine, alone, plan.runtime, plan.measured))
        except InputError as error:  # other settings fit only the profile's number of workers or cores
            reasons.append(
                Reason(what="without the profile", value="no plan for these settings", why=str(error.args[0]))
            )
        else:
            slower = 100 * (1 - model.images_per_s(model.of(compared)) / comparison.images_per_s)
            reasons.append(Reason(what="without the profile", value=_slower(round(slower, 1)), why=source))
    return reasons


def _slower(percent: float) -> str:
    return f"{percent:g} % slower" if percent >= 0 else f"{-percent:g} % faster"
