"""Planning options -> planned host, and several instances of a program on one host."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cputrain.affinity.errors import InputError, RequestError
from cputrain.affinity.kernel.running import NOT_SHARED, plan_beside
from cputrain.affinity.planner.domains import uniform_groups, usable_cores
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.records import plan_this_machine, read_measured
from cputrain.affinity.planner.request import CPUS, JOB_OPTIONS, OPTIONS, Request
from cputrain.affinity.ranks.host_names import LOCALHOST
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import Machine, format_list, parse_list
from cputrain.mpi.fabric import Fabric, Setting, fabric_between
from cputrain.mpi.hosts.groups import Cluster, HostGroup, one_group, plan_cluster
from cputrain.mpi.launchers.detect import find_launcher, newest_version, without_path
from cputrain.mpi.launchers.launcher import InstalledLauncher
from cputrain.mpi.launchers.programs import INTEL_MPI

THIS_MACHINE, THIS_HOST = "this", (LOCALHOST,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """What a user requests of a plan.

    `given`: the value of each of OPTIONS by its name; None: the recipe or the planner's rules decide. `real_hosts`: the
    hosts' names are real, not placeholders for a number of hosts. `hostfile_format`: how their list was written.
    `groups`: the hosts and the machine of each group, where hosts differ. `components`: the hosts of each component of
    the heterogeneous Slurm job around this process. `pods`: this host is one of so many.
    """

    machine: str
    hosts: tuple[str, ...]
    given: Mapping[str, Any]
    launcher: str
    bind: str
    fabric: str
    real_hosts: bool
    hostfile_format: str
    groups: tuple[tuple[tuple[str, ...], str], ...] = ()
    components: tuple[tuple[str, ...], ...] = ()
    pods: int = 1

    @property
    def on_this_host(self) -> bool:
        """Whether the job is this host alone."""
        return self.hosts == THIS_HOST

    @property
    def recipe_settings(self) -> tuple[str, ...]:
        """The options as settings of a recipe, for a plan that is made later: "plan.threads=4"."""
        given = ((option, self.given[option.name]) for option in JOB_OPTIONS)
        return tuple(
            f"plan.{option.name}={format_list(value) if option.kind == CPUS else value}"
            for option, value in given
            if value is not None
        )

    def with_given(self, **values: Any) -> "PlanningOptions":
        """The same with these values of OPTIONS."""
        return replace(self, given={**self.given, **values})


def network_of(options: PlanningOptions) -> Fabric:
    """The fabric between the hosts: as requested, or this host's own; for another machine that of the published run."""
    elsewhere = None if options.machine == THIS_MACHINE else "opa"
    return fabric_between(len(options.hosts) * options.pods, options.fabric, elsewhere=elsewhere)


def network_settings(options: PlanningOptions) -> tuple[Setting, ...]:
    """The variables that the fabric needs between several hosts."""
    return network_of(options).settings if len(options.hosts) > 1 else ()


def request_of_options(options: PlanningOptions, base: Request) -> Request:
    """The options over `base`, which is a recipe's request or the default one."""
    changes: dict[str, Any] = {"nodes": len(options.hosts) * options.pods, "link_gbit": network_of(options).link_gbit}
    given = ((option, options.given[option.name]) for option in OPTIONS if hasattr(base, option.name))
    changes |= {option.name: option.requested(value) for option, value in given if value is not None}
    return replace(base, **changes)


def plan_host(options: PlanningOptions, base: Request, env: Mapping[str, str], command: tuple[str, ...] = ()) -> Plan:
    """The plan of one host of the requested machine. Raises InputError where the request does not fit.

    `command` is the program that will run: its Python's libraries decide the OpenMP runtime and the allocator.
    """
    request = request_of_options(options, base)
    if options.machine == THIS_MACHINE and options.on_this_host:
        return plan_beside(request, env, command, share=bool(options.given["share"]))
    if options.given["share"]:
        raise RequestError(NOT_SHARED)
    if options.machine == THIS_MACHINE:
        return plan_this_machine(request, env, command)
    # The other machine's libraries cannot be inspected here; its ranks run this same Python, with torch's libgomp.
    machine = find_machine(options.machine)
    return plan_machine(machine, request, Runtime(), read_measured(machine, request, env))


def plan_hosts(
    options: PlanningOptions, base: Request, env: Mapping[str, str], command: tuple[str, ...] = ()
) -> Cluster:
    """The plans of all hosts: one plan, or one for each group of hosts that differ."""
    if not options.groups:
        plan = plan_host(options, base, env, command)
        if not options.components:
            return one_group(options.hosts, plan)
        return Cluster(
            groups=tuple(HostGroup(hosts=hosts, plan=plan) for hosts in options.components if hosts), warnings=()
        )
    if options.given["share"]:
        raise RequestError(NOT_SHARED)
    groups = [(hosts, find_machine(machine)) for hosts, machine in options.groups]
    return plan_cluster(groups, request_of_options(options, base))


def het_groups(options: PlanningOptions, cluster: Cluster) -> tuple[int, ...]:
    """The number of each group's component of the heterogeneous Slurm job; () where the groups are no components."""
    components = {number: hosts for number, hosts in enumerate(options.components) if hosts}
    return tuple(components) if tuple(components.values()) == tuple(group.hosts for group in cluster.groups) else ()


def planned_launcher(options: PlanningOptions, env: Mapping[str, str]) -> InstalledLauncher:
    """The launcher of a job that is only planned: as installed here, or else its newest version.

    What is on PATH here says nothing about another machine: without a request that gets Intel MPI.
    """
    requested = options.launcher
    if requested == "auto" and options.machine != THIS_MACHINE:
        return newest_version(INTEL_MPI.name)
    try:
        return without_path(find_launcher(requested, env))
    except InputError:
        return newest_version(INTEL_MPI.name if requested == "auto" else requested)


def assumed(options: PlanningOptions, launcher: InstalledLauncher) -> str:
    """What a job that is only planned takes for granted, and what to give instead; "" where nothing is."""
    guesses = []
    if len(options.hosts) > 1 and not options.real_hosts:
        guesses.append(f"hosts named {options.hosts[0]} to {options.hosts[-1]} (--hosts or --hostfile gives others)")
    if options.launcher == "auto" and launcher == newest_version(launcher.launcher.name):
        guesses.append(f"{launcher.launcher.title} (--launcher gives another)")
    if len(options.hosts) > 1 and options.fabric == "auto" and options.machine != THIS_MACHINE:
        guesses.append(f"fabric {network_of(options).name} (--fabric gives another)")
    return f"assumed: {', '.join(guesses)}" if guesses else ""


LATENCY, THROUGHPUT = "latency", "throughput"
LATENCY_CORES = 4  # of each copy, as in ipexrun and torch.backends.xeon.run_cpu


def with_instances(options: PlanningOptions, wanted: int | str, machine: Machine) -> PlanningOptions:
    """The options for so many copies; LATENCY: one for every 4 cores, THROUGHPUT: one for each NUMA node.

    No cores are reserved for communication or for loading images, unless they are requested. Raises InputError where
    options contradict this.
    """
    if not options.on_this_host:
        raise InputError("--instances starts independent programs on this host: remove --hosts, --hostfile and --nodes")
    if options.given["ppn"] is not None or options.launcher not in ("auto", "local"):
        raise InputError("--instances is a number of workers itself: remove --ppn and --launcher")
    options = options.with_given(**{name: options.given[name] or 0 for name in ("comm_cores", "loader_cores")})
    groups = uniform_groups(usable_cores(machine, request_of_options(options, Request())).machine.allowed_cores)
    if wanted == THROUGHPUT:
        return options.with_given(ppn=len({group[0].numa_node for group in groups}))
    if wanted == LATENCY:
        threads = min(LATENCY_CORES, max(map(len, groups)))
        return options.with_given(ppn=max(1, sum(len(group) // threads for group in groups)), threads=threads)
    return options.with_given(ppn=wanted)


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
