"""One rank of `cputrain bench`: trains a few steps, times their parts, layers and buckets, and the kernels' limits.

The trainer's code is unchanged: torch's hooks report when the forward pass, the optimizer and each layer begin and end,
and the communication hook reports when the backward pass waits.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import functional

from cputrain.comm.group import end_group
from cputrain.comm.hooks import HOOKS, AllReduceHook
from cputrain.data.loader import Batch
from cputrain.kernels.evidence import measuring
from cputrain.launch.rank_process import RankContext
from cputrain.schedule import lr_at
from cputrain.studies.bench.figures import seconds_of
from cputrain.studies.bench.model import BACKWARD, FORWARD, MATRIX, PARTS, Spec
from cputrain.training.batches import endless_batches
from cputrain.training.building import build_state
from cputrain.training.local import asked_recipe
from cputrain.training.session import Session, start_session
from cputrain.training.state import TrainState
from cputrain.training.step import StepResult, StepSettings, train_step

CHANNELS, SIDE, KERNEL = 128, 28, 3  # the 3 x 3 convolutions of ResNet-50's second stage
MATRIX_SIDE, TEST_MATRIX_SIDE = 2048, 256
MAX_IMAGES = 16  # of a convolution that is timed as the limit
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
Span = tuple[str, float, float]
"""Name, start and end, in seconds of the host's monotonic clock."""

LIMIT_ROUNDS = 5  # of each kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel with its number of floating-point operations."""

    name: str
    flop: float
    run: Callable[[], object]

    def flops(self) -> float:
        """Run the kernel once; return FLOP/s."""
        with torch.no_grad():
            return self.flop / seconds_of(self.run)


def kernels(precision: str, images: int, *, quick: bool) -> tuple[Kernel, ...]:
    """Return convolution forward, convolution backward and matrix product in a precision."""
    dtype, images = TYPES[precision], min(images, MAX_IMAGES)
    shape = (images, CHANNELS, SIDE, SIDE)
    x, gradient = (torch.rand(shape).to(dtype=dtype, memory_format=torch.channels_last) for _ in range(2))
    weights = torch.rand(CHANNELS, CHANNELS, KERNEL, KERNEL).to(dtype=dtype, memory_format=torch.channels_last)
    flop = 2.0 * weights.numel() * images * SIDE * SIDE
    geometry = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    side = TEST_MATRIX_SIDE if quick else MATRIX_SIDE
    a, b = (torch.rand(side, side).to(dtype) for _ in range(2))

    def forward() -> Tensor:
        return functional.conv2d(x, weights, padding=1)

    def backward() -> object:
        return torch.ops.aten.convolution_backward(gradient, x, weights, None, *geometry, (True, True, False))

    return (
        Kernel(name=FORWARD, flop=flop, run=forward),
        Kernel(name=BACKWARD, flop=2 * flop, run=backward),
        Kernel(name=MATRIX, flop=2.0 * side**3, run=lambda: a @ b),
    )


@dataclass(slots=True)
class ObservedAllReduce(AllReduceHook):
    """All-reduce hook that also records each bucket: bytes, when its gradients were ready, when the sum was ready."""

    inner: AllReduceHook = field(default_factory=AllReduceHook)
    buckets: list[tuple[int, float, float]] = field(default_factory=list)

    def hook(self, group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """All-reduce a bucket of gradients."""
        size = bucket.buffer().nbytes
        summed = self.inner.hook(group, bucket)
        self.last_ready_s, self.finished = self.inner.last_ready_s, self.inner.finished
        ready = self.last_ready_s
        summed.add_done_callback(lambda _: self.buckets.append((size, ready, time.perf_counter())))
        return summed

    def reset(self) -> None:
        """Drop the state of earlier gradients."""
        self.inner.reset()


@dataclass(slots=True)
class StepRecorder:
    """Times the forward passes and the optimizer of each step of a training state."""

    state: TrainState
    forwards: list[tuple[float, float]] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        began = 0.0

        def begin_forward(*_: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        self.state.ddp.register_forward_pre_hook(begin_forward)
        self.state.ddp.register_forward_hook(lambda *_: self.forwards.append((began, time.perf_counter())))
        for register in (self.state.optimizer.register_step_pre_hook, self.state.optimizer.register_step_post_hook):
            register(lambda *_: self.optimizer.append(time.perf_counter()))

    def clear(self) -> None:
        """Forget the last step."""
        self.forwards.clear()
        self.optimizer.clear()

    def parts(self, result: StepResult, start: float, end: float, *, alone: bool) -> list[Span]:
        """Return the parts of the step from `start` to `end`, in order; the time between them is "other".

        The forward pass includes the loss, the backward pass with gradient accumulation the preparation of the next
        pass. `alone` means that there is one rank, which never waits for another.
        """
        waits = 0.0 if alone else result.comm_wait_s
        # the last forward pass ends before the last backward pass begins, which ends once the sums are ready
        ended = self.state.all_reduce.last_ready_s + result.comm_wait_s
        spans: list[Span] = [("data wait", start, start + result.data_wait_s)]
        for number, (began, done) in enumerate(self.forwards):
            following = self.forwards[number + 1][0] if number + 1 < len(self.forwards) else ended - waits
            spans += [("forward", began, done), ("backward", done, following)]
        spans.append(("exposed communication", ended - waits, ended))
        if self.optimizer:  # skipped in a step with NaN or Inf
            spans.append(("optimizer", self.optimizer[0], self.optimizer[-1]))
        return spans


@dataclass(slots=True)
class LayerRecorder:
    """Records when each layer's forward and backward pass begin and end."""

    forwards: list[Span] = field(default_factory=list)
    gradients: list[tuple[str, float]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    flop: dict[str, tuple[float, float]] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def attached(self, network: nn.Module) -> Iterator[None]:
        """Record the layers of a network, meaning its modules without children."""
        handles = []
        for name, module in network.named_modules():
            if not list(module.children()) and not isinstance(module, nn.Identity):
                self.kinds[name] = type(module).__name__
                self.weights[name] = sum(weight.numel() for weight in module.parameters())
                handles.append(module.register_forward_pre_hook(measuring(partial(self._begin, name))))
                handles.append(module.register_forward_hook(measuring(partial(self._end, name))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, name: str, *_: Any) -> None:
        self._began[name] = time.perf_counter()

    def _end(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.forwards.append((name, self._began[name], time.perf_counter()))
        if isinstance(output, Tensor) and output.grad_fn is not None:
            # a hook on the tensor itself would change how the block's output is used, compared to training
            output.grad_fn.register_prehook(lambda _: self.gradients.append((name, time.perf_counter())))
        forward, backward = flop_of(module, inputs, output)
        before = self.flop.get(name, (0.0, 0.0))
        self.flop[name] = (before[0] + forward, before[1] + backward)

    def backwards(self, end: float) -> list[Span]:
        """Return the backward passes: a layer's pass lasts from the gradient of its output to the gradient of the next
        layer's output; the last one ends at `end`."""
        ends = [*(at for _, at in self.gradients[1:]), max(end, self.gradients[-1][1])] if self.gradients else []
        return [(name, began, done) for (name, began), done in zip(self.gradients, ends, strict=True)]

    def clear(self) -> None:
        """Forget the last step."""
        self.forwards.clear()
        self.gradients.clear()
        self.flop.clear()

    def times(self, end: float) -> list[dict[str, Any]]:
        """Return {"name", "kind", "weights" (their number), "forward_s", "backward_s", "forward_flop", "backward_flop"}
        of each layer in the step whose backward pass ended at `end`, in the order of the forward pass."""
        times_of_layers: dict[str, dict[str, Any]] = {}
        for name, began, done in self.forwards:
            about = {"name": name, "kind": self.kinds[name], "weights": self.weights[name]}
            flop = dict(zip(("forward_flop", "backward_flop"), self.flop[name], strict=True))
            times_of_layers.setdefault(name, {**about, "forward_s": 0.0, "backward_s": 0.0, **flop})["forward_s"] += (
                done - began
            )
        for name, began, done in self.backwards(end):
            times_of_layers[name]["backward_s"] += done - began
        return list(times_of_layers.values())


def flop_of(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> tuple[float, float]:
    """Return the floating-point operations of a convolution or linear layer, forward and backward; 0 for other layers.

    The backward pass computes the gradients of weights and input, or of the weights only if the input needs none.
    """
    if not isinstance(module, nn.Conv2d | nn.Linear) or not isinstance(output, Tensor):
        return 0.0, 0.0
    pixels = output.shape[2] * output.shape[3] if isinstance(module, nn.Conv2d) else 1
    forward = 2.0 * module.weight.numel() * output.shape[0] * pixels
    return forward, forward * (module.weight.requires_grad + bool(inputs[0].requires_grad))


def measure(arguments: dict[str, Any], context: RankContext) -> dict[str, Any]:
    """Train a few steps as one rank, and measure what arguments["spec"] requests."""
    recipe, spec = asked_recipe(arguments), Spec(**arguments["spec"])

    session = start_session(context, recipe, measured=True)
    observed = ObservedAllReduce(inner=HOOKS[recipe.comm.compression]())
    state, _ = build_state(session, None, observed)
    recorder, layers, batches = StepRecorder(state=state), LayerRecorder(), endless_batches(session)
    gc.freeze()  # as in a training
    for _ in range(spec.warm_up):
        _step(session, state, batches, recorder)
    steps = [_step(session, state, batches, recorder) for _ in range(spec.steps)]
    profiled = []
    for _ in range(spec.profiled):
        with layers.attached(state.network):
            profiled.append(_profiled_step(session, state, batches, recorder, layers))
    results = {
        "rank": session.rank.rank,
        "pus": list(context.worker.pus),
        "backend": session.group.backend,
        "engine": session.engine.name,
        "images": session.sizes.global_batch,
        "local_batch": max(session.local_batches),
        "bucket_mib": state.bucket_mib,
        "winograd": state.winograd or {},
        "steps": steps,
        "profiled": profiled,
        "limits": _limits(session, spec),
    }
    end_group(session.group)
    return results


def _step(session: Session, state: TrainState, batches: Iterator[Batch], recorder: StepRecorder) -> dict[str, Any]:
    """Train one step; return its duration and the durations of its parts."""

    recorder.clear()
    recipe, sizes = session.recipe, session.sizes
    settings = StepSettings(
        images=sizes.global_batch,
        passes=sizes.accumulation_steps,
        lr=lr_at(0, session.schedule),
        weight_decay=recipe.optim.weight_decay,
        clip_norm=recipe.optim.clip_norm,
        skips_non_finite=recipe.on_nan == "skip",
    )
    start = time.perf_counter()
    result = train_step(state, batches, settings, session.task)
    end = time.perf_counter()
    spans = recorder.parts(result, start, end, alone=session.rank.world_size == 1)
    parts = dict.fromkeys(PARTS, 0.0)
    for name, began, done in spans:
        parts[name] += done - began
    parts["other"] = end - start - sum(parts.values())
    return {"seconds": end - start, "start": start, "end": end, "parts": parts, "spans": spans}


def _profiled_step(
    session: Session,
    state: TrainState,
    batches: Iterator[Batch],
    recorder: StepRecorder,
    layers: LayerRecorder,
) -> dict[str, Any]:
    """Train one step, recording its layers and gradient buckets."""

    observed = state.all_reduce
    assert isinstance(observed, ObservedAllReduce)
    layers.clear()
    observed.buckets.clear()
    step = _step(session, state, batches, recorder)
    end = observed.last_ready_s
    backwards = layers.backwards(end)
    return {
        **step,
        "layers": layers.times(end),
        "layer_spans": [[name, "forward", *span] for name, *span in layers.forwards]
        + [[name, "backward", *span] for name, *span in backwards],
        # a thread of the backend may have appended the previous step's last bucket after the list was cleared
        "buckets": [[size, ready, done] for size, ready, done in observed.buckets if ready >= step["start"]],
    }


def _limits(session: Session, spec: Spec) -> list[dict[str, Any]]:
    """Return this worker's FLOP/s in each kernel and precision, while all ranks compute the same."""

    rates = []
    for precision in spec.limits:
        for kernel in kernels(precision, session.recipe.batch.local, quick=spec.quick):
            kernel.flops()
            values = []
            for _ in range(LIMIT_ROUNDS):
                dist.barrier()
                values.append(kernel.flops())
            rates.append({"name": kernel.name, "precision": precision, "flops": values})
    return rates
