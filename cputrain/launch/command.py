"""The launch of any command under a plan: its job, checked hosts, restarts after failures; or one rank of it.

Before a host's first job whose ranks may use MPI or libfabric, oneCCL's transports are measured, in processes of their
own.
"""

import logging
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NoReturn
from uuid import uuid4

from cputrain.affinity.errors import InputError, RunError, as_option
from cputrain.affinity.filesystem import cache_folder, check_writable
from cputrain.affinity.kernel.bound_plan import exec_bound, plan_for_rank, plan_in_memory
from cputrain.affinity.planner.plan import Plan, Request
from cputrain.affinity.ranks.host_names import is_this_host
from cputrain.affinity.ranks.rank import Rank, port_of
from cputrain.affinity.start import own_program
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import counted, first_named
from cputrain.files import LOGS, PLAN
from cputrain.launch.options import (
    PlanningOptions,
    check_binder,
    chosen,
    in_pods,
    network_of,
    plan_hosts,
    planned_job,
    request_of_options,
    uses_launcher,
    wait_for_name,
    with_allocated_hosts,
    with_host_groups,
    with_instances,
    with_pods,
)
from cputrain.measurements import TITLES, VARIABLE, kept_seconds
from cputrain.mpi.hosts.groups import Cluster
from cputrain.mpi.hosts.schedulers import Allocation, allocation
from cputrain.mpi.launchers.command import find_launcher
from cputrain.mpi.launchers.programs import LAUNCHERS, InstalledLauncher, Job, Launcher
from cputrain.mpi.preflight import run_preflight, unreachable
from cputrain.mpi.supervise.processes import JobFailedError
from cputrain.mpi.supervise.run import free_port, run_local, run_remote
from cputrain.native_build import COMPILING
from cputrain.variables import restart_variables

if TYPE_CHECKING:
    from cputrain.recipe.schema import Recipe

PYTHON = re.compile(r"python[0-9.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """How the workers of a launch are bound; as in Job."""

    verify: bool
    allow_other_layout: bool
    keep_env: bool
    plan_on_host: bool


def command_job(
    options: PlanningOptions,
    cluster: Cluster,
    command: tuple[str, ...],
    folder: Path,
    env: Mapping[str, str],
    switches: Switches,
) -> Job:
    """The job of a command on the planned hosts.

    MASTER_ADDR, MASTER_PORT and the fabric's variables that the user has exported win over the defaults. They are
    handed to the other hosts explicitly, as not every launcher does so.
    """
    port = port_of(env)
    here = options.on_this_host
    settings = () if here and options.pods == 1 else network_of(options).settings
    # By its path: Open MPI puts its own folder first on its ranks' PATH, and a Python may be there.
    by_path = (shutil.which(command[0]) or command[0], *command[1:])
    return replace(
        planned_job(options, cluster, by_path),
        plan_path=folder / PLAN,
        log_dir=folder / LOGS,
        master_addr=None if here and options.pods == 1 else env.get("MASTER_ADDR") or None,
        master_port=free_port() if here and port is None else port,
        variables=tuple((name, env.get(name, value)) for name, value, _ in settings),
        **asdict(switches),
        names_errors="cputrain" in [PurePath(word).name for word in command[:4]],  # or python -m cputrain
        starting=COMPILING,
    )


def program(words: tuple[str, ...], *, module: bool) -> tuple[str, ...]:
    """The command of the words behind launch's options: this Python runs a .py file and, with `module`, a module."""
    if module:
        return (sys.executable, "-m", *words)
    return (sys.executable, *words) if words[0].endswith(".py") else words


def check_program(command: tuple[str, ...], env: Mapping[str, str]) -> None:
    """Raise InputError where this host has no such program, or Python no such script."""
    first, behind = command[0], command[1:2]
    if behind and behind[0].endswith(".py") and is_python(first) and not Path(behind[0]).is_file():
        raise InputError(f"script {behind[0]} does not exist: give an existing one")
    if shutil.which(first, path=env.get("PATH")) is None:
        raise InputError(f"{first[:60]} is {_no_program(first)}")


def is_python(word: str) -> bool:
    """Whether a word names Python's interpreter: "python3", "/usr/bin/python3.11"."""
    return PYTHON.fullmatch(PurePath(word).name) is not None


def _no_program(name: str) -> str:
    """What a word is that was given for a program, and what to do with it."""
    if Path(name).is_dir():
        return "a folder, not a program: give a script or a program"
    if Path(name).is_file():
        return f"a file that cannot be executed: chmod +x {name}, or name its interpreter first"
    if is_python(name):
        return "no program here: leave it out, and a .py script runs under the Python of cputrain"
    from cputrain.recipe.loading import recipe_names  # pydantic: only where it may be one

    if name in recipe_names():
        return f"a recipe, not a program: cputrain train {name} trains it"
    return "no program on PATH: give a script or a program, as in cputrain launch -- python x.py"


def check_launch(options: PlanningOptions, *, plan_on_host: bool) -> None:
    """Raise InputError where options of a launch cannot be combined."""
    here = options.on_this_host
    if options.machine != "this" and here:
        raise InputError("launch runs on real hosts: remove --machine, or name hosts of that machine with --hosts")
    if options.launcher == "local" and not here:
        raise InputError("--launcher local starts workers on this host only: leave out --launcher or --hosts")
    launcher = LAUNCHERS.get(options.launcher)
    if launcher is not None and not launcher.reaches_hosts and not here:
        raise InputError(
            f"{launcher.title} must be started on every host: run there what cputrain plan prints, or name an MPI's "
            "launcher"
        )
    check_binder(options)
    if plan_on_host and options.given["share"]:
        raise InputError("--share and --plan-on-host cannot be combined: give one")
    if plan_on_host and (not isinstance(options.given["ppn"], int) or options.bind == "launcher"):
        raise InputError("--plan-on-host needs the same --ppn N on every host, and excludes --bind launcher")


def new_folder(folder: Path, *, named: bool) -> Path:
    """Make a launch's folder, which no other launch shares.

    A `named` folder must be empty or absent (InputError); the default name gets a number where it is taken.
    """
    for number in count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if candidate.is_dir() and any(candidate.iterdir()) and named:
            break
        try:
            (candidate / LOGS).mkdir(parents=True)
        except FileExistsError:
            if named:
                break
            continue
        return candidate
    raise InputError(f"--output {folder} already exists: name another folder")


MAY_USE_CCL = ("python", "cputrain")  # what a command starts with
BACKENDS = "ccl-torch*/*.so"


def measure_transports(job: Job, launcher: Launcher, env: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Measure, where nothing is known of this host and nothing else decides; reports what was found, or why nothing."""
    if not is_due(job, launcher, env):
        return
    report(f"measuring oneCCL over MPI and libfabric, once ({VARIABLE}=mpi or ofi starts without)")
    command = own_program("cputrain.comm.ccl.check")
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8", check=False
    )
    last_line = (done.stdout.strip().splitlines() or [f"the measurement ended with status {done.returncode}"])[-1]
    report(f"warning: not measured: {last_line}" if done.returncode else f"measured: {last_line}")


def is_due(job: Job, launcher: Launcher, env: Mapping[str, str]) -> bool:
    """Whether a job may use oneCCL over both transports, on this host alone, and their times are not known."""
    here = len(job.hosts) == 1 and is_this_host(job.hosts[0])
    may_use_ccl = Path(job.command[0]).name.startswith(MAY_USE_CCL) and _has_backend(env)
    open_choice = here and launcher.has_pmi and VARIABLE not in env and may_use_ccl
    return open_choice and len(kept_seconds(env)) < len(TITLES)


def _has_backend(env: Mapping[str, str]) -> bool:
    """Whether the backend has been compiled for this user, as its first use does."""
    with suppress(RunError):  # no cache folder
        return any(cache_folder(env).glob(BACKENDS))
    return False


TRAINER = ("cputrain", "train")


def training_arguments(command: tuple[str, ...]) -> tuple[str, ...] | None:
    """The arguments of `cputrain train` where a command is that, or `python -m cputrain train`; None for others."""
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
        if self.gone and training_arguments(self.command) is None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command and what starts it, at its first start and at its restarts.

    `launcher` is None where this process starts the workers. `instances`: how many independent copies were requested,
    `instance` which of them are started. `allocation` is the scheduler's job around this process.
    """

    command: tuple[str, ...]
    options: PlanningOptions
    base: Request
    switches: Switches
    env: Mapping[str, str]
    launcher: InstalledLauncher | None
    folder: Path
    instances: int | str | None
    instance: str | None
    allocation: Allocation | None

    def planned(self) -> tuple[Job, Cluster]:
        """The job and its hosts' plans. Raises InputError where the request does not fit."""
        cluster = plan_hosts(self.options, self.base, self.env, self.command)
        job = command_job(self.options, cluster, self.command, self.folder, self.env, self.switches)
        job = in_pods(job, self.env)
        return (job if self.instances is None else replace(job, instances=chosen(self.instance, job.ppn))), cluster


def make_launch(
    command: tuple[str, ...],
    options: PlanningOptions,
    base: Request,
    switches: Switches,
    env: Mapping[str, str],
    *,
    host_groups: tuple[str, ...],
    instances: int | str | None,
    instance: str | None,
    folder: Path,
) -> Launch:
    """The launch of a command as requested, on the hosts of the batch job around this process where none are named.
    Raises InputError where options cannot be combined."""
    found = allocation(env)
    options = with_allocated_hosts(with_host_groups(options, host_groups), found)
    options = with_pods(options, env)
    check_launch(options, plan_on_host=switches.plan_on_host)
    if instances is not None:
        options = with_instances(options, instances, this_machine())
    return Launch(
        command=command,
        options=options,
        base=base,
        switches=switches,
        env=env,
        launcher=find_launcher(options.launcher, env) if uses_launcher(options) else None,
        folder=folder,
        instances=instances,
        instance=instance,
        allocation=found,
    )


def run_launch(
    launch: Launch,
    first: Job,
    cluster: Cluster,
    *,
    named: bool,
    restarts: int,
    preflight: bool | None,
    report: Callable[[str], None],
) -> int:
    """Run the job that was planned first, after failures again on the hosts that are left; its exit status.

    Makes the launch's folder, whose name the user has given where `named`. `preflight` checks the hosts before the
    start; None: where there are several. `report` shows a line to the user. Raises InputError, JobFailedError.
    """
    if launch.launcher is None:
        check_program(launch.command, launch.env)
    check_writable(launch.folder, "--output")
    launch = replace(launch, folder=new_folder(launch.folder, named=named))
    name = uuid4().hex
    left = HostsLeft(hosts=launch.options.hosts, command=launch.command)

    def start(attempt: int, failure: JobFailedError | None) -> int:
        job, hosts = replace(first, plan_path=launch.folder / PLAN, log_dir=launch.folder / LOGS), cluster
        if failure is not None:
            keep_logs(launch.folder / LOGS, attempt - 1)
            job, hosts = replace(launch, options=on_hosts(launch.options, left.after(failure))).planned()
        job = replace(job, variables=(*job.variables, *restart_variables(attempt, restarts, name)))
        for warning in (*hosts.warnings, *(text for group in hosts.groups for text in _warnings(group.plan))):
            report(f"warning: {warning}")
        try:
            return _run(job, launch, preflight, report)
        except JobFailedError as error:
            arguments = training_arguments(job.command)
            if error.shortage is None or arguments is None or job.instances is not None:
                raise with_absent_module(error) from None
            from cputrain.launch.local import with_remedy  # the recipes: only where one has failed

            raise with_remedy(error, job, arguments) from None

    return with_restarts(start, restarts)


def become_rank(
    rank: Rank,
    request: Request,
    command: tuple[str, ...],
    env: Mapping[str, str],
    *,
    check: bool,
    keep_env: bool,
    report: Callable[[str], None],
) -> NoReturn:
    """Be the rank that mpirun, srun or torchrun has started: bind to its share of this host and become the command."""
    plan, index = plan_for_rank(request, rank, command, env)
    for warning in _warnings(plan) if rank.local_rank == 0 else ():
        report(f"warning: {warning}")
    exec_bound(plan.workers[index], plan_in_memory(plan), command, env, rank=rank, check=check, keep_env=keep_env)


def request_of_rank(options: PlanningOptions, base: Request, rank: Rank) -> Request:
    """The request of the host that a rank shares. Raises InputError for another number of workers than it has."""
    ppn = options.given["ppn"]
    if ppn not in (None, "auto", rank.local_world_size):
        raise InputError(
            f"--ppn {ppn}, but {rank.local_world_size} ranks were started on this host: remove --ppn, or "
            f"set it to {rank.local_world_size}"
        )
    return request_of_options(options, base)


def _warnings(plan: Plan) -> tuple[str, ...]:
    return tuple(plan.worded(as_option).warnings)


def _run(job: Job, launch: Launch, preflight: bool | None, report: Callable[[str], None]) -> int:
    """Check the hosts where that is wanted, run the job; its exit status."""
    if launch.launcher is None:
        wait_for_name(job.master_addr or "", job.pods)
        return run_local(job, launch.env)
    if preflight or (preflight is None and len(job.hosts) > 1):
        _check_hosts(job, launch, launch.launcher, report)
    measure_transports(job, launch.launcher.launcher, launch.env, report)
    return run_remote(job, launch.launcher, launch.folder, launch.env)


def _check_hosts(job: Job, launch: Launch, launcher: InstalledLauncher, report: Callable[[str], None]) -> None:
    """Check the hosts and report the warnings. Raises RunError with all errors."""
    started = time.monotonic()
    findings = run_preflight(job, launcher, launch.folder / "preflight", launch.env, COMPARED_PACKAGES)
    for warning in findings.warnings:
        report(f"pre-flight: {warning}")
    if findings.errors:
        more = "".join(f"\n  {error}" for error in findings.errors[1:])
        raise RunError(f"pre-flight: {findings.errors[0]}{more}\n  (use --no-preflight to skip this check)")
    seconds = time.monotonic() - started
    report(f"pre-flight: {counted(len(job.hosts), 'host')} checked in {seconds:.1f} s")
