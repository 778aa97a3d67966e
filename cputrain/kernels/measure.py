"""Speedups measured at a start, kept for the next one on this host: those of convolution kernels and of others."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from cputrain.affinity.errors import RunError
from cputrain.affinity.wording import plural
from cputrain.kernels.convolution import ConvolutionKernels, ConvolutionShape, speedup
from cputrain.kernels.operators import registered
from cputrain.kernels.plan import Gain, Target

RECORD = "winograd"
"""Kind of the records with measured speedups of Winograd's algorithm."""


def shape_key(shape: ConvolutionShape, images: int) -> str:
    """Return the key of a convolution's measured speedup."""
    sizes = f"{shape.inputs} to {shape.outputs} channels, {shape.height} x {shape.width}, padding {shape.padding}"
    return f"{sizes}, {plural(images, 'image')}"


def measured_gains(
    shapes: set[ConvolutionShape], images: int, target: Target, kernels: ConvolutionKernels, env: Mapping[str, str]
) -> Callable[[ConvolutionShape], Gain]:
    """Return the speedup of Winograd's algorithm for each shape, as `kept_speedups` does."""
    direct = ", kernels of operators" if registered() else ""
    name = f"{'bf16' if target.is_bf16 else target.dtype}, {plural(target.threads, 'thread')}{direct}"
    dtype: torch.dtype = getattr(torch, target.dtype)
    by_key = {shape_key(shape, images): shape for shape in sorted(shapes)}
    gains = kept_speedups(RECORD, name, by_key, lambda key: speedup(by_key[key], images, dtype, kernels), env)

    def gain(shape: ConvolutionShape) -> Gain:
        return gains[shape_key(shape, images)], "measured on this host"

    return gain


def kept_speedups(
    kind: str, name: str, keys: Iterable[str], measure: Callable[[str], float], env: Mapping[str, str]
) -> dict[str, float]:
    """Return the speedup of each key: kept on rank 0's host in its record of this kind and name, or measured now.

    In a process group, all ranks must call this; keys that rank 0's host does not know are measured on all ranks at
    the same time and in the same order, as they will be used.
    """
    # The planner's records need modules that a network with known kernels does not.
    from cputrain.affinity.planner.records import read_records
    from cputrain.affinity.topology.sysfs import read_machine
    from cputrain.measurements import new_record, save_measurement

    group = dist.is_available() and dist.is_initialized()
    main = not group or dist.get_rank() == 0
    speedups: dict[str, float] = {}
    if main:
        machine = read_machine(Path("/"))
        records = [record for record in read_records(machine, env).of(kind) if record.name == name]
        entries = (entry for record in records for entry in record.values.items())
        speedups = {key: value for key, value in entries if isinstance(value, float)}
    if group:
        by_rank: list[dict[str, float]] = [speedups] * dist.get_world_size()
        dist.all_gather_object(by_rank, speedups)
        speedups = by_rank[0]
    gains = speedups | {key: measure(key) for key in keys if key not in speedups}
    if main and gains != speedups:
        with suppress(RunError):  # without a writable cache, the next start measures again
            save_measurement(new_record(machine, kind, name, gains, command="cputrain train"), env)
    return gains
