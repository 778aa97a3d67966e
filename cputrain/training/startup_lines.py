"""What a run prints at its start: what it communicates, decodes and allocates with, and what would be faster."""

from collections.abc import Mapping
from pathlib import Path

from cputrain.affinity.kernel.bound_plan import PLAN_VARIABLE, read_host_plan

# Measured: docs/benchmarks.md. An all-reduce of 25 MiB over two ranks, and photos as they are or prepared.
CCL_GAIN = "all-reduces of 25 MiB up to 3.2 times as fast"
TURBO_GAIN = "2.6-3.6 times the images per CPU-second"
ENGINE_GAIN = "evaluations 1.2 times as fast, steps up to 1.05 times"
BF16_GAIN = 1.2  # of a convolution, from which on bf16 is worth a word
OWN_CHOICE = ("comm.backend=gloo", "data.decoder=pillow")


def startup_lines(
    *,
    backend: str,
    backend_why: str,
    engine: str,
    engine_why: str,
    decoder: str,
    allocator: str,
    ranks: int,
    bf16_speedup: float,
) -> list[str]:
    """What rank 0 says at its start: a line of what is in use, and one for each faster part that is missing.

    `backend_why` of ccl is its transport: "over libfabric (...)". `decoder` is its name, a colon, and where it lies or
    why it was taken. `bf16_speedup` is a convolution's, 1 where
    the training is not in float32.
    """
    name, _, decoder_why = decoder.partition(": ")
    transport = f" {backend_why}" if backend == "ccl" and ranks > 1 else ""
    lines = [f"backend {backend}{transport}, engine {engine}, decoder {name}, allocator {allocator}"]
    if backend == "gloo" and ranks > 1 and backend_why not in OWN_CHOICE:
        lines.append(f"faster: oneCCL ({CCL_GAIN}): {backend_why}")
    if engine == "eager" and not engine_why.startswith(("engine=", "precision=")):
        lines.append(f"faster: native kernels ({ENGINE_GAIN}): {engine_why}")
    if bf16_speedup >= BF16_GAIN:
        lines.append(bf16_line(bf16_speedup))
    if name == "Pillow" and decoder_why not in OWN_CHOICE:
        lines.append(f"faster: libjpeg-turbo ({TURBO_GAIN}): {decoder_why.removeprefix('data.decoder=turbo: ')}")
    if allocator == "glibc":
        lines.append("faster: tcmalloc, which a plan preloads where it is installed (Debian: libtcmalloc-minimal4)")
    return lines


def bf16_line(speedup: float) -> str:
    """What is said where bfloat16 is that much faster."""
    return (
        f"faster: precision=bf16, in which a convolution is {speedup:.1f} times as fast on this CPU; "
        "weights, sums and statistics stay float32"
    )


def planned_allocator(env: Mapping[str, str]) -> str:
    """The memory allocator of the plan that has bound this process."""
    plan = read_host_plan(Path(env[PLAN_VARIABLE]))
    return str(plan["runtime"]["allocator"])
