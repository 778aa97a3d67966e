"""Where the planner's rules and the predicted step time disagree, on all machines of the catalog and of a folder.

python -m benchmarks.plan_model [FOLDER]
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner import (
    LOSES,
    RESNET50,
    SMALL_HOST_CORES,
    USUAL_BATCH,
    Plan,
    Request,
    checked_plan,
    choices_of,
    host_model,
    plan_machine,
)
from cputrain.affinity.terminal import markdown_table
from cputrain.affinity.topology import Machine, catalog_machines, described_machines, find_machine

HOSTS, GBIT = (1, 16, 256), (100.0, 200.0)
HEAD = ("machine", "hosts", "Gbit/s", "rules", "loses by the model", "auto", "loses")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A machine on some hosts over some link: its plans by the rules and by auto, and what each loses by the model: the
    largest loss of one of its values, in parts of the speed with the best, and both values."""

    machine: str
    request: Request
    rules: Plan
    auto: Plan
    before: tuple[float, str]
    after: tuple[float, str]

    @property
    def cells(self) -> tuple[str, ...]:
        """The case as a row under HEAD."""
        (loss, what), (left, _) = self.before, self.after
        return (
            self.machine,
            str(self.request.nodes),
            f"{self.request.link_gbit:g}",
            layout(self.rules),
            f"{loss:.1%}: {what}",
            layout(self.auto),
            f"{left:.1%}",
        )


def layout(plan: Plan) -> str:
    """Workers x threads, comm and loader cores of the first worker: "2 x 22, 1 + 1"."""
    first, core_of = plan.workers[0], {pu: core for core in plan.machine.cores for pu in core.pus}
    comm, loader = (len({core_of[pu] for pu in pus}) for pus in (first.comm_pus, first.loader_pus))
    return f"{len(plan.workers)} x {first.intra_op}, {comm} + {loader}"


def worst(plan: Plan) -> tuple[float, str]:
    """Return the largest loss of one of a plan's values, and what would be better."""
    model = host_model(plan)
    assert model is not None, "PyYAML is installed"
    choice = max(choices_of(plan, model), key=lambda each: each.loss)
    return choice.loss, f"{choice.what} {choice.value}, best {choice.best}"


def cases(machines: list[Machine]) -> Iterator[Case]:
    """Plan every machine for all numbers of hosts and links."""
    for machine in machines:
        if len(machine.allowed_cores) <= SMALL_HOST_CORES:  # planned as measured
            continue
        for nodes in HOSTS:
            for gbit in GBIT[: 1 if nodes == 1 else None]:
                request = Request(nodes=nodes, link_gbit=gbit, local_batch=USUAL_BATCH, workload=RESNET50)
                try:
                    rules, auto = plan_machine(machine, request), checked_plan(machine, request)
                except InputError as error:
                    print(f"{machine.name}: {error}", file=sys.stderr)
                    continue
                before, after = worst(rules), worst(auto)
                yield Case(machine=machine.name, request=request, rules=rules, auto=auto, before=before, after=after)


def summary(found: list[Case]) -> str:
    """Count the cases that lose more than LOSES before and after."""
    before, after = (
        sum(loss > LOSES for loss, _ in each)
        for each in ([case.before for case in found], [case.after for case in found])
    )
    return f"{len(found)} cases; more than {LOSES:.0%} lost by the rules: {before}, by auto: {after}"


def main(arguments: list[str]) -> int:
    """Print a row for each case in which the rules lose more than LOSES, and their number before and after."""
    machines = list(catalog_machines())
    for folder in map(Path, arguments):
        for path in described_machines(folder):
            try:
                machines.append(find_machine(str(path)))
            except InputError as error:
                print(f"{path.name}: {error}", file=sys.stderr)
    found = list(cases(machines))
    print(markdown_table([HEAD, *(case.cells for case in found if max(case.before[0], case.after[0]) > LOSES)]))
    print(f"\n{summary(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
