"""The command of a training, the software in its ranks, and when a failed training is started again."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from cputrain.affinity.errors import RunError
from cputrain.affinity.start import own_program
from cputrain.affinity.wording import counted, first_named
from cputrain.launch.options import PlanningOptions
from cputrain.mpi.preflight.run import unreachable
from cputrain.mpi.supervise.processes import JobFailedError

if TYPE_CHECKING:
    from cputrain.recipe.schema import Recipe


TRAINER = ("cputrain", "train")


def is_training(command: tuple[str, ...]) -> bool:
    """Whether a command is `cputrain train`, or `python -m cputrain train`."""
    return training_arguments(command) is not None


def training_arguments(command: tuple[str, ...]) -> tuple[str, ...] | None:
    """The arguments of `cputrain train` where a command is that, or `python -m cputrain train`."""
    pairs = list(pairwise(PurePath(word).name for word in command))
    return command[pairs.index(TRAINER) + 2 :] if TRAINER in pairs else None


def training_command(name: str, settings: tuple[str, ...], here: "Recipe | None") -> tuple[str, ...]:
    """The command that trains a recipe, by its file or name; `here`, the recipe itself, where this machine will train:
    it finds recipe and data from any folder."""
    command = (*own_program("cputrain"), "train")
    if here is None:
        return (*command, name, *settings)
    from cputrain.recipe.loading import input_settings  # pydantic: only where there is a recipe

    paths = input_settings(here)
    replaced = {setting.partition("=")[0] for setting in paths}
    kept = (setting for setting in settings if setting.partition("=")[0] not in replaced)
    return (*command, str(Path(name).absolute()) if Path(name).is_file() else name, *kept, *paths)


COMPARED_PACKAGES = ("cputrain", "torch", "torchvision", "oneccl-devel", "impi-rt")
COMPILING = ("/native_build.py:", "/cpp_extension.py:", "/torch/_inductor/")
"""In a line of a Python stack: the rank compiles our parts or torch's, and has not started yet."""

# Modules that scripts import, as their error names them -> what to do without them.
ABSENT_MODULES = {
    **dict.fromkeys(
        ("oneccl_bindings_for_pytorch", "torch_ccl"),
        'pip install "cputrain[compat]" provides it, or remove the import: init_process_group("ccl") needs none',
    ),
    "intel_extension_for_pytorch": "remove the import: it ended at PyTorch 2.8, for which there is cputrain[ipex]",
}


def with_absent_module(error: JobFailedError) -> JobFailedError:
    """The error of a job, with a line about a module that the failed rank has missed, where we know what to do."""
    for module, advice in ABSENT_MODULES.items():
        if any(line.endswith(f"No module named '{module}'") for line in error.tail):
            return error.advised(f"{module}: {advice}")
    return error


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
