"""What the workers send in a step: DDP's gradient buckets in their order, and the cost of each all-reduce."""

from dataclasses import dataclass
from math import inf

from affinity.units import MIB
from cputrain.comm.bucket_sizes import MEASURED_BYTES, bucket_bytes, fit_alpha_beta
from cputrain.simulate.all_reduce import Cost, Path, cost, exchanges
from cputrain.simulate.assumptions import Constants
from cputrain.simulate.compute import HALF, weight_tensors
from cputrain.simulate.setup import DEFAULT_BUCKETS, Setup

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 * MIB, 25 * MIB  # torch's DDP without bucket_cap_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A bucket: the index of the layer whose gradients complete it, its float32 bytes, and its all-reduce."""

    layer: int
    size: int
    cost: Cost


def messages_of(setup: Setup, constants: Constants) -> tuple[Message, ...]:
    """The buckets of a step, in the order in which they are sent; none for a single worker."""
    if setup.ranks == 1:
        return ()
    path = _path(setup, constants)
    return tuple(
        Message(layer=layer, size=size, cost=_all_reduce(setup, size, path))
        for layer, size in assigned_buckets(setup, constants)
    )


def _all_reduce(setup: Setup, size: float, path: Path) -> Cost:
    """The all-reduce of a bucket of `size` bytes of float32 gradients."""
    sent = size * (HALF if setup.compression == "bf16" else 1.0)
    leaf_hosts = setup.hosts if setup.link is None else setup.link.leaf_hosts
    found = exchanges(setup.algorithm, sent, hosts=setup.hosts, workers=setup.workers, leaf_hosts=leaf_hosts)
    return cost(found, path)


def bucket_limits(setup: Setup, constants: Constants) -> tuple[int, int]:
    """Bytes of the first bucket and of the others, as the trainer sets them: the recipe's, or by alpha and beta."""
    if setup.bucket_mib == DEFAULT_BUCKETS:
        return FIRST_BUCKET_BYTES, BUCKET_BYTES
    if setup.bucket_mib is not None:
        return (round(setup.bucket_mib * MIB),) * 2
    if setup.ranks == 1:
        return (BUCKET_BYTES,) * 2
    path = _path(setup, constants)
    points = [(float(size), _all_reduce(setup, size, path).seconds) for size in MEASURED_BYTES]
    return (bucket_bytes(setup.gradient_bytes, *fit_alpha_beta(points)),) * 2


def assigned_buckets(setup: Setup, constants: Constants) -> list[tuple[int, int]]:
    """(index of the layer that completes it, bytes) of each bucket, in the order in which they are sent.

    A bucket takes gradients as the backward pass finishes them and is full once it has reached its limit.
    """
    first, other = bucket_limits(setup, constants)
    found: list[tuple[int, int]] = []
    size, last = 0, 0
    for layer, gradient in weight_tensors(setup.layers):
        size, last = size + gradient, layer
        if size >= (other if found else first):
            found.append((last, size))
            size = 0
    return [*found, (last, size)] if size else found


def _path(setup: Setup, constants: Constants) -> Path:
    wire = inf
    if setup.move_bytes_per_s is not None:
        moved = setup.move_bytes_per_s
    elif setup.backend == "gloo":
        moved = constants.gloo_move_bytes_per_s
    else:
        cores = max(setup.comm_cores, 1) / (constants.phi_core_slowness if setup.phi else 1.0)
        moved = cores * constants.core_move_bytes_per_s
        if setup.link is not None and setup.link.name == "ethernet":
            wire = cores * constants.tcp_move_bytes_per_s
    if setup.compression == "bf16":
        slowness = constants.gloo_bf16_slowness if setup.backend == "gloo" else constants.ccl_bf16_slowness
        moved, wire = moved / slowness, wire / slowness
    return Path(
        link=setup.link,
        host_latency_s=constants.host_latency_s,
        move_bytes_per_s=moved,
        wire_move_bytes_per_s=wire,
    )
