"""ResNet-50 training from JPEGs on disk, 224 x 224, on this machine: cputrain, its peers, and the limit in one run.

    python -m benchmarks.train_throughput [--rounds 3] [--workers 2] [--bf16] [--avx2] [--data DIR]
        [--ipex-python PYTHON] [--script] [--only NAME ...]

Peers run benchmarks/plain_ddp.py: as an expert writes it, with the one line of cputrain.optimize more, as people
usually write it, and through Intel's extension if a Python that has it is named. `--script` runs the recipe, the
expert's script and that with the line. The last row is benchmarks/convolutions_alone.py. Rounds are
interleaved; the table shows each contender's median over rounds of its median step. Needs two cores: two workers with
one thread each, or one worker with two threads.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from cputrain.affinity.planner.openmp import find_runtime, target_of
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.views import processor_text
from cputrain.runs.events import read_events

GLOBAL_BATCH, CORES = 32, 2
EXPERT, OPTIMIZED = "an expert's script", "an expert's script and cputrain.optimize"
RECIPE, LIMIT = "cputrain, native, Winograd", "convolutions alone, by oneDNN"
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="image folder; default: generated JPEGs with the size of photos")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, choices=(1, CORES), default=CORES)
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16")
    parser.add_argument("--avx2", action="store_true", help="restrict torch, oneDNN and the kernels to AVX2")
    parser.add_argument("--ipex-python", help="a Python with intel_extension_for_pytorch")
    parser.add_argument("--script", action="store_true", help="run the recipe and the expert with and without the line")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="run these and the expert")
    options = parser.parse_args()
    if options.script:
        options.only = [RECIPE, OPTIMIZED]
    with tempfile.TemporaryDirectory() as scratch:
        if options.avx2:
            os.environ |= avx2_only(Path(scratch))
        data = options.data or make_images(Path(scratch) / "images")
        contenders = {
            name: run
            for name, run in contenders_of(data, Path(scratch), options).items()
            if name == EXPERT or any(word in name for word in options.only)
        }
        if len(contenders) == 1:
            parser.error(f"--only {' '.join(options.only)}: no contender has such a name")
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for i in range(options.rounds):
            for name, run in contenders.items():
                rates[name].append(run(i))
                print(f"round {i + 1}/{options.rounds}  {rates[name][-1]:5.2f} img/s  {name}", file=sys.stderr)
    precision = "bf16" if options.bf16 else "float32"
    print(f"{processor_text(this_machine())}\n")
    show(rates, f"{precision}, {options.workers} x {CORES // options.workers} threads{', AVX2' * options.avx2}")


def contenders_of(data: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Callable[[int], float]]:
    """Return the contenders by name: functions of the round that return images/s."""
    steps, bf16, workers = options.steps, ["--bf16"] * options.bf16, options.workers
    script = [str(HERE / "plain_ddp.py"), str(data)]
    quick = {"LD_PRELOAD": allocator()}

    def ours(name: str, *settings: str) -> Callable[[int], float]:
        own = (*settings, f"precision={'bf16' if options.bf16 else 'float32'}", f"plan.ppn={workers}")
        return lambda i: trained(data, scratch / f"{name}{i}", steps, (*own, f"batch.local={GLOBAL_BATCH // workers}"))

    def peer(*extra: str, processes: int, env: dict[str, str] | None = None, python: str = sys.executable) -> float:
        launcher = torchrun(processes) if processes > 1 else ()
        sizes = ("--batch", str(GLOBAL_BATCH // processes), "--steps", str(steps))
        return measured([python, *launcher, *script, *sizes, *extra, *bf16], env)

    def alone(i: int) -> float:
        """Run a script under cputrain's plan, bound, and with an allocator that keeps its memory."""
        launch = ("-m", "cputrain", "launch", "--ppn", str(workers), "--output", str(scratch / f"alone{i}"), "--")
        sizes = ("--batch", str(GLOBAL_BATCH // workers), "--steps", "3", "--threads", str(CORES // workers))
        return measured([sys.executable, *launch, sys.executable, str(HERE / "convolutions_alone.py"), *sizes, *bf16])

    contenders: dict[str, Callable[[int], float]] = {
        RECIPE: ours("winograd", "engine=native", "model.winograd=auto"),
        "cputrain, native, direct": ours("direct", "engine=native", "model.winograd=off"),
        "cputrain, eager": ours("eager", "engine=eager"),
        EXPERT: lambda _: peer("--expert", processes=workers, env=quick),
        OPTIMIZED: lambda _: peer("--expert", "--optimize", processes=workers, env=quick),
        "a plain script": lambda _: peer(processes=workers),
    }
    if options.ipex_python:
        contenders["IPEX"] = lambda _: peer("--ipex", processes=workers, env=quick, python=options.ipex_python)
    contenders[LIMIT] = alone
    return contenders


def avx2_only(scratch: Path) -> dict[str, str]:
    """Return variables that keep torch and oneDNN from using AVX-512, and a compiler that does so for the kernels."""
    compiler = scratch / "c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -march=haswell\n', encoding="utf-8")
    compiler.chmod(0o755)
    kernels = {"CXX": str(compiler), "CPUTRAIN_CACHE": str(scratch / "cache")}
    return {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", **kernels}


def allocator() -> str:
    """Return the allocator to preload, the same that a plan would choose; "" if there is none."""
    preload = find_runtime(target_of((sys.executable,)), os.environ).preload
    return ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), *(path for path in preload if "alloc" in path)])


def torchrun(processes: int) -> Iterable[str]:
    """Return torchrun's command, which gives each process one thread."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))


def show(rates: dict[str, list[float]], precision: str) -> None:
    """Print the table: median and range of each contender, relative to the expert's script and to the limit."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"| training ResNet-50, 224 x 224, from JPEGs, {precision} | img/s (range) | to the expert | to the limit |")
    print("|---|---|---|---|")
    for name, values in rates.items():
        spread = f"{medians[name]:.2f} ({min(values):.2f}-{max(values):.2f})"
        to_limit = f"{medians[name] / medians[LIMIT]:.2f}" if LIMIT in medians else "-"
        print(f"| {name} | {spread} | {medians[name] / medians[EXPERT]:.2f} | {to_limit} |")


def trained(data: Path, run: Path, steps: int, own: Iterable[str]) -> float:
    """Return images/s of cputrain's median step without the first, from the times of its events."""
    settings = (*own, f"data.path={data}", f"max_steps={steps}", f"output={run}")
    start([sys.executable, "-m", "cputrain", "train", "imagefolder", *settings])
    return GLOBAL_BATCH / median_step_s(run)


def measured(argv: list[str], env: dict[str, str] | None = None) -> float:
    """Return images/s of a script that prints the seconds of its median step."""
    return GLOBAL_BATCH / float(start(argv, env).split()[-1])


def start(argv: list[str], env: dict[str, str] | None = None) -> str:
    """Run a command and return its output. A failure ends the benchmark."""
    result = subprocess.run(argv, check=False, capture_output=True, encoding="utf-8", env={**os.environ, **(env or {})})
    if result.returncode:
        sys.exit(f"{argv} failed:\n{result.stderr}")
    return result.stdout


def make_images(root: Path) -> Path:
    """Generate JPEGs of ImageNet's usual size that cost a decoder about as much as a photo."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 100), ("val", 4)):
        for label in range(2):
            (root / split / str(label)).mkdir(parents=True)
            for i in range(count):
                coarse = Image.fromarray(rng.integers(0, 255, (47, 63, 3), dtype=np.uint8))
                photo = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)).astype(np.int16)
                grain = rng.integers(-12, 12, photo.shape, dtype=np.int16)
                pixels = (photo + grain).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / str(label) / f"{i}.jpg", quality=90)
    return root


def median_step_s(run: Path) -> float:
    """Return the median seconds between the step events of a run, which must have at least two.

    Includes everything that the trainer does between steps, unlike the events' images_per_s.
    """
    times = [event["time"] for event in read_events(run) if event["event"] == "step"]
    return statistics.median(after - before for before, after in pairwise(times))


if __name__ == "__main__":
    main()
