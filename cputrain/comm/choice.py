"""The choice of the communication backend: oneCCL where every rank can use it, else gloo; torch's MPI if set."""

import torch.distributed as dist

from affinity.errors import InputError, RunError
from affinity.ranks.rank import Rank
from cputrain.comm import ccl
from cputrain.comm.store import SignedKeys


def choose_backend(requested: str, rank: Rank, keys: SignedKeys) -> tuple[str, str]:
    """The backend of all ranks and the reason for it; loads oneCCL if that is chosen. Waits for every rank's attempt.

    With "auto", all ranks use gloo if one cannot use oneCCL. With "ccl", raises InputError or RunError on every rank if
    one cannot use oneCCL; with "mpi", InputError where torch is built without MPI.
    """
    if requested == "mpi" and not dist.is_mpi_available():
        raise InputError(
            "comm.backend=mpi: this torch is built without MPI, as every one from PyPI: build torch from source with "
            "it, or set comm.backend=ccl, which communicates over MPI too"
        )
    if requested in ("gloo", "mpi"):
        return requested, f"comm.backend={requested}"
    problem: InputError | RunError | None = None
    over = ""
    try:
        transport = ccl.transport_of_job(rank, keys)
        ccl.extension(rank, transport)
        over = f"over {transport}"
    except (InputError, RunError) as error:
        problem = error
    own = f"rank {rank.rank}: {str(problem).removeprefix('comm.backend=ccl: ')}" if problem else ""
    found = keys.problem_of_any("ccl", own, rank)
    if not found:
        return "ccl", over
    if requested == "ccl":
        raise problem or RunError(f"comm.backend=ccl: {found}")
    return "gloo", found
