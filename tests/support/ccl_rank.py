"""One rank of a test of the ccl backend, for any launcher: python -m tests.support.ccl_rank TASK [ARGUMENT...]."""

import json
import math
import os
import resource
import signal
import sys
import time
from datetime import timedelta
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from cputrain.affinity.rank import rank_from_env, rendezvous

rank = rank_from_env(os.environ)
assert rank is not None
os.environ.update(rendezvous(rank, os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])))
torch.set_num_threads(1)
import cputrain.comm.ccl as ccl  # noqa: E402
from cputrain.comm import watchdog  # noqa: E402

TYPES = {
    torch.float32: 1e-6,
    torch.float64: 1e-14,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.int8: 0,
    torch.uint8: 0,
    torch.int16: 0,
    torch.int32: 0,
    torch.int64: 0,
}
REDUCTIONS = {
    "sum": (dist.ReduceOp.SUM, lambda values: values.sum(0)),
    "avg": (dist.ReduceOp.AVG, lambda values: values.mean(0)),
    "product": (dist.ReduceOp.PRODUCT, lambda values: values.prod(0)),
    "min": (dist.ReduceOp.MIN, lambda values: values.min(0).values),
    "max": (dist.ReduceOp.MAX, lambda values: values.max(0).values),
}
BITWISE = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple)
LAYOUTS = st.sampled_from(["plain", "transposed", "strided", "offset"])


def say(**values: object) -> None:
    """Print a line of JSON in one write, so that other output cannot split it."""
    os.write(1, json.dumps({"rank": rank.rank, **values}).encode() + b"\n")


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in memory that is not contiguous, or not at its storage's start."""
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided" and values.dim():
        return values.repeat_interleave(2, dim=-1)[..., ::2]
    if layout == "offset":
        return torch.cat([values.new_zeros(3), values.reshape(-1)])[3:].reshape(values.shape)
    return values


def of_rank(number: int, key: int, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    """Return the values of rank `number` for an example, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * key + number)
    if kind.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)
    return torch.randint(-3 if kind.is_signed else 0, 4, shape, generator=generator).to(kind)


def near(found: torch.Tensor, exact: torch.Tensor, kind: torch.dtype, scale: torch.Tensor) -> bool:
    """Return whether a result equals the float64 reference within a few roundings of its type."""
    if not kind.is_floating_point:
        return torch.equal(found, exact.to(kind))
    return bool(((found.double() - exact).abs() <= TYPES[kind] * (scale + exact.abs()) + 1e-30).all())


def exchange(shape: tuple[int, ...], kind: torch.dtype, layout: str, how: str, *, root: int, key: int) -> None:
    """Check the collectives in which each rank has other values for each rank."""
    me, world = dist.get_rank(), dist.get_world_size()
    op, reference = REDUCTIONS[how]
    mixed = [of_rank(i, key + me + 1, shape, kind) for i in range(world)]
    theirs = torch.stack([of_rank(me, key + i + 1, shape, kind) for i in range(world)])
    out = laid_out(torch.empty(shape, dtype=kind), layout)
    dist.scatter(out, mixed if me == root else None, src=root)
    assert torch.equal(out, of_rank(me, key + root + 1, shape, kind)), "scatter"
    outs = [torch.empty(shape, dtype=kind) for _ in range(world)]
    dist.all_to_all(outs, [laid_out(value, layout) for value in mixed])
    assert torch.equal(torch.stack(outs), theirs), "all_to_all"
    flat = torch.empty(world * math.prod(shape), dtype=kind)
    dist.all_to_all_single(flat, torch.stack(mixed).reshape(-1))
    assert torch.equal(flat, theirs.reshape(-1)), "all_to_all_single"
    part = laid_out(torch.empty(shape, dtype=kind), layout)
    dist.reduce_scatter(part, mixed, op)
    scattered, spread = reference(theirs.double()), theirs.double().abs()
    spread = spread.prod(0) if how == "product" else spread.sum(0)
    assert near(part, scattered, kind, spread), "reduce_scatter"


def combine_bits(all_values: torch.Tensor, layout: str, root: int) -> None:
    """Check the bitwise reductions of integers, [ranks, ...]."""
    me, world = dist.get_rank(), dist.get_world_size()
    for op, combine in BITWISE.items():
        exact = reduce(combine, all_values)
        reduced, onto = (laid_out(all_values[me].clone(), layout) for _ in range(2))
        dist.all_reduce(reduced, op)
        assert torch.equal(reduced, exact), "bitwise all_reduce"
        dist.reduce(onto, root, op)
        assert torch.equal(onto, exact if me == root else all_values[me]), "bitwise reduce"
        part = laid_out(torch.empty_like(exact), layout)
        dist.reduce_scatter(part, [all_values[me].bitwise_xor(i) for i in range(world)], op)
        assert torch.equal(part, reduce(combine, all_values.bitwise_xor(me))), "bitwise reduce_scatter"


def examples(count: int) -> None:
    """Check every collective on generated shapes, types and layouts, against float64 references."""
    me, world = dist.get_rank(), dist.get_world_size()
    made = 0

    @seed(0)  # every rank must generate the same examples in the same order
    @settings(max_examples=count, database=None, deadline=None, derandomize=False, report_multiple_bugs=False)
    @given(
        shape=SHAPES,
        kind=st.sampled_from(list(TYPES)),
        how=st.sampled_from(list(REDUCTIONS)),
        layout=LAYOUTS,
        root=st.integers(0, world - 1),
        key=st.integers(0, 1 << 20),
    )
    def one(shape: tuple[int, ...], kind: torch.dtype, how: str, layout: str, root: int, key: int) -> None:
        nonlocal made
        made += 1
        if how == "avg" and not kind.is_floating_point:
            how = "sum"
        op, reference = REDUCTIONS[how]
        all_values = torch.stack([of_rank(i, key, shape, kind) for i in range(world)])
        exact = reference(all_values.double())
        scale = all_values.double().abs().prod(0) if how == "product" else all_values.double().abs().sum(0)
        mine = all_values[me]

        reduced = laid_out(mine.clone(), layout)
        dist.all_reduce(reduced, op)
        assert near(reduced, exact, kind, scale), ("all_reduce", reduced, exact)
        onto = laid_out(mine.clone(), layout)
        dist.reduce(onto, root, op)
        assert near(onto, exact, kind, scale) if me == root else torch.equal(onto, mine), "reduce"
        sent = laid_out(mine.clone(), layout)
        dist.broadcast(sent, root)
        assert torch.equal(sent, all_values[root]), "broadcast"
        gathered = [laid_out(torch.zeros_like(mine), layout) for _ in range(world)]
        dist.all_gather(gathered, laid_out(mine, layout))
        assert torch.equal(torch.stack(gathered), all_values), "all_gather"
        into = torch.empty((world * mine.numel(),), dtype=kind)
        dist.all_gather_into_tensor(into, laid_out(mine, layout).reshape(-1))
        assert torch.equal(into, all_values.reshape(-1)), "all_gather_into_tensor"
        collected = [torch.empty_like(mine) for _ in range(world)] if me == root else None
        dist.gather(laid_out(mine, layout), collected, dst=root)
        assert collected is None or torch.equal(torch.stack(collected), all_values), "gather"
        exchange(shape, kind, layout, how, root=root, key=key)
        if not kind.is_floating_point:
            combine_bits(all_values, layout, root)

    one()
    say(examples=made)


def against_gloo() -> None:
    """Sums of two ranks equal gloo's bit for bit; a huge tensor is summed completely."""
    gloo = dist.new_group(backend="gloo")
    for kind in TYPES:
        if kind == torch.int16:
            continue  # gloo does not support it
        for count in (1, 7, 1000, 1 << 16, 1_234_567):
            generator = torch.Generator().manual_seed(count * 31 + rank.rank)
            values = (torch.randn(count, generator=generator, dtype=torch.float64) * 3).to(kind)
            ours, theirs = values.clone(), values.clone()
            dist.all_reduce(ours)
            dist.all_reduce(theirs, group=gloo)
            assert torch.equal(ours, theirs), (kind, count)
    huge = torch.ones((2 << 30) // 4 + 5)  # more than 2 GiB
    huge[-1] = rank.rank
    dist.all_reduce(huge)
    assert huge[:-1].min() == huge[:-1].max() == 2.0 and huge[-1] == 1.0
    del huge
    big = torch.full(((1 << 31) + 8,), rank.rank, dtype=torch.uint8)
    dist.broadcast(big, 1)
    assert big.min() == big.max() == 1
    say(equal=True)


def soak(count: int) -> None:
    """Mixed collectives, synchronous and asynchronous, in the group and in subgroups; memory does not grow."""
    groups = [dist.group.WORLD, dist.new_group(list(range(dist.get_world_size())))]
    generator = torch.Generator().manual_seed(0)
    begun = 0
    for i in range(count):
        if i == count // 5:
            begun = resident_kib()
        work = begun_collective(i, int(torch.randint(1, 20_000, (1,), generator=generator)), groups[i % 2])
        if i % 3:
            work.wait()
    dist.barrier()
    say(grown_mib=round((resident_kib() - begun) / 1024, 1))


def begun_collective(kind: int, size: int, group: dist.ProcessGroup) -> dist.Work:
    """Start one of five collectives without waiting for it."""
    values, many = torch.ones(size), torch.ones(size * group.size())
    if kind % 5 == 0:
        return dist.all_reduce(values, group=group, async_op=True)
    if kind % 5 == 1:
        return dist.broadcast(values, 0, group=group, async_op=True)
    if kind % 5 == 2:
        return dist.all_gather_into_tensor(many, values, group=group, async_op=True)
    if kind % 5 == 3:
        return dist.all_to_all_single(torch.empty_like(many), many, group=group, async_op=True)
    return dist.reduce_scatter_tensor(values, many, group=group, async_op=True)


def resident_kib() -> int:
    """Return this process's current resident memory."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize() // 1024


def users() -> None:
    """FSDP2, distributed checkpoints, DDP with a hook and with unused parameters, subgroups."""
    import tempfile

    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from cputrain.comm.hooks import Bf16AllReduceHook

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    sharded = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=mesh)
    images = torch.randn(4 * dist.get_world_size(), 6)
    whole(images).square().mean().backward()
    sharded(images[4 * rank.rank : 4 * rank.rank + 4]).square().mean().backward()
    for ours, exact in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), exact.grad)

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    state = {"model": sharded.state_dict()}
    checkpoint.save(state, checkpoint_id=folder[0])
    before = [value.full_tensor().clone() for value in state["model"].values()]
    with torch.no_grad():
        for value in sharded.parameters():
            value.zero_()
    checkpoint.load(state, checkpoint_id=folder[0])
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(before, state["model"].values(), strict=True))

    hooked = DistributedDataParallel(torch.nn.Linear(6, 4))
    hook = Bf16AllReduceHook()
    hooked.register_comm_hook(None, hook.hook)
    hooked(images[: rank.rank + 1]).sum().backward()
    exact = torch.stack([images[: i + 1].sum(0) for i in range(dist.get_world_size())]).sum(0).expand(4, 6)
    torch.testing.assert_close(hooked.module.weight.grad, exact, rtol=2e-2, atol=2e-2)
    assert max(float(kept.abs().max()) for kept in hook.residuals.values()) > 0
    # Values lost by rounding in one step arrive later: over many steps of a single rank nothing is lost.
    alone = [dist.new_group([i]) for i in range(dist.get_world_size())][rank.rank]
    single, hook, total = DistributedDataParallel(torch.nn.Linear(6, 4), process_group=alone), Bf16AllReduceHook(), 0.0
    single.register_comm_hook(alone, hook.hook)
    for _ in range(256):
        single.zero_grad()
        single(images[:3]).sum().backward()
        total = total + single.module.weight.grad.double()
    exact = images[:3].sum(0).expand(4, 6).double()
    rounded = exact.to(torch.bfloat16).double()
    assert float((total / 256 - exact).abs().max()) < 0.05 * float((rounded - exact).abs().max()), "error feedback"
    say(users="ok")


def wrong(how: str) -> None:
    """Fail on rank 1 or rank 0 while the others are in their second all-reduce."""
    values = torch.ones(10)
    dist.all_reduce(values)
    victim = 0 if how.endswith("0") else 1
    started = time.monotonic()
    try:
        if how.startswith(("kill", "stop")) and rank.rank == victim:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL if how.startswith("kill") else signal.SIGSTOP)
        if how in ("late", "late_future", "late_beside"):
            if rank.rank == victim:
                time.sleep(8)
            patient = dist.all_reduce(torch.ones(10), async_op=True) if how == "late_beside" else None
            work = impatient_all_reduce(values)
            if how == "late_future":
                work.get_future().wait()
            (patient or work).wait()
        if how == "late_group":
            if rank.rank == victim:
                time.sleep(12)
            dist.new_group([0, 1], timeout=timedelta(seconds=4))
        if how == "shape":
            values = torch.ones(10 + rank.rank)
        if how == "type":
            values = values.to([torch.float32, torch.float64][rank.rank])
        if how == "order" and rank.rank == 0:
            dist.broadcast(values, 0)
        dist.all_reduce(values)
        say(fine=True)
    except RuntimeError as error:
        say(error=str(error), seconds=round(time.monotonic() - started, 1))
        os._exit(1)


def impatient_all_reduce(values: torch.Tensor) -> dist.Work:
    """All-reduce with a timeout of 4 s; the group's timeout is longer, as ranks do not start simultaneously."""
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=4)
    return dist.group.WORLD.allreduce([values], options)


def recover() -> None:
    """Catch a timeout, and take longer to clean up than a stuck rank is allowed to (2 s, and 3 s to report)."""
    watchdog.OVERDUE_S = 2.0
    if rank.rank == 1:
        time.sleep(25)
        os._exit(0)
    try:
        impatient_all_reduce(torch.ones(10)).wait()
    except RuntimeError as error:
        time.sleep(8)
        say(error=str(error))
    os._exit(0)


def leave() -> None:
    """Exit without waiting for an all-reduce, one that never completes on rank 0, as rank 1 does not join."""
    if rank.rank == 0:
        dist.all_reduce(torch.ones(1 << 20), async_op=True)
        sys.exit(3)
    time.sleep(4)
    sys.exit(3)


def meet() -> None:
    """Report the rank, its transport, and the CPUs of oneCCL's and cputrain's threads."""
    from cputrain.affinity.binding import threads_of

    total = torch.tensor([1.0])
    dist.all_reduce(total)
    threads = [(thread.name, thread.pus) for thread in threads_of(os.getpid())]
    transport = next(value for name, value, _ in ccl.applied if name == "CCL_ATL_TRANSPORT")
    say(sum=total.item(), transport=transport, pus=sorted(os.sched_getaffinity(0)), threads=threads)


TASKS = {
    "examples": examples,
    "gloo": against_gloo,
    "soak": soak,
    "users": users,
    "wrong": wrong,
    "recover": recover,
    "leave": leave,
    "meet": meet,
}


def main() -> None:
    """Join the group, run the task, leave."""
    task, *arguments = sys.argv[1:]
    dist.init_process_group("ccl", timeout=timedelta(seconds=120))
    TASKS[task](*(int(word) if word.isdigit() else word for word in arguments))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
