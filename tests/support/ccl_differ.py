"""Ranks that call different collectives: python -m tests.support.ccl_differ CASE:PORT ... runs each case in a separate
process, forked by a rank's interpreter with all modules loaded; a single CASE runs in the interpreter. Each case prints
a line of JSON at its end."""

import ctypes
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear, Sequential
from torch.nn.parallel import DistributedDataParallel

from cputrain.comm import ccl

Case = Callable[[int], object]
TIMEOUT = timedelta(seconds=60)
AT_ONCE = 6
BUSY_S = 20  # longer than a rank may be silent
ABSENT_S = 15  # longer than the timeout of the waiting ranks
PR_SET_PDEATHSIG = 1
returned: list[str] = []  # cases whose differing call has returned


def ones(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(count, dtype=dtype)


def into(count: int) -> list[Tensor]:
    return [torch.empty(count) for _ in range(2)]


def reduce_many(count: int, other: int, rank: int) -> None:
    dist.all_reduce_coalesced([ones(1000 + (rank if number == other else 0)) for number in range(count)])


def other_rows(rank: int) -> None:
    dist.all_to_all_single(torch.empty(4), ones(4 + rank), [2, 2], [2 + rank, 2])


def far_ahead(call: Case) -> Case:
    """Rank 0 gives rank 1 the values of its late calls: it is many calls ahead, as none of them waits for the other."""

    def run(rank: int) -> None:
        time.sleep(3 * rank)
        for number in range(60):
            call(rank if number == 1 else 0)

    return run


def one_way(other: int) -> None:
    """Rank 0 sends 4 values, but rank 1 expects 4 + `other`."""
    rank = dist.get_rank()
    given = [0, 0] if rank else [0, 4]
    taken = [4 + other, 0] if rank else [0, 0]
    dist.all_to_all_single(torch.empty(sum(taken)), ones(sum(given)), taken, given)


def gather_to_late(other: int) -> None:
    dist.gather(ones(4 + other), into(4 + other) if dist.get_rank() else None, 1)


def uneven_batches(rank: int) -> None:
    network = DistributedDataParallel(Linear(8, 2))
    for _ in range(5 - rank):
        network(torch.ones(4, 8)).sum().backward()
    dist.barrier()


def skipped_layer(rank: int) -> None:
    layers = [fully_shard(Linear(8, 8)) for _ in range(2)]
    network = fully_shard(Sequential(*layers, Linear(8, 4)))
    used = network if rank == 0 else Sequential(network[0], network[2])
    used(torch.ones(2, 8)).sum().backward()


def checkpoint_thread(rank: int) -> None:
    network = fully_shard(Sequential(Linear(64, 64), Linear(64, 8)))
    saved = dcp.async_save({"network": network.state_dict()}, checkpoint_id=os.environ["CHECKPOINT"])
    for _ in range(2000):
        dist.all_reduce(ones(1 << 10))
    saved.result()


def known_types(rank: int) -> None:
    """All ranks have called both before, so that between hosts nothing delays the wrong sum."""
    types = [torch.float32, torch.int32]
    for dtype in [*types, types[rank]]:
        dist.all_reduce(ones(8, dtype))
    returned.append("known_types")
    for _ in range(6000):
        dist.all_reduce(ones(8))
        time.sleep(0.01)


def message_between(rank: int) -> None:
    """Legal: rank 1 calls its first sums of this kind only after a message that rank 0 sends after its own calls."""
    values = [ones(5), ones(7)]
    works = [] if rank else [dist.all_reduce(each, async_op=True) for each in values]
    if rank:
        dist.recv(ones(3), 0)
        works = [dist.all_reduce(each, async_op=True) for each in values]
    else:
        dist.send(ones(3), 1)
    for work in reversed(works):
        work.wait()
    assert all(bool((each == 2).all()) for each in values), values


def refused_type(_: int) -> None:
    """All ranks call something that oneCCL cannot reduce; the group continues."""
    refused = ""
    try:
        dist.all_reduce(ones(4).to(torch.float8_e4m3fn))
    except RuntimeError as error:
        refused = str(error)
    assert refused.endswith("ccl cannot reduce Float8_e4m3fn: convert the tensor first"), refused


def refused_start(_: int) -> None:
    """A call that waits for the other rank's call can then not be started; only that call fails."""
    value, refused = ones(9), ""
    torch._C._set_throw_on_mutable_data_ptr(value)  # which only the start asks for
    work = dist.all_reduce(value, async_op=True)
    try:
        work.wait()
    except RuntimeError as error:
        refused = str(error)
    assert refused.startswith("oneCCL refused ALLREDUCE #2 of group 0 (Float[9]): Cannot access data pointer"), refused


CASES: dict[str, Case] = {
    "sizes": lambda rank: dist.all_reduce(ones(8 + 8 * rank)),
    "large_sizes": lambda rank: dist.all_reduce(ones(200_000 - 198_000 * rank)),
    "types": lambda rank: dist.all_reduce(ones(8, torch.int32 if rank else torch.float32)),
    "short_types": lambda rank: dist.all_reduce(ones(8, torch.bfloat16 if rank else torch.float16)),
    "operators": lambda rank: dist.all_reduce(ones(8), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
    "barrier": lambda rank: dist.barrier() if rank else dist.all_reduce(ones(1, torch.uint8)),
    "reduce_and_barrier": lambda rank: dist.barrier() if rank else dist.reduce(ones(1), 0),
    "broadcast_sizes": lambda rank: dist.broadcast(ones(8 - 4 * rank), 0),
    "roots": lambda rank: dist.broadcast(ones(8), rank),
    "reduce_roots": lambda rank: dist.reduce(ones(8), rank),
    "gather_roots": lambda rank: dist.gather(ones(4), into(4), rank),
    "all_gather_shapes": lambda rank: dist.all_gather(into(4 + 4 * rank), ones(4 + 4 * rank)),
    "long_lists": lambda rank: reduce_many(60, 20, rank),
    "longer_lists": lambda rank: reduce_many(60, 55, rank),
    "rows": other_rows,
    "late_rows": far_ahead(one_way),
    "gather_sizes": lambda rank: dist.gather(ones(4 + rank), None if rank else into(4)),
    "late_gather_sizes": far_ahead(gather_to_late),
    "scatter_sizes": lambda rank: dist.scatter(torch.empty(4 + rank), None if rank else [ones(4), ones(4)]),
    "one_way": lambda rank: one_way(2 * rank),
    "uneven_batches": uneven_batches,
    "skipped_layer": skipped_layer,
    "checkpoint_thread": checkpoint_thread,
    "known_types": known_types,
    "message_between": message_between,
    "refused_type": refused_type,
    "refused_start": refused_start,
}


def differ(case: str) -> None:
    dist.barrier()
    CASES[case](dist.get_rank())
    returned.append(case)
    dist.all_reduce(ones(3))  # reached only if the first call did not depend on the other rank
    dist.all_reduce(ones(3))


def leaves(_: str) -> None:
    """Rank 1 has one batch less, and exits normally."""
    dist.barrier()
    if dist.get_rank() != 1:
        dist.all_reduce(ones(3))


def leaves_message(_: str) -> None:
    """Rank 1 exits normally while rank 0 waits for a message from it."""
    dist.barrier()
    if dist.get_rank() == 0:
        dist.recv(ones(3), 1)


def unanswered(_: str) -> None:
    """Rank 0 waits for a message from any rank, rank 1 for rank 2 to receive one; rank 2 calls neither."""
    dist.barrier()
    if dist.get_rank() == 0:
        try:
            dist.recv(ones(3))
        finally:
            time.sleep(5)  # it serves the store, without which rank 1, if later, could not ask what rank 2 does
    elif dist.get_rank() == 1:
        dist.send(ones(1 << 22), 2)
    else:
        time.sleep(ABSENT_S)


def full_memory(_: str) -> None:
    """The shared memory of a host's ranks is full when a group is created."""
    with Path("/dev/shm/others").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    try:
        dist.new_group([0])
    finally:
        Path("/dev/shm/others").unlink()


def other_group(_: str) -> None:
    """Rank 0 waits for ranks 1 and 2: one sleeps, the other is in a collective of a group with a higher number."""
    pair = dist.new_group([1, 2], timeout=TIMEOUT)
    rank = dist.get_rank()
    for _ in range(50 if rank else 0):
        dist.all_reduce(ones(3), group=pair)
    dist.all_reduce(ones(3))
    if rank == 1:
        time.sleep(ABSENT_S)
    else:
        dist.all_reduce(ones(3), group=pair if rank else None)


def busy_first_rank(_: str) -> None:
    """A call blocks rank 0's Python while rank 1 waits for rank 2, which is killed."""
    pair = dist.new_group([1, 2])
    dist.all_reduce(ones(3))
    if dist.get_rank() == 0:
        signal.alarm(BUSY_S)  # ends the process, which has no handler
        sum(range(1 << 40))
    elif dist.get_rank() == 1:
        dist.all_reduce(ones(3), group=pair)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def run(case: str) -> None:
    if case.endswith("without_openssl"):
        ccl.openssl_hmac = lambda: None
    limit = timedelta(seconds=10) if case.startswith(("other_group", "unanswered")) else TIMEOUT
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # On a busy host the ranks may take longer than the limit to meet.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0, TIMEOUT)
    dist.init_process_group("ccl", store=store, rank=rank, world_size=size, timeout=limit)
    begun, error = time.monotonic(), ""
    others = (leaves, leaves_message, unanswered, full_memory, other_group, busy_first_rank)
    try:
        {other.__name__: other for other in others}.get(case.removesuffix("_without_openssl"), differ)(case)
    except (AssertionError, RuntimeError) as raised:
        error = str(raised)
    seconds = time.monotonic() - begun
    said = {"rank": dist.get_rank(), "case": case, "error": error, "seconds": seconds, "returned": bool(returned)}
    if case == "full_memory":
        said["left"] = [path.name for path in Path("/dev/shm").iterdir()]
    os.write(1, json.dumps(said).encode() + b"\n")
    if not case.startswith("leaves") or error:
        time.sleep(2)  # mpirun would kill the other rank before it has reported
        os._exit(0)


def run_in_children(cases: list[str]) -> None:
    """Run some cases at once, in the same order on every rank, as they mostly wait."""
    names: dict[int, str] = {}

    def await_one() -> None:
        pid, status = os.wait()
        print(f"{names.pop(pid)} ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)

    for case in cases:
        if len(names) == AT_ONCE:
            await_one()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            name, os.environ["MASTER_PORT"] = case.split(":")
            run(name)
            return
        names[pid] = case
    while names:
        await_one()


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # of all_reduce_coalesced
    if "PMI_RANK" in os.environ:  # mpirun's names
        os.environ.update(RANK=os.environ["PMI_RANK"], WORLD_SIZE=os.environ["PMI_SIZE"])
    if ":" in sys.argv[1]:
        run_in_children(sys.argv[1:])
    else:
        run(sys.argv[1])


main()
