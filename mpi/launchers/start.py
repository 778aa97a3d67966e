"""One small function per launcher: Job -> tokens, variables, files. Nothing here starts anything."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from affinity.errors import InputError
from affinity.planner.plan import Plan
from affinity.planner.plan_file import request_to_json
from affinity.ranks.rank import LOOPBACK, MASTER_PORT, Rank, rendezvous
from affinity.topology.cpuset import format_list, format_mask
from mpi.hosts.hostfile import Host, format_hosts
from mpi.launchers.detect import Launcher
from mpi.launchers.job import Job

MASKS_IN_HEX = (2021,)  # Intel MPI from this version on wants 0x before a mask, older ones refuse it


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What starts a job: the launcher's tokens, variables to add to its environment, files to write beforehand."""

    argv: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[Path, str], ...] = ()


def bound(job: Job) -> tuple[str, ...]:
    """The job's command behind affinity.bind, the same tokens for every rank."""
    flags = (
        *(("--bound",) if job.binder == "launcher" else ()),
        *(() if job.verify else ("--no-verify",)),
        *(("--keep-env",) if job.keep_env else ()),
    )
    plan = ("--plan", str(job.plan_path))
    if job.plan_on_host:
        plan = ("--plan-here", request_to_json(replace(job.plan.request, ppn=job.ppn)))
    return (sys.executable, "-m", "affinity.bind", *plan, *flags, "--", *job.command)


def local(job: Job, port: int) -> tuple[tuple[tuple[str, ...], dict[str, str]], ...]:
    """(argv, variables to add) of each worker of this host, by rank."""
    ranks = (
        Rank(rank=i, world_size=job.ppn, local_rank=i, local_world_size=job.ppn, launcher="env") for i in range(job.ppn)
    )
    return tuple((bound(job), rendezvous(rank, LOOPBACK, port)) for rank in ranks)


def start(job: Job, launcher: Launcher, command: tuple[str, ...], folder: Path | None) -> Start:
    """What starts `command` as every rank of the job; its files lie in the folder, None: it needs no files."""
    if job.binder == "launcher" and len(job.kinds) > 1:
        raise InputError("--bind launcher gives all hosts the same masks: hosts of several kinds need --bind self")
    if job.binder == "launcher" and any(kind.plan.oversubscribed for kind in job.kinds):
        raise InputError("--bind launcher: launchers give each rank cores of its own: leave it or --oversubscribe out")
    if job.binder == "launcher" and launcher.kind == "torchrun":
        raise InputError("torchrun binds nobody: leave --bind launcher out")
    return LAUNCHERS[launcher.kind](job, launcher, command, folder)


def intelmpi(job: Job, launcher: Launcher, command: tuple[str, ...], folder: Path | None) -> Start:
    """Intel MPI's mpirun; its pinning is switched off, or given the plan's masks by local rank."""
    pin: tuple[str, ...] = ("-genv", "I_MPI_PIN", "0")
    if job.binder == "launcher":
        spell = format_mask if launcher.version >= MASKS_IN_HEX else _bare_mask
        masks = ",".join(spell(worker.pus) for worker in job.plan.workers)
        pin = ("-genv", "I_MPI_PIN", "1", "-genv", "I_MPI_PIN_DOMAIN", f"[{masks}]")
    where, files = _hosts_of(job, folder, ("-machinefile", "hydra"), ("-hosts", ",".join(job.hosts)))
    variables = (word for name, value in rank_variables(job) for word in ("-genv", name, value))
    return Start(
        argv=(
            *(launcher.program, "-np", str(job.world_size)),
            *(("-ppn", str(job.ppn)) if len(job.kinds) == 1 else ()),
            *(*where, *pin, *variables, *command),
        ),
        variables=launcher.variables,
        files=files,
    )


def mpich(job: Job, launcher: Launcher, command: tuple[str, ...], folder: Path | None) -> Start:
    """MPICH's mpiexec (Hydra)."""
    pin = "none"
    if job.binder == "launcher":
        pin = "user:" + ",".join("+".join(map(str, worker.pus)) for worker in job.plan.workers)
    where, files = _hosts_of(job, folder, ("-f", "hydra"), ("-hosts", _with_slots(job)))
    variables = (word for name, value in rank_variables(job) for word in ("-genv", name, value))
    return Start(
        argv=(launcher.program, "-n", str(job.world_size), *where, "-bind-to", pin, *variables, *command),
        variables=launcher.variables,
        files=files,
    )


def openmpi(job: Job, launcher: Launcher, command: tuple[str, ...], folder: Path | None) -> Start:
    """Open MPI's mpirun, 4 and 5; bound by a rankfile in logical cores, which both read."""
    where, files = _hosts_of(job, folder, ("--hostfile", "openmpi"), ("--host", _with_slots(job)))
    place: tuple[str, ...] = ("--map-by", "slot", "--bind-to", "none")
    if job.binder == "launcher":
        if folder is None:
            raise InputError("--bind launcher gives Open MPI a rankfile: cputrain plan --write DIR writes it")
        ranks = folder / "rankfile"
        files = (*files, (ranks, rankfile(job)))
        old = launcher.version < (5,)
        place = ("--rankfile", str(ranks)) if old else ("--map-by", f"rankfile:file={ranks}")
    exports = (word for name, value in rank_variables(job) for word in ("-x", f"{name}={value}"))
    return Start(
        argv=(
            *(launcher.program, *(("--allow-run-as-root",) if launcher.as_root else ())),
            *(("--prefix", launcher.prefix) if launcher.prefix else ()),
            *("-np", str(job.world_size), *where, *place, *exports, *command),
        ),
        variables=launcher.variables,
        files=files,
    )


def srun(job: Job, launcher: Launcher, command: tuple[str, ...], folder: Path | None) -> Start:
    """Slurm's srun, inside an allocation. Each host is wanted whole: only then are masks honoured, and only then may
    a rank bind itself to any PU of the plan."""
    if len(job.kinds) > 1 or job.hosts == ("localhost",):
        raise InputError("srun starts equal numbers of ranks on hosts of an allocation: give --hosts of one kind")
    pin = "none"
    if job.binder == "launcher":
        pin = "mask_cpu:" + ",".join(format_mask(worker.pus) for worker in job.plan.workers)
    pus = max(1, len(job.plan.machine.allowed_pus) // job.ppn)
    # An exclusive step gets a CPU for each task or is refused; one that may overcommit has the whole allocation.
    whole = "--overcommit" if job.ppn > len(job.plan.machine.allowed_pus) else "--exclusive"
    names = (Host(name=host) for host in job.hosts)
    files = () if folder is None else ((folder / "hosts", format_hosts(names, "plain")),)
    where = f"--nodelist={','.join(job.hosts)}" if folder is None else f"--nodefile={folder / 'hosts'}"
    return Start(
        argv=(
            *(launcher.program, f"--nodes={len(job.hosts)}", f"--ntasks={job.world_size}"),
            *(f"--ntasks-per-node={job.ppn}", f"--cpus-per-task={pus}", whole, where),
            *("--distribution=block:block", f"--cpu-bind={pin}", "--kill-on-bad-exit=1", *command),
        ),
        variables=(*launcher.variables, *rank_variables(job)),
        files=files,
    )


def torchrun(job: Job, launcher: Launcher, command: tuple[str, ...], folder: Path | None) -> Start:
    """torchrun, whose line is the same on every host and has to be started on each."""
    if len(job.kinds) > 1:
        raise InputError("torchrun starts equal numbers of ranks on each host: hosts of several kinds need mpirun")
    meeting = f"{job.hosts[0]}:{job.master_port or MASTER_PORT}"
    return Start(
        argv=(
            *(launcher.program, f"--nnodes={len(job.hosts)}", f"--nproc-per-node={job.ppn}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", "--no-python", *command),
        ),
        variables=(*launcher.variables, *job.variables),
    )


LAUNCHERS: dict[str, Callable[[Job, Launcher, tuple[str, ...], Path | None], Start]] = {
    "intelmpi": intelmpi,
    "openmpi": openmpi,
    "mpich": mpich,
    "srun": srun,
    "torchrun": torchrun,
}


def rank_variables(job: Job) -> tuple[tuple[str, str], ...]:
    """What every rank gets beside its plan's environment: where the ranks meet, and the job's own variables."""
    first = LOOPBACK if job.hosts == ("localhost",) else job.hosts[0].rpartition("@")[2]
    port = () if job.master_port is None else (("MASTER_PORT", str(job.master_port)),)
    return (("MASTER_ADDR", job.master_addr or first), *port, *job.variables)


def _hosts_of(
    job: Job, folder: Path | None, by_file: tuple[str, str], in_line: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[tuple[Path, str], ...]]:
    """How a launcher is told the hosts: (tokens, files). `by_file` is its option for a hostfile, and the format."""
    if folder is None:
        return in_line, ()
    option, form = by_file
    path = folder / "hosts"
    return (option, str(path)), ((path, format_hosts(_slots(job), form)),)


def _with_slots(job: Job) -> str:
    """h1:2,h2:2, as Open MPI and MPICH take hosts and their ranks in a line."""
    return ",".join(format_hosts(_slots(job), "hydra").split())


def _slots(job: Job) -> Iterator[Host]:
    return (Host(name=host, slots=len(plan.workers)) for host, plan in _hosts(job))


def _hosts(job: Job) -> Iterator[tuple[str, Plan]]:
    return ((host, kind.plan) for kind in job.kinds for host in kind.hosts)


def rankfile(job: Job) -> str:
    """Open MPI's rankfile: the logical cores of each rank's domain, as hwloc counts them among those allowed."""
    lines, rank = [], 0
    for host, plan in _hosts(job):
        logical = {pu: i for i, core in enumerate(plan.machine.allowed_cores) for pu in core.pus}
        for worker in plan.workers:
            lines.append(f"rank {rank}={host} slot={format_list({logical[pu] for pu in worker.pus})}")
            rank += 1
    return "\n".join(lines) + "\n"


def _bare_mask(pus: tuple[int, ...]) -> str:
    return format_mask(pus).removeprefix("0x")
