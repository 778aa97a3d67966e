"""Verify and time two ranks on this host over each transport of oneCCL, and cache the results for later starts.

`python -m cputrain.comm.ccl.check` runs before the first job on a host; cputrain doctor and bench run it on request.
With the argument "rank" it is one of the two ranks. They are not started by a plan like other tasks: MPI needs the
mpirun that is installed with oneCCL, and the results must not depend on the plan that uses them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.records import Record
from cputrain.affinity.rank import ENV, LOOPBACK, PREFIXES, Rank, rank_from_env, rendezvous, with_rank
from cputrain.affinity.start import isolated_command
from cputrain.affinity.terminal import ExitStatus, status_of, use_utf8
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.comm.ccl import BACKEND
from cputrain.comm.ccl.environment import Libraries, ensure_extension, find_libraries
from cputrain.comm.group import timed_rounds
from cputrain.measurements import BUCKET_BYTES, MPI, TITLES, VARIABLE, comparison, save_measurement, transport_records
from cputrain.mpi.supervise.run import free_port

RANK = "rank"
PROGRAM = (*isolated_command("cputrain.comm.ccl.check"), RANK)
SIZES = (1 << 10, 1 << 20, BUCKET_BYTES)
ROUNDS = 9
MPIRUN = "bin/mpiexec.hydra"
TIMEOUT_S, END_S = 120.0, 5.0
# Prefixes of variables of a surrounding job, to which the two ranks do not belong.
OF_A_JOB = (*PREFIXES, *ENV.rank_names, "AFFINITY_", "CCL_WORKER", "CCL_LOCAL", "CCL_PROCESS")

Command = tuple[tuple[str, ...], dict[str, str]]
"""Argument vector and environment."""
Times = dict[int, list[float]]
"""Bytes -> seconds of each round."""


def time_transports(libraries: Libraries, env: Mapping[str, str]) -> tuple[dict[str, Times], list[str]]:
    """Time all-reduces of two ranks over each transport; also return a line about each transport that fails.

    Raises RunError if all fail.
    """
    times: dict[str, Times] = {}
    problems: list[str] = []
    for transport in TITLES:
        try:
            times[transport] = time_two_ranks(transport, libraries, env)
        except RunError as error:
            problems.append(str(error))
    if not times:
        raise RunError("; ".join(problems))
    return times, problems


def time_two_ranks(transport: str, libraries: Libraries, env: Mapping[str, str]) -> Times:
    """Time all-reduces over one transport. Raises RunError with the ranks' error message, or last line of output."""
    clean = {name: value for name, value in env.items() if name == "I_MPI_ROOT" or not name.startswith(OF_A_JOB)}
    clean[VARIABLE] = transport
    mpirun, port = libraries.mpi_root / MPIRUN, free_port()
    if transport == MPI and not mpirun.is_file():
        raise RunError(f"all-reduces over MPI cannot be measured without {mpirun}, which is missing")
    ranks = [Rank(rank=i, world_size=2, local_rank=i, local_world_size=2, convention="env") for i in (0, 1)]
    commands: list[Command] = [(PROGRAM, {**clean, **rendezvous(rank, LOOPBACK, port)}) for rank in ranks]
    if transport == MPI:
        meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
        commands = [((str(mpirun), "-n", "2", *PROGRAM), {**clean, **meeting, **_for_mpirun(libraries, clean)})]
    lines, failed = _run(commands)
    result = next((line for line in lines if line.startswith("{")), None)
    if failed or result is None:
        messages = [line for line in lines if line == line.lstrip()]  # without a traceback's indented source lines
        errors = [line for line in messages if "Error: " in line or "ccl: " in line] or lines[-1:] or ["no output"]
        raise RunError(f"all-reduces of two ranks over oneCCL and {TITLES[transport]} failed: {errors[0].strip()}")
    return {int(size): seconds for size, seconds in json.loads(result).items()}


def _for_mpirun(libraries: Libraries, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for Intel MPI's mpirun to start two ranks on this host, even inside a scheduler's job."""
    folder = libraries.mpi.parent
    return {
        "I_MPI_ROOT": str(libraries.mpi_root),
        "FI_PROVIDER_PATH": str(libraries.fabric.parent),
        "LD_LIBRARY_PATH": ":".join(filter(None, (str(folder), env.get("LD_LIBRARY_PATH")))),
        "I_MPI_HYDRA_BOOTSTRAP": "fork",
        "I_MPI_PIN": "0",  # the ranks bind themselves
    }


def _run(commands: list[Command]) -> tuple[list[str], bool]:
    """Run commands in parallel; return their output lines, and whether any of them failed or timed out."""
    with tempfile.TemporaryFile() as output:
        processes = [
            subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            for argv, env in commands
        ]
        deadline = time.monotonic() + TIMEOUT_S
        late: list[str] = []
        try:
            failed = any(process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes)
        except subprocess.TimeoutExpired:
            failed, late = True, [f"they did not end in {TIMEOUT_S:g} s"]
        finally:
            for process in processes:
                _end(process)
        output.seek(0)
        return [*output.read().decode(errors="replace").strip().splitlines(), *late], failed


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)  # mpirun ends its ranks
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def bucket_seconds(by_provider: Mapping[str, Times]) -> dict[str, list[float]]:
    """Return the seconds of each all-reduce of BUCKET_BYTES, by transport."""
    return {transport: times[BUCKET_BYTES] for transport, times in by_provider.items()}


def records_of(times: Mapping[str, Times]) -> tuple[Record, ...]:
    """Return the records to cache for later starts."""
    return transport_records(bucket_seconds(times), command="cputrain doctor ccl")


def be_rank(env: MutableMapping[str, str]) -> int:
    """Verify and time all-reduces on one core, as one of two ranks; rank 0 prints the seconds of each round by bytes,
    as a JSON object."""
    rank = rank_from_env(env)
    if rank is None:
        raise InputError("this command is one rank of two: run cputrain doctor ccl")
    env.update(with_rank(rank, env))  # torch reads the rank variables there
    cores = this_machine().allowed_cores
    os.sched_setaffinity(0, cores[rank.rank * len(cores) // rank.world_size].pus)
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND)
    times = {size: _timed(size) for size in SIZES}
    if rank.rank == 0:
        os.write(1, json.dumps(times).encode() + b"\n")
    dist.barrier()
    dist.destroy_process_group()
    return ExitStatus.DONE


def _timed(size: int) -> list[float]:
    """Return the seconds of each round, after a warm-up round."""
    values = torch.full((size // 4,), float(dist.get_rank() + 1))
    seconds = timed_rounds(partial(dist.all_reduce, values), ROUNDS + 1)
    if not bool((values == 3.0 * 2**ROUNDS).all()):  # 1 + 2, doubled by each further round: exact in float32
        raise RunError(f"an all-reduce of {size} bytes returned a wrong sum")
    return seconds[1:]


def main() -> int:
    """Measure the transports, cache the results and print one line about them; with "rank", run as one of the ranks."""
    env = os.environ
    if sys.argv[1:] == [RANK]:
        return be_rank(env)
    try:
        libraries = find_libraries(env)
        ensure_extension(libraries, env)
        by_provider, problems = time_transports(libraries, env)
        for record in records_of(by_provider):
            save_measurement(record, env)
    except (InputError, RunError) as error:
        print(error)
        return status_of(error)
    print(
        "; ".join((*problems, comparison({name: median(times) for name, times in bucket_seconds(by_provider).items()})))
    )
    return ExitStatus.FAILED if problems else ExitStatus.DONE


if __name__ == "__main__":
    use_utf8()
    sys.exit(main())
