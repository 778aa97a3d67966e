"""Plans x hosts x command -> frozen Job."""

from dataclasses import dataclass
from pathlib import Path

from affinity.planner.plan import Plan
from mpi.hosts.groups import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command, started on each host as often as its plan has workers, every copy bound by that plan.

    `plan_path` is where the ranks find the plan; `log_dir` gets one rank-N.log each. `binder` says who binds: "self",
    each rank itself, or "launcher". `verify` makes a rank that the kernel bound otherwise an error; with `keep_env`
    variables that a rank inherits win over the plan's. `plain_rank` names a rank whose output is shown without its
    label. `master_addr` and `master_port` are where the ranks meet; without them it is the first host, at a port that
    they find themselves. `variables` are set for every rank. With `plan_on_host` each host is planned by its own ranks,
    as the kinds' plans were asked for: hosts need not be alike.
    """

    kinds: tuple[Kind, ...]
    command: tuple[str, ...]
    plan_path: Path
    log_dir: Path
    binder: str = "self"
    verify: bool = True
    keep_env: bool = False
    plain_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    variables: tuple[tuple[str, str], ...] = ()
    plan_on_host: bool = False

    @property
    def plan(self) -> Plan:
        """The plan of the first kind of host, which is that of all where there is one kind."""
        return self.kinds[0].plan

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host, in the order of the ranks."""
        return tuple(host for kind in self.kinds for host in kind.hosts)

    @property
    def ppn(self) -> int:
        """Workers per host, on the first kind."""
        return len(self.plan.workers)

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return sum(len(kind.hosts) * len(kind.plan.workers) for kind in self.kinds)
