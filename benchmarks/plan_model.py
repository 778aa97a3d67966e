"""Where the planner's rules and the predicted step time disagree, on all machines of the catalog and of a folder.

python -m benchmarks.plan_model [FOLDER]
"""

import sys
from collections import Counter
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
    choices_of,
    host_model,
    plan_machine,
)
from cputrain.affinity.terminal import markdown_table
from cputrain.affinity.topology import Machine, catalog_machines, described_machines, find_machine

HOSTS, GBIT = (1, 16, 256), (100.0, 200.0)
HEAD = ("machine", "hosts", "Gbit/s", "plan", "slower than the best number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A machine on some hosts over some link, its plan, and the largest loss of one of the plan's numbers by the model:
    in parts of the speed with the best number, and both numbers."""

    machine: str
    request: Request
    plan: Plan
    loss: float
    numbers: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The case as a row under HEAD."""
        request = self.request
        lost = f"{self.loss:.1%}: {self.numbers}"
        return self.machine, str(request.nodes), f"{request.link_gbit:g}", layout(self.plan), lost


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
                    plan = plan_machine(machine, request)
                except InputError as error:
                    print(f"{machine.name}: {error}", file=sys.stderr)
                    continue
                loss, numbers = worst(plan)
                yield Case(machine=machine.name, request=request, plan=plan, loss=loss, numbers=numbers)


def summary(found: list[Case]) -> str:
    """Count the cases that lose more than LOSES, by what loses."""
    kinds = Counter(case.numbers.partition(" per")[0] for case in found if case.loss > LOSES)
    each = ", ".join(f"{count} by the {kind}" for kind, count in kinds.most_common())
    return f"{len(found)} cases; more than {LOSES:.0%} lost in {kinds.total()}: {each}"


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
    print(markdown_table([HEAD, *(case.cells for case in found if case.loss > LOSES)]))
    print(f"\n{summary(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
