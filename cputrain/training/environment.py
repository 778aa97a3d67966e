"""The record of a run's environment: versions, backend, CPU features and variables, and each rank's binding."""

import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from cputrain import __version__
from cputrain.runs.folder import job_in
from cputrain.training.session import Session
from cputrain.training.startup_lines import planned_allocator
from cputrain.variables import shown_variables


def describe_environment(session: Session, env: Mapping[str, str]) -> dict[str, Any]:
    """The content of environment.json."""
    return {
        "cputrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": session.ranks.group.backend,
        "backend_why": session.ranks.group.why,
        "engine": session.engine.name,
        "engine_why": session.engine.why,
        "decoder": session.data.decoder,
        "allocator": planned_allocator(env),
        "torch_build": torch.__config__.show().split("\n"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": platform.release(),
        "host": socket.gethostname(),
        "job": job_in(env),
        "variables": shown_variables(env),
    }


def binding_record(session: Session) -> dict[str, Any]:
    """This rank's entry of the start event: planned and actual PUs, threads and memory."""
    rank, binding = session.ranks.this.rank, session.binding
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "planned_pus": list(binding.worker.pus),
        "local_batch": mean_local_batch(session),
        **asdict(binding.observed),
        "threads": torch.get_num_threads(),
        "thread_pus": [list(thread.pus) for thread in binding.team],
        "memory_share": binding.memory_share,
    }


def mean_local_batch(session: Session) -> int:
    """Images of one of this rank's backward passes, rounded where passes or steps differ."""
    batches = session.ranks.local_batches
    share = batches[session.ranks.this.rank] / sum(batches)
    return round(session.sizes.global_batch * share / session.sizes.accumulation_steps)
