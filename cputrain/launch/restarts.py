"""Starting a failed job again: how often, and over which hosts."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from affinity.errors import RunError
from affinity.wording import counted, first_named
from cputrain.launch.options import PlanningOptions
from cputrain.launch.training_command import is_training
from mpi.preflight.run import unreachable
from mpi.supervise.exits import JobFailedError

logger = logging.getLogger(__name__)


def with_restarts(start: Callable[[int, JobFailedError | None], int], restarts: int) -> int:
    """The exit status of start(0, None); of start(n, failure) after the n-th failure of the job, `restarts` times at
    most. Wrong input, signals and checks that fail before the ranks start end it at once."""
    failure: JobFailedError | None = None
    for attempt in range(restarts):
        try:
            return start(attempt, failure)
        except JobFailedError as error:
            failure = error
            logger.warning("cputrain: %s\nrestart %d of %d", error, attempt + 1, restarts)
    return start(restarts, failure)


def keep_logs(logs: Path, attempt: int) -> None:
    """Rename the logs of the attempt that has failed: the next one writes its own."""
    for path in sorted(logs.glob("rank-*.log")):
        if ".attempt-" not in path.name:
            path.rename(path.with_suffix(f".attempt-{attempt}.log"))


@dataclass(slots=True, kw_only=True)
class HostsLeft:
    """A job's hosts, of which some go during its restarts, and may come back."""

    hosts: tuple[str, ...]
    command: tuple[str, ...]
    gone: frozenset[str] = frozenset()

    def after(self, failure: JobFailedError) -> tuple[str, ...]:
        """The hosts that answer after a failure: those that it names and those that were gone before are asked.

        Raises RunError where none does, or where one does not whose loss would change what the command computes: only
        `cputrain train` keeps its global batch on fewer hosts.
        """
        suspected = self.gone.union(failure.hosts)
        self.gone = frozenset(unreachable([host for host in self.hosts if host in suspected]))
        left = tuple(host for host in self.hosts if host not in self.gone)
        names = first_named(sorted(self.gone))
        if not left:
            raise RunError(f"no restart: none of the job's hosts answers ({names})")
        if self.gone and not is_training(self.command):
            raise RunError(
                f"no restart: these hosts do not answer: {names}; only cputrain train keeps its global batch on fewer "
                "hosts: start the command again on the others"
            )
        if self.gone:
            logger.warning("restarting on %s, without %s", counted(len(left), "host"), names)
        return left


def on_hosts(options: PlanningOptions, hosts: tuple[str, ...]) -> PlanningOptions:
    """The options for some of their hosts."""
    groups = ((tuple(host for host in names if host in hosts), machine) for names, machine in options.groups)
    components = tuple(tuple(host for host in names if host in hosts) for names in options.components)
    return replace(options, hosts=hosts, groups=tuple(group for group in groups if group[0]), components=components)
