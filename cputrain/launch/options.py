"""Turn planning options into plans; choose the hosts of a launch (named, a scheduler's allocation, or pods) and the
instances of a program on one host."""

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cputrain.affinity.bound_plan import NOT_SHARED, plan_beside
from cputrain.affinity.errors import InputError, RequestError, RunError
from cputrain.affinity.filesystem import PLAN_FILE
from cputrain.affinity.host_names import (
    LOCALHOST,
    is_loopback,
    is_this_host,
    names_of_one_host,
    repeated_host,
    repeated_this_host,
)
from cputrain.affinity.planner.domains import usable_cores
from cputrain.affinity.planner.layouts import uniform_groups
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.records import plan_this_machine, read_measured
from cputrain.affinity.planner.request import CPUS, JOB_OPTIONS, OPTIONS, Request
from cputrain.affinity.rank import COUNT, MASTER_PORT, Pods, pods_of, port_of
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import Machine, format_list, parse_list
from cputrain.affinity.wording import join_or, plural
from cputrain.mpi.fabric import Fabric, Setting, fabric_between
from cputrain.mpi.hostfile import (
    FORMATS,
    MAX_HOSTS,
    Cluster,
    Host,
    HostGroup,
    HostList,
    check_name,
    expand_hosts,
    fold_hosts,
    host_with_slots,
    one_group,
    plan_cluster,
    read_hostfile,
)
from cputrain.mpi.launch_command import find_launcher, newest_version, without_path
from cputrain.mpi.launchers import INTEL_MPI, InstalledLauncher, Job
from cputrain.mpi.schedulers import SCHEDULERS, Allocation
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE
from cputrain.predict.next_best import compare_plan

THIS_MACHINE, THIS_HOST = "this", (LOCALHOST,)
LATENCY, THROUGHPUT = "latency", "throughput"
LATENCY_CORES = 4  # per copy, as in ipexrun and torch.backends.xeon.run_cpu
NAME_S = 300.0  # until the first pod has a name: it must be scheduled, and its image may be pulled


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """A user's request for a plan.

    `given` has the value of each of OPTIONS by name; None leaves it to the recipe or the planner's rules. `real_hosts`:
    the hosts' names are real, not placeholders for a number of hosts. `hostfile_format` is the format of their list.
    `groups` has the hosts and the machine of each group if hosts differ, `components` the hosts of each component of
    the heterogeneous Slurm job around this process. `pods` is the number of pods, of which this host is one.
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
        """Whether the job runs on this host only."""
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
        """Return a copy with these values of OPTIONS."""
        return replace(self, given={**self.given, **values})


def network_of(options: PlanningOptions) -> Fabric:
    """Return the fabric between the hosts: requested, or this host's; for another machine the published run's."""
    elsewhere = None if options.machine == THIS_MACHINE else "opa"
    return fabric_between(len(options.hosts) * options.pods, options.fabric, elsewhere=elsewhere)


def network_settings(options: PlanningOptions) -> tuple[Setting, ...]:
    """Return the variables that the fabric needs if there are several hosts."""
    return network_of(options).settings if len(options.hosts) > 1 else ()


def request_of_options(options: PlanningOptions, base: Request) -> Request:
    """Apply the options to `base`, a recipe's request or the default."""
    changes: dict[str, Any] = {
        "nodes": len(options.hosts) * options.pods,
        "link_gbit": network_of(options).link_gbit,
        "fabric": network_of(options).name,
    }
    given = ((option, options.given[option.name]) for option in OPTIONS if hasattr(base, option.name))
    changes |= {option.name: option.requested(value) for option, value in given if value is not None}
    return replace(base, **changes)


def plan_host(options: PlanningOptions, base: Request, env: Mapping[str, str], command: tuple[str, ...] = ()) -> Plan:
    """Plan one host of the requested machine. Raises InputError if the request does not fit.

    `command` is the program that will run: the libraries of its Python determine the OpenMP runtime and the allocator.
    """
    request = request_of_options(options, base)
    if options.machine == THIS_MACHINE and options.on_this_host:
        return plan_beside(request, env, command, share=bool(options.given["share"]), compare=compare_plan)
    if options.given["share"]:
        raise RequestError(NOT_SHARED)
    if options.machine == THIS_MACHINE:
        return plan_this_machine(request, env, command, compare=compare_plan)
    # The other machine's libraries cannot be inspected from here; its ranks run this Python, with torch's libgomp.
    machine = find_machine(options.machine)
    return plan_machine(machine, request, Runtime(), read_measured(machine, request, env), compare=compare_plan)


def plan_hosts(
    options: PlanningOptions, base: Request, env: Mapping[str, str], command: tuple[str, ...] = ()
) -> Cluster:
    """Plan all hosts: one plan, or one for each group of hosts that differ."""
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
    return plan_cluster(groups, request_of_options(options, base), compare=compare_plan)


def het_groups(options: PlanningOptions, cluster: Cluster) -> tuple[int, ...]:
    """Return the number of each group's component in the heterogeneous Slurm job; () if groups are not components."""
    components = {number: hosts for number, hosts in enumerate(options.components) if hosts}
    return tuple(components) if tuple(components.values()) == tuple(group.hosts for group in cluster.groups) else ()


def planned_job(options: PlanningOptions, cluster: Cluster, command: tuple[str, ...]) -> Job:
    """Return the job of a command that is planned now, and started later or elsewhere."""
    return Job(
        groups=cluster.groups,
        command=command,
        plan_path=Path(PLAN_FILE),
        log_dir=Path("logs"),
        binder=options.bind,
        variables=tuple((name, value) for name, value, _ in network_settings(options)),
        het_groups=het_groups(options, cluster),
    )


def planned_launcher(options: PlanningOptions, env: Mapping[str, str]) -> InstalledLauncher:
    """Return the launcher of a job that is only planned: the installed one, or else its newest version.

    PATH here says nothing about another machine, for which "auto" therefore selects Intel MPI.
    """
    requested = options.launcher
    if requested == "auto" and options.machine != THIS_MACHINE:
        return newest_version(INTEL_MPI.name)
    try:
        return without_path(find_launcher(requested, env))
    except InputError:
        return newest_version(INTEL_MPI.name if requested == "auto" else requested)


def assumptions(options: PlanningOptions, launcher: InstalledLauncher) -> str:
    """List what a job that is only planned assumes, and the options to change it; "" if nothing is assumed."""
    guesses = []
    if len(options.hosts) > 1 and not options.real_hosts:
        guesses.append(f"hosts named {options.hosts[0]} to {options.hosts[-1]} (change with --hosts or --hostfile)")
    if options.launcher == "auto" and launcher == newest_version(launcher.launcher.name):
        guesses.append(f"{launcher.launcher.title} (change with --launcher)")
    if len(options.hosts) > 1 and options.fabric == "auto" and options.machine != THIS_MACHINE:
        guesses.append(f"fabric {network_of(options).name} (change with --fabric)")
    return f"assumed: {', '.join(guesses)}" if guesses else ""


def with_instances(options: PlanningOptions, requested: int | str, machine: Machine) -> PlanningOptions:
    """Set the options for this many copies; LATENCY: one for every 4 cores, THROUGHPUT: one for each NUMA node.

    No cores are reserved for communication or image loading unless requested. Raises InputError if other options
    contradict this.
    """
    if not options.on_this_host:
        raise InputError("--instances starts independent programs on this host: remove --hosts, --hostfile and --nodes")
    if options.given["ppn"] is not None or options.launcher not in ("auto", "local"):
        raise InputError("--instances already sets the number of workers: remove --ppn and --launcher")
    options = options.with_given(**{name: options.given[name] or 0 for name in ("comm_cores", "loader_cores")})
    groups = uniform_groups(usable_cores(machine, request_of_options(options, Request())).machine.allowed_cores)
    if requested == THROUGHPUT:
        return options.with_given(ppn=len({group[0].numa_node for group in groups}))
    if requested == LATENCY:
        threads = min(LATENCY_CORES, max(map(len, groups)))
        return options.with_given(ppn=max(1, sum(len(group) // threads for group in groups)), threads=threads)
    return options.with_given(ppn=requested)


def chosen_instances(numbers: str | None, count: int) -> tuple[int, ...]:
    """Return the copies to start, of `count`: all, or a list such as 0,2-3. Raises InputError for other numbers."""
    if numbers is None:
        return tuple(range(count))
    try:
        listed = parse_list(numbers)
    except ValueError as error:
        raise InputError(f"--instance {numbers[:30]!r} is invalid ({error}): give numbers like 0,2-3") from None
    if not listed or listed[-1] >= count:
        raise InputError(f"--instance {numbers[:30]!r} is out of range: choose from instances 0 to {count - 1}")
    return listed


def requested_hosts(names: str | None, hostfile: Path | None, nodes: int | None) -> HostList:
    """Return the hosts of --hosts or --hostfile, or placeholders for --nodes. Raises InputError on a contradiction."""
    if nodes is not None and nodes > MAX_HOSTS:
        raise InputError(f"--nodes {nodes} is more than {MAX_HOSTS:,}, the limit for a job: correct it")
    if names is not None and hostfile is not None:
        raise InputError("--hosts and --hostfile cannot be combined: remove one")
    if hostfile is not None:
        listed = read_hostfile(hostfile)
    elif names is not None:
        each = expand_hosts(names, "--hosts")
        listed = HostList(hosts=tuple(host_with_slots(text, "--hosts") for text in each), format="plain")
    elif nodes in (None, 1):
        listed = HostList(hosts=(Host(name=LOCALHOST),), format="plain")
    else:
        listed = HostList(hosts=tuple(Host(name=f"node{i:03d}") for i in range(1, nodes + 1)), format="plain")
    every, source = [host.name for host in listed.hosts], "--hosts" if hostfile is None else str(hostfile)
    _check_names(every, source, by_name=hostfile is not None)
    if nodes not in (None, len(listed.hosts)):
        raise InputError(f"--nodes {nodes}, but the list contains {plural(len(listed.hosts), 'host')}: remove --nodes")
    return listed


def _check_names(hosts: Sequence[str], source: str, *, by_name: bool = False, slurm: bool = False) -> None:
    """Raise InputError if two names are the same host, or a name means a different host on each of them (localhost).

    `by_name`: a short name equals the only longer name that begins with it, as in Open MPI, unless their addresses
    differ. With `slurm` several nodes may be this host.
    """
    if twice := repeated_host(hosts):
        raise InputError(f"{source}: {twice[0]} and {twice[1]} are the same host: name it once, with all of its slots")
    if not slurm and (twice := repeated_this_host(hosts)):
        raise InputError(f"{source}: {twice[0]} and {twice[1]} are both this host: name it once, with all of its slots")
    if twice := names_of_one_host(hosts, by_name=by_name):
        raise InputError(
            f"{source}: {twice[0]} and {twice[1]} are one host by their addresses or, where these are "
            "unknown, by their names: name it once, with all of its slots"
        )
    own, others = (next((host for host in hosts if is_loopback(host) == loopback), None) for loopback in (True, False))
    if own and others:
        raise InputError(f"{source}: {own} means a different host on {others}: replace it by the host's name")


def workers_per_host(hosts: tuple[Host, ...], ppn: int | str | None) -> int | str | None:
    """Return the hosts' number of slots, which a requested `ppn` must equal; `ppn` if the hosts have none."""
    slots = {host.slots for host in hosts}
    if slots == {None} or (ppn == "auto" and None in slots):
        return ppn
    if len(slots) > 1:
        first, other = hosts[0], next(host for host in hosts if host.slots != hosts[0].slots)
        raise InputError(
            f"host {first.name} has {_slots(first)} but {other.name} has {_slots(other)}: describe different hosts "
            "with one --host-group per group"
        )
    each = slots.pop()
    if isinstance(ppn, int) and ppn != each:
        raise InputError(
            f"ppn={ppn}, but {hosts[0].name} has {_slots(hosts[0])}: set ppn to {each} or change the slots"
        )
    return each


def _slots(host: Host) -> str:
    return "no number of slots" if host.slots is None else plural(host.slots, "slot")


def with_allocated_hosts(options: PlanningOptions, found: Allocation | None) -> PlanningOptions:
    """Use the hosts of the scheduler's allocation around this process if no hosts are named."""
    components = () if found is None or len(found.components) < 2 else tuple(map(_names, found.components))
    if options.real_hosts or options.launcher == "local":
        return replace(options, components=components if options.groups else ())
    if found is not None and (len(found.hosts) > 1 or found.note):
        hosts = _names(found.hosts)
        if len(options.hosts) not in (1, len(hosts)):
            raise InputError(
                f"--nodes {len(options.hosts)}, but this job has {plural(len(hosts), 'host')}: remove --nodes"
            )
        slurm = found.scheduler.name == "Slurm"  # Slurm's nodes have full names
        _check_names(hosts, found.title, by_name=not slurm, slurm=slurm)
        return replace(options, hosts=hosts, real_hosts=True, components=components)
    if len(options.hosts) > 1:
        known = join_or([scheduler.name for scheduler in SCHEDULERS if scheduler.found is not None])
        raise InputError(f"launch needs host names: give --hosts or --hostfile, or run it in a job of {known}")
    return options


def allocation_notes(options: PlanningOptions, found: Allocation | None, cluster: Cluster) -> Iterator[str]:
    """Yield notes on the scheduler's allocation around this process: unused hosts, components planned alike, slots that
    differ from the plan's workers."""
    if found is None or options.launcher == "local":
        return
    used = frozenset(options.hosts)
    if found.note and (options.on_this_host or used == frozenset(_names(found.hosts))):
        yield found.note
    if options.on_this_host:
        if found.uses_one_host and not found.hosts:
            yield found.uses_one_host
        given: tuple[Host, ...] = found.hosts if len(found.hosts) == 1 else ()
    else:
        given = tuple(host for host in found.hosts if host.name in used)
    if options.components and not options.groups:
        listed = "; ".join(fold_hosts(names) for names in options.components)
        yield (
            f"{found.title} ({listed}): all are planned like this host; if they differ, give --host-group "
            "HOSTS=MACHINE for each component, or --plan-on-host"
        )
    plan_of = {host: group.plan for group in cluster.groups for host in group.hosts}
    for slots in dict.fromkeys(host.slots for host in given):
        here = [host.name for host in given if host.slots == slots]
        plans = {len(plan.workers): plan for name in here for plan in [plan_of.get(name, cluster.groups[0].plan)]}
        for plan in plans.values():
            if slots is not None and _differs(slots, plan, cores=found.scheduler.slots_are_cores):
                yield _difference(found, slots, here, plan)


def _differs(slots: int, plan: Plan, *, cores: bool) -> bool:
    """Return whether a host's slots differ from the plan's workers and, with `cores`, also from its cores and CPUs."""
    machine = plan.machine
    return slots not in (len(plan.workers), *((len(machine.allowed_cores), len(machine.allowed_pus)) if cores else ()))


def _difference(found: Allocation, slots: int, hosts: list[str], plan: Plan) -> str:
    workers, cores = plural(len(plan.workers), "worker"), plural(len(plan.machine.allowed_cores), "core")
    on = f"{plural(slots, found.scheduler.slot)} on {fold_hosts(hosts)}"
    start = f"--ppn {slots} starts a worker for each" if 0 < slots <= len(plan.machine.allowed_cores) else ""
    ask = f"request {plural(len(plan.workers), found.scheduler.slot)} per host"
    if found.scheduler.slots_are_cores:
        ask = f"request whole hosts of {cores}, or give the job's CPUs with --cores"
    what_to_do = "; or ".join(filter(None, (start, ask)))
    return f"{found.scheduler.name} gives {on}, the plan has {workers} on {cores}: {what_to_do}"


def _names(hosts: tuple[Host, ...]) -> tuple[str, ...]:
    return tuple(host.name for host in hosts)


def with_host_groups(options: PlanningOptions, groups: tuple[str, ...]) -> PlanningOptions:
    """Set the options for several groups of hosts, each written HOSTS=MACHINE."""
    if not groups:
        return options
    if len(options.hosts) > 1 or options.real_hosts or options.machine != THIS_MACHINE:
        raise InputError("--host-group names hosts and machines: remove --hosts, --nodes and --machine")
    pairs = []
    for group in groups:
        hosts, _, machine = group.partition("=")
        if not machine:
            raise InputError(f"--host-group {group!r} is not HOSTS=MACHINE, as in n[001-128]=skx-8160-2s")
        pairs.append((tuple(check_name(host, "--host-group") for host in expand_hosts(hosts, "--host-group")), machine))
    every = tuple(host for hosts, _ in pairs for host in hosts)
    _check_names(every, "--host-group")
    return replace(options, hosts=every, real_hosts=True, groups=tuple(pairs))


def check_binder(options: PlanningOptions) -> None:
    """Raise InputError if a launcher is to bind the ranks but none starts them."""
    if options.bind == "launcher" and not uses_launcher(options):
        raise InputError("--bind launcher needs a launcher: choose one with --launcher")


def uses_launcher(options: PlanningOptions) -> bool:
    """Return whether a launcher starts the ranks, rather than this process on this host."""
    return not options.on_this_host or options.launcher not in ("auto", "local")


def converted_hostfile(options: PlanningOptions, launcher: InstalledLauncher) -> str | None:
    """Return a note if the hostfile is in another launcher's format, so that this one gets a converted copy."""
    own = launcher.launcher.hosts
    if own is None or options.hostfile_format in ("plain", own.file_format):
        return None
    return f"the hostfile is in {FORMATS[options.hostfile_format]} and was converted for {launcher.launcher.title}"


def with_pods(options: PlanningOptions, env: Mapping[str, str]) -> PlanningOptions:
    """Set the options for this host, which may be one of several pods. Raises InputError if the options exclude pods.

    If this host is the only one, under any of its names, and no launcher is named, it becomes localhost, which needs
    none.
    """
    alone = len(options.hosts) == 1 and not options.groups and options.machine == THIS_MACHINE
    if alone and options.launcher in ("auto", "local") and is_this_host(options.hosts[0]):
        options = replace(options, hosts=THIS_HOST)
    pods = pods_of(env)
    if pods.count > 1 and (not options.on_this_host or not isinstance(options.given["ppn"], int)):
        raise InputError(
            f"{COUNT}={pods.count} makes this one of {pods.count} pods, which all need the same --ppn N: set it, and "
            "remove --hosts, --hostfile and --nodes"
        )
    return replace(options, pods=pods.count)


def in_pods(job: Job, env: Mapping[str, str]) -> Job:
    """Make the job of one host this pod's part of a larger job. Raises InputError if the first pod is not named, or if
    the pods share no secret to authenticate their ranks."""
    pods = pods_of(env)
    if pods.count == 1:
        return job
    if not job.master_addr:
        raise InputError(f"{COUNT}={pods.count}, but MASTER_ADDR does not name the first pod: set it for all pods")
    if not env.get(TOKEN_VARIABLE):
        raise InputError(f"{COUNT}={pods.count}, but {TOKEN_VARIABLE} is not set: set the same secret for all pods")
    secrets = ((TOKEN_VARIABLE, env[TOKEN_VARIABLE]),)
    return replace(job, pods=pods, master_port=port_of(env) or MASTER_PORT, secrets=secrets)


def wait_for_name(address: str, pods: Pods) -> None:
    """Wait until the first pod has an address: its name appears when it is scheduled. Raises RunError at the limit."""
    if pods.count == 1:
        return
    deadline = time.monotonic() + NAME_S
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"the first pod, {address}, has no address after {NAME_S:g} s ({error.strerror}): check "
                    "that it is scheduled, and that a headless Service has the name of the pods' subdomain"
                ) from None
        time.sleep(1)
