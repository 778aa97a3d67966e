"""Plan x hosts x command -> frozen Job."""

from dataclasses import dataclass
from pathlib import Path

from affinity.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command, started `ppn` times on each host, every copy bound by its plan.

    `plan_path` is where the ranks find the plan; `log_dir` gets one rank-N.log each. `verify` makes a rank that the
    kernel bound otherwise an error; with `keep_env` variables that a rank inherits win over the plan's.
    `plain_rank` names a rank whose output is shown without its label.
    """

    plan: Plan
    hosts: tuple[str, ...]
    command: tuple[str, ...]
    plan_path: Path
    log_dir: Path
    verify: bool = True
    keep_env: bool = False
    plain_rank: int | None = None

    @property
    def ppn(self) -> int:
        """Workers per host."""
        return len(self.plan.workers)

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.ppn * len(self.hosts)
