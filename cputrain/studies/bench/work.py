"""The least time of a call of one of torch's operators on this machine: the larger of its FLOP at the threads' fastest
rate and of its bytes at their bandwidth, both measured.

Shapes of results are those of torch's meta device; FLOP are counted by torch's flop_counter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.wording import plural
from cputrain.kernels.recorder import Argument, Call, TensorType
from cputrain.studies.bench.limits import MIN_BYTES, TEST_BYTES, Place, bandwidth
from cputrain.studies.bench.model import precisions
from cputrain.studies.bench.recorder import LIMIT_ROUNDS, MAX_IMAGES, TYPES, kernels

ATEN = "aten::"
ALLOCATES = ("empty", "new_empty")  # prefixes of operators
ONLY_WRITES = ("copy_", "zero_", "fill_", "uniform_", "normal_", "bernoulli_", "random_", "zeros_like", "ones_like")
SELECTS = ("embedding", "index", "index_select", "gather")  # read as many values as they return


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What `threads` threads reach: FLOP/s by type, and bytes/s."""

    flops: Mapping[str, float]
    bytes_per_s: float
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOP and bytes of a call, and the type of its numbers."""

    flop: float
    bytes: int
    dtype: str


def measured_rates(machine: Machine, dtypes: frozenset[str], threads: int, *, quick: bool) -> Rates:
    """Measure what operators are compared with, on `threads` threads: a product of matrices and 3 x 3 convolutions in
    those of these types that the processor has instructions for, and in float32; a copy."""
    before = torch.get_num_threads()
    flops = {}
    torch.set_num_threads(threads)
    try:
        for precision in precisions(machine.isa):
            name = str(TYPES[precision]).removeprefix("torch.")
            if name in dtypes | {"float32"}:
                compared = kernels(precision, MAX_IMAGES, quick=quick)
                flops[name] = max(kernel.flops() for kernel in compared for _ in range(LIMIT_ROUNDS))
    finally:
        torch.set_num_threads(before)
    if "bfloat16" in dtypes:  # also computed in float32
        flops["bfloat16"] = max(flops.get("bfloat16", 0.0), flops["float32"])
    pus = tuple(core.pus[0] for core in machine.allowed_cores[:threads])
    place = Place(name=plural(len(pus), "thread"), pus=pus, nodes=(None,) * len(pus))
    array = (TEST_BYTES if quick else MIN_BYTES) // len(pus)
    copies = bandwidth(place, "copy", array, LIMIT_ROUNDS)
    return Rates(flops=flops, bytes_per_s=max(copies), threads=threads)


def operator_of(call: Call) -> Any:
    """Return torch's operator; None if this process has none, as of the operators of a program's own."""
    namespace, _, name = call.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, call.overload or "default", None)


def work_of(call: Call) -> Work | None:
    """Return a call's work; None if it is unknown, as where its result's size depends on values."""
    operator, base = operator_of(call), call.name.removeprefix(ATEN)
    if base.startswith(ALLOCATES):
        return Work(flop=0.0, bytes=0, dtype="")
    if operator is None:
        return None
    try:
        arguments = _meta_arguments(operator, call.arguments)
        result = operator(**arguments)
    except (RuntimeError, TypeError, ValueError, AssertionError, IndexError):  # not on the meta device, or incomplete
        return None
    read = [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]
    made = [value for value in tree_leaves(result) if isinstance(value, Tensor) and not _is_in(value, read)]
    count = sum(map(_bytes, made))
    most = count if base in SELECTS else None
    writes = base in ONLY_WRITES
    for argument in operator._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for value in tree_leaves(arguments.get(argument.name)):
            if isinstance(value, Tensor) and not (writes and not is_written and base != "copy_"):
                size = _bytes(value) * (2 if is_written and not writes else 1)
                count += size if most is None else min(size, most)
    dtype = next((_name(value) for value in (*read, *made) if value.dim() and value.is_floating_point()), "")
    return Work(flop=_flop(operator, arguments, result), bytes=count, dtype=dtype)


def _meta_arguments(operator: Any, values: Sequence[Argument]) -> dict[str, Any]:
    """Return the arguments on the meta device, by name. Raises ValueError if one is unknown."""
    arguments: dict[str, Any] = {}
    for parameter, value in zip(operator._schema.arguments, values, strict=False):
        if parameter.name == "device":
            arguments["device"] = torch.device("meta")
        elif value is None and not parameter.has_default_value():
            if "Optional" not in str(parameter.type) and not str(parameter.type).endswith("?"):
                raise ValueError(f"{parameter.name} is unknown")
            arguments[parameter.name] = None
        elif value is not None:
            arguments[parameter.name] = on_meta(value)
    return arguments


def on_meta(value: Argument) -> Any:
    """Return a tensor, or list of tensors, on the meta device; other values as they are."""
    if isinstance(value, TensorType):
        return torch.empty_strided(value.shape, value.strides, dtype=getattr(torch, value.dtype), device="meta")
    return list(map(on_meta, value)) if isinstance(value, tuple) else value


def _flop(operator: Any, arguments: Mapping[str, Any], result: Any) -> float:
    shapes = {name: value.shape for name, value in arguments.items() if isinstance(value, Tensor)}
    aten, packet = torch.ops.aten, operator.overloadpacket
    if packet is aten.convolution_backward:  # flop_counter multiplies a grouped layer's weight gradient by its groups
        x, w, grad = (list(shapes[name]) for name in ("input", "weight", "grad_output"))
        forward = conv_flop_count(x, w, grad, arguments["transposed"])
        return float(forward * sum(arguments["output_mask"][:2]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return float(sdpa_flop_count(*(shapes[name] for name in ("query", "key", "value"))))  # type: ignore[no-untyped-call]
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        sizes = (shapes[name] for name in ("grad_out", "query", "key", "value"))
        return float(sdpa_backward_flop_count(*sizes))  # type: ignore[no-untyped-call]
    if packet not in flop_registry:
        return 0.0
    by_name = {parameter.name for parameter in operator._schema.arguments if parameter.kwarg_only}
    in_order = [value for name, value in arguments.items() if name not in by_name]
    named = {name: value for name, value in arguments.items() if name in by_name}
    return float(flop_registry[packet](*in_order, **named, out_val=result))


def _is_in(value: Tensor, others: Sequence[Tensor]) -> bool:
    return any(value is other for other in others)


def _bytes(value: Tensor) -> int:
    """Bytes of memory; an expanded axis is read once."""
    sizes = zip(value.shape, value.stride(), strict=True)
    return prod(size for size, stride in sizes if stride or size == 0) * value.element_size()


def _name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def tensors_in(arguments: Sequence[Argument]) -> Iterator[TensorType]:
    """Return the tensors of a call, also those in lists."""
    for value in arguments:
        if isinstance(value, TensorType):
            yield value
        elif isinstance(value, tuple):
            yield from tensors_in(value)
