"""The result of a tuning: a table of the candidates, what is kept for the plan, and what would change the training."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from affinity.planner.defaults import tuning_name
from affinity.planner.records import TUNED, Record
from affinity.text_table import align_columns
from affinity.wording import counted
from cputrain.measurements import new_record
from cputrain.tune.candidates import PlanCandidate, Values
from cputrain.tune.race import Race

SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A race over candidates, of which the first is the present plan."""

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
        """Whether no other candidate can still win, judged by more measurements than a few."""
        return self.decided and self.race.knows_noise

    @property
    def rival(self) -> int | None:
        """The candidate to name beside the winner: the present plan, or if that has won the best one with another
        number of workers, else of all other plans; None where there is none. Another engine is no other plan."""
        race, winner = self.race, self.race.winner()
        own = plan_values(self.winner)
        tried = [i for i in range(len(self.candidates)) if race.costs[i] and i not in race.failed]
        others = [i for i in tried if plan_values(self.candidates[i]) != own]
        if 0 in others:
            return 0
        workers = self.winner.planned.ppn
        others = [i for i in others if self.candidates[i].planned.ppn != workers] or others
        return min(others, key=lambda i: -race.ratio(i, winner).value, default=None)

    @property
    def why(self) -> str:
        """By how much the winner is faster: "measured: 2 x 1 is 1.31 (1.27-1.36) times as fast as 1 x 2"."""
        rival = self.rival
        if rival is None:
            return "measured: no other plan ran"
        name, other = distinct_names(self.winner.name, self.candidates[rival].name)
        return f"measured: {name} is {self.race.ratio(self.race.winner(), rival)} times as fast as {other}"


def plan_values(candidate: PlanCandidate) -> Values:
    """A candidate's values of what a plan decides: all but the engine."""
    return tuple((axis, value) for axis, value in candidate.values if axis != "engine")


def distinct_names(name: str, other: str) -> tuple[str, str]:
    """Two candidates' names without what they share, but always with workers x threads."""
    parts, others = name.split(", "), other.split(", ")
    kept = [part for i, part in enumerate(parts) if i == 0 or part not in others]
    kept_others = [part for i, part in enumerate(others) if i == 0 or part not in parts]
    return ", ".join(kept), ", ".join(kept_others)


def result_text(result: Result) -> str:
    """The candidates, the fastest first, relative to the present plan."""
    race, own = result.race, 0
    tried = [i for i in range(len(result.candidates)) if race.costs[i] and i not in race.failed]
    tried.sort(key=race.mean_beside(own) if own in tried else race.mean)
    rows = [("plan", "images/s", "times the present plan", "trials", "")]
    for i in tried[:SHOWN]:
        ratio = str(race.ratio(i, own)) if own in tried and i != own else ""
        notes = ["the present plan" if i == own else "", "fastest" if i == race.winner() else ""]
        rate = f"{race.images_per_s(i):,.4g}"
        rows.append((result.candidates[i].name, rate, ratio, str(len(race.costs[i])), ", ".join(filter(None, notes))))
    more = [f"({len(tried) - SHOWN} slower ones)"] if len(tried) > SHOWN else []
    failed = [f"failed: {result.candidates[i].name}" for i in race.failed]
    return "\n".join([align_columns(rows), *more, *failed])


def outcome_text(result: Result) -> str:
    """One line: how sure the result is."""
    race = result.race
    trials = counted(race.trials, "trial")
    if not race.knows_noise:
        return f"{trials}: not decided, too few to tell how much a trial varies: give more --time"
    noise = f"a trial varies by {100 * race.noise:.1f} %"
    if result.decided:
        return f"{trials}: no other plan can be faster by more than {100 * race.resolution:g} %; {noise}"
    others = counted(len(race.running) - 1, "other plan")
    return f"{trials}: not decided, {others} may be faster still; {noise}: give more --time, or a quieter machine"


def tuned_record(result: Result, command: str) -> Record | None:
    """What plan and train use of a result; None for a network whose size is not known."""
    winner = result.winner
    plan = winner.planned.plan
    name = tuning_name(plan.request)
    if name is None:
        return None
    workers = plan.workers
    values = {
        "ppn": len(workers),
        "comm_cores": plan.request.comm_cores or 0,
        "loader_cores": plan.request.loader_cores or 0,
        "allocator": plan.runtime.allocator,
        "why": result.why,
        "settings": list(winner.settings),
        "decided": result.decided,
        "trials": result.race.trials,
    }
    return new_record(plan.machine, TUNED, name, values, command=command)


def suggestions(found: Result, others: Result | None) -> list[str]:
    """What else is faster, as settings: changes of the training itself."""
    lines = []
    if others is not None and (best := others.race.winner()) != 0:
        winner = others.winner
        changed = [setting for setting in winner.settings if setting not in others.candidates[0].settings]
        sizes, own = winner.planned.sizes, others.candidates[0].planned.sizes
        batch = (
            "" if sizes == own else f", with a global batch of {sizes.global_batch:,} instead of {own.global_batch:,}"
        )
        lines.append(
            f"{' '.join(changed)} has {others.race.ratio(best, 0)} times the images/s{batch}; it changes the training: "
            "nothing uses it unless you set it"
        )
    return lines


def result_json(found: Result, others: Result | None) -> str:
    """{"plans": [...], "changes": [...], "why", "decided", "settings", "suggestions"}; ratios are to the first plan."""
    return json.dumps(
        {
            "plans": _rows(found),
            "changes": _rows(others) if others else [],
            "why": found.why,
            "decided": found.decided,
            "settings": list(found.winner.settings),
            "trials": found.race.trials + (others.race.trials if others else 0),
            "noise": found.race.noise,
            "suggestions": suggestions(found, others),
        },
        indent=1,
    )


def _rows(result: Result) -> list[dict[str, object]]:
    """Each candidate's name, settings, speed and trials; those of failed ones are null and 0."""
    race, rows = result.race, list[dict[str, object]]()
    for i, candidate in enumerate(result.candidates):
        ran = bool(race.costs[i]) and i not in race.failed
        compared = ran and bool(race.costs[0]) and 0 not in race.failed
        rows.append(
            {
                "name": candidate.name,
                "settings": list(candidate.settings),
                "images_per_s": race.images_per_s(i) if ran else None,
                "times": asdict(race.ratio(i, 0)) if compared else None,
                "trials": len(race.costs[i]),
                "won": i == race.winner(),
            }
        )
    return rows
