"""The environment of a rank's command: its rank, and where the ranks meet (torch.distributed's env://)."""

import errno
import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from affinity.errors import InputError, RunError
from affinity.process_stat import read_stat
from affinity.ranks.launcher_variables import HYDRA, LAUNCHER_VARIABLES, PMI_CONNECTIONS, SLURM, START_IDS
from affinity.ranks.rank import LOOPBACK, MASTER_PORT, NUMBER, Rank, rendezvous
from affinity.ranks.route import LOOPBACK_INTERFACE, interface_to

# Below the ports that Linux gives to outgoing connections (32768 and up) and to Kubernetes' services (30000 and up).
FIRST_PORT, PORTS = 20_000, 10_000
# Names that scripts read instead of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE. An MPI does not conclude from
# these alone that its own mpirun started the process.
OTHER_NAMES = {each.convention: each.rank_names for each in LAUNCHER_VARIABLES if each.for_scripts}
# oneCCL's own default: accelerate and transformers with Intel's bindings take "ccl" only where it is set.
ONE_CCL_WORKER = {"CCL_WORKER_COUNT": "1"}
FIRST_HOSTS = re.compile(r"(?:[^\[,]|\[[^\]]*\])+")  # of Slurm's list, to the first comma that is not in brackets
FIRST_NUMBER = re.compile(r"\[(\d+)[\d,-]*\]")


def with_rank(rank: Rank, env: Mapping[str, str]) -> dict[str, str]:
    """The environment with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, the same numbers by the names of Intel MPI,
    MPICH, Open MPI and Slurm, the host's number (NODE_RANK, GROUP_RANK, SLURM_NODEID), and, where they are not set,
    MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and CCL_WORKER_COUNT.

    Raises InputError where rank 0's host cannot be known, RunError where the port is taken.
    """
    address, port = meeting_place(rank, env)
    interface = LOOPBACK_INTERFACE if rank.one_host else interface_to(address)
    defaults = ONE_CCL_WORKER | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})
    host = env["SLURM_NODEID"] if rank.convention == SLURM.convention else str(rank.rank // rank.local_world_size)
    node = {"SLURM_NODEID": host, "NODE_RANK": host, "GROUP_RANK": host}
    numbers = [str(n) for n in (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size)]
    others = [names for convention, names in OTHER_NAMES.items() if convention != rank.convention]
    same = {name: number for names in others for name, number in zip(names, numbers, strict=True)}
    # A PMI from outside this job (that of a shell that srun started) does not know its ranks.
    foreign = [env.get(name) for name in HYDRA.rank_names[:2]] != numbers[:2]
    kept = {name: value for name, value in env.items() if not (foreign and name in PMI_CONNECTIONS)}
    return {**defaults, **kept, **same, **node, **rendezvous(rank, address, port)}


def meeting_place(rank: Rank, env: Mapping[str, str]) -> tuple[str, int]:
    """The same (address, port) for all ranks of the job, found without communication.

    Address: MASTER_ADDR, or loopback on one host, or the first host of Slurm's list. Port: MASTER_PORT, or one of
    20000-29999 derived from the launcher's job id, or 29500. Rank 0 checks values that are not from the environment.
    """
    address, port = env.get("MASTER_ADDR"), port_of(env)
    meant = address or (LOOPBACK if rank.one_host else _first_host(env))
    number = _port_of_job(_job(env)) if port is None else port
    if rank.rank == 0 and not address:
        _check_address(meant)
    if rank.rank == 0 and port is None:
        _check_port(number)
    return meant, number


def port_of(env: Mapping[str, str]) -> int | None:
    """MASTER_PORT, where it is set. Raises InputError where it is not a TCP port."""
    port = env.get("MASTER_PORT")
    if port is not None and not (NUMBER.fullmatch(port) and 0 < int(port) < 1 << 16):
        raise InputError(f"MASTER_PORT={port[:60]} is not a TCP port: export a number from 1 to 65535, or unset it")
    return None if port is None else int(port)


def _first_host(env: Mapping[str, str]) -> str:
    nodes = env.get("SLURM_STEP_NODELIST") if env.get("SLURM_STEP_ID", "").isdigit() else None
    match = FIRST_HOSTS.match(nodes or env.get("SLURM_JOB_NODELIST", ""))
    if match is None:
        raise InputError(
            "several hosts, but the host of rank 0 is not known: set MASTER_ADDR to its name for all ranks (mpirun "
            "-genv MASTER_ADDR HOST; Open MPI: -x MASTER_ADDR=HOST), or start with cputrain launch --hosts"
        )
    return FIRST_NUMBER.sub(r"\1", match[0])


def _job(env: Mapping[str, str]) -> str | None:
    """The launcher's id of this job; MPICH's before that of the job in which its mpiexec was started."""
    named = (names for names in START_IDS if all(name in env for name in names))
    return _hydra_port() or next((".".join(env[name] for name in names) for names in named), None)


def _hydra_port() -> str | None:
    """HOST:PORT at which MPICH's mpiexec controls its job: an option of each host's proxy, an ancestor of its ranks."""
    for argv in _ancestors():
        if Path(argv[0]).name == "hydra_pmi_proxy" and "--control-port" in argv[:-1]:
            return argv[argv.index("--control-port") + 1]
    return None


def _ancestors() -> Iterator[list[str]]:
    """The command lines of this process's ancestors, parent first, as far as they can be read."""
    pid = os.getppid()
    while pid > 1:
        try:
            yield Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
            pid = read_stat(pid).parent
        except OSError:
            return


def _port_of_job(job: str | None) -> int:
    return MASTER_PORT if job is None else FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _check_address(address: str) -> None:
    """Raise, on rank 0, where the address is not this host's."""
    here = socket.gethostname()
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except socket.gaierror as error:
        raise InputError(
            f"{address}, the first host of Slurm's list, has no address on {here} ({error.strerror}): set MASTER_ADDR "
            "to an address of rank 0's host"
        ) from None
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise RunError(f"cannot listen on {address}: {error.strerror}: set MASTER_ADDR to another name") from None
        raise InputError(
            f"rank 0 runs on {here}, not on {address}, the first host of Slurm's list: set MASTER_ADDR to {here}"
        ) from None


def _check_port(port: int) -> None:
    """Raise, on rank 0, where the port is in use on any address: torch.distributed's store listens on all."""
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
            f"port {port} of {socket.gethostname()}, where this job's ranks would meet, is {why}: set MASTER_PORT to a "
            "free one"
        ) from None
