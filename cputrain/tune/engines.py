"""The engines that a tuning tries, and what is kept of it for `engine=auto`."""

from collections.abc import Mapping, Sequence

from affinity.planner.defaults import tuning_name
from affinity.planner.records import ENGINE, Record
from cputrain.measurements import new_record
from cputrain.native_build import compiler
from cputrain.training.ipex import has_ipex
from cputrain.tune.candidates import Values
from cputrain.tune.result import Result


def engines_here(precision: str, axes: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The engines to try, native first if it can be: torch.compile only where nothing else is varied, because it takes
    a minute to compile in each trial."""
    can_compile = compiler(env) is not None
    known = {
        "native": can_compile and precision != "float64",
        "eager": True,
        "compile": can_compile and tuple(axes) == ("engine",),
        "ipex": has_ipex() and precision != "float64",
    }
    return tuple(name for name, usable in known.items() if usable)


def engine_record(result: Result, command: str) -> Record | None:
    """The engine of the fastest plan, and by how much it is faster than the first one with this plan; None where
    engines were not compared, or the network's size is not known."""
    winner = result.winner
    plan = winner.planned.plan
    name, tried = tuning_name(plan.request), _tried(result)
    if name is None or len(tried) < 2:
        return None
    first, best = next(iter(tried.items())), dict(winner.values)["engine"]
    why = f"measured: {best} is the fastest of {', '.join(tried)}"
    if first[0] != best:
        why = f"measured: {best} is {result.race.ratio(result.race.winner(), first[1])} times as fast as {first[0]}"
    return new_record(plan.machine, ENGINE, name, {"engine": best, "why": why}, command=command)


def _tried(result: Result) -> dict[str, int]:
    """The engines that were measured with the winner's plan, and their candidates."""

    def other_values(values: Values) -> Values:
        return tuple(pair for pair in values if pair[0] != "engine")

    race, own = result.race, other_values(result.winner.values)
    return {
        dict(candidate.values)["engine"]: i
        for i, candidate in enumerate(result.candidates)
        if other_values(candidate.values) == own
        and "engine" in dict(candidate.values)
        and race.costs[i]
        and i not in race.failed
    }
