"""What a profile, or a tuned plan, puts where a request leaves a choice."""

from dataclasses import replace
from typing import Any

from affinity.planner.measured import Measured, Tuned
from affinity.planner.profiles import PROFILES
from affinity.planner.request import Request
from affinity.topology.machine import Machine

TUNED = ("ppn", "comm_cores", "loader_cores")


def with_defaults(machine: Machine, request: Request, measured: Measured) -> tuple[Request, dict[str, str]]:
    """The request with the profile's values, or those of the tuned plan, where the user set none; and why, by field."""
    if request.profile != "auto":
        profile = PROFILES[request.profile]
        return _filled(request, profile.decide(machine, request.ppn), f"profile {request.profile}: {profile.source}")
    if measured.tuned is not None and measured.tuned.ppn <= len(machine.allowed_cores):
        return _filled(request, tuned_values(measured.tuned, request), measured.tuned.why)
    return request, {}


def _filled(request: Request, values: dict[str, Any], why: str) -> tuple[Request, dict[str, str]]:
    blank = Request()
    changes = {name: value for name, value in values.items() if getattr(request, name) == getattr(blank, name)}
    return replace(request, **changes), dict.fromkeys(changes, why)


def tuned_values(tuned: Tuned, request: Request) -> dict[str, Any]:
    """The values of a tuned plan for a request; empty where the request asks for anything else than that plan.

    It was measured on a whole host: for a job of several hosts only its number of workers counts.
    """
    other_cores = request.occupied or request.cores or request.e_cores != "auto" or request.oversubscribe
    if other_cores or request.smt or request.threads is not None or request.balance != "equal":
        return {}
    if request.most_workers is not None and tuned.ppn * request.nodes > request.most_workers:
        return {}
    if any(getattr(request, name) not in (None, getattr(tuned, name)) for name in TUNED):
        return {}
    if request.nodes > 1:
        return {"ppn": tuned.ppn}
    return {**{name: getattr(tuned, name) for name in TUNED}, "allocator": tuned.allocator}


def tuning_name(request: Request) -> str | None:
    """What a tuned plan is for: network, precision, decoder and batch; None where the network is unknown."""
    workload = request.workload
    if workload is None or workload.assumed or request.local_batch is None:
        return None
    batch = f"batch of {request.local_batch} a worker"
    if request.global_batch is not None:
        batch = f"global batch of {request.global_batch}, {request.local_batch} a worker at most"
    return f"{workload.name}, {workload.precision}, {workload.decoder}, {batch}"
