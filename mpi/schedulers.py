"""The scheduler's allocation around this process: its hosts and slots, with one record per scheduler."""

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.host_names import find_host, host_key
from cputrain.affinity.rank import tasks_per_node
from cputrain.affinity.topology.machine import parse_list
from cputrain.affinity.wording import first_named, plural
from cputrain.mpi.hostfile import MAX_SLOTS, Host, check_name, expand_hosts, read_hostfile

Hosts = tuple[Host, ...]
Env = Mapping[str, str]
FLUX_TIMEOUT_S = 20.0
PIECE = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
SLOTS = re.compile("[0-9]{1,9}")
LIST = "SLURM_JOB_NODELIST"
AFFINITY_FILE = "LSB_AFFINITY_HOSTFILE"
LISTED = re.compile(r'[^\s,\[\]"]+')


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHosts:
    """Hosts from a scheduler's variables, by component of the job, and a note about hosts left out."""

    components: tuple[Hosts, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A scheduler's record.

    `variables` are set in its jobs; the first that is set holds the job's ID, unless `job_id` names another variable
    (one that other programs set, too). `found` reads the hosts and returns None if the variables do not name them;
    without it reading is not implemented. `slot` is the scheduler's unit on a host; `slots_are_cores` whether slots may
    be cores rather than ranks. `give` is the option that passes the hosts to `cputrain launch`. Without `found`,
    `hosts_in` matches variables with the number of hosts, their names or their file; `one_if_unset`: jobs of one host
    lack them.
    """

    name: str
    variables: tuple[str, ...]
    job_id: str = ""
    found: Callable[[Env], JobHosts | None] | None = None
    slot: str = "slot"
    slots_are_cores: bool = False
    give: str = "--hosts or --hostfile"
    hosts_in: str = ""
    one_if_unset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The scheduler's allocation around this process.

    `components` are the hosts of each component: several in a heterogeneous Slurm job, none if the hosts are unknown.
    `note` describes hosts left out. `alone`: the hosts are not listed, but the job has only this one.
    """

    scheduler: Scheduler
    job: str
    components: tuple[Hosts, ...]
    note: str = ""
    alone: bool = False

    @property
    def hosts(self) -> Hosts:
        """All hosts, component by component."""
        return tuple(host for component in self.components for host in component)

    @property
    def title(self) -> str:
        """Title such as "Slurm job 17 of 2 components, 3 hosts"."""
        many = f" of {len(self.components)} components" if len(self.components) > 1 else ""
        counted = f", {plural(len(self.hosts) or 1, 'host')}" if self.hosts or self.alone else ""
        return f"{self.scheduler.name} job {self.job}{many}{counted}"

    @property
    def uses_one_host(self) -> str:
        """A note that only this host is used, and what to do; "" if the job has only this host."""
        if self.alone or (len(self.hosts) == 1 and not self.note):
            return ""
        if len(self.hosts) == 1:
            return f"{self.title}; only this host is used; for cputrain launch, {self.note}"
        return f"{self.title}; only this host is used: " + (
            "cputrain launch uses all of them" if self.hosts else f"name the job's hosts with {self.scheduler.give}"
        )


def scheduler_allocation(env: Env) -> Allocation | None:
    """Return the scheduler's allocation around this process, if any. Raises InputError if its variables are damaged."""
    for scheduler in SCHEDULERS:
        job = next((env[name] for name in scheduler.variables if env.get(name)), None)
        if job is None:
            continue
        allocated = None if scheduler.found is None else scheduler.found(env)
        allocated = allocated or JobHosts(components=())
        job = env.get(scheduler.job_id) or job
        return Allocation(
            scheduler=scheduler,
            job=job[:60],
            components=allocated.components,
            note=allocated.note,
            alone=not allocated.components and _has_one_host(scheduler, env),
        )
    return None


def _slurm(env: Env) -> JobHosts | None:
    """Read Slurm's variables, which end in component numbers in heterogeneous jobs (sbatch(1), OUTPUT ENVIRONMENT
    VARIABLES)."""
    is_new = "SLURM_HET_SIZE" in env or any(name.startswith(f"{LIST}_HET_GROUP_") for name in env)
    word = "HET" if is_new else "PACK"  # before Slurm 20.02
    size_text = env.get(f"SLURM_{word}_SIZE", "1")
    numbers = [int(match[1]) for name in env if (match := re.fullmatch(rf"{LIST}_{word}_GROUP_([0-9]{{1,4}})", name))]
    size = max(int(size_text) if SLOTS.fullmatch(size_text) else 1, *(number + 1 for number in numbers), 1)
    suffixes = [""]
    if size > 1:
        suffixes = [f"_{word}_GROUP_{number}" for number in range(min(size, MAX_SLOTS))]
        absent = [suffix for suffix in suffixes if not env.get(f"{LIST}{suffix}")]
        if absent:
            raise InputError(
                f"this Slurm job has {size} components (SLURM_{word}_SIZE={size_text[:30]}), but {LIST}{absent[0]} "
                "is not set: name the hosts with --hosts"
            )
    if not env.get(f"{LIST}{suffixes[0]}"):
        return None
    return JobHosts(components=tuple(_slurm_component(env, suffix) for suffix in suffixes))


def _slurm_component(env: Env, suffix: str) -> Hosts:
    source, tasks_name = f"{LIST}{suffix}", f"SLURM_TASKS_PER_NODE{suffix}"
    names = expand_hosts(env[source], source)
    tasks = env.get(tasks_name) if f"SLURM_NTASKS{suffix}" in env else None  # without NTASKS it counts CPUs
    counts: tuple[int | None, ...] = tasks_per_node(env, tasks_name) if tasks else (None,) * len(names)
    if len(counts) != len(names):
        raise InputError(
            f"{tasks_name}={tasks!r} has {plural(len(counts), 'host')}, {source}={env[source]!r} has "
            f"{len(names):,}: unset {tasks_name}, or name the hosts with --hosts"
        )
    return tuple(Host(name=check_name(n, source), slots=c) for n, c in zip(names, counts, strict=True))


def _pbs(env: Env) -> JobHosts | None:
    """Read the node file, which has a line per MPI process (PBS Professional User's Guide, 5.1.3 The Job Node File)."""
    path = env.get("PBS_NODEFILE")
    if not path:
        return None
    listed = read_hostfile(Path(path), "PBS_NODEFILE", any_spelling=True).hosts
    return JobHosts(components=(tuple(replace(host, slots=host.slots or 1) for host in listed),))


def _lsf(env: Env) -> JobHosts | None:
    """Read LSF's host lists and note lists that contradict the first (IBM Spectrum LSF, environment variables).

    LSB_MCPU_HOSTS is "HOST SLOTS HOST SLOTS"; LSB_HOSTS and the file LSB_DJOB_HOSTFILE have each host once per slot;
    the file LSB_AFFINITY_HOSTFILE has a line per task.
    """
    lists = dict(_lists_of_lsf(env))
    if not lists:
        return None
    (variable, hosts), *other_lists = lists.items()
    used, notes = hosts, []
    first, *further = hosts
    if further and first.slots == 1 and all(host.slots and host.slots > 1 for host in further):
        used = tuple(further)
        notes.append(
            f"LSF's first host, {first.name}, has 1 slot and the others have more, so it is treated as the batch host "
            "without workers: name all hosts with --hosts to use it, too"
        )
    for another, listed in other_lists:
        tasks = another == AFFINITY_FILE  # lists tasks with any number of slots, none on the batch host
        if not (_are_same(listed, used, slots=False) if tasks else _are_same(listed, hosts, slots=True)):
            notes.append(
                f"LSF's variables differ: {variable} is used, {_in_words(hosts)}; {another} has {_in_words(listed)}: "
                "name the hosts with --hosts if that is right"
            )
    return JobHosts(components=(used,), note="; ".join(notes))


def _lists_of_lsf(env: Env) -> Iterator[tuple[str, Hosts]]:
    """Yield LSF's variables that list a job's hosts, with their lists. Unreadable files are skipped if LSB_MCPU_HOSTS
    is set: they may be on other hosts."""
    words = env.get("LSB_MCPU_HOSTS", "").split()
    if words:
        if len(words) % 2:
            raise InputError(
                f"LSB_MCPU_HOSTS={env['LSB_MCPU_HOSTS'][:60]!r} is not HOST SLOTS HOST SLOTS: name the hosts with "
                "--hosts"
            )
        yield "LSB_MCPU_HOSTS", _summed(zip(words[::2], words[1::2], strict=True), "LSB_MCPU_HOSTS")
    path = env.get("LSB_DJOB_HOSTFILE")
    if path and (not words or _has_lines(path)):
        yield "LSB_DJOB_HOSTFILE", _host_of_each_line(path, "LSB_DJOB_HOSTFILE")
    if names := env.get("LSB_HOSTS", "").split():
        yield "LSB_HOSTS", _summed(((name, "1") for name in names), "LSB_HOSTS")
    path = env.get(AFFINITY_FILE)
    if path and _has_lines(path):  # empty if the job has no affinity requirement
        yield AFFINITY_FILE, _host_of_each_line(path, AFFINITY_FILE)


def _has_lines(path: str) -> bool:
    return os.access(path, os.R_OK) and Path(path).stat().st_size > 0


def _host_of_each_line(path: str, variable: str) -> Hosts:
    return _summed(((line[0], "1") for line in _lines(path, variable)), f"{variable}={path}")


def _are_same(some: Hosts, candidates: Hosts, *, slots: bool) -> bool:
    """Return whether two lists have the same hosts (short names match), and with `slots` the same slots on each."""
    positions = [find_host(host.name, [candidate.name for candidate in candidates]) for host in some]
    if None in positions or len(set(positions)) != len(candidates):
        return False
    return not slots or all(
        host.slots == candidates[i].slots for host, i in zip(some, positions, strict=True) if i is not None
    )


def _in_words(hosts: Hosts) -> str:
    """Return text such as "85 slots on 3 hosts (a, b, c)"."""
    slots = plural(sum(host.slots or 0 for host in hosts), "slot")
    return f"{slots} on {plural(len(hosts), 'host')} ({first_named([host.name for host in hosts])})"


def _lines(path: str, variable: str) -> list[list[str]]:
    """Return the words of each line in the file that a variable names."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise InputError(f"{variable}={path} cannot be read: {error.strerror}: name the hosts with --hosts") from None
    return [words for line in text.splitlines() if (words := line.split())]


def _grid_engine(env: Env) -> JobHosts | None:
    """Read lines of HOST SLOTS QUEUE PROCESSORS; a host has a line for each of its queues (sge_pe(5), $PE_HOSTFILE)."""
    path = env["PE_HOSTFILE"]
    lines = _lines(path, "PE_HOSTFILE")
    short = next((line for line in lines if len(line) < 2), None)
    if short is not None or not lines:
        problem = "is empty" if short is None else f"has the line {short[0][:40]!r}"
        raise InputError(f"PE_HOSTFILE={path} {problem}, not HOST SLOTS QUEUE: name the hosts with --hosts")
    return JobHosts(components=(_summed(((line[0], line[1]) for line in lines), f"PE_HOSTFILE={path}"),))


def _flux(env: Env) -> JobHosts | None:
    """Read the hosts from `flux` as a resource set (Flux RFC 20): no variable names them (flux-environment(7))."""
    job = env.get("FLUX_JOB_ID")
    # A batch script has no FLUX_JOB_ID; its Flux instance has exactly the job's resources.
    words = ("job", "info", job, "R") if job else ("resource", "R")
    jobid = job or env.get("FLUX_ENCLOSING_ID") or _flux_prints(env, "getattr", "jobid")
    shown = _flux_prints(env, *words) if jobid else None  # an instance outside a job has the whole cluster
    if shown is None:
        return None
    try:
        execution = json.loads(shown)["execution"]
        cores = {
            rank: len(parse_list(entry["children"].get("core", "")))
            for entry in execution["R_lite"]
            for rank in parse_list(entry["rank"].strip("[]"))
        }
        listed = [piece for text in execution["nodelist"] for piece in PIECE.findall(text)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"flux {' '.join(words)} prints no resource set ({error!r}): name the hosts with --hosts"
        ) from None
    names = [name for piece in listed for name in expand_hosts(piece, f"flux {' '.join(words)}")]
    if not names or len(names) != len(cores):
        raise InputError(
            f"flux {' '.join(words)} prints {plural(len(names), 'host')} for {plural(len(cores), 'rank')}: name the "
            "hosts with --hosts"
        )
    pairs = zip(names, (str(cores[rank]) for rank in sorted(cores)), strict=True)
    return JobHosts(components=(_summed(pairs, "flux"),))


def _flux_prints(env: Env, *words: str) -> str | None:
    """Return the output of a flux command; None if flux is missing or fails."""
    program = shutil.which("flux", path=env.get("PATH"))
    if program is None:
        return None
    try:
        ran = subprocess.run(
            [program, *words], env=env, capture_output=True, encoding="utf-8", timeout=FLUX_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout if ran.returncode == 0 else None


def _summed(pairs: Iterable[tuple[str, str]], source: str) -> Hosts:
    """Return each host once, in its first spelling, with the sum of its slots. Raises InputError on a bad name or
    number."""
    spelled: dict[str, str] = {}
    slots: Counter[str] = Counter()
    for name, number in pairs:
        if not SLOTS.fullmatch(number) or int(number) > MAX_SLOTS:
            raise InputError(f"{source}: {number[:30]!r} is not a number of slots: name the hosts with --hosts")
        slots[spelled.setdefault(host_key(name), check_name(name, source))] += int(number)
    hosts = tuple(Host(name=name, slots=count) for name, count in slots.items() if count)
    if not hosts:
        raise InputError(f"{source} has no host with a slot: name the hosts with --hosts")
    return hosts


def _has_one_host(scheduler: Scheduler, env: Env) -> bool:
    """Return whether a job's variables show that it has one host."""
    values = [env[name] for name in env if re.fullmatch(scheduler.hosts_in, name) and env[name] not in ("", "0")]
    if len(values) != 1:
        return scheduler.one_if_unset and not values
    if not values[0].startswith("/"):
        return values[0].strip() == "1" or (not values[0].isdecimal() and len(set(LISTED.findall(values[0]))) == 1)
    try:
        return len(read_hostfile(Path(values[0]), scheduler.hosts_in).hosts) == 1
    except InputError:
        return False


# The first one whose variables are set is the job's scheduler.
SCHEDULERS = (
    Scheduler(name="Slurm", variables=("SLURM_JOB_ID", "SLURM_JOB_NODELIST"), found=_slurm, slot="task"),
    # Torque sets PBS's variables and these. With nodes=2:ppn=16, PBS_NODEFILE has 16 lines per host, one per core.
    Scheduler(
        name="Torque",
        variables=("PBS_NUM_PPN", "PBS_VNODENUM"),
        job_id="PBS_JOBID",
        found=_pbs,
        slots_are_cores=True,
    ),
    Scheduler(name="PBS", variables=("PBS_JOBID", "PBS_NODEFILE"), found=_pbs),
    Scheduler(
        name="LSF",
        variables=("LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE"),
        found=_lsf,
        slots_are_cores=True,
        give='--hosts or --hostfile "$LSB_DJOB_HOSTFILE"',
    ),
    # A job without a parallel environment has no PE_HOSTFILE, and runs on one host.
    Scheduler(
        name="Grid Engine",
        variables=("PE_HOSTFILE",),
        job_id="JOB_ID",
        found=_grid_engine,
        slots_are_cores=True,
    ),
    Scheduler(
        name="Flux",
        variables=("FLUX_JOB_ID", "FLUX_ENCLOSING_ID", "FLUX_URI"),
        found=_flux,
        slot="core",
        slots_are_cores=True,
        give='--hosts "$(flux hostlist)"',
    ),
    Scheduler(
        name="Cobalt",
        variables=("COBALT_JOBID",),
        give='--hostfile "$COBALT_NODEFILE"',
        hosts_in="COBALT_NODEFILE",
    ),
    Scheduler(
        name="OAR",
        variables=("OAR_JOB_ID", "OAR_JOBID"),
        give='--hostfile "$OAR_NODEFILE"',
        hosts_in="OAR_NODEFILE",
    ),
    Scheduler(
        name="LoadLeveler",
        variables=("LOADL_STEP_ID", "LOADL_JOB_NAME"),
        give='--hostfile "$LOADL_HOSTFILE"',
        hosts_in="LOADL_HOSTFILE",
    ),
    # Set only in the parallel universe.
    Scheduler(
        name="HTCondor",
        variables=("_CONDOR_JOB_AD", "_CONDOR_SCRATCH_DIR"),
        hosts_in="_CONDOR_NPROCS",
        one_if_unset=True,
    ),
    Scheduler(name="Cray PALS", variables=("PALS_APID",)),
    Scheduler(
        name="PJM",
        variables=("PJM_JOBID",),
        give='--hostfile "$PJM_O_NODEINF"',
        hosts_in="PJM_O_NODEINF",
    ),
    Scheduler(
        name="HyperQueue",
        variables=("HQ_NODE_FILE",),
        job_id="HQ_JOB_ID",
        give='--hostfile "$HQ_NODE_FILE"',
        hosts_in="HQ_NODE_FILE",
    ),
    Scheduler(
        name="OpenCCS",
        variables=("CCS_NODEFILE",),
        job_id="CCS_REQID",
        give='--hostfile "$CCS_NODEFILE"',
        hosts_in="CCS_NODEFILE",
    ),
    # Kubernetes' MPI operator sets these in its launcher pod to the launcher's hostfile, which lists other hosts.
    *(
        Scheduler(name="MPI operator", variables=(name,), job_id="HOSTNAME", give=f'--hostfile "${name}"')
        for name in (
            *("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"),
            *("I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE"),
        )
    ),
    # Volcano, SkyPilot, dstack, Kubeflow Trainer, SageMaker and Azure ML may run the same command on every host.
    Scheduler(
        name="Volcano",
        variables=("VC_TASK_INDEX",),
        job_id="HOSTNAME",
        give="--hosts, on one of them only",
        hosts_in="VC_[A-Z0-9_]+_NUM",
    ),
    Scheduler(
        name="SkyPilot",
        variables=("SKYPILOT_TASK_ID", "SKYPILOT_NODE_IPS"),
        give='--hosts "$SKYPILOT_NODE_IPS", on one of them only',
        hosts_in="SKYPILOT_NODE_IPS",
    ),
    Scheduler(
        name="dstack",
        variables=("DSTACK_RUN_NAME", "DSTACK_NODES_IPS"),
        give='--hosts "$DSTACK_NODES_IPS", on one of them only',
        hosts_in="DSTACK_NODES_IPS",
    ),
    # torchrun's variables, as Kubeflow sets them in its pods.
    Scheduler(
        name="Kubeflow Trainer",
        variables=("PET_NODE_RANK",),
        job_id="HOSTNAME",
        give="--hosts, on one of them only",
        hosts_in="PET_NNODES",
    ),
    Scheduler(
        name="SageMaker",
        variables=("SM_HOSTS",),
        job_id="TRAINING_JOB_NAME",
        give="--hosts, on one of them only",
        hosts_in="SM_HOSTS",
    ),
    Scheduler(
        name="Azure ML",
        variables=("AZUREML_RUN_ID",),
        give="--hosts, on one of them only",
        hosts_in="AZUREML_NODE_COUNT",
    ),
    # Set only in multi-node parallel jobs and multi-instance tasks.
    Scheduler(
        name="AWS Batch",
        variables=("AWS_BATCH_JOB_ID",),
        hosts_in="AWS_BATCH_JOB_NUM_NODES",
        one_if_unset=True,
    ),
    Scheduler(
        name="Azure Batch",
        variables=("AZ_BATCH_JOB_ID",),
        give='--hosts "$AZ_BATCH_HOST_LIST"',
        hosts_in="AZ_BATCH_HOST_LIST",
        one_if_unset=True,
    ),
)
