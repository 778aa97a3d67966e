"""All-reduces between two ranks of this host, a core each: time and bandwidth by size, for each backend."""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.plan import Plan, Request
from cputrain.affinity.planner.records import Record, plan_this_machine
from cputrain.affinity.planner.request import ALL_REDUCE
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.wording import counted
from cputrain.bench.figures import Figure, Report, Table, figure_of, number, spread_of
from cputrain.comm.bucket_sizes import fit_alpha_beta
from cputrain.launch.rank_process import RankContext
from cputrain.launch.task import run_on_ranks
from cputrain.measurements import BUCKET_BYTES, TITLES, WHAT, rate_record, transport_records

BACKENDS = ("gloo", "ccl")
SIZES = tuple(1 << k for k in range(10, 29, 2))  # 1 KiB to 256 MiB
TEST_SIZES = (1 << 10, 1 << 16, 1 << 20)
LARGE = 16 << 20  # from here on the bytes take all the time: gradient buckets are as large
RANKS = 2
TIMEOUT_S = 300.0
FLOAT = 4
GB, US = 1e9, 1e6
COMMAND = "cputrain bench comm"

Times = dict[int, dict[str, list[float]]]
"""Bytes -> "all-reduce" and "copy" -> seconds of each round."""


def bench_all_reduce(
    machine: Machine, env: Mapping[str, str], *, repeats: int, quick: bool
) -> tuple[Report, tuple[Record, ...]]:
    """All-reduces of each backend. Raises InputError on a host with one core, RunError where the ranks fail."""
    if len(machine.allowed_cores) < RANKS:
        raise InputError(f"bench comm needs two cores, and this process may use {len(machine.allowed_cores)}")
    plan = plan_this_machine(Request(ppn=RANKS, threads=1, comm_cores=0, loader_cores=0), env, machine=machine)
    found: dict[str, Times] = {}
    notes = []
    for backend in BACKENDS:
        try:
            found[backend] = _times(plan, backend, TEST_SIZES if quick else SIZES, repeats, env)
        except (InputError, RunError) as error:
            if backend == "gloo":
                raise
            notes.append(f"{backend} is not measured: {error}")
    transports = {} if quick or "ccl" not in found else _transports(env, notes)
    figures = [figure for size in found["gloo"] for figure in _figures(size, found)]
    title = f"all-reduce of float32 between {RANKS} ranks of {machine.name}, a core each: {counted(repeats, 'repeat')}"
    tables = (_fits(found), *((_bucket_times(transports),) if transports else ()))
    report = Report(title=title, figures=tuple(figures), tables=tables, notes=tuple(notes))
    records = tuple(_record(machine, backend, times) for backend, times in found.items())
    return report, (*records, *transport_records(transports, command=COMMAND))


def _transports(env: Mapping[str, str], notes: list[str]) -> dict[str, tuple[float, float, float]]:
    """Seconds of an all-reduce of a bucket over each of oneCCL's transports; adds a note on one that does not run."""
    from cputrain.comm.ccl.check import time_transports  # torch
    from cputrain.comm.ccl.environment import find_libraries

    try:
        found, problems = time_transports(find_libraries(env), env)
    except RunError as error:
        found, problems = {}, [str(error)]
    notes += problems
    return {transport: spread_of(times[BUCKET_BYTES]) for transport, times in found.items()}


def _bucket_times(transports: Mapping[str, tuple[float, float, float]]) -> Table:
    rows = tuple(
        (TITLES[name], 1000 * middle, 1000 * lowest, 1000 * highest)
        for name, (middle, lowest, highest) in transports.items()
    )
    return Table(title=f"oneCCL's transports: {WHAT}", head=("transport", "ms", "lowest", "highest"), rows=rows)


def _times(plan: Plan, backend: str, sizes: tuple[int, ...], repeats: int, env: Mapping[str, str]) -> Times:
    asked = {"backend": backend, "rounds": repeats, "sizes": sizes}
    with tempfile.TemporaryDirectory() as name:
        what = f"the all-reduce over {backend}"
        first, *_ = run_on_ranks(plan, f"{__name__}:time_all_reduces", asked, Path(name), env, what=what)
    return {int(size): times for size, times in first.items()}


def time_all_reduces(asked: dict[str, Any], context: RankContext) -> Times:
    """Time all-reduces and copies of float32 values of each size, as one of the ranks."""
    import torch
    import torch.distributed as dist

    from cputrain.comm.group import end_group, start_group

    torch.set_num_threads(1)
    group = start_group(context.rank, context.worker, asked["backend"], TIMEOUT_S, context.env)
    found: Times = {}
    for size in asked["sizes"]:
        values, copied = torch.zeros(size // FLOAT), torch.ones(size // FLOAT)

        def all_reduce(values: torch.Tensor = values) -> None:
            dist.all_reduce(values)

        def copy(values: torch.Tensor = values, copied: torch.Tensor = copied) -> None:
            copied.copy_(values)

        found[size] = {"all-reduce": _timed(all_reduce, asked["rounds"]), "copy": _timed(copy, asked["rounds"])}
    end_group(group)
    return found


def _timed(act: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of each round, which all ranks begin together; one more before them does not count."""
    import torch.distributed as dist

    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def bus_bytes_per_s(size: int, seconds: float) -> float:
    """The bytes/s that each rank sends, as NCCL's tests count them: 2 (n - 1) / n of the size."""
    return 2 * (RANKS - 1) / RANKS * size / seconds


def _figures(size: int, found: Mapping[str, Times]) -> list[Figure]:
    """Each backend's bandwidth for a size, beside a copy of as many bytes."""
    figures = []
    for backend, times in found.items():
        seconds, copied = times[size]["all-reduce"], spread_of(times[size]["copy"])[0]
        rates = [bus_bytes_per_s(size, each) / GB for each in seconds]
        figures.append(
            figure_of(
                f"{backend}, {size_text(size)}",
                rates,
                "GB/s",
                limit=size / copied / GB,
                limited_by="a copy by one core",
                note=f"{number(US * spread_of(seconds)[0])} us",
            )
        )
    return figures


def size_text(size: int) -> str:
    """1024 -> "1 KiB"."""
    power = min((size.bit_length() - 1) // 10, 3)
    return f"{size >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _fits(found: Mapping[str, Times]) -> Table:
    """Latency and bandwidth of each backend, fitted to its medians."""
    rows = []
    for backend, times in found.items():
        points = [(float(size), spread_of(each["all-reduce"])[0]) for size, each in times.items()]
        alpha, beta = fit_alpha_beta(points)
        rows.append((backend, US * alpha, 1 / beta / GB))
    return Table(title="time = alpha + bytes / bandwidth", head=("backend", "alpha us", "GB/s"), rows=tuple(rows))


def _record(machine: Machine, backend: str, times: Times) -> Record:
    """The bandwidth of large messages: what a core receives, adds and sends."""
    large = [size for size in times if size >= LARGE] or [max(times)]
    rates = [bus_bytes_per_s(size, seconds) for size in large for seconds in times[size]["all-reduce"]]
    return rate_record(machine, f"{ALL_REDUCE} {backend}", spread_of(rates), command=COMMAND)
