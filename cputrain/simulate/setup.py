"""What is predicted: a training's work for each worker, on so many hosts, and how fast its machine is."""

from dataclasses import dataclass

from affinity.planner.core_rates import core_rates
from affinity.planner.plan import Plan
from affinity.planner.profiles import is_phi
from affinity.topology.catalog import processor_facts
from cputrain.models.sizes import COPIES, workload_of
from cputrain.recipe.derivation import largest_local_batch, passes_per_step
from cputrain.recipe.schema import Recipe
from cputrain.simulate.layers import Layer, layers_of
from cputrain.simulate.links import Link
from mpi.fabric import FABRICS

DEFAULT_BUCKETS = 0.0  # DDP's own: the first of 1 MiB, then 25 MiB
# Passes over the weights of an optimizer step: reads of weights, gradients and state, writes of weights and state.
# LARS and LAMB read weights and gradients once more, for their norms.
USUAL_CLOCK_RANGE = 0.33  # 2.1 to 2.8 GHz
PLAIN_PASSES, PASSES_PER_COPY, NORM_READS = 3, 2, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A training on `hosts` x `workers` ranks. Cores are those of one worker; `local_batch` are images of a backward
    pass, of which a step makes `accumulation`.

    `move_bytes_per_s` replaces the assumed speed at which a worker's cores move messages, where it is known. `link` is
    None on one host. `clock_range` is how much faster than their base clock all cores run at most: hosts differ by a
    part of it. `bucket_mib` is None for the size that the trainer finds by itself.
    """

    layers: tuple[Layer, ...]
    hosts: int
    workers: int
    threads: int
    comm_cores: int
    loader_cores: int
    local_batch: int
    accumulation: int = 1
    precision: str = "float32"
    compression: str = "none"
    optimizer_passes: int = 5
    bucket_mib: float | None = None
    backend: str = "ccl"
    algorithm: str = "ring"
    link: Link | None = None
    phi: bool = False
    clock_range: float = 0.0
    decoded_per_core_s: float | None = None
    move_bytes_per_s: float | None = None

    @property
    def ranks(self) -> int:
        """Workers of all hosts."""
        return self.hosts * self.workers

    @property
    def global_batch(self) -> int:
        """Images of a step."""
        return self.ranks * self.local_batch * self.accumulation

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a worker's gradients in float32."""
        return sum(layer.weight_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a host computes: FLOP/s of a core in convolutions and matrix products, and bytes/s of all its memory."""

    core_flops: float
    host_bytes_per_s: float


def setup_of(recipe: Recipe, plan: Plan, link: Link | None, algorithm: str | None = None) -> Setup:
    """A recipe's training under a plan, on as many hosts as the plan was made for."""
    hosts, workers = plan.request.nodes, len(plan.workers)
    rates = core_rates(plan.machine, workload_of(recipe), plan.measured)
    return Setup(
        layers=layers_of(recipe),
        hosts=hosts,
        workers=workers,
        # the worker with the fewest threads decides: every step waits for it
        threads=min(worker.intra_op for worker in plan.workers),
        comm_cores=min(len(_cores(plan, worker.comm_pus)) for worker in plan.workers),
        loader_cores=min(len(_cores(plan, worker.loader_pus)) for worker in plan.workers),
        local_batch=largest_local_batch(recipe.batch, hosts * workers),
        accumulation=passes_per_step(recipe.batch, hosts * workers),
        precision=recipe.precision,
        compression=recipe.comm.compression,
        optimizer_passes=optimizer_passes(recipe.optim.name),
        bucket_mib=None if recipe.comm.bucket_mib == "auto" else recipe.comm.bucket_mib,
        backend="gloo" if recipe.comm.backend == "gloo" else "ccl",
        algorithm=algorithm or usual_algorithm(link if hosts > 1 else None, recipe.comm.backend),
        link=link if hosts > 1 else None,
        phi=is_phi(plan.machine),
        clock_range=clock_range(plan.machine.model),
        decoded_per_core_s=None if recipe.data.generated else rates.decoded_per_s,
    )


def clock_range(model: str) -> float:
    """How much faster than its base clock a processor runs all cores at most: that of a Xeon 8160 where not known."""
    known = processor_facts(model).clock_range
    return USUAL_CLOCK_RANGE if known is None else known


def optimizer_passes(name: str) -> int:
    """Passes over the weights in an update."""
    return PLAIN_PASSES + PASSES_PER_COPY * COPIES[name] + (NORM_READS if name in ("lars", "lamb") else 0)


def usual_algorithm(link: Link | None, backend: str) -> str:
    """The algorithm that the fabric's settings choose for oneCCL; gloo has a ring only."""
    if link is None or backend == "gloo":
        return "ring"
    return next((value for name, value, _ in FABRICS[link.name].settings if name == "CCL_ALLREDUCE"), "ring")


def _cores(plan: Plan, pus: tuple[int, ...]) -> set[int]:
    """The cores of these PUs, by the first PU of each."""
    return {core.pus[0] for core in plan.machine.cores if not set(core.pus).isdisjoint(pus)}
