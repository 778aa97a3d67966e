"""The operators of a network's training step beside their limits: torch's and ours.

python -m benchmarks.operators [NETWORK...] [--dtype bfloat16] [--batch 4] [--size 224] [--rounds 2] [--rows 12]

Each call of a step (channels-last, one thread) is measured where it happens, in CPU seconds, in steps that alternate
between torch's operators and ours. Its limit is the larger of its FLOP at this core's fastest rate and of the bytes of
its arguments and results at the core's bandwidth, both measured in the same run. The first table has a row for each
operator, the second one for each call that takes more than twice its limit; both are ordered by the time above it.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import cputrain
from benchmarks.networks import NETWORKS
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.views import processor_text
from cputrain.models.vision import import_torchvision

WAYS = ("torch", "ours")
TIMES_LIMIT = 2.0  # rows of the second table


@dataclass
class Calls:
    """Calls of a step with the same operator and shapes: their number, FLOP, bytes, and seconds by way and round."""

    count: int = 0
    flop: float = 0.0
    bytes: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def ms(self, way: str) -> float:
        """The fewest of the rounds, as the limits are: other programs only add to them."""
        return 1e3 * min(self.seconds[way])


class Recorder(TorchDispatchMode):
    """Measure each operator that torch dispatches, by its name and its tensors' shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, str], Calls] = defaultdict(Calls)
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.thread_time()
        made = function(*args, **(kwargs or {}))
        seconds = time.thread_time() - started
        if function.is_view:
            return made
        key = function.overloadpacket.__name__, _shapes(args)
        call = self.calls[key]
        call.count += 1
        call.flop += _flop(function, args, kwargs or {}, made)
        call.bytes += sum(map(_bytes, {id(value): value for value in _tensors((args, kwargs, made))}.values()))
        self.seconds[key] += seconds
        return made


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))


def _shapes(args: Any) -> str:
    """Return shapes and type of the first tensors, and the first list of numbers above 1: a convolution's stride."""
    shapes = [str(tuple(value.shape)).replace(" ", "") for value in _tensors(args) if value.dim() > 0][:3]
    strides = [f"stride {value[0]}" for value in args if _is_stride(value)]
    return " ".join([*shapes, *(str(value.dtype)[6:] for value in [*_tensors(args)][:1]), *strides[:1]])


def _is_stride(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(one, int) for one in value) and value[0] > 1


def _bytes(value: Tensor) -> int:
    """Bytes of memory; an expanded axis is read once."""
    count = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        count *= size if stride or size == 0 else 1
    return count * value.element_size()


def _flop(function: Any, args: Any, kwargs: Any, made: Any) -> float:
    packet = function.overloadpacket
    if packet is torch.ops.aten.convolution:
        return 2.0 * made.numel() * args[1][0].numel()
    if packet is torch.ops.aten.convolution_backward:
        return 2.0 * args[0].numel() * args[2][0].numel() * sum(args[-1][:2])
    return float(flop_registry[packet](*args, **kwargs, out_val=made)) if packet in flop_registry else 0.0


def best(work: Callable[[], object], rounds: int = 7) -> float:
    """The fewest CPU seconds of a call."""
    seconds = []
    for _ in range(rounds):
        started = time.thread_time()
        work()
        seconds.append(time.thread_time() - started)
    return min(seconds)


def peak(dtype: torch.dtype) -> float:
    """FLOP/s of this core: the faster of a product of matrices and a 3 x 3 convolution, in this type or float32."""
    rates = []
    for type_ in {dtype, torch.float32}:
        a, x, w = (torch.randn(shape).to(type_) for shape in ((1024, 1024), (4, 256, 14, 14), (256, 256, 3, 3)))
        x = x.contiguous(memory_format=torch.channels_last)
        rates.append(2 * a.numel() * 1024 / best(partial(torch.mm, a, a)))
        rates.append(2 * x.numel() * w[0].numel() / best(partial(functional.conv2d, x, w, padding=1)))
    return max(rates)


def bandwidth() -> float:
    """Bytes per second that this core reads and writes in a copy of 256 MB."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / best(lambda: target.copy_(source))


def measured(network: nn.Module, images: Tensor, dtype: torch.dtype, rounds: int) -> dict[tuple[str, str], Calls]:
    """Return the calls of a step, measured in `rounds` steps each way after one that compiles and allocates."""
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
    labels = torch.randint(0, 1000, (len(images),))
    calls: dict[tuple[str, str], Calls] = {}
    for number in range(-1, rounds):
        for way in WAYS:
            (cputrain.kernels.enable if way == "ours" else cputrain.kernels.disable)()
            with Recorder() as recorder:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                    loss = functional.cross_entropy(network(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for key, seconds in recorder.seconds.items() if number >= 0 else ():
                calls.setdefault(key, recorder.calls[key]).seconds[way].append(seconds)
    return calls


def print_tables(name: str, calls: dict[tuple[str, str], Calls], limit: Callable[[Calls], float], rows: int) -> None:
    """Print the operators of a step, and the calls far above their limit."""
    torchs, ours = (sum(call.ms(way) for call in calls.values()) for way in WAYS)
    print(f"\n## {name}: {torchs:.0f} ms a step, ours {ours:.0f}: {torchs / ours:.2f}")
    operators: dict[str, list[Calls]] = defaultdict(list)
    for (operator, _), call in calls.items():
        operators[operator].append(call)
    print_rows("operator", operators, torchs, limit, rows)
    far = {
        f"{operator} {shapes}": [call]
        for (operator, shapes), call in calls.items()
        if call.ms(WAYS[0]) > TIMES_LIMIT * limit(call)
    }
    print_rows(f"more than {TIMES_LIMIT:g} times its limit", far, torchs, limit, rows)


def print_rows(
    title: str, groups: dict[str, list[Calls]], total: float, limit: Callable[[Calls], float], rows: int
) -> None:
    """Print the groups that lose most, with sums of their calls; `total` is a step of torch's, in ms."""
    print(f"\n| {title} | calls | share | torch's, ms | limit, ms | ours, ms |\n|---|---|---|---|---|---|")
    sums = {
        word: (sum(call.count for call in calls), *(sum(map(of, calls)) for of in (torchs_ms, limit, ours_ms)))
        for word, calls in groups.items()
    }
    for word, (count, torchs, least, ours) in sorted(sums.items(), key=lambda item: item[1][2] - item[1][1])[:rows]:
        print(f"| {word} | {count} | {torchs / total:.1%} | {torchs:.2f} | {least:.2f} | {ours:.2f} |")


def torchs_ms(call: Calls) -> float:
    """Return the time by torch's operators."""
    return call.ms(WAYS[0])


def ours_ms(call: Calls) -> float:
    """Return the time by ours."""
    return call.ms(WAYS[1])


def main() -> None:
    """Print two tables for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    for option, default in (("--batch", 4), ("--size", 224), ("--rounds", 2), ("--rows", 12)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    cputrain.kernels.enable()
    flop_s, bytes_s = peak(dtype), bandwidth()
    print(f"{processor_text(this_machine())}: {flop_s / 1e9:.0f} GFLOP/s, {bytes_s / 1e9:.1f} GB/s; {options.dtype}")
    images = torch.randn(options.batch, 3, options.size, options.size).contiguous(memory_format=torch.channels_last)
    for name in options.networks:
        torch.manual_seed(1)
        network = getattr(import_torchvision("models"), name)().to(memory_format=torch.channels_last)
        calls = measured(network, images, dtype, options.rounds)

        def limit(call: Calls) -> float:
            return 1e3 * max(call.flop / flop_s, call.bytes / bytes_s)

        print_tables(name, calls, limit, options.rows)


if __name__ == "__main__":
    main()
