"""A program without any knowledge of cputrain that uses the backend "ccl": python -m tests.support.ccl_stranger TASK...

Each task is a part of a training script that runs unchanged over gloo.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.support import ccl_callbacks


def say(**values: object) -> None:
    """Print a line of JSON in one write, so that other output cannot split it."""
    os.write(1, json.dumps({"rank": int(os.environ["RANK"]), **values}).encode() + b"\n")


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"rank {dist.get_rank()}: {what}")


def refused(act: Callable[[], object]) -> str:
    """Return the message of an error; fail if there is none."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def a_group_is_made_while_a_collective_is_in_flight() -> None:
    values = torch.ones(25 << 20)
    if dist.get_rank() == 0:
        work = dist.all_reduce(values, async_op=True)
        dist.new_group([0, 1])
        work.wait()
    else:
        dist.all_reduce(values)
        dist.new_group([0, 1])
    expect(values.min() == values.max() == dist.get_world_size(), "sum")


def groups_of_gloo_go_on_beside() -> None:
    """Two collectives in flight at once, of all ranks and of some; objects and monitored barriers use gloo."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everybody, some = dist.new_group(backend="gloo"), dist.new_group([0, 1], backend="gloo")
    for _ in range(20):
        values = [torch.ones(1000) for _ in range(3)]
        works = [dist.all_reduce(each, async_op=True) for each in values[:2]]
        works.insert(1, dist.all_reduce(values[2], group=everybody, async_op=True))
        if rank < 2:
            dist.all_reduce(pair := torch.ones(3), group=some)
            expect(bool((pair == 2).all()), f"of some: {pair}")
        for work in reversed(works):
            work.wait()
        expect(all(bool((each == world).all()) for each in values), f"of all: {values}")
    ranks = [None] * world
    dist.all_gather_object(ranks, rank, group=everybody)
    expect(ranks == [*range(world)], f"objects: {ranks}")
    dist.monitored_barrier(group=everybody)
    for group in (everybody, some) if rank < 2 else (everybody,):
        dist.destroy_process_group(group)


def inference_tensors_are_communicated() -> None:
    world = dist.get_world_size()
    with torch.inference_mode():
        ours = torch.ones(3)
        for i in range(100):
            outputs = [torch.empty(64).t() for _ in range(world)]
            work = dist.all_gather(outputs, torch.full((64,), float(i)), async_op=True)
            mean = torch.full((8, 8), float(dist.get_rank())).t()[::2]
            average = dist.all_reduce(mean, dist.ReduceOp.AVG, async_op=True)
            time.sleep(0.001)
            work.wait()
            average.wait()
            expect(all(bool((output == i).all()) for output in outputs), "all_gather")
            expect(bool((mean == (world - 1) / 2).all()), "average")
    dist.all_reduce(ours, dist.ReduceOp.AVG)  # called by non-members too, as gloo allows
    expect(ours.tolist() == [1.0] * 3, "average outside")


def a_wait_times_out_once() -> None:
    dist.barrier()
    values = torch.ones(4)
    if dist.get_rank() == 1:
        time.sleep(2.5)
    work = dist.all_reduce(values, async_op=True)
    if dist.get_rank() == 0:
        error = refused(lambda: work.wait(timedelta(seconds=0.5)))
        expect("waited 0.5 s for ALLREDUCE" in error and "still in flight" in error and "\n" not in error, error)
    work.wait()
    dist.all_reduce(values)
    expect(values.tolist() == [dist.get_world_size() ** 2] * 4, "sums after it")


def data_loaders_fork() -> None:
    data = TensorDataset(torch.arange(64.0).reshape(32, 2))
    for workers, persistent in product((2, 4), (False, True)):
        loader = DataLoader(data, batch_size=4, num_workers=workers, persistent_workers=persistent)
        for _ in range(2):
            work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
            total = sum(batch.sum() for (batch,) in loader)
            work.wait()
            dist.all_reduce(total)
            expect(total.item() == dist.get_world_size() * 63 * 32, "sum over the data")


def a_forked_child_is_refused() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = refused(lambda: dist.all_reduce(torch.ones(1))) + refused(lambda: dist.new_group([dist.get_rank()]))
        grandchild = os.fork()  # as loader workers do that start processes
        if not grandchild:
            os._exit(0)
        os.waitpid(grandchild, 0)
        os.write(writing, said.encode())
        sys.exit(7)  # runs the exit handlers, which must not destroy the parent's group
    os.close(writing)
    said = os.read(reading, 1 << 16).decode()
    expect(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "the child's status")
    expect(said.count("was called in a process forked after the group was created") == 2 and "\n" not in said, said)
    dist.barrier()


def messages_are_matched() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for tag in (5, 6, 7):
            dist.send(torch.full((3,), float(tag)), 1, tag=tag)
        seen = {}
        for _ in range(world - 1):
            values = torch.zeros(2)
            source = dist.recv(values, tag=9)
            seen[source] = values.tolist()
        expect(seen == {i: [float(i)] * 2 for i in range(1, world)}, f"from any source: {seen}")
    elif rank == 1:
        for tag in (7, 5, 6):
            values = torch.zeros(3)
            dist.recv(values, 0, tag=tag)
            expect(values.tolist() == [float(tag)] * 3, f"tag {tag}")
    if rank > 0:
        dist.send(torch.full((2,), float(rank)), 0, tag=9)
    # A message of another size only fails its receive; a collective between send and receive changes nothing.
    if rank == 0:
        work = dist.isend(torch.ones(10), 1)
        dist.barrier()
        work.wait()
        dist.send(torch.full((1,), 4.0), 1)
    else:
        dist.barrier()
    if rank == 1:
        error = refused(lambda: dist.recv(torch.ones(2), 0))
        expect("recv of 8 bytes with tag 0 met a message of 40 bytes from rank 0" in error, error)
        expect("\n" not in error, error)
        values = torch.zeros(1)
        dist.recv(values, 0)
        expect(values.item() == 4.0, "the next message")


def a_group_is_destroyed_after_receives_from_any_source() -> None:
    """Rank 0 waits for a message from every other rank, but only rank 1 has sent one."""
    rank = dist.get_rank()
    for number in range(10):
        group = dist.new_group()
        values = torch.zeros(1000)
        if rank == 0:
            expect(dist.recv(values, group=group) == 1, "the source")
            expect(values.eq(number).all().item(), "the message")
        elif rank == 1:
            dist.send(torch.full((1000,), float(number)), 0, group=group)
        dist.barrier()
        dist.destroy_process_group(group)
        total = torch.full((1000,), float(rank))
        dist.all_reduce(total)
        expect(total.eq(sum(range(dist.get_world_size()))).all().item(), "a sum after the group's end")


def sparse_gradients_are_summed() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (world + 1,))
    dist.all_reduce(mine)
    expect(mine.to_dense().tolist() == [float(world)] + [2.0] * world, "sparse sum")
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 2), (4, 2))
    dist.all_reduce(empty)
    expect(not empty.to_dense().any(), "empty")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(6, 3, sparse=True), torch.nn.Linear(3, 2)))
    model(torch.tensor([rank, 5])).sum().backward()
    gradient = model.module[0].weight.grad.to_dense()
    expect(bool(gradient[5].any()) and bool(gradient[world - 1].any()), "DDP's sparse gradient")


def a_monitored_barrier_names_the_missing() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=20))
    if rank == 1:
        time.sleep(1.5)
        return
    error = refused(lambda: group.monitored_barrier(timedelta(seconds=1)))
    expect("Rank 1 failed to pass monitoredBarrier in 1000 ms" in error and "\n" not in error, error)


def monitored_barriers_leave_nothing_in_the_store() -> None:
    group, keys = dist.new_group(), []
    for _ in range(2):
        for _ in range(3):
            group.monitored_barrier(timedelta(seconds=20))
        dist.barrier()
        keys.append(distributed_c10d._get_default_store().num_keys())
        dist.barrier()
    expect(keys[0] == keys[1], f"keys in the store: {keys}")


def good() -> None:
    """Everything that must work, in one group."""
    for act in (
        a_group_is_made_while_a_collective_is_in_flight,
        groups_of_gloo_go_on_beside,
        inference_tensors_are_communicated,
        a_wait_times_out_once,
        data_loaders_fork,
        a_forked_child_is_refused,
        messages_are_matched,
        a_group_is_destroyed_after_receives_from_any_source,
        sparse_gradients_are_summed,
        a_monitored_barrier_names_the_missing,
        monitored_barriers_leave_nothing_in_the_store,
        *ccl_callbacks.ALL,
    ):
        act()
        dist.barrier()
        say(passed=act.__name__)


def beside() -> None:
    """Entry point of ranks that mp.spawn starts."""
    groups_of_gloo_go_on_beside()
    say(passed="beside")


def late() -> None:
    """A rank reaches new_group after oneCCL's timeout, which the environment has shortened."""
    if dist.get_rank() == 1:
        time.sleep(6)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1), group=group)
    say(passed="late")


def store_gone() -> None:
    """The rank that serves the store dies while the other waits for it to create a group."""
    if dist.get_rank() == 0:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    say(error=refused(lambda: dist.new_group([0, 1])))


def gil() -> None:
    """A rank is in a C call that holds the GIL for longer than heartbeats may be missing."""
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(20)
    dist.all_reduce(torch.ones(1))
    say(passed="gil")


def suspended() -> None:
    """The test stops and continues both ranks while one waits for the other."""
    say(pid=os.getpid())
    if dist.get_rank() == 1:
        time.sleep(5)
    dist.all_reduce(torch.ones(1))
    time.sleep(4)
    dist.all_reduce(torch.ones(1))
    say(passed="suspended")


def killed() -> None:
    """A rank of a group is lost."""
    group = dist.new_group([0, 1], backend="ccl")
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    error = refused(lambda: dist.all_reduce(torch.ones(1), group=group))
    say(error=error, seconds=time.monotonic() - started)


def killed_before() -> None:
    """A rank is lost before it creates a group that the other waits for; its earlier output is kept."""
    print("printed before")
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.new_group([0, 1])


def fork_while_stuck() -> None:
    """Rank 1 is lost between joining a group and oneCCL's part of its creation, which leaves rank 0 stuck there; rank 0
    forks."""
    dist.barrier()
    if dist.get_rank() == 1:
        from cputrain.comm import ccl

        ccl._extension.CclBackend = arrive_only
        refused(lambda: dist.new_group([0, 1]))
        time.sleep(30)
        os._exit(0)
    making = threading.Thread(target=lambda: dist.new_group([0, 1]), daemon=True)
    making.start()
    time.sleep(3)
    child = os.fork()
    if not child:
        os._exit(7)
    expect(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "the child's status")
    say(passed="fork_while_stuck", stuck=making.is_alive())
    os._exit(0)


def fork_while_beating() -> None:
    """Fork children that destroy the group while heartbeat threads constantly read its state."""
    from cputrain.comm import ccl

    for number in range(2):
        place = (f"beat{number}", "token", '"host": "n"', 1e-6)
        ccl._extension.HeartbeatSender(dist.HashStore(), *place, *ccl.openssl_hmac(), -1)
    for _ in range(40):
        child = os.fork()
        if not child:
            dist.destroy_process_group()
            os._exit(7)
        expect(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "the child's status")
    say(passed="fork_while_beating")
    os._exit(0)


def arrive_only(store: dist.Store, rank: int, size: int, _seconds: float, _name: str) -> None:
    """Report the state of a rank that creates a group, before oneCCL is called."""
    store.add("feature", 0)
    store.set(f"here/{rank}", "here")
    if store.add("count", 1) == size:
        store.set("all", "here")
    raise RuntimeError("lost")


def messages_are_left() -> None:
    """Only rank 0 cannot destroy its communicators, as it waits for messages that the others never send."""
    a_group_is_destroyed_after_receives_from_any_source()
    say(passed="messages_are_left")


def leaves_in_flight(status: str) -> None:
    """Rank 1 exits while its all-reduce is in flight, which rank 0 does not join."""
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(10), async_op=True)
        sys.exit(int(status))
    time.sleep(3)
    sys.exit(0)


def callbacks_fail() -> None:
    """A timeout fails a collective whose callback waits for another collective, which it fails too."""
    say(error=ccl_callbacks.error_of_a_callback_that_waits_for_another_one_that_fails())
    os._exit(0)


def messages_between_some() -> None:
    """A third rank knows nothing of this group; then rank 1 is missing from a collective if the test says so."""
    group = dist.new_group(timeout=timedelta(seconds=6))
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1, group=group)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(3), 0, group=group)
    if "MISSING" not in os.environ:
        dist.all_reduce(torch.ones(2), group=group)
        say(passed="messages_between_some")
        return
    if dist.get_rank() == 1:
        time.sleep(15)
    else:
        say(error=refused(lambda: dist.all_reduce(torch.ones(2), group=group)))
    os._exit(0)


def joins_late() -> None:
    """Rank 1 joins some seconds before the timeout of a collective that rank 2 never calls."""
    group = dist.new_group(timeout=timedelta(seconds=float(os.environ["TIMEOUT_S"])))
    dist.all_reduce(torch.ones(2), group=group)
    if dist.get_rank() == 2:
        time.sleep(30)
        os._exit(0)
    time.sleep(dist.get_rank() * float(os.environ["LATE_S"]))
    say(error=refused(lambda: dist.all_reduce(torch.ones(2), group=group)))
    time.sleep(10)
    os._exit(0)


def waits() -> None:
    """Each rank waits for the other for longer than a watchdog needs to read the store."""
    for waiting in (0, 1):
        if dist.get_rank() != waiting:
            time.sleep(6)
        dist.all_reduce(torch.ones(1))
    say(passed="waits")


def some() -> None:
    """A ccl group of two ranks; the third rank never creates one."""
    group = dist.new_group([0, 1], backend="ccl")
    if dist.get_rank() < 2:
        values = torch.ones(1)
        dist.all_reduce(values, group=group)
        expect(values.item() == 2.0, "sum of two ranks")
    say(passed="some", transport=os.environ.get("CCL_ATL_TRANSPORT"))


def again() -> None:
    """A world ends together with its store; a rank of a ccl group of the next world is late."""
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1], backend="ccl"))
    dist.barrier()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["PORT"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    group = dist.new_group([0, 1], backend="ccl")
    if dist.get_rank() == 1:
        time.sleep(12)
    dist.all_reduce(torch.ones(1), group=group)
    say(passed="again")


def next_world() -> None:
    """Group 1 of a finished world had ranks 0 and 1; the next world's has ranks 1 and 2 and other collectives."""
    for members in ([0, 1], [1, 2]):
        pair = dist.new_group(members)
        for _ in range(70 if dist.get_rank() in members else 0):
            dist.all_reduce(torch.ones(2 + members[0]), group=pair)
        time.sleep(5)  # until these have been read by the heartbeat thread
        dist.barrier()
        if members == [0, 1]:
            dist.destroy_process_group()
            os.environ["MASTER_PORT"] = os.environ["PORT"]
            dist.init_process_group("ccl", timeout=timedelta(seconds=120))
    say(passed="next_world")


def soak(count: str) -> None:
    """Collectives of sizes that never repeat; reports resident memory after a fifth of them and at the end."""
    generator = torch.Generator().manual_seed(0)
    begun = 0.0
    for i in range(int(count)):
        if i == int(count) // 5:
            begun = resident_mib()
        size = int(torch.randint(1, 1 << 19, (1,), generator=generator))
        if i % 2:
            dist.all_reduce(torch.ones(size))
        else:
            outputs = [torch.empty(size // 8 + 1) for _ in range(dist.get_world_size())]
            dist.all_gather(outputs, torch.ones(size // 8 + 1))
    say(grown_mib=round(resident_mib() - begun, 1))


def resident_mib() -> float:
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


TASKS = {
    task.__name__: task
    for task in (
        beside,
        good,
        late,
        store_gone,
        gil,
        suspended,
        killed,
        killed_before,
        leaves_in_flight,
        fork_while_stuck,
        fork_while_beating,
        joins_late,
        waits,
        messages_are_left,
        messages_between_some,
        callbacks_fail,
        some,
        again,
        next_world,
        soak,
    )
}


def spawned(rank: int, world: int, port: str) -> None:
    """Run a rank as scripts with torch.multiprocessing.spawn do."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    main("ccl", sys.argv[2:])


def store_of_test() -> dict[str, object]:
    """Return how to join a store that the test serves and that outlives the ranks; empty without one."""
    if "STORE_PORT" not in os.environ:
        return {}
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]))
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def main(backend: str, words: list[str]) -> None:
    """Join the group, run the task, leave."""
    torch.set_num_threads(1)
    of_intel_mpi = (("RANK", "PMI_RANK"), ("WORLD_SIZE", "PMI_SIZE"))
    of_open_mpi = (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    for mine, theirs in (*of_intel_mpi, *of_open_mpi):  # under mpirun, as scripts do it
        if theirs in os.environ:
            os.environ.setdefault(mine, os.environ[theirs])
    dist.init_process_group(backend, timeout=timedelta(seconds=120), **store_of_test())
    TASKS[words[0]](*words[1:])
    if words[0] not in ("store_gone", "killed"):
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(spawned, (2, os.environ["PORT"]), nprocs=2)
    else:
        main(sys.argv[1], sys.argv[2:])
