"""Everything in a training step of ResNet-50 besides convolutions: time by operator, and oneDNN's reorders; one thread.

    python -m benchmarks.step_passes [--batch 16] [--side 224] [--engine native] [--bf16]

The step is the trainer's: normalization of bytes, forward and backward pass, norm, optimizer, zeroing gradients. The
second table counts oneDNN's calls in another step by kind; reorders of weights convert between oneDNN's layout and
torch's. It also reports whether the stem computes its input's gradient, which nothing uses.
"""

import argparse
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict

SHOWN = 20
VERBOSE = "--verbose-step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--engine", default="native")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument(VERBOSE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    run_steps(options)
    if not options.verbose_step:
        show_primitives(options)


def run_steps(options: argparse.Namespace) -> None:
    """Run two warm-up steps, and one that is profiled or whose oneDNN calls are printed."""
    import torch
    from torch.nn.functional import cross_entropy

    from cputrain.data.loader import IMAGENET_MEAN, IMAGENET_STD, choose_normalize
    from cputrain.models.networks import build_model
    from cputrain.models.settings import ModelSettings
    from cputrain.optim import build_optimizer, set_lr_and_decay
    from cputrain.optim_settings import OptimSettings
    from cputrain.training.engine import autocast, choose_engine, optimize_training, prepare_model, to_weight_dtype

    torch.set_num_threads(1)
    precision = "bf16" if options.bf16 else "float32"
    engine = choose_engine(options.engine, precision, os.environ)
    network = prepare_model(build_model(ModelSettings(name="resnet50"), 1000, options.side), engine, precision)
    network, optimizer = optimize_training(network, build_optimizer(network, OptimSettings()), engine)
    set_lr_and_decay(optimizer, 0.1, 5e-5)
    normalize = choose_normalize(IMAGENET_MEAN, IMAGENET_STD, "auto", os.environ)
    pixels = torch.randint(0, 256, (options.batch, options.side, options.side, 3), dtype=torch.uint8)
    labels = torch.zeros(options.batch, dtype=torch.long)

    def step() -> None:
        with torch.profiler.record_function("normalize"):
            images = to_weight_dtype(normalize(pixels), precision)
        with autocast(precision):
            outputs = network(images)
        cross_entropy(outputs.float(), labels).backward()
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        float(torch.stack(torch._foreach_norm(gradients)).double().norm())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    if options.verbose_step:
        print("the step", flush=True)
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):  # type: ignore[no-untyped-call]
            step()
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total)
    whole = sum(row.self_cpu_time_total for row in rows)
    print(f"| operator, {options.batch} images, {precision}, {engine.name} | calls | ms | % of the step |")
    print("|---|---|---|---|")
    for row in rows[:SHOWN]:
        ms, share = row.self_cpu_time_total / 1e3, 100 * row.self_cpu_time_total / whole
        print(f"| {row.key} | {row.count} | {ms:.1f} | {share:.1f} |")
    print(f"| all | | {whole / 1e3:.1f} | 100 |", flush=True)


def show_primitives(options: argparse.Namespace) -> None:
    """Count and time oneDNN's calls in a step of a separate process, which prints them."""
    flags = ["--batch", str(options.batch), "--side", str(options.side), "--engine", options.engine]
    argv = [sys.executable, "-m", "benchmarks.step_passes", *flags, *["--bf16"] * options.bf16, VERBOSE]
    printed = subprocess.run(
        argv,
        check=True,
        capture_output=True,
        encoding="utf-8",
    ).stdout.partition("the step\n")[2]
    calls, ms = Counter[str](), defaultdict[str, float](float)
    stem_gradient = False
    for line in printed.splitlines():
        # onednn_verbose,v1,primitive,exec,cpu,convolution,jit:avx2,backward_weights,src:f32:..., ...,milliseconds
        fields = re.sub(r"^onednn_verbose,(v\d+,)?(primitive,)?", "", line).split(",")
        if fields[0] != "exec" or len(fields) < 6:
            continue
        kind, direction = fields[2], fields[4]
        name = kind if kind == "reorder" else f"{kind} {direction}"
        calls[name] += 1
        ms[name] += float(fields[-1])
        stem_gradient |= direction == "backward_data" and "ic3oc64" in line
    print("\n| oneDNN | calls | ms |\n|---|---|---|")
    for name, count in calls.most_common():
        print(f"| {name} | {count} | {ms[name]:.1f} |")
    print(f"gradient of the stem's input: {'computed' if stem_gradient else 'not computed'}")


if __name__ == "__main__":
    main()
