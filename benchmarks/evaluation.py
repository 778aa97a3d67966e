"""CPU seconds of an evaluation's forward pass: as an expert writes it, with folded batch-norm, and with Winograd.

    python -m benchmarks.evaluation [--network resnet50] [--batch 32] [--side 224] [--rounds 5] [--bf16]

One thread. The expert uses channels-last images, inference mode, and batch-norm folded by torch.fx. Contenders take
turns; the first round is a warm-up. Folding, done once per evaluation, is a separate row, and the logits are compared.
CPU time is used because other processes disturb it less than wall time.
"""

import argparse
import os
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from cputrain.kernels.convolution import load_convolutions, supports_winograd, use_winograd
from cputrain.kernels.norms import batchnorms
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.training.engine import Engine, autocast, choose_engine, evaluation_network, prepare_model

EAGER = choose_engine("eager", "float32", {})
CLASSES = 1000
EXPERT, PLAIN, WINOGRAD = "expert", "native, not folded", "native, folded, Winograd"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    precision = "bf16" if options.bf16 else "float32"
    images = torch.randn(options.batch, 3, options.side, options.side).to(memory_format=torch.channels_last)
    native = choose_engine("native", precision, os.environ)
    plain = network_of(options.network, options.side, native, precision)
    quick = network_of(options.network, options.side, native, precision)
    kernels = load_convolutions(os.environ)
    for layer in quick.modules():
        if supports_winograd(layer):
            use_winograd(layer, kernels)
    with torch.inference_mode():
        folding, folded = timed(lambda: evaluation_network(plain, native, precision))
        contenders = {
            EXPERT: fuse(network_of(options.network, options.side, EAGER, precision)),
            PLAIN: plain,
            "native, folded": folded,
            WINOGRAD: evaluation_network(quick, native, precision),
        }
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        logits: dict[str, Tensor] = {}
        for _ in range(options.rounds + 1):
            for name, network in contenders.items():
                with autocast(precision):
                    seconds, logits[name] = timed(lambda network=network: network(images).float())  # type: ignore[misc]
                taken[name].append(seconds)
    medians = {name: median(seconds[1:]) for name, seconds in taken.items()}
    sizes = f"{options.network}, {options.batch} images of {options.side} x {options.side}, {precision}, one thread"
    print(f"| evaluation of {sizes} | CPU s (range) | times the expert's |\n|---|---|---|")
    for name, seconds in taken.items():
        spread = f"{medians[name]:.3f} ({min(seconds[1:]):.3f}-{max(seconds[1:]):.3f})"
        print(f"| {name} | {spread} | {medians[EXPERT] / medians[name]:.2f} |")
    print(f"| folding, once | {folding:.3f} | |")
    ours, whole = logits[WINOGRAD], logits[PLAIN]
    same = (ours.argmax(1) == whole.argmax(1)).sum()
    distance = float((ours - whole).abs().max() / whole.abs().max())
    print(f"largest difference of logits {distance:.1e} of the largest; same top-1: {same} of {len(ours)}")


def network_of(name: str, side: int, engine: Engine, precision: str) -> nn.Module:
    """Return a network with non-trivial batch-norm statistics, as after a training."""
    torch.manual_seed(1)
    network = prepare_model(build_model(ModelSettings(name=name), CLASSES, side), engine, precision)
    for layer in batchnorms(network):
        layer.momentum = 1.0
    with torch.no_grad():
        network(torch.randn(4, 3, side, side).to(memory_format=torch.channels_last))
    return network.eval()


def timed(run):  # type: ignore[no-untyped-def]
    """Return the CPU seconds of a call, and its result."""
    started = time.thread_time()
    found = run()
    return time.thread_time() - started, found


if __name__ == "__main__":
    main()
