"""Steps of a script for Intel's extension: IPEX 2.8 with torch 2.8, and the stand-in with the current torch.

python -m benchmarks.ipex [CASE...] [--original .ipex/bin/python] [--batch 8] [--size 224] [--threads 2] [--rounds 9]

The two Pythons, of `make test-ipex` and of `make install`, train by the same code (`task`, `step`), on the same random
samples, each in its process, in turns: one computes a step while the other waits for its turn. The ratios are of
medians. tcmalloc or jemalloc is preloaded in both, if it is installed, as ipexrun and `cputrain launch` do. Run it
without other programs. A case is NETWORK:TYPE: one of torchvision, or bert, an encoder of BERT-base's size.
"""

import argparse
import importlib
import os
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from cputrain.affinity.planner.openmp import find_runtime, target_of
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.views import processor_text
from cputrain.models.vision import import_torchvision

ROOT = Path(__file__).parents[1]
STAND_INS = str(ROOT / "compat/stand_ins")
CASES = (
    *("resnet50:float32", "resnet50:bfloat16", "efficientnet_b0:bfloat16", "mobilenet_v3_large:bfloat16"),
    *("bert:float32", "bert:bfloat16"),
)
WORDS, SENTENCE, WIDTH, LAYERS = 30522, 128, 768, 12  # of BERT-base; words of a sample
TORCH_S = {"CPUTRAIN_KERNELS": "off"}  # its operators, for the original
WARM_UP = 2  # first steps, which compile and allocate


class Encoder(nn.Module):
    """BERT-base: words and their places, 12 layers of attention, a classifier of the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(SENTENCE, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, 4 * WIDTH, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.classify = nn.Linear(WIDTH, 2)

    def forward(self, words: Tensor) -> Tensor:
        """(N, L) -> (N, 2)."""
        states = self.norm(self.words(words) + self.places.weight[: words.shape[1]])
        return cast(Tensor, self.classify(torch.tanh(self.layers(states)[:, 0])))


def task(name: str, batch: int, size: int) -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    """Return a network, its optimizer as its users choose it, random samples and their labels, always the same."""
    torch.manual_seed(1)
    if name == "bert":
        encoder = Encoder()
        words, labels = torch.randint(WORDS, (batch, SENTENCE)), torch.randint(2, (batch,))
        return encoder, AdamW(encoder.parameters(), 2e-5, weight_decay=0.01), words, labels
    network: nn.Module = getattr(import_torchvision("models"), name)().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,))
    if name.startswith(("vit", "swin")):
        return network, AdamW(network.parameters(), 1e-3, weight_decay=0.05), images, labels
    return network, SGD(network.parameters(), 0.01, momentum=0.9, weight_decay=1e-4), images, labels


def step(network: nn.Module, optimizer: Optimizer, samples: Tensor, labels: Tensor, *, bf16: bool) -> float:
    """Train a step; return its seconds."""
    started = time.perf_counter()
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = functional.cross_entropy(network(samples).float(), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return time.perf_counter() - started


class Process:
    """A Python that trains, a step at each call of `step`."""

    def __init__(self, python: str, options: argparse.Namespace, **variables: str) -> None:
        sizes = (f"--{name}={getattr(options, name)}" for name in ("batch", "size", "threads"))
        words = (python, "-m", "benchmarks.ipex", "--trains", *sizes)
        env = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "LD_PRELOAD": allocator(), **variables}
        pipe = subprocess.PIPE
        self.python = python
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, encoding="utf-8", bufsize=1, cwd=ROOT, env=env)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def step(self, case: str) -> float:
        """Return the seconds of a case's next step. Raises SystemExit if the Python has failed."""
        print(case, file=self.process.stdin)
        if line := cast(IO[str], self.process.stdout).readline():
            return float(line)
        raise SystemExit(f"{self.python} ended with status {self.process.wait()}")


def train(options: argparse.Namespace) -> None:
    """Read cases from stdin and print the seconds of a step for each; another case than before starts a training."""
    ipex: Any = importlib.import_module("intel_extension_for_pytorch")
    torch.set_num_threads(options.threads)
    for case, lines in groupby(map(str.strip, sys.stdin)):
        name, word = case.split(":")
        dtype = getattr(torch, word)
        network, optimizer, *samples = task(name, options.batch, options.size)
        network, optimizer = ipex.optimize(network.train(), optimizer=optimizer, dtype=dtype)
        for _ in lines:
            print(step(network, optimizer, *samples, bf16=dtype == torch.bfloat16), flush=True)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE")
    parser.add_argument("--original", default=".ipex/bin/python", metavar="PYTHON", help="a Python that has IPEX 2.8")
    for option, default in (("--batch", 8), ("--size", 224), ("--threads", 2), ("--rounds", 9)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--trains", action="store_true", help=argparse.SUPPRESS)  # a Process of this program
    options = parser.parse_args()
    if options.trains:
        train(options)
        return
    print(f"{processor_text(this_machine())}\n")
    images = f"{options.batch} images of {options.size} x {options.size}, or sentences of {SENTENCE} words"
    print(f"{images}, {options.threads} threads, seconds a step\n")
    print(f"| network | type | IPEX 2.8, torch 2.8 | stand-in, torch {torch.__version__} | times as fast |")
    print("|---" * 5 + "|")
    with (
        Process(options.original, options, **TORCH_S) as original,
        Process(sys.executable, options, PYTHONPATH=STAND_INS) as stand_in,
    ):
        for case in options.cases:
            for _ in range(WARM_UP):
                original.step(case), stand_in.step(case)
            rounds = [(original.step(case), stand_in.step(case)) for _ in range(options.rounds)]
            before, now = (median(column) for column in zip(*rounds, strict=True))
            print(f"| {' | '.join(case.split(':'))} | {before:.3f} | {now:.3f} | {before / now:.2f} |", flush=True)


def allocator() -> str:
    """Return the allocator to preload, the one that a plan chooses; "" if there is none."""
    preload = find_runtime(target_of((sys.executable,)), os.environ).preload
    return ":".join(path for path in preload if "alloc" in path)


if __name__ == "__main__":
    main()
