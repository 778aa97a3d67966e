"""What a rank runs in: environment.json, the start-up lines about it, and the ranks' bindings."""

import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cputrain import __version__
from cputrain.affinity.bound_plan import PLAN_VARIABLE, read_host_plan
from cputrain.measurements import BF16_GAIN, auto_line, bf16_line
from cputrain.training.session import Session
from cputrain.variables import job_in, shown_variables

# Measured in docs/benchmarks.md: an all-reduce of 25 MiB over two ranks; photos, original or prepared.
CCL_GAIN = "all-reduces of 25 MiB up to 3.2 times as fast"
TURBO_GAIN = "2.6-3.6 times the images per CPU-second"
ENGINE_GAIN = "evaluations up to 1.6 times as fast, steps up to 1.2 times"
SET = "set by the recipe"
OWN_CHOICE = ("comm.backend=gloo", "data.decoder=pillow")


def describe_environment(session: Session) -> dict[str, Any]:
    """Return the content of environment.json."""
    env = session.context.env
    return {
        "cputrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": session.group.backend,
        "backend_why": session.group.why,
        "engine": session.engine.name,
        "engine_why": session.engine.why,
        "precision": session.recipe.precision,
        "precision_why": session.precision_why or SET,
        "decoder": session.decoder,
        "allocator": read_host_plan(Path(env[PLAN_VARIABLE])).runtime.allocator,
        "torch_build": torch.__config__.show().split("\n"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": platform.release(),
        "host": socket.gethostname(),
        "job": job_in(env),
        "variables": shown_variables(env),
    }


def binding_record(session: Session) -> dict[str, Any]:
    """Return this rank's entry in the start event: planned and actual PUs, threads and memory."""
    context = session.context
    return {
        "rank": session.rank.rank,
        "host": socket.gethostname(),
        "planned_pus": list(context.worker.pus),
        "local_batch": session.mean_local_batch,
        **asdict(context.observed),
        "threads": torch.get_num_threads(),
        "thread_pus": [list(thread.pus) for thread in session.team],
        "memory_share": session.memory_share,
    }


def startup_lines(environment: Mapping[str, Any], *, ranks: int, bf16_speedup: float) -> list[str]:
    """Return rank 0's start-up lines: the components in use, and one line for each faster one that is not in use.

    In `environment`, `backend_why` of ccl is its transport, "over libfabric (...)"; `decoder` is "NAME: WHY", where WHY
    is the library's path or the reason for the choice. `bf16_speedup` is a convolution's, 1 if the precision is not
    float32.
    """
    backend, backend_why, engine, engine_why, decoder, allocator = (
        environment[name] for name in ("backend", "backend_why", "engine", "engine_why", "decoder", "allocator")
    )
    name, _, decoder_why = decoder.partition(": ")
    transport = f" {backend_why}" if backend == "ccl" and ranks > 1 else ""
    lines = [f"backend {backend}{transport}, engine {engine}, decoder {name}, allocator {allocator}"]
    if environment["precision_why"] != SET:
        lines.append(auto_line(environment["precision"], environment["precision_why"]))
    if backend == "gloo" and ranks > 1 and backend_why not in OWN_CHOICE:
        lines.append(f"faster: oneCCL ({CCL_GAIN}): {backend_why}")
    if engine == "eager" and not engine_why.startswith(("engine=", "precision=", "the network ")):
        lines.append(f"faster: native kernels ({ENGINE_GAIN}): {engine_why}")
    if bf16_speedup >= BF16_GAIN:
        lines.append(bf16_line(bf16_speedup))
    if name == "Pillow" and decoder_why not in OWN_CHOICE:
        lines.append(f"faster: libjpeg-turbo ({TURBO_GAIN}): {decoder_why.removeprefix('data.decoder=turbo: ')}")
    if allocator == "glibc":
        lines.append("faster: tcmalloc, which a plan preloads if it is installed (Debian: libtcmalloc-minimal4)")
    return lines
