"""Several copies of a program on one host that know nothing of each other, each on cores of its own."""

from dataclasses import replace

from affinity.errors import InputError
from affinity.planner.core_groups import uniform_groups
from affinity.planner.request import Request
from affinity.planner.usable_cores import usable_cores
from affinity.topology.cpuset import parse_list
from affinity.topology.machine import Machine
from cputrain.launch.options import PlanningOptions, request_of_options

LATENCY, THROUGHPUT = "latency", "throughput"
LATENCY_CORES = 4  # of each copy, as in ipexrun and torch.backends.xeon.run_cpu


def with_instances(options: PlanningOptions, wanted: int | str, machine: Machine) -> PlanningOptions:
    """The options for so many copies; LATENCY: one for every 4 cores, THROUGHPUT: one for each NUMA node.

    No cores are reserved for communication or for loading images, unless they are requested. Raises InputError where
    options contradict this.
    """
    if not options.on_this_host:
        raise InputError("--instances starts independent programs on this host: remove --hosts, --hostfile and --nodes")
    if options.ppn is not None or options.launcher not in ("auto", "local"):
        raise InputError("--instances is a number of workers itself: remove --ppn and --launcher")
    options = replace(options, comm_cores=options.comm_cores or 0, loader_cores=options.loader_cores or 0)
    groups = uniform_groups(usable_cores(machine, request_of_options(options, Request())).machine.allowed_cores)
    if wanted == THROUGHPUT:
        return replace(options, ppn=len({group[0].numa_node for group in groups}))
    if wanted == LATENCY:
        threads = min(LATENCY_CORES, max(map(len, groups)))
        return replace(options, ppn=max(1, sum(len(group) // threads for group in groups)), threads=threads)
    return replace(options, ppn=wanted)


def chosen(numbers: str | None, count: int) -> tuple[int, ...]:
    """The copies to start, of `count`: all, or those of a list such as 0,2-3. Raises InputError for others."""
    if numbers is None:
        return tuple(range(count))
    try:
        listed = parse_list(numbers)
    except ValueError as error:
        raise InputError(f"--instance {numbers[:30]!r}: {error}: give numbers as in 0,2-3") from None
    if not listed or listed[-1] >= count:
        raise InputError(f"--instance {numbers[:30]!r}: the plan has instances 0 to {count - 1}: give numbers of these")
    return listed
