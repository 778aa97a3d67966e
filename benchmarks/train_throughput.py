"""ResNet-50 training from JPEGs on disk, 224 x 224, this machine: cputrain against plain PyTorch in the same run.

    python -m benchmarks.train_throughput [--data DIR] [--rounds 3]

Peers run benchmarks/plain_ddp.py (a) under torchrun with two processes, (b) as one process with two threads. Rounds are
interleaved; the table shows each contender's median over rounds of its median step. Needs two cores.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from cputrain.runs.events import read_events

LOCAL_BATCH, WORKERS = 16, 2
GLOBAL_BATCH = LOCAL_BATCH * WORKERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="an image folder; default: photo-sized JPEGs made on the spot")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data or make_images(Path(scratch) / "images")
        contenders: dict[str, Callable[[int], float]] = {
            "cputrain, 2 workers under its plan": lambda i: ours(data, Path(scratch) / f"run{i}", options.steps),
            "torchrun, 2 processes, plain script": lambda _: plain(data, options.steps, processes=2),
            "python, 1 process of 2 threads, plain script": lambda _: plain(data, options.steps, processes=1),
        }
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for i in range(options.rounds):
            for name, run in contenders.items():
                rates[name].append(run(i))
                print(f"round {i + 1}/{options.rounds}  {rates[name][-1]:5.2f} img/s  {name}", file=sys.stderr)
    show(rates)


def show(rates: dict[str, list[float]]) -> None:
    """Print the table: median and range of each contender, and its ratio to the better peer."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best_peer = max(rate for name, rate in medians.items() if not name.startswith("cputrain"))
    print("| training ResNet-50, 224 x 224, from JPEGs | img/s (range) | ratio to the better peer |\n|---|---|---|")
    for name, values in rates.items():
        print(
            f"| {name} | {medians[name]:.2f} ({min(values):.2f}-{max(values):.2f}) | {medians[name] / best_peer:.2f} |"
        )


def ours(data: Path, run: Path, steps: int) -> float:
    """Images per second of cputrain's median step, without the first."""
    settings = (f"data.path={data}", f"batch.local={LOCAL_BATCH}", f"max_steps={steps}", f"output={run}")
    start([sys.executable, "-m", "cputrain", "train", "imagefolder", *settings, f"plan.ppn={WORKERS}"])
    rates = [event["images_per_s"] for event in read_events(run) if event["event"] == "step"]
    return statistics.median(rates[1:])


def plain(data: Path, steps: int, *, processes: int) -> float:
    """Images per second of the plain script's median step, without the first."""
    script = str(Path(__file__).with_name("plain_ddp.py"))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    launcher = torchrun if processes > 1 else ()
    arguments = (str(data), "--batch", str(GLOBAL_BATCH // processes), "--steps", str(steps))
    # One process takes all cores by default; torchrun gives each process one thread: both as people get them.
    printed = start([sys.executable, *launcher, script, *arguments])
    return GLOBAL_BATCH / float(printed.split()[-1])


def start(argv: list[str]) -> str:
    """Run to the end; what it printed. A failure is this benchmark's failure."""
    result = subprocess.run(argv, check=False, capture_output=True, text=True)
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
