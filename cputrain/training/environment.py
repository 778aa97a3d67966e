"""The record of a run's environment: versions, backend, CPU features and variables, and each rank's binding."""

import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from cputrain import __version__
from cputrain.training.session import Session
from cputrain.training.startup_lines import planned_allocator

PREFIXES = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "I_MPI_", "FI_", "CCL_", "GLOO_", "AFFINITY_", "SLURM_", "PBS_"),
)
VARIABLES = ("LD_PRELOAD", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


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
        "variables": {k: v for k, v in sorted(env.items()) if k.startswith(PREFIXES) or k in VARIABLES},
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
