"""Launch any command under a plan: its job, the check of its hosts, restarts after failures; or become one rank of it.

Before a host's first job whose ranks may use MPI or libfabric, oneCCL's transports are measured in separate processes.
"""

import logging
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise
from pathlib import Path, PurePath
from typing import NoReturn
from uuid import uuid4

from cputrain.affinity.bound_plan import exec_bound, plan_for_rank, plan_in_memory
from cputrain.affinity.errors import InputError, RunError, as_option
from cputrain.affinity.filesystem import cache_folder, check_writable
from cputrain.affinity.host_names import is_this_host
from cputrain.affinity.planner.plan import Plan, Request
from cputrain.affinity.rank import Rank, port_of
from cputrain.affinity.start import isolated_command
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import first_named, plural
from cputrain.files import LOGS, PLAN, recipe_names
from cputrain.launch.options import (
    PlanningOptions,
    check_binder,
    chosen_instances,
    in_pods,
    network_of,
    plan_hosts,
    planned_job,
    planned_launcher,
    request_of_options,
    uses_launcher,
    wait_for_name,
    with_allocated_hosts,
    with_host_groups,
    with_instances,
    with_pods,
)
from cputrain.measurements import TITLES, VARIABLE, cached_seconds
from cputrain.mpi.hostfile import Cluster
from cputrain.mpi.launch_command import find_launcher
from cputrain.mpi.launchers import LAUNCHERS, InstalledLauncher, Job, Launcher
from cputrain.mpi.preflight import run_preflight, unreachable_hosts
from cputrain.mpi.schedulers import Allocation, scheduler_allocation
from cputrain.mpi.supervise.processes import JobFailedError
from cputrain.mpi.supervise.run import free_port, run_local, run_remote
from cputrain.native_build import COMPILING
from cputrain.predict.next_best import compare_plan
from cputrain.variables import KERNELS_VARIABLE, restart_variables

PYTHON = re.compile(r"python[0-9.]*")
MAY_USE_CCL = ("python", "cputrain")  # prefixes of programs
BACKENDS = "ccl-torch*/*.so"
TRAINER = ("cputrain", "train")
COMPARED_PACKAGES = ("cputrain", "torch", "torchvision", "oneccl-devel", "impi-rt")

# Modules that scripts import, as in Python's error -> what to do without them.
MISSING_MODULES = {
    **dict.fromkeys(
        ("oneccl_bindings_for_pytorch", "torch_ccl"),
        'pip install "cputrain[compat]" provides it, or remove the import: init_process_group("ccl") does not need it',
    ),
    "intel_extension_for_pytorch": 'it ended at PyTorch 2.8: pip install "cputrain[compat]" provides its API',
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingOptions:
    """How the workers of a launch are bound; see the same fields of Job."""

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
    switches: BindingOptions,
) -> Job:
    """Return the job of a command on the planned hosts.

    MASTER_ADDR, MASTER_PORT and the fabric's variables that the user has exported override the defaults. They are
    passed to the other hosts explicitly, because not every launcher passes them on.
    """
    port = port_of(env)
    kernels = ((KERNELS_VARIABLE, env[KERNELS_VARIABLE]),) if KERNELS_VARIABLE in env else ()
    here = options.on_this_host
    settings = () if here and options.pods == 1 else network_of(options).settings
    # Use its path: Open MPI puts its own directory first on its ranks' PATH, and may have a Python there.
    by_path = (shutil.which(command[0]) or command[0], *command[1:])
    return replace(
        planned_job(options, cluster, by_path),
        plan_path=folder / PLAN,
        log_dir=folder / LOGS,
        master_addr=None if here and options.pods == 1 else env.get("MASTER_ADDR") or None,
        master_port=free_port() if here and port is None else port,
        variables=(*((name, env.get(name, value)) for name, value, _ in settings), *kernels),
        **asdict(switches),
        names_errors="cputrain" in [PurePath(word).name for word in command[:4]],  # or python -m cputrain
        starting=COMPILING,
    )


def program(words: tuple[str, ...], *, module: bool) -> tuple[str, ...]:
    """Return the command for the words after launch's options: .py files and modules (`module`) run in this Python."""
    if module:
        return (sys.executable, "-m", *words)
    return (sys.executable, *words) if words[0].endswith(".py") else words


def with_kernels(command: tuple[str, ...], env: Mapping[str, str], requested: str | None) -> Mapping[str, str]:
    """Return the environment in which a command's ranks use kernels below torch's operators ("auto") or not ("off"): as
    requested, or as it says, else auto. `cputrain train` decides by the recipe, and is only told off.

    Raises InputError if it says something else."""
    kernels = requested or env.get(KERNELS_VARIABLE, "auto")
    if kernels not in ("auto", "off"):
        raise InputError(f"{KERNELS_VARIABLE}={kernels}: give auto or off")
    decides = kernels == "auto" and training_arguments(command) is not None
    return env if decides else {**env, KERNELS_VARIABLE: kernels}


def check_program(command: tuple[str, ...], env: Mapping[str, str]) -> None:
    """Raise InputError if this host lacks the program, or the script that Python is to run."""
    first, behind = command[0], command[1:2]
    if behind and behind[0].endswith(".py") and is_python(first) and not Path(behind[0]).is_file():
        raise InputError(f"script {behind[0]} does not exist: give an existing one")
    if shutil.which(first, path=env.get("PATH")) is None:
        raise InputError(f"{first[:60]} is {_no_program(first)}")


def is_python(word: str) -> bool:
    """Return whether a word names Python's interpreter: "python3", "/usr/bin/python3.11"."""
    return PYTHON.fullmatch(PurePath(word).name) is not None


def _no_program(name: str) -> str:
    """Say what a word is instead of a program, and what to do."""
    if PurePath(name).name == name and shutil.which(beside := Path(sys.executable).parent / name):
        return f"not on PATH, but in cputrain's environment: activate it, or give {shlex.quote(str(beside))}"
    if Path(name).is_dir():
        return "a folder, not a program: give a script or a program"
    if Path(name).is_file():
        return f"a file that cannot be executed: chmod +x {name}, or name its interpreter first"
    if is_python(name):
        return "not a program here: remove it, and cputrain's Python runs the .py script"
    if name in recipe_names():
        return f"a recipe, not a program: train it with cputrain train {name}"
    return "not a program on PATH: give a script or a program, as in cputrain launch -- python x.py"


def check_launch(options: PlanningOptions, *, plan_on_host: bool) -> None:
    """Raise InputError if options of a launch cannot be combined."""
    here = options.on_this_host
    if options.machine != "this" and here:
        raise InputError("launch runs on real hosts: remove --machine, or name hosts of that machine with --hosts")
    if options.launcher == "local" and not here:
        raise InputError("--launcher local starts workers on this host only: remove --launcher or --hosts")
    launcher = LAUNCHERS.get(options.launcher)
    if launcher is not None and not launcher.reaches_hosts and not here:
        raise InputError(
            f"{launcher.title} must be started on every host: run what cputrain plan prints there, or choose an MPI "
            "launcher"
        )
    check_binder(options)
    if plan_on_host and options.given["share"]:
        raise InputError("--share and --plan-on-host cannot be combined: remove one")
    if plan_on_host and (not isinstance(options.given["ppn"], int) or options.bind == "launcher"):
        raise InputError("--plan-on-host needs the same --ppn N on every host and excludes --bind launcher")


def new_folder(folder: Path, *, named: bool) -> Path:
    """Create a launch's folder, which no other launch shares.

    A `named` folder must be empty or absent (else InputError); the default name gets a number if it is taken.
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
    raise InputError(f"--output {folder} already exists: choose another folder")


def measure_transports(job: Job, launcher: Launcher, env: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Measure oneCCL's transports if their times on this host are unknown and no setting decides; report the result or
    the reason for none."""
    if not is_due(job, launcher, env):
        return
    report(f"measuring oneCCL over MPI and libfabric once (set {VARIABLE}=mpi or ofi to skip this)")
    command = isolated_command("cputrain.comm.ccl.check")
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8", check=False
    )
    last_line = (done.stdout.strip().splitlines() or [f"the measurement exited with status {done.returncode}"])[-1]
    report(f"warning: not measured: {last_line}" if done.returncode else f"measured: {last_line}")


def is_due(job: Job, launcher: Launcher, env: Mapping[str, str]) -> bool:
    """Return whether a job may use oneCCL over both transports, on this host only, and their times are unknown."""
    here = len(job.hosts) == 1 and is_this_host(job.hosts[0])
    may_use_ccl = Path(job.command[0]).name.startswith(MAY_USE_CCL) and _has_backend(env)
    open_choice = here and launcher.has_pmi and VARIABLE not in env and may_use_ccl
    return open_choice and len(cached_seconds(env)) < len(TITLES)


def _has_backend(env: Mapping[str, str]) -> bool:
    """Return whether the backend has been compiled for this user; its first use does that."""
    with suppress(RunError):  # no cache folder
        return any(cache_folder(env).glob(BACKENDS))
    return False


def training_arguments(command: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the arguments of `cputrain train` if a command is that, or `python -m cputrain train`; else None."""
    pairs = list(pairwise(PurePath(word).name for word in command))
    return command[pairs.index(TRAINER) + 2 :] if TRAINER in pairs else None


def training_command(name: str, settings: tuple[str, ...], paths: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the command that trains a recipe, given by its file or name. `paths` are the settings of absolute paths if
    this machine will train: then the command finds recipe and data from any directory."""
    command = (*isolated_command("cputrain"), "train")
    if paths is None:
        return (*command, name, *settings)
    replaced = {setting.partition("=")[0] for setting in paths}
    kept = (setting for setting in settings if setting.partition("=")[0] not in replaced)
    return (*command, str(Path(name).absolute()) if Path(name).is_file() else name, *kept, *paths)


def with_missing_module(error: JobFailedError) -> JobFailedError:
    """Return a job's error with advice about the module that the failed rank could not import, if it is known."""
    for module, advice in MISSING_MODULES.items():
        if any(line.endswith(f"No module named '{module}'") for line in error.tail):
            return error.advised(f"{module}: {advice}")
    return error


def with_restarts(start: Callable[[int, JobFailedError | None], int], restarts: int) -> int:
    """Return the exit status of start(0, None), or of start(n, failure) after the n-th failure of the job, with up to
    `restarts` restarts. Wrong input, signals and checks that fail before the ranks start end it immediately."""
    failure: JobFailedError | None = None
    for attempt in range(restarts):
        try:
            return start(attempt, failure)
        except JobFailedError as error:
            failure = error
            logger.warning("cputrain: %s\nrestart %d of %d", error, attempt + 1, restarts)
    return start(restarts, failure)


def keep_logs(logs: Path, attempt: int) -> None:
    """Rename the logs of the failed attempt, as the next attempt writes its own."""
    for path in sorted(logs.glob("rank-*.log")):
        if ".attempt-" not in path.name:
            path.rename(path.with_suffix(f".attempt-{attempt}.log"))


@dataclass(slots=True, kw_only=True)
class RemainingHosts:
    """A job's hosts, some of which may disappear during its restarts and come back."""

    hosts: tuple[str, ...]
    command: tuple[str, ...]
    gone: frozenset[str] = frozenset()

    def after(self, failure: JobFailedError) -> tuple[str, ...]:
        """Return the hosts that respond after a failure; only hosts that it names or that were gone before are probed.

        Raises RunError if none responds, or if a host is gone and the command is not `cputrain train`: other commands
        may compute something else on fewer hosts, as only `cputrain train` keeps its global batch.
        """
        suspected = self.gone.union(failure.hosts)
        self.gone = frozenset(unreachable_hosts([host for host in self.hosts if host in suspected]))
        left = tuple(host for host in self.hosts if host not in self.gone)
        names = first_named(sorted(self.gone))
        if not left:
            raise RunError(f"the job cannot restart because none of its hosts responds: {names}")
        if self.gone and training_arguments(self.command) is None:
            raise RunError(
                f"the job cannot restart because {names} did not respond and only cputrain train keeps its global "
                "batch on fewer hosts: start the command again on the other hosts"
            )
        if self.gone:
            logger.warning("restarting on %s, without %s", plural(len(left), "host"), names)
        return left


def on_hosts(options: PlanningOptions, hosts: tuple[str, ...]) -> PlanningOptions:
    """Restrict the options to some of their hosts."""
    groups = ((tuple(host for host in names if host in hosts), machine) for names, machine in options.groups)
    components = tuple(tuple(host for host in names if host in hosts) for names in options.components)
    return replace(options, hosts=hosts, groups=tuple(group for group in groups if group[0]), components=components)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command and how it is started, first and at restarts.

    `launcher` is None if this process starts the workers. `instances` is the requested number of independent copies,
    `instance` selects those to start. `allocation` is the scheduler's allocation around this process.
    """

    command: tuple[str, ...]
    options: PlanningOptions
    base: Request
    switches: BindingOptions
    env: Mapping[str, str]
    launcher: InstalledLauncher | None
    folder: Path
    instances: int | str | None
    instance: str | None
    allocation: Allocation | None

    def planned(self) -> tuple[Job, Cluster]:
        """Return the job and its hosts' plans. Raises InputError if the request does not fit."""
        cluster = plan_hosts(self.options, self.base, self.env, self.command)
        job = command_job(self.options, cluster, self.command, self.folder, self.env, self.switches)
        job = in_pods(job, self.env)
        if self.instances is not None:
            job = replace(job, instances=chosen_instances(self.instance, job.ppn))
        return job, cluster


def make_launch(
    command: tuple[str, ...],
    options: PlanningOptions,
    base: Request,
    switches: BindingOptions,
    env: Mapping[str, str],
    *,
    host_groups: tuple[str, ...],
    instances: int | str | None,
    instance: str | None,
    folder: Path,
    dry_run: bool,
    report: Callable[[str], None],
) -> Launch:
    """Return the requested launch; if no hosts are named, on the hosts of the scheduler's allocation around this
    process. A dry run does without the launcher, and `report` says so. Raises InputError if options cannot be
    combined."""
    found = scheduler_allocation(env)
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
        launcher=_launcher(options, env, dry_run, report) if uses_launcher(options) else None,
        folder=folder,
        instances=instances,
        instance=instance,
        allocation=found,
    )


def _launcher(
    options: PlanningOptions, env: Mapping[str, str], dry_run: bool, report: Callable[[str], None]
) -> InstalledLauncher:
    """Return the installed launcher. A dry run needs none: it reports what is missing, and shows the newest version."""
    try:
        return find_launcher(options.launcher, env)
    except InputError as missing:
        if not dry_run:
            raise
        shown = planned_launcher(options, env)
        version = ".".join(map(str, shown.version))
        report(f"note: {missing}; the command is for {shown.launcher.title} {version}".rstrip())
        return shown


def run_launch(
    launch: Launch,
    first: Job,
    cluster: Cluster,
    *,
    named: bool,
    restarts: int,
    preflight: bool | None,
    report: Callable[[str], None],
    advise: Callable[[JobFailedError, Job, tuple[str, ...]], JobFailedError],
) -> int:
    """Run the first, already planned job, and after failures a new one on the remaining hosts; return the exit status.

    Creates the launch's folder, whose name is the user's if `named`. `preflight` checks the hosts before the start;
    if it is None, only if there are several. `report` shows a line to the user; `advise(error, job, arguments)` adds to
    the error of a `cputrain train` with these arguments that ran out of memory what to do.
    Raises InputError, JobFailedError.
    """
    if launch.launcher is None:
        check_program(launch.command, launch.env)
    check_writable(launch.folder, "--output")
    launch = replace(launch, folder=new_folder(launch.folder, named=named))
    name = uuid4().hex
    remaining = RemainingHosts(hosts=launch.options.hosts, command=launch.command)

    def start(attempt: int, failure: JobFailedError | None) -> int:
        job, hosts = replace(first, plan_path=launch.folder / PLAN, log_dir=launch.folder / LOGS), cluster
        if failure is not None:
            keep_logs(launch.folder / LOGS, attempt - 1)
            job, hosts = replace(launch, options=on_hosts(launch.options, remaining.after(failure))).planned()
        job = replace(job, variables=(*job.variables, *restart_variables(attempt, restarts, name)))
        for warning in (*hosts.warnings, *(text for group in hosts.groups for text in _warnings(group.plan))):
            report(f"warning: {warning}")
        try:
            return _run(job, launch, preflight, report)
        except JobFailedError as error:
            arguments = training_arguments(job.command)
            if error.shortage is None or arguments is None or job.instances is not None:
                raise with_missing_module(error) from None
            raise advise(error, job, arguments) from None

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
    """Become the rank that mpirun, srun or torchrun has started: bind to its share of this host, exec the command."""
    plan, index = plan_for_rank(request, rank, command, env, compare=compare_plan)
    for warning in _warnings(plan) if rank.local_rank == 0 else ():
        report(f"warning: {warning}")
    exec_bound(plan.workers[index], plan_in_memory(plan), command, env, rank=rank, check=check, keep_env=keep_env)


def request_of_rank(options: PlanningOptions, base: Request, rank: Rank) -> Request:
    """Return the request for the host that a rank shares. Raises InputError if --ppn differs from its number of
    ranks."""
    ppn = options.given["ppn"]
    if ppn not in (None, "auto", rank.local_world_size):
        raise InputError(
            f"--ppn {ppn}, but this host has {plural(rank.local_world_size, 'rank')}: remove --ppn, or "
            f"set it to {rank.local_world_size}"
        )
    return request_of_options(options, base)


def _warnings(plan: Plan) -> tuple[str, ...]:
    return tuple(plan.render(as_option).warnings)


def _run(job: Job, launch: Launch, preflight: bool | None, report: Callable[[str], None]) -> int:
    """Check the hosts if requested, or if there are several, and run the job; return its exit status."""
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
    report(f"pre-flight: {plural(len(job.hosts), 'host')} checked in {seconds:.1f} s")
