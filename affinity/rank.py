"""Rank, local rank, world size and rendezvous (torch.distributed's env://) from any launcher's environment.

`LAUNCHER_VARIABLES` lists each launcher's and scheduler's variables: rank numbers, job id, and prefixes of all others.

In an Indexed Job, Kubernetes numbers the pods, and `cputrain job kubernetes` sets their count.
"""

import errno
import fcntl
import os
import re
import socket
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import read_stat
from cputrain.affinity.wording import plural

SIOCGIFADDR = 0x8915  # linux/sockios.h
LOOPBACK_INTERFACE = "lo"
IPV6 = Path("/proc/net/if_inet6")

PMI_CONNECTIONS = ("PMI_FD", "PMI_PORT")  # an MPI's connection to the PMI server

LOOPBACK = "127.0.0.1"
MASTER_PORT = 29500  # torch.distributed's default
MAX_RANKS = 1 << 24
NUMBER = re.compile("[0-9]{1,9}")
SLURM_HOST, PALS_HOST = "SLURM_NODEID", "PALS_NODEID"  # number of the rank's host
STEP_TASKS = "SLURM_STEP_TASKS_PER_NODE"
SET_TASKS = "set it to the tasks per host in Slurm's format, 4(x2) for two hosts with 4 each"
SET_RANKS = "set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for each rank"
TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")

APINFO, APINFO_HEADER = "PALS_APINFO", struct.Struct("@iNNNiNNiNNiNNi")
APINFO_RANK = struct.Struct("@iii")  # local rank, number of the command, number of the host

INDEX, COUNT = "JOB_COMPLETION_INDEX", "CPUTRAIN_PODS"  # the first is set by Kubernetes
POD_NUMBER = re.compile("[0-9]{1,6}")

# Below Linux's ephemeral ports (32768 and up) and Kubernetes' node ports (30000 and up).
FIRST_PORT, PORTS = 20_000, 10_000

# oneCCL's default, set because accelerate and transformers with Intel's bindings choose "ccl" only if it is set.
ONE_CCL_WORKER = {"CCL_WORKER_COUNT": "1"}
# The part of Slurm's host list up to the first comma outside brackets.
FIRST_HOSTS = re.compile(r"(?:[^\[\],\s]|\[\d[\d,-]*\])+(?=,|\s*\Z)")
FIRST_NUMBER = re.compile(r"\[(\d+)[\d,-]*\]")


def address_to(peer: str) -> str:
    """Return this host's address on the route to a peer. Raises OSError if the peer has no address or no route."""
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # chooses the route without sending anything
        return str(probe.getsockname()[0])


def interface_to(peer: str) -> str | None:
    """Return the network interface on the route to a peer; None if there is none."""
    try:
        address = address_to(peer)
    except OSError:
        return None
    if ":" in address:
        number = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = (line.split() for line in IPV6.read_text(encoding="utf-8").splitlines())
        return next((words[-1] for words in lines if words[0] == number), None)
    return next((name for _, name in socket.if_nameindex() if _address(name) == address), None)


def local_addresses() -> list[str]:
    """Return this host's addresses: for each interface except loopback one IPv4 and all IPv6 addresses."""
    names = [name for _, name in socket.if_nameindex() if name != LOOPBACK_INTERFACE]
    listed = (line.split() for line in IPV6.read_text(encoding="utf-8").splitlines()) if IPV6.exists() else ()
    six = [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])) for words in listed if words[-1] in names]
    return [*filter(None, map(_address, names)), *six]


def _address(interface: str) -> str | None:
    """Return an interface's IPv4 address; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherVariables:
    """Environment variables that a kind of launcher, or a scheduler, sets for a rank."""

    convention: str
    """Name of the kind, used in `Rank.convention`."""
    rank_names: tuple[str, ...] = ()
    """Variables of rank, world size, local rank, local world size; () if it starts no ranks."""
    names_suffice: bool = True
    """Whether `rank_names` alone identify a rank; if False, a separate function does, or there are none."""
    for_scripts: bool = False
    """Whether `rank_names` are also set under all other launchers, for scripts that read them."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of all its variables besides `rank_names`."""
    start_id: tuple[str, ...] = ()
    """Variables whose values together identify a start: the same for all its ranks, different for every start."""
    job_variable: str | None = None
    """Variable with the id of a scheduler's job."""
    pmi_of: tuple[str, str] | None = None
    """For launchers with whose PMI oneCCL cannot use MPI: a variable that only this launcher sets, and its name in
    messages."""


ENV = LauncherVariables(
    convention="env",  # torch.distributed's env://, which torchrun and cputrain launch set
    rank_names=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    prefixes=("TORCHELASTIC_",),
)
OPEN_MPI = LauncherVariables(
    convention="openmpi",
    rank_names=(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    for_scripts=True,
    prefixes=("OMPI_", "PRTE_", "PMIX_"),
    start_id=("PMIX_NAMESPACE",),
    pmi_of=("OMPI_UNIVERSE_SIZE", "Open MPI's mpirun"),
)
MVAPICH = LauncherVariables(
    convention="mvapich",
    rank_names=(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    prefixes=("MV2_",),
)
HYDRA = LauncherVariables(
    convention="intelmpi",  # and MPICH
    rank_names=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    for_scripts=True,
    prefixes=("PMI_", "MPI_", "I_MPI_", "HYDRA_", "HYDI_"),
    start_id=("I_MPI_HYDRA_UUID",),
)
PALS = LauncherVariables(
    convention="pals",  # names from HPE's pals.h (2018-2023), which has none for the world size
    rank_names=("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    names_suffice=False,
    prefixes=("PALS_",),
    start_id=("PALS_APID",),
)
SLURM = LauncherVariables(
    convention="srun",
    rank_names=("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    names_suffice=False,
    for_scripts=True,
    prefixes=("SLURM_",),
    start_id=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    job_variable="SLURM_JOB_ID",
)
PBS = LauncherVariables(convention="pbs", names_suffice=False, prefixes=("PBS_",), job_variable="PBS_JOBID")

# Most specific first: srun's variables are also set if another launcher runs inside a Slurm job, PMI's by several
# launchers, and PALS's by srun (Slurm's plugin mpi/cray_shasta).
LAUNCHER_VARIABLES = (ENV, OPEN_MPI, MVAPICH, HYDRA, SLURM, PALS, PBS)
# In this order, as Intel MPI's mpirun may run in a task that has a PMIx namespace from srun.
START_IDS = tuple(variables.start_id for variables in (HYDRA, OPEN_MPI, SLURM, PALS))
PREFIXES = tuple(prefix for variables in LAUNCHER_VARIABLES for prefix in variables.prefixes)

# The launchers' variables for the local rank.
LOCAL_RANK_VARIABLES = tuple(variables.rank_names[2] for variables in LAUNCHER_VARIABLES if variables.rank_names)

# Variables that scripts read instead of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE. They alone do not make an MPI
# library believe that its mpirun started the process.
OTHER_NAMES = {variables.convention: variables.rank_names for variables in LAUNCHER_VARIABLES if variables.for_scripts}

# All variables that `with_rank` sets.
SET_FOR_RANKS = (
    *ENV.rank_names,
    *(name for names in OTHER_NAMES.values() for name in names),
    *("SLURM_NODEID", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"),
    "CCL_WORKER_COUNT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A process's rank in its job; `convention` names the launcher variables that it was read from."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    convention: str

    @property
    def one_host(self) -> bool:
        """Whether all ranks of the job are on this host."""
        return self.local_world_size == self.world_size

    @property
    def numbers(self) -> tuple[str, ...]:
        """Its numbers as text, in the order of `LauncherVariables.rank_names`."""
        return tuple(map(str, (self.rank, self.world_size, self.local_rank, self.local_world_size)))


def rank_from_env(env: Mapping[str, str]) -> Rank | None:
    """Return this process's rank; None if no launcher started it. Raises InputError if variables are missing."""
    incomplete = []
    for launcher in LAUNCHER_VARIABLES:
        names = launcher.rank_names
        if not launcher.names_suffice or names[0] not in env or names[1] not in env:
            continue
        missing = [name for name in names if name not in env]
        if missing:
            incomplete.append(f"{names[0]} is set, but not {', '.join(missing)}")
            continue
        rank, world, local, local_world = (_number(env, name) for name in names)
        return _checked(
            Rank(
                rank=rank,
                world_size=world,
                local_rank=local,
                local_world_size=local_world,
                convention=launcher.convention,
            )
        )
    # srun sets half of PMI's variables, too. A batch script has SLURM_PROCID like a task, but only tasks belong to a
    # numbered job step; a step of one task is most often an interactive shell.
    if "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "").isdigit():
        return _srun_rank(env) if _number(env, "SLURM_STEP_NUM_TASKS") > 1 else None
    if PALS.rank_names[0] in env:
        return _pals_rank(env)
    if "PMIX_RANK" in env:  # the only number in a rank's environment (PMIx Standard); its server has all others
        incomplete.append("PMIX_RANK is set, but no world size, which PMIx gives to MPI programs only")
    if incomplete:
        raise InputError(
            f"{'; '.join(incomplete)}: {SET_RANKS}, or unset these variables if no launcher started this process"
        )
    return None


def local_rank_of(env: Mapping[str, str]) -> int | None:
    """Return this process's local rank if a launcher has set at least that, else None."""
    return next((int(env[name]) for name in LOCAL_RANK_VARIABLES if NUMBER.fullmatch(env.get(name, ""))), None)


def _srun_rank(env: Mapping[str, str]) -> Rank:
    tasks, node = tasks_per_node(env, STEP_TASKS), _number(env, SLURM_HOST)
    if node >= len(tasks):
        raise InputError(
            f"SLURM_NODEID={node}, but {STEP_TASKS}={env[STEP_TASKS][:60]} has "
            f"{plural(len(tasks), 'host')}: start the rank with srun"
        )
    return _checked(
        Rank(
            rank=_number(env, "SLURM_PROCID"),
            world_size=_number(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(env, "SLURM_LOCALID"),
            local_world_size=tasks[node],
            convention=SLURM.convention,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PalsApplication:
    """The ranks that PALS has started together: the host's number for each rank, and the names of the hosts."""

    host_of: tuple[int, ...]
    hosts: tuple[str, ...]


def pals_application(env: Mapping[str, str]) -> PalsApplication | None:
    """Read the file PALS_APINFO, which PALS writes for Cray's PMI; None if there is none.

    Its format is in Slurm's plugin mpi/cray_shasta (apinfo.c): a header with size, offset and count of each table, and
    the tables. Raises InputError if the file cannot be read or has another format.
    """
    path = Path(env.get(APINFO, ""))
    try:
        data = path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise InputError(f"cannot read {APINFO}={str(path)[:100]} ({error.strerror}): {SET_RANKS}") from None
    application = None if data is None else _application_in(data)
    if data is not None and application is None:
        raise InputError(f"{APINFO}={str(path)[:100]} is not a description of ranks by PALS: {SET_RANKS}")
    return application


def _application_in(data: bytes) -> PalsApplication | None:
    if len(data) < APINFO_HEADER.size:
        return None
    *_, rank_size, ranks_at, ranks, host_size, hosts_at, hosts = APINFO_HEADER.unpack_from(data)
    name_at = struct.calcsize("@i")
    if rank_size < APINFO_RANK.size or host_size <= name_at or ranks < 1 or hosts < 1:
        return None
    if max(ranks_at + ranks * rank_size, hosts_at + hosts * host_size) > len(data):
        return None
    host_of = tuple(APINFO_RANK.unpack_from(data, ranks_at + i * rank_size)[2] for i in range(ranks))
    starts = (hosts_at + i * host_size for i in range(hosts))
    records = (data[start + name_at : start + host_size] for start in starts)
    names = tuple(record.partition(b"\0")[0].decode("ascii", errors="replace") for record in records)
    return PalsApplication(host_of=host_of, hosts=names) if {*host_of} <= {*range(hosts)} else None


def _pals_rank(env: Mapping[str, str]) -> Rank:
    """Return a rank of PALS's mpiexec; sizes that are not in its environment are in the file PALS_APINFO."""
    rank, world, local, local_world = PALS.rank_names
    local_world = local_world if local_world in env else "PMI_LOCAL_SIZE"
    missing = [name for name in (world, local_world) if name not in env]
    application = pals_application(env) if missing else None
    if missing and application is None:
        raise InputError(
            f"{rank} is set, but not {', '.join(missing)}, and {APINFO} is not a file: {SET_RANKS}, or "
            "unset these variables if no launcher started it"
        )
    sizes = (
        (_number(env, world), _number(env, local_world))
        if application is None
        else (len(application.host_of), application.host_of.count(_number(env, PALS_HOST)))
    )
    return _checked(
        Rank(
            rank=_number(env, rank),
            world_size=sizes[0],
            local_rank=_number(env, local),
            local_world_size=sizes[1],
            convention=PALS.convention,
        )
    )


def tasks_per_node(env: Mapping[str, str], name: str) -> tuple[int, ...]:
    """Parse a variable in Slurm's run-length format: "2(x3),1" -> (2, 2, 2, 1). Raises InputError on anything else."""
    text = env.get(name, "")
    counts: list[int] = []
    for part in text.split(","):
        match = TASKS.fullmatch(part)
        if match is None:
            raise InputError(f"{name}={text[:60]!r}: {part[:30]!r} is not N or N(xM); {SET_TASKS}")
        if len(counts) + int(match[2] or 1) > MAX_RANKS:
            raise InputError(f"{name}={text[:60]!r} has more than {MAX_RANKS:,} hosts: {SET_TASKS}")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def rendezvous(rank: Rank, address: str, port: int) -> dict[str, str]:
    """Return the env:// variables that torch.distributed.init_process_group() reads."""
    return {
        **dict(zip(ENV.rank_names, rank.numbers, strict=True)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _number(env: Mapping[str, str], name: str) -> int:
    if not NUMBER.fullmatch(env.get(name, "")):
        raise InputError(
            f"{name}={env.get(name, '')[:60]!r} is not a number of at most 9 digits: start the rank with mpirun, "
            "srun, torchrun or cputrain launch"
        )
    return int(env[name])


def _checked(rank: Rank) -> Rank:
    if not (rank.rank < rank.world_size and rank.local_rank < rank.local_world_size <= rank.world_size):
        raise InputError(
            f"the launcher's variables contradict each other (rank {rank.rank} of {rank.world_size}, local rank "
            f"{rank.local_rank} of {rank.local_world_size}): unset them, or start with cputrain launch"
        )
    return rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Index of a pod among the `count` pods of its job."""

    index: int = 0
    count: int = 1


def pods_of(env: Mapping[str, str]) -> Pods:
    """Return this pod's index and the pod count of its job; 0 of 1 outside such a job.

    Without the count the index is ignored, as the pods of most Indexed Jobs are independent. Raises InputError if the
    variables are invalid.
    """
    if COUNT not in env:
        return Pods()
    index, count = env.get(INDEX, ""), env[COUNT]
    if not (POD_NUMBER.fullmatch(index) and POD_NUMBER.fullmatch(count) and int(index) < int(count)):
        raise InputError(
            f"{COUNT}={count[:30]} and {INDEX}={index[:30] or 'unset'}: the index must be a number below the count; "
            f"start with the manifest of cputrain job kubernetes, or unset {COUNT}"
        )
    return Pods(index=int(index), count=int(count))


def with_rank(rank: Rank, env: Mapping[str, str]) -> dict[str, str]:
    """Add a rank's variables to an environment.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; the same numbers by their names in Intel MPI, MPICH, Open MPI and
    Slurm; the host's number (NODE_RANK, GROUP_RANK, SLURM_NODEID); and, unless set, MASTER_ADDR, MASTER_PORT,
    GLOO_SOCKET_IFNAME and CCL_WORKER_COUNT. Raises InputError if rank 0's host is unknown, RunError if the port is in
    use.
    """
    address, port = rendezvous_address(rank, env)
    interface = LOOPBACK_INTERFACE if rank.one_host else interface_to(address)
    defaults = ONE_CCL_WORKER | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})
    host_variable = {SLURM.convention: SLURM_HOST, PALS.convention: PALS_HOST}.get(rank.convention, "")
    host = env.get(host_variable) or str(rank.rank // rank.local_world_size)
    node = {"SLURM_NODEID": host, "NODE_RANK": host, "GROUP_RANK": host}
    other_names = [names for convention, names in OTHER_NAMES.items() if convention != rank.convention]
    same = {name: number for names in other_names for name, number in zip(names, rank.numbers, strict=True)}
    # A PMI server from outside this job, such as that of a shell started by srun, does not know this job's ranks.
    foreign = [env.get(name) for name in HYDRA.rank_names[:2]] != [*rank.numbers[:2]]
    passed = {name: value for name, value in env.items() if not (foreign and name in PMI_CONNECTIONS)}
    return {**defaults, **passed, **same, **node, **rendezvous(rank, address, port)}


def rendezvous_address(rank: Rank, env: Mapping[str, str]) -> tuple[str, int]:
    """Return the rendezvous (address, port), the same for all ranks of the job, without communication.

    Address: MASTER_ADDR, or loopback on one host, or the first of Slurm's or PALS's list. Port: MASTER_PORT, or one of
    20000-29999 derived from the launcher's job id, or 29500. Rank 0 checks values that are not from the environment.
    """
    configured, port = env.get("MASTER_ADDR"), port_of(env)
    address = configured or (LOOPBACK if rank.one_host else _first_host(env))
    number = _port_of_job(_job(env)) if port is None else port
    if rank.rank == 0 and not configured:
        _check_address(address, _list_of_hosts(env))
    if rank.rank == 0 and port is None:
        _check_port(number)
    return address, number


def port_of(env: Mapping[str, str]) -> int | None:
    """Return MASTER_PORT; None if it is unset. Raises InputError if it is not a TCP port."""
    port = env.get("MASTER_PORT")
    if port is not None and not (NUMBER.fullmatch(port) and 0 < int(port) < 1 << 16):
        raise InputError(f"MASTER_PORT={port[:60]} is not a TCP port: export a number from 1 to 65535, or unset it")
    return None if port is None else int(port)


def _list_of_hosts(env: Mapping[str, str]) -> str:
    """Return the name of Slurm's or PALS's variable that lists the ranks' hosts."""
    if env.get("SLURM_STEP_ID", "").isdigit() and env.get("SLURM_STEP_NODELIST"):
        return "SLURM_STEP_NODELIST"
    return APINFO if PALS.rank_names[0] in env and "SLURM_JOB_NODELIST" not in env else "SLURM_JOB_NODELIST"


def _first_host(env: Mapping[str, str]) -> str:
    variable = _list_of_hosts(env)
    application = pals_application(env) if variable == APINFO else None
    if application is not None:
        return application.hosts[application.host_of[0]]
    listed = "" if variable == APINFO else env.get(variable, "")
    match = FIRST_HOSTS.match(listed)
    if match is None and listed:
        raise InputError(
            f"{variable}={listed[:60]!r} does not begin with a host: set MASTER_ADDR to the name of rank 0's host for "
            "all ranks"
        )
    if match is None:
        raise InputError(
            "several hosts, but the host of rank 0 is unknown: set MASTER_ADDR to its name for all ranks (mpirun -genv "
            "MASTER_ADDR HOST, or with Open MPI -x MASTER_ADDR=HOST), or start with cputrain launch --hosts"
        )
    return FIRST_NUMBER.sub(r"\1", match[0])


def _job(env: Mapping[str, str]) -> str | None:
    """Return the launcher's id of this job; MPICH's has precedence over the job in which its mpiexec was started."""
    complete = (names for names in START_IDS if all(name in env for name in names))
    return _hydra_port() or next((".".join(env[name] for name in names) for names in complete), None)


def _hydra_port() -> str | None:
    """Return HOST:PORT of MPICH's mpiexec, an option of the proxy that is an ancestor of all ranks on a host."""
    for argv in _ancestors():
        if Path(argv[0]).name == "hydra_pmi_proxy" and "--control-port" in argv[:-1]:
            return argv[argv.index("--control-port") + 1]
    return None


def _ancestors() -> Iterator[list[str]]:
    """Yield the command lines of this process's ancestors, parent first, up to the first unreadable one."""
    pid = os.getppid()
    while pid > 1:
        try:
            yield Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
            pid = read_stat(pid).parent
        except OSError:
            return


def _port_of_job(job: str | None) -> int:
    return MASTER_PORT if job is None else FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _check_address(address: str, variable: str) -> None:
    """Raise an error on rank 0 if the address, from the variable `variable`, is not this host's."""
    host = socket.gethostname()
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(endpoint)
    except socket.gaierror as error:
        raise InputError(
            f"{address}, the first host of {variable}, has no address on {host} ({error.strerror}): set MASTER_ADDR to "
            "an address of rank 0's host"
        ) from None
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise RunError(f"cannot listen on {address} ({error.strerror}): set MASTER_ADDR to another name") from None
        raise InputError(
            f"rank 0 runs on {host}, not on {address}, the first host of {variable}: set MASTER_ADDR to {host}"
        ) from None


def _check_port(port: int) -> None:
    """Raise an error on rank 0 if the port is in use on any address, as torch.distributed's store listens on all."""
    both = socket.has_dualstack_ipv6()
    try:
        with socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if both:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("", port))
    except OSError as error:
        why = "in use" if error.errno == errno.EADDRINUSE else f"not usable ({error.strerror})"
        raise RunError(
            f"port {port} of {socket.gethostname()}, the rendezvous of this job's ranks, is {why}: set MASTER_PORT to "
            "a free one"
        ) from None
