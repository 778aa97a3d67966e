"""Reasons for what depends on several stages: local batches, memory per worker, oneCCL's threads."""

from math import inf

from affinity.planner.memory import Memory, memory_name
from affinity.planner.reasons import SET, Reason
from affinity.planner.request import Request
from affinity.planner.worker_plan import WorkerPlan
from affinity.planner.workload import USUAL_BATCH, footprint
from affinity.topology.machine import Machine
from affinity.units import GIB
from affinity.wording import counted


def batch_reasons(
    machine: Machine, request: Request, workers: tuple[WorkerPlan, ...], memories: tuple[Memory, ...]
) -> list[Reason]:
    """The local batches and the memory that they take."""
    batches = sorted({worker.local_batch for worker in workers if worker.local_batch is not None})
    if not batches:
        return []
    default = request.workload is not None and request.workload.assumed and request.local_batch == USUAL_BATCH
    why = "a typical value, as neither a recipe nor {local_batch} sets one" if default else SET
    if request.global_batch is not None:
        why = (
            f"equal parts of the global batch of {request.global_batch} images on "
            f"{counted(request.nodes * len(workers), 'worker')}, in as few backward passes as possible"
        )
    if request.balance == "batch":
        why = f"in proportion to compute threads, {request.local_batch} on average: all workers take the same time"
    value = str(batches[0]) if len(batches) == 1 else f"{batches[0]}-{batches[-1]}"
    reasons = [Reason(what="local batch", value=value, why=why)]
    if request.workload is not None:
        parts = footprint(request.workload, batches[-1])
        room = min(memory.room_bytes for memory in memories)
        name = f"{request.workload.name}{' (assumed)' if request.workload.assumed else ''}"
        why = (
            f"{name}, {counted(batches[-1], 'image')} per step: activations {parts.activations / GIB:.2f}, weights "
            f"{parts.weights / GIB:.2f}, gradients {parts.gradients / GIB:.2f}, optimizer {parts.optimizer / GIB:.2f}, "
            f"the process itself {parts.process / GIB:.2f} GiB"
        )
        of = "" if room == inf else f" of {room / GIB:.1f}"
        kinds = {memory_name(machine, w.memory_policy, w.memory_nodes, w.pus) for w in workers}
        value = f"{parts.total / GIB:.1f}{of} GiB of {' or '.join(sorted(kinds))}"
        reasons.append(Reason(what="memory per worker", value=value, why=why))
    return reasons


def worker_costs(request: Request, workers: tuple[WorkerPlan, ...]) -> list[Reason]:
    """What so many workers cost: ranks in each all-reduce, images per backward pass, memory."""
    ranks, images = request.nodes * len(workers), [w.local_batch for w in workers if w.local_batch is not None]
    memory = [w.memory_bytes for w in workers if w.memory_bytes is not None]
    costs = [
        f"{counted(ranks, 'rank')} in each all-reduce",
        *([f"{request.nodes * sum(images):,} images in one backward pass of all workers"] if images else []),
        *([f"{sum(memory) / GIB:.1f} GiB on a host"] if memory else []),
    ]
    why = "each worker has its own process, weights and gradients, so fewer workers with more threads cost less"
    return [Reason(what="cost of the workers", value=", ".join(costs), why=why)] if ranks > 1 else []


def ccl_reasons(env: tuple[tuple[str, str], ...], default_why: str | None) -> list[Reason]:
    """oneCCL's threads and how it waits, as a worker's environment has them."""
    variables, reasons = dict(env), []
    if "CCL_WORKER_COUNT" in variables:
        why = default_why or "one for each comm CPU; every worker lists the CPUs of all workers"
        reasons.append(Reason(what="oneCCL threads per worker", value=variables["CCL_WORKER_COUNT"], why=why))
    if "CCL_YIELD" in variables:
        why = "workers share cores: a waiting rank yields its core to another, where MPI and oneCCL would spin"
        reasons.append(Reason(what="waiting of MPI and oneCCL", value="yields", why=why))
    return reasons
