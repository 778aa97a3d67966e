"""Measured speedups of convolution kernels, kept for the next start on this host."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from cputrain.affinity.errors import RunError
from cputrain.affinity.wording import plural
from cputrain.kernels.convolution import ConvolutionKernels, ConvolutionShape, speedup
from cputrain.kernels.plan import Gain, Target

RECORD = "winograd"
"""Kind of the records with measured speedups."""


def shape_key(shape: ConvolutionShape, images: int) -> str:
    """Return the key of a convolution's measured speedup."""
    sizes = f"{shape.inputs} to {shape.outputs} channels, {shape.height} x {shape.width}, padding {shape.padding}"
    return f"{sizes}, {plural(images, 'image')}"


def measured(
    shapes: set[ConvolutionShape], images: int, target: Target, kernels: ConvolutionKernels, env: Mapping[str, str]
) -> Callable[[ConvolutionShape], Gain]:
    """Return the speedup of Winograd's algorithm for each shape: kept on rank 0's host, or measured now.

    In a process group, all ranks must call this; shapes that rank 0's host does not know are measured on all ranks at
    the same time, as they will be used.
    """
    # The planner's records need modules that a network with known kernels does not.
    from cputrain.affinity.planner.records import read_records
    from cputrain.affinity.topology.sysfs import read_machine
    from cputrain.measurements import new_record, save_measurement

    name = f"{'bf16' if target.is_bf16 else target.dtype}, {plural(target.threads, 'thread')}"
    group = dist.is_available() and dist.is_initialized()
    main = not group or dist.get_rank() == 0
    speedups: dict[str, float] = {}
    if main:
        machine = read_machine(Path("/"))
        records = [record for record in read_records(machine, env).of(RECORD) if record.name == name]
        entries = (entry for record in records for entry in record.values.items())
        speedups = {key: value for key, value in entries if isinstance(value, float)}
    if group:
        by_rank: list[dict[str, float]] = [speedups] * dist.get_world_size()
        dist.all_gather_object(by_rank, speedups)
        speedups = by_rank[0]
    missing = sorted(shape for shape in shapes if shape_key(shape, images) not in speedups)
    dtype: torch.dtype = getattr(torch, target.dtype)
    gains = speedups | {shape_key(shape, images): speedup(shape, images, dtype, kernels) for shape in missing}
    if main and gains != speedups:
        with suppress(RunError):  # without a writable cache, the next start measures again
            save_measurement(new_record(machine, RECORD, name, gains, command="cputrain train"), env)

    def gain(shape: ConvolutionShape) -> Gain:
        return gains[shape_key(shape, images)], "measured on this host"

    return gain
