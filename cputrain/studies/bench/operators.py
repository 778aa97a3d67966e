"""`cputrain bench operators`: the operators of a training step or of a program by time, each beside its limit."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import median
from typing import Any

import torch

from cputrain.affinity.wording import first_named, plural
from cputrain.kernels.recorder import Call, Spent, TensorType
from cputrain.studies.bench.figures import Cell, Figure, Report, Table, figure_of, number_text
from cputrain.studies.bench.limits import GB
from cputrain.studies.bench.work import ATEN, Rates, on_meta, operator_of, tensors_in, work_of

MS = 1e3  # in a second
MS_PER_NS = 1e-6
GIGA = 1e9
OUTSIDE = "outside of operators"

Profiled = Mapping[Call, Spent]
"""The calls of a step, or of a recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Profiles of repeated steps, or one of a program's `steps` steps (0: unknown), and the seconds of each profile;
    `without`: the same steps by torch's operators alone, in turns with the others; `images` a step."""

    title: str
    profiles: Sequence[Profiled]
    seconds: Sequence[float]
    without: Sequence[Profiled] = ()
    seconds_without: Sequence[float] = ()
    steps: int = 1
    images: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Calls that are shown together."""

    operator: str
    shapes: str
    dtype: str
    layout: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.operator, self.shapes, self.dtype, self.layout)))


@dataclass(slots=True)
class Sum:
    """The calls of a group: number, ms, least ms (None: unknown) and that of their FLOP, ms without our kernels (None:
    not measured), and the names of the kernels that computed some of them."""

    calls: float = 0.0
    ms: float = 0.0
    limit_ms: float | None = 0.0
    flop_ms: float = 0.0
    flop: float = 0.0
    bytes: float = 0.0
    torch_ms: float | None = None
    kernels: set[str] = field(default_factory=set)

    @property
    def times(self) -> float | None:
        """How many times over its limit."""
        return self.ms / self.limit_ms if self.limit_ms else None

    def add(self, other: "Sum") -> None:
        """Add other calls."""
        for name in ("calls", "ms", "flop_ms", "flop", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.limit_ms = None if self.limit_ms is None or other.limit_ms is None else self.limit_ms + other.limit_ms
        if other.torch_ms is not None:
            self.torch_ms = (self.torch_ms or 0.0) + other.torch_ms
        self.kernels |= other.kernels


def group_of(call: Call) -> Group:
    """Return how a call is shown: operator, its tensors' shapes and what distinguishes a convolution, type, layout."""
    operator = call.name.removeprefix(ATEN)
    tensors = [value for value in tensors_in(call.arguments) if value.shape]
    main = max(tensors, key=lambda value: len(value.shape), default=None)  # the first one, but not a bias
    if any(isinstance(value, tuple) and any(tensors_in(value)) for value in call.arguments):
        values = sum(prod(value.shape) for value in tensors)
        shapes = f"{plural(len(tensors), 'tensor')} of {number_text(float(values))} values"
    else:
        shapes = " ".join("x".join(map(str, value.shape)) for value in tensors[: 2 + ("convolution" in operator)])
        shapes += _geometry(operator, call)
    return Group(operator, shapes, main.dtype if main else "", _layout(main) if main else "")


def _geometry(operator: str, call: Call) -> str:
    known = operator_of(call)
    if not operator.startswith("convolution") or known is None:
        return ""
    names = [parameter.name for parameter in known._schema.arguments]
    values = dict(zip(names, call.arguments, strict=False))
    words = []
    for name in ("stride", "dilation"):
        numbers = values.get(name)
        if isinstance(numbers, tuple) and any(number != 1 for number in numbers):
            words.append(f"{name} {numbers[0]}")
    if isinstance(groups := values.get("groups"), int) and groups > 1:
        words.append(plural(groups, "group"))
    return "".join(f" {word}" for word in words)


def _layout(value: TensorType) -> str:
    meta = on_meta(value)
    if 0 in [stride for size, stride in zip(value.shape, value.strides, strict=False) if size > 1]:
        return "expanded"
    if meta.is_contiguous():
        return "contiguous"
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if meta.dim() in formats and meta.is_contiguous(memory_format=formats[meta.dim()]):
        return "channels-last"
    return "strided"


def groups_of(measured: Measured, rates: Rates) -> dict[Group, Sum]:
    """Return the calls of a step by group, medians of the profiles; the longest first."""
    groups: dict[Group, Sum] = {}
    for call, spents in _by_call(measured.profiles).items():
        groups.setdefault(group_of(call), Sum()).add(_sum_of(call, spents, measured.steps or 1, rates))
    for call, spents in _by_call(measured.without).items():
        ms = median(spent.ns for spent in spents) * MS_PER_NS
        groups.setdefault(group_of(call), Sum()).add(Sum(torch_ms=ms))
    return dict(sorted(groups.items(), key=lambda item: -item[1].ms))


def dtypes_of(measured: Measured) -> frozenset[str]:
    """Return the types of the tensors."""
    calls = (call for profile in measured.profiles for call in profile)
    return frozenset(tensor.dtype for call in calls for tensor in tensors_in(call.arguments))


def _by_call(profiles: Sequence[Profiled]) -> dict[Call, list[Spent]]:
    """Return what each call takes in each of the profiles."""
    calls = dict.fromkeys(call for profile in profiles for call in profile)
    return {call: [profile.get(call, Spent()) for profile in profiles] for call in calls}


def _sum_of(call: Call, spents: Sequence[Spent], steps: int, rates: Rates) -> Sum:
    count = median(spent.count for spent in spents) / steps
    total = Sum(calls=count, ms=median(spent.ns for spent in spents) * MS_PER_NS / steps, limit_ms=None)
    total.kernels = {name for spent in spents for name in spent.kernels}
    if (work := work_of(call)) is not None:
        total.flop, total.bytes = count * work.flop, count * work.bytes
        total.flop_ms = MS * total.flop / rates.flops[work.dtype] if work.dtype in rates.flops else 0.0
        total.limit_ms = max(total.flop_ms, MS * total.bytes / rates.bytes_per_s)
    return total


def operators_report(measured: Measured, rates: Rates, shown: int | None) -> Report:
    """Return the report: the operators, then their calls by shape, `shown` rows of each."""
    groups = groups_of(measured, rates)
    operators: dict[str, Sum] = defaultdict(Sum)
    for group, total in groups.items():
        operators[group.operator].add(total)
    step_ms = MS * median(measured.seconds) / (measured.steps or 1)
    rows = [_cells(name, total, step_ms) for name, total in sorted(operators.items(), key=lambda item: -item[1].ms)]
    outside_ms = max(0.0, step_ms - sum(total.ms for total in operators.values()))
    rows.append((OUTSIDE, None, outside_ms, 100 * outside_ms / step_ms, *(None for _ in range(7))))
    rows.sort(key=lambda row: -float(row[2] or 0.0))
    by_shape = [
        (*_cells(str(group), total, step_ms), *(group.operator, group.shapes, group.dtype, group.layout))
        for group, total in groups.items()
    ]
    per_step = "ms" if measured.steps == 0 else "ms a step"
    head = ("calls", per_step, "% of the time", "limit ms", "times its limit", "torch's ms", "our kernel")
    more = ("limited by", "GFLOP", "MB")
    drawn: Any = {"shown": shown, "drawn": 2, "limit": 4, "marked": 7}
    return Report(
        title=measured.title,
        figures=_figures(measured, groups),
        tables=(
            Table(title="operators", head=("operator", *head, *more), rows=tuple(rows), hidden=len(more), **drawn),
            Table(
                title="operators by shape",
                head=("operator of", *head, *more, "operator", "shapes", "type", "layout"),
                rows=tuple(by_shape),
                hidden=len(more) + 4,
                **drawn,
            ),
        ),
        notes=(_limits_note(rates), *_unknown_note(operators, step_ms), *measured.notes),
    )


def _cells(name: str, total: Sum, step_ms: float) -> tuple[Cell, ...]:
    by = None if not total.limit_ms else "FLOP" if total.flop_ms > total.limit_ms / 2 else "bytes"
    return (
        *(name, number_text(total.calls), total.ms, 100 * total.ms / step_ms, total.limit_ms or None, total.times),
        *(total.torch_ms, ", ".join(sorted(total.kernels)) or None, by, total.flop / GIGA, total.bytes / 1e6),
    )


def _figures(measured: Measured, groups: Mapping[Group, Sum]) -> tuple[Figure, ...]:
    """Return images/s with our kernels and without; the limit is a step in which each operator takes its least time."""
    if not measured.images:
        return ()
    least_ms = sum(total.limit_ms or 0.0 for total in groups.values())
    limit = MS * measured.images / least_ms
    names = ("our kernels", "torch's operators") if measured.without else ("torch's operators",)
    return tuple(
        figure_of(
            name,
            [measured.images / value for value in seconds],
            "images/s",
            limit=limit,
            limited_by="all operators at their limits",
            note=f"{number_text(MS * median(seconds))} ms a step",
        )
        for name, seconds in zip(names, (measured.seconds, measured.seconds_without), strict=False)
    )


def _unknown_note(operators: Mapping[str, Sum], step_ms: float) -> tuple[str, ...]:
    """Return a line about the operators of which some calls' work is unknown, if there are any."""
    unknown = {name: total.ms for name, total in operators.items() if total.limit_ms is None}
    if not unknown:
        return ()
    names = first_named(sorted(unknown, key=lambda name: -unknown[name]))
    share = number_text(100 * sum(unknown.values()) / step_ms)
    return (f"no limit, as their work is unknown: {names}; {share} % of the time, which counts as 0 in other limits",)


def _limits_note(rates: Rates) -> str:
    speeds = ", ".join(f"{number_text(value / GIGA)} GFLOP/s in {name}" for name, value in rates.flops.items())
    return (
        f"limit: the larger of FLOP and bytes at what {plural(rates.threads, 'thread')} reach here: {speeds}, "
        f"{number_text(rates.bytes_per_s / GB)} GB/s"
    )
