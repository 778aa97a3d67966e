"""Plans x hosts x command -> frozen Job, and what each of its ranks runs and finds in its environment."""

from dataclasses import dataclass, replace
from pathlib import Path

from affinity.planner.plan import Plan
from affinity.planner.plan_file import request_to_json
from affinity.ranks.host_names import LOCALHOST, network_name
from affinity.ranks.pods import Pods
from affinity.ranks.rank import LOOPBACK
from affinity.start import own_program
from mpi.hosts.groups import HostGroup
from mpi.hosts.hostfile import Host

ONE_POD = Pods()
Variables = tuple[tuple[str, str], ...]
"""Names and values of environment variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command, started on each host as often as its plan has workers, every copy bound by that plan.

    `plan_path` is where the ranks find the plan; `log_dir` gets one rank-N.log each. `binder` is "self" where each rank
    binds itself, "launcher" where the launcher binds the ranks. With `verify` a rank fails if the kernel bound it
    otherwise, or if its host is laid out otherwise and `allow_other_layout` is not set. With `keep_env` variables that
    a rank inherits win over the plan's. The output of `plain_rank` is shown without a label. `master_addr` and
    `master_port` are where the ranks meet; by default that is the first host, at a port that the ranks choose.
    `variables` are set for every rank; `secrets` too, but in no command line, where every user of a host can read them.
    With `plan_on_host` the ranks of each host plan it themselves, by the request of the groups' plans: hosts may
    differ. `instances` are the workers of this host to start as programs that know nothing of each other; None: all,
    as ranks of one job. `pods`: which part of a larger job this host's ranks are, where each pod starts its own. With
    `names_errors` the command itself says in a line what is wrong with its input before it exits with status 2. A rank
    has not started yet while it imports, or while one of the texts `starting` is in its Python stack. `het_groups` are
    the numbers of the components of a heterogeneous Slurm job that the groups are; () outside one.
    """

    groups: tuple[HostGroup, ...]
    command: tuple[str, ...]
    plan_path: Path
    log_dir: Path
    binder: str = "self"
    verify: bool = True
    allow_other_layout: bool = False
    keep_env: bool = False
    plain_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    variables: Variables = ()
    secrets: Variables = ()
    plan_on_host: bool = False
    instances: tuple[int, ...] | None = None
    pods: Pods = ONE_POD
    names_errors: bool = False
    starting: tuple[str, ...] = ()
    het_groups: tuple[int, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan of the first host group, which is the only one where all hosts are equal."""
        return self.groups[0].plan

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host, in the order of the ranks."""
        return tuple(host for group in self.groups for host in group.hosts)

    @property
    def host_of_ranks(self) -> tuple[str, ...]:
        """Each rank's host."""
        return tuple(host for group in self.groups for host in group.hosts for _ in group.plan.workers)

    @property
    def slots(self) -> tuple[Host, ...]:
        """Every host with its number of ranks, in the order of the ranks."""
        return tuple(Host(name=host, slots=len(group.plan.workers)) for group in self.groups for host in group.hosts)

    @property
    def ppn(self) -> int:
        """Workers per host, in the first group."""
        return len(self.plan.workers)

    @property
    def started(self) -> tuple[int, ...]:
        """The ranks that are started on this host, or the numbers of programs without a rank."""
        first = self.pods.index * self.ppn
        return tuple(range(first, first + self.ppn)) if self.instances is None else self.instances

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return sum(len(group.hosts) * len(group.plan.workers) for group in self.groups)


def bound_command(job: Job, instance: int | None = None) -> tuple[str, ...]:
    """The job's command behind affinity.bind, the same tokens for every rank; for a program without a rank, those of
    its number."""
    flags = (
        *(() if instance is None else ("--local-rank", str(instance))),
        *(("--bound",) if job.binder == "launcher" else ()),
        *(() if job.verify else ("--no-verify",)),
        *(("--allow-other-layout",) if job.allow_other_layout else ()),
        *(("--keep-env",) if job.keep_env else ()),
    )
    plan = ("--plan", str(job.plan_path))
    if job.plan_on_host:
        plan = ("--plan-here", request_to_json(replace(job.plan.request, ppn=job.ppn)))
    return (*own_program("affinity.bind"), *plan, *flags, "--", *job.command)


def rank_variables(job: Job) -> Variables:
    """Variables of every rank beside its plan's environment: where the ranks meet, and the job's own variables."""
    first = LOOPBACK if job.hosts == (LOCALHOST,) else network_name(job.hosts[0])
    port = () if job.master_port is None else (("MASTER_PORT", str(job.master_port)),)
    return (("MASTER_ADDR", job.master_addr or first), *port, *job.variables)
