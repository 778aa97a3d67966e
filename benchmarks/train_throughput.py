"""ResNet-50 training from JPEGs on disk, 224 x 224, this machine: cputrain, its peers, and the limit in one run.

    python -m benchmarks.train_throughput [--data DIR] [--rounds 3] [--bf16] [--ipex-python PYTHON]

Peers run benchmarks/plain_ddp.py: as an expert writes it, as people write it, in one process, and through Intel's
extension where a Python that has it is named. The last row is benchmarks/convolutions_alone.py. Rounds are interleaved;
the table shows each contender's median over rounds of its median step. Needs two cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.step_times import median_step_s
from cputrain.affinity.planner import find_runtime, target_of

LOCAL_BATCH, WORKERS = 16, 2
GLOBAL_BATCH = LOCAL_BATCH * WORKERS
EXPERT, LIMIT = "torchrun, 2 x 1 threads, an expert's script", "convolutions alone, 2 x 1 threads"
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="an image folder; default: photo-sized JPEGs made on the spot")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bf16", action="store_true", help="in bfloat16")
    parser.add_argument("--ipex-python", help="a Python with intel_extension_for_pytorch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data or make_images(Path(scratch) / "images")
        contenders = contenders_of(data, Path(scratch), options)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for i in range(options.rounds):
            for name, run in contenders.items():
                rates[name].append(run(i))
                print(f"round {i + 1}/{options.rounds}  {rates[name][-1]:5.2f} img/s  {name}", file=sys.stderr)
    show(rates, "bf16" if options.bf16 else "float32")


def contenders_of(data: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Callable[[int], float]]:
    """What trains, by name: a function of the round that returns images per second."""
    steps, bf16 = options.steps, ["--bf16"] * options.bf16
    script = [str(HERE / "plain_ddp.py"), str(data)]
    quick = {"LD_PRELOAD": allocator()}

    def ours(engine: str) -> Callable[[int], float]:
        precision = "bf16" if options.bf16 else "float32"
        return lambda i: trained(data, scratch / f"{engine}{i}", steps, engine, precision)

    def peer(*extra: str, processes: int, env: dict[str, str] | None = None, python: str = sys.executable) -> float:
        launcher = torchrun(processes) if processes > 1 else ()
        sizes = ("--batch", str(GLOBAL_BATCH // processes), "--steps", str(steps))
        return measured([python, *launcher, *script, *sizes, *extra, *bf16], env)

    def alone(i: int) -> float:
        """Under our plan: bound, and with an allocator that keeps its memory."""
        launch = ("-m", "cputrain", "launch", "--ppn", str(WORKERS), "--output", str(scratch / f"alone{i}"), "--")
        sizes = ("--batch", str(LOCAL_BATCH), "--steps", "3")
        return measured([sys.executable, *launch, sys.executable, str(HERE / "convolutions_alone.py"), *sizes, *bf16])

    contenders: dict[str, Callable[[int], float]] = {
        "cputrain, native": ours("native"),
        "cputrain, eager": ours("eager"),
        EXPERT: lambda _: peer("--expert", processes=2, env=quick),
        "torchrun, 2 processes, plain script": lambda _: peer(processes=2),
        "python, 1 process of 2 threads, plain script": lambda _: peer(processes=1),
    }
    if options.ipex_python:
        contenders["torchrun, 2 x 1 threads, IPEX"] = lambda _: peer(
            "--ipex", processes=2, env=quick, python=options.ipex_python
        )
    contenders[LIMIT] = alone
    return contenders


def allocator() -> str:
    """The allocator to preload, which a plan would take too; "" without one."""
    preload = find_runtime(target_of((sys.executable,)), os.environ).preload
    return ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), *(path for path in preload if "alloc" in path)])


def torchrun(processes: int) -> Iterable[str]:
    """It gives each process one thread."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))


def show(rates: dict[str, list[float]], precision: str) -> None:
    """Print the table: median and range of each contender, and its ratios to the expert's script and to the limit."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"| training ResNet-50, 224 x 224, from JPEGs, {precision} | img/s (range) | to the expert | to the limit |")
    print("|---|---|---|---|")
    for name, values in rates.items():
        spread = f"{medians[name]:.2f} ({min(values):.2f}-{max(values):.2f})"
        print(f"| {name} | {spread} | {medians[name] / medians[EXPERT]:.2f} | {medians[name] / medians[LIMIT]:.2f} |")


def trained(data: Path, run: Path, steps: int, engine: str, precision: str) -> float:
    """Images per second of cputrain's median step, without the first, by the times of its events."""
    settings = (
        *(f"data.path={data}", f"batch.local={LOCAL_BATCH}", f"max_steps={steps}", f"output={run}"),
        *(f"plan.ppn={WORKERS}", f"engine={engine}", f"precision={precision}"),
    )
    start([sys.executable, "-m", "cputrain", "train", "imagefolder", *settings])
    return GLOBAL_BATCH / median_step_s(run)


def measured(argv: list[str], env: dict[str, str] | None = None) -> float:
    """Images per second of a script that prints the seconds of its median step."""
    return GLOBAL_BATCH / float(start(argv, env).split()[-1])


def start(argv: list[str], env: dict[str, str] | None = None) -> str:
    """Run to the end; what it printed. A failure is this benchmark's failure."""
    result = subprocess.run(argv, check=False, capture_output=True, encoding="utf-8", env={**os.environ, **(env or {})})
    if result.returncode:
        sys.exit(f"{argv} failed:\n{result.stderr}")
    return result.stdout


def make_images(root: Path) -> Path:
    """JPEGs of ImageNet's usual size with content that costs a decoder about as much as a photo."""
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


if __name__ == "__main__":
    main()
