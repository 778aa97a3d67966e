"""A run's usage/ and plan -> the resource use of its workers and hosts, as tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from affinity.errors import InputError
from affinity.planner.plan import WorkerPlan
from affinity.planner.plan_file import PLAN_FILE, plan_from_dict, plan_of_host, read_json
from affinity.units import GIB
from mpi.usage.file import FOLDER, read_records
from mpi.usage.records import HostUse, Use, WorkerUse, total

LOOPBACK = "lo"
MB = 1e6
PAUSE_S = 2.0  # a longer time without records is the pause between a run's end and its resumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A run's records, oldest first, by rank and by host; and the planned worker of each rank."""

    workers: dict[int, list[WorkerUse]]
    hosts: dict[str, list[HostUse]]
    planned: dict[int, WorkerPlan]


def read_usage(run: Path) -> Usage | None:
    """The records in a run's folder; None where nothing was sampled."""
    folder = run / FOLDER
    workers = {
        int(path.stem[len("rank-") :]): read_records(path, WorkerUse) for path in folder.glob("rank-[0-9]*.jsonl")
    }
    hosts = {path.stem[len("host-") :]: read_records(path, HostUse) for path in folder.glob("host-*.jsonl")}
    known = {rank: workers[rank] for rank in sorted(workers) if workers[rank]}
    if not known:
        return None
    return Usage(
        workers=known,
        hosts={host: hosts[host] for host in sorted(hosts) if hosts[host]},
        planned=_planned(run / PLAN_FILE, {rank: records[-1].host for rank, records in known.items()}),
    )


def _planned(path: Path, host_of: dict[int, str]) -> dict[int, WorkerPlan]:
    """The planned worker of each rank, without hosts that ran another number of ranks than planned."""
    try:
        data = read_json(path)
    except InputError:  # absent, or damaged
        return {}
    found: dict[int, WorkerPlan] = {}
    for host in sorted(set(host_of.values())):
        ranks = sorted(rank for rank, where in host_of.items() if where == host)
        try:
            plan = plan_of_host(data, host)
            workers = plan_from_dict(plan).workers
        except InputError:
            continue  # a host that is not in the plan, as after a requeue
        if len(workers) == len(ranks):
            found |= dict(zip(ranks, workers, strict=True))
    return found


def busy(record: WorkerUse | HostUse) -> float:
    """CPUs that were busy on average: CPU seconds per second."""
    return record.cpu_s / record.seconds if record.seconds > 0 else 0.0


def mean_of(records: Sequence[Use], value: Callable[[Use], float]) -> float:
    """A rate's mean over time."""
    return sum(value(r) * r.seconds for r in records) / max(sum(r.seconds for r in records), 1e-9)


def mb_per_s(name: str, direction: int) -> Callable[[HostUse], float]:
    """A record's MB/s of an interface, received (0) or sent (1)."""
    return lambda r: r.network.get(name, (0, 0))[direction] / MB / r.seconds if r.seconds > 0 else 0.0


def interfaces_of(records: Sequence[HostUse]) -> list[str]:
    """A host's interfaces with traffic, the busiest first, the loopback last."""
    by_name = total(*(record.network for record in records))
    return sorted(by_name, key=lambda name: (name == LOOPBACK, -sum(by_name[name]), name))


def worker_rows(usage: Usage) -> list[tuple[str, ...]]:
    """For each rank: rank, host, CPUs busy (mean, peak), planned, GiB of memory (peak), estimated, processes."""
    rows: list[tuple[str, ...]] = []
    for rank, records in usage.workers.items():
        plan = usage.planned.get(rank)
        estimate = plan.memory_bytes if plan else None
        rows.append(
            (
                str(rank),
                records[-1].host,
                f"{mean_of(records, busy):.2f}",
                f"{max(map(busy, records)):.2f}",
                str(len(plan.pus)) if plan else "",
                f"{max(r.rss_bytes for r in records) / GIB:.2f}",
                f"{estimate / GIB:.2f}" if estimate else "",
                str(max(r.processes for r in records)),
            )
        )
    return rows


def host_rows(usage: Usage) -> list[tuple[str, ...]]:
    """For each host: host, CPUs busy (mean, peak), least GiB of memory available."""
    return [
        (
            host,
            f"{mean_of(records, busy):.2f}",
            f"{max(map(busy, records)):.2f}",
            f"{min(r.memory_available_bytes for r in records) / GIB:.1f}",
        )
        for host, records in usage.hosts.items()
    ]


def network_rows(usage: Usage) -> list[tuple[str, ...]]:
    """For each host and interface: host, interface, MB/s received (mean, peak), MB/s sent (mean, peak)."""
    rows: list[tuple[str, ...]] = []
    for host, records in usage.hosts.items():
        for name in interfaces_of(records):
            rates = [mb_per_s(name, direction) for direction in (0, 1)]
            figures = [figure for rate in rates for figure in (mean_of(records, rate), max(map(rate, records)))]
            rows.append((host, "lo (loopback)" if name == LOOPBACK else name, *(f"{mb:.3f}" for mb in figures)))
    return rows


def running_time(usage: Usage) -> Callable[[Sequence[float]], np.ndarray]:
    """A function from unix times to seconds of running time, without the pauses before resumptions."""
    every: list[Sequence[WorkerUse | HostUse]] = [*usage.workers.values(), *usage.hosts.values()]
    spans: list[tuple[float, float]] = []
    for start, end in sorted((r.time - r.seconds, r.time) for records in every for r in records):
        if spans and start <= spans[-1][1] + PAUSE_S:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((start, end))
    edges = [edge for span in spans for edge in span]
    before = accumulate((end - start for start, end in spans), initial=0.0)
    elapsed = [edge for pair in pairwise(before) for edge in pair]
    return lambda times: np.interp(times, edges, elapsed)
