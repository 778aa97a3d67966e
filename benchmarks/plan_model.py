"""Where the planner's rules and the predicted step time disagree, on all machines of the catalog and of a folder: the
plan by the rules alone, and the plan of `cputrain plan`, which takes the faster number.

python -m benchmarks.plan_model [FOLDER]
"""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.layouts import SMALL_HOST_CORES
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.planner.workload import RESNET50, USUAL_BATCH
from cputrain.affinity.terminal import markdown_table
from cputrain.affinity.topology.catalog import catalog_machines, described_machines, find_machine
from cputrain.affinity.topology.machine import Machine
from cputrain.predict.host import host_model
from cputrain.predict.next_best import LOSES, ComparedChoice, Comparison, compared_plan

HOSTS, GBIT = (1, 16, 256), (100.0, 200.0)
HEAD = ("machine", "hosts", "Gbit/s", "by the rules", "slower than the best number", "plan", "still slower")
KNOWN = replace(RESNET50, name="resnet50 at 224 x 224", assumed=False)  # plans of an assumed network keep the rules'


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A machine on some hosts over some link: its plan by the rules, and that of `cputrain plan`, each with the largest
    loss of one of its numbers by the model, in parts of the speed with the best number, and both numbers."""

    machine: str
    request: Request
    rules: Plan
    lost: tuple[float, str]
    plan: Plan
    still_lost: tuple[float, str]

    @property
    def cells(self) -> tuple[str, ...]:
        """The case as a row under HEAD."""
        request = self.request
        pairs = (self.rules, self.lost), (self.plan, self.still_lost)
        each = [cell for plan, (loss, numbers) in pairs for cell in (layout(plan), f"{loss:.1%}: {numbers}")]
        return self.machine, str(request.nodes), f"{request.link_gbit:g}", *each


def layout(plan: Plan) -> str:
    """Workers x threads, comm and loader cores of the first worker: "2 x 22, 1 + 1"."""
    first, core_of = plan.workers[0], {pu: core for core in plan.machine.cores for pu in core.pus}
    comm, loader = (len({core_of[pu] for pu in pus}) for pus in (first.comm_pus, first.loader_pus))
    return f"{len(plan.workers)} x {first.intra_op}, {comm} + {loader}"


def worst(choices: tuple[ComparedChoice, ...]) -> tuple[float, str]:
    """Return the largest loss of one of a plan's values, and what would be better."""
    choice = max(choices, key=lambda each: each.loss)
    return choice.loss, f"{choice.what} {choice.value}, best {choice.best}"


def cases(machines: list[Machine]) -> Iterator[Case]:
    """Plan every machine for all numbers of hosts and links."""
    for machine in machines:
        if len(machine.allowed_cores) <= SMALL_HOST_CORES:  # planned as measured
            continue
        for nodes in HOSTS:
            for gbit in GBIT[: 1 if nodes == 1 else None]:
                request = Request(nodes=nodes, link_gbit=gbit, local_batch=USUAL_BATCH, workload=KNOWN)
                try:
                    rules = plan_machine(machine, request)
                    plan, choices = compared_plan(rules)
                except InputError as error:
                    print(f"{machine.name}: {error}", file=sys.stderr)
                    continue
                yield Case(
                    machine=machine.name,
                    request=request,
                    rules=rules,
                    lost=worst(Comparison(plan=rules, model=host_model(rules), chosen={}).choices()),
                    plan=plan,
                    still_lost=worst(choices),
                )


def summary(found: list[Case]) -> str:
    """Count the cases that lose more than LOSES, by what loses, by the rules and with the faster numbers."""

    def counted(lost: list[tuple[float, str]]) -> str:
        kinds = Counter(numbers.partition(" per")[0] for loss, numbers in lost if loss > LOSES)
        return f"{kinds.total()}" + "".join(f", {count} by the {kind}" for kind, count in kinds.most_common())

    before, after = counted([case.lost for case in found]), counted([case.still_lost for case in found])
    return f"{len(found)} cases; more than {LOSES:.0%} lost by the rules in {before}; by the plan in {after}"


def main(arguments: list[str]) -> int:
    """Print a row for each case in which the rules lose more than LOSES, and their number."""
    machines = list(catalog_machines())
    for folder in map(Path, arguments):
        for path in described_machines(folder):
            try:
                machines.append(find_machine(str(path)))
            except InputError as error:
                print(f"{path.name}: {error}", file=sys.stderr)
    found = list(cases(machines))
    print(markdown_table([HEAD, *(case.cells for case in found if case.lost[0] > LOSES)]))
    print(f"\n{summary(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
