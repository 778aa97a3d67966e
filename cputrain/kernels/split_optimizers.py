"""Optimizer steps of split weights: torch's SGD, Adam and AdamW in one pass over memory, by torch's own kernels."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_double, c_int, c_int64, c_void_p
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from cputrain.affinity.errors import InputError
from cputrain.kernels.build import KERNELS, KernelLibrary, NativeKernels, library_options, load_kernels
from cputrain.kernels.split_weights import SplitParameter, split
from cputrain.native_build import NativeExtension, ensure_compiled

HEADERS = ("split_layers.hpp", "split_values.hpp", "rows.hpp", "values.hpp")
SOURCES = tuple(KERNELS / name for name in ("split_weights.cpp", *HEADERS))
REQUESTED_BY = 'master_weights="split"'
OTHER_ARITHMETIC = ("foreach", "capturable", "differentiable")
"""Options of torch's optimizers that request another arithmetic than the fused kernels'."""
States = Sequence[dict[str, Any]]
CHECKED_VALUES, CHECKED_STEPS = 4096, 4
# Options with which the kernels' own loops are compared with torch's kernels.
_SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 1e-3, "nesterov": False, "maximize": False}
_ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
CHECKED: tuple[dict[str, Any], ...] = (
    *(
        {**_SGD, **more}
        for more in ({}, {"momentum": 0.0}, {"weight_decay": 0.0, "dampening": 0.3}, {"nesterov": True})
    ),
    *({**_ADAM, "decoupled_weight_decay": decoupled} for decoupled in (False, True)),
    {**_ADAM, "weight_decay": 0.0, "maximize": True, "decoupled_weight_decay": True},
)


class Weight(ctypes.Structure):
    """struct Weight of split_values.hpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("upper", "lower", "gradient")),
        ("states", c_void_p * 3),
        ("step", c_void_p),
        ("size", c_int64),
        ("is_first", c_int64),
    )


# Without the first, roots are not computed in vectors; without the second, other products and sums than torch's become
# one operation.
OPTIONS = (*library_options(), "-fno-math-errno", "-ffp-contract=off")


def _command(cxx: str, output: Path) -> tuple[str, ...]:
    root = Path(torch.__file__).parent
    include = (f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", "-DAT_PER_OPERATOR_HEADERS")
    libraries = (f"-L{root}/lib", "-ltorch_cpu", "-lc10")
    return (cxx, *OPTIONS, *include, str(SOURCES[0]), *libraries, "-o", str(output))


class SplitSteps(NativeKernels):
    """The compiled steps of weights that have gradients, all of one parameter group.

    `direct` is whether they use loops of their own, which are faster than torch's kernels on blocks of joined weights,
    and on this CPU, with this torch, were found to give the same bits.
    """

    extension: ClassVar[NativeExtension] = NativeExtension(
        title="optimizers of split weights",
        requested_by=REQUESTED_BY,
        alternative="leave master_weights out",
        argv=_command,
    )

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        weights = POINTER(Weight), c_int64
        self._sgd = self.function("split_sgd", *weights, c_int, *(c_double,) * 4, *(c_int,) * 2)
        self._adam = self.function("split_adam", *weights, c_int, *(c_double,) * 5, *(c_int,) * 3)
        self._read = self.function("split_read", *weights)
        self._write = self.function("split_write", *weights)
        self.direct = all(torch.equal(self._tried(group, False), self._tried(group, True)) for group in CHECKED)

    @torch.no_grad()
    def _tried(self, group: Mapping[str, Any], direct: bool) -> Tensor:
        """Return the bits of random weights and their state after steps with these options."""
        self.direct = direct
        generator = torch.Generator().manual_seed(1)
        shape: dict[str, Any] = {"size": (CHECKED_VALUES,), "generator": generator, "device": "cpu"}
        upper, lower = split(torch.randn(**shape, dtype=torch.float32))
        weight = nn.Parameter(upper)
        weight.__class__ = SplitParameter
        weight.lower = lower  # type: ignore[attr-defined]
        state: dict[str, Any] = {}
        for _ in range(CHECKED_STEPS):
            scales = 10 ** torch.randint(-6, 3, **shape).float()
            weight.grad = (torch.randn(**shape, dtype=torch.float32) * scales).bfloat16()
            (self.sgd if "momentum" in group else self.adam)(group, [cast(SplitParameter, weight)], [state])
        tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
        return torch.cat([upper.view(torch.int16), lower, *(value.view(torch.int16) for value in tensors)])

    def sgd(self, group: Mapping[str, Any], weights: Sequence[SplitParameter], states: States) -> None:
        """Update weights by the options and state of torch.optim.SGD."""
        momentum = float(group["momentum"])
        names = ("momentum_buffer",) if momentum else ()
        first = [state.get("momentum_buffer") is None for state in states]
        options = momentum, float(group["dampening"]), float(group["weight_decay"])
        switches = bool(group["nesterov"]), bool(group["maximize"])
        structs = structs_of(weights, tensors_of(weights, states, names), first)
        self._sgd(*structs, self.direct, float(group["lr"]), *options, *switches)

    def adam(self, group: Mapping[str, Any], weights: Sequence[SplitParameter], states: States) -> None:
        """Update weights by the options and state of torch.optim.Adam or AdamW."""
        for state in states:
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).add_(1)
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        beta1, beta2 = group["betas"]
        options = float(group["lr"]), float(beta1), float(beta2), float(group["weight_decay"]), float(group["eps"])
        switches = [bool(group[name]) for name in ("amsgrad", "maximize", "decoupled_weight_decay")]
        steps = [state["step"] for state in states]
        structs = structs_of(weights, tensors_of(weights, states, names), steps=steps)
        self._adam(*structs, self.direct, *options, *switches)

    def read(self, weights: Sequence[SplitParameter]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights and their gradients in float32, in the weights' memory order."""
        pairs = [[torch.empty_like(weight, dtype=torch.float32) for _ in range(2)] for weight in weights]
        self._read(*structs_of(weights, pairs))
        return [weight for weight, _ in pairs], [gradient for _, gradient in pairs]

    def write(self, weights: Sequence[SplitParameter], values: Sequence[Tensor]) -> None:
        """Replace weights by float32 values in the same memory order."""
        self._write(*structs_of(weights, [[value] for value in values]))


def tensors_of(weights: Sequence[SplitParameter], states: States, names: tuple[str, ...]) -> list[list[Tensor]]:
    """Return the tensors of these names in each state, float32 in the weight's memory order; missing ones are zeros."""
    for state, weight in zip(states, weights, strict=True):
        for name in names:
            value = state.get(name)
            if value is None:
                state[name] = torch.zeros_like(weight.data, dtype=torch.float32)
            elif value.stride() != weight.stride() or value.dtype != torch.float32:
                state[name] = torch.empty_like(weight.data, dtype=torch.float32).copy_(value)
    return [[state[name] for name in names] for state in states]


def structs_of(
    weights: Sequence[SplitParameter],
    states: Sequence[Sequence[Tensor]],
    first: Sequence[bool] = (),
    steps: Sequence[Tensor] = (),
) -> tuple[Any, int]:
    """Return the arguments of a native step: an array of struct Weight, and its length.

    Raises RuntimeError for gradients that the steps cannot read.
    """
    structs = (Weight * len(weights))()
    for i, weight in enumerate(weights):
        if weight.dtype != torch.bfloat16:
            weight.joined()  # raises
        if weight.lower.stride() != weight.stride():  # after model.to(memory_format=...)
            weight.lower = torch.empty_like(weight.data, dtype=torch.int16).copy_(weight.lower)
        gradient = weight.grad
        assert gradient is not None
        if gradient.layout is not torch.strided or gradient.dtype != torch.bfloat16:
            raise RuntimeError(
                f"a gradient of split weights is {gradient.dtype}, {gradient.layout}: they must be dense bfloat16"
            )
        if gradient.stride() != weight.stride():
            weight.grad = gradient = torch.empty_like(weight.data).copy_(gradient)
        structs[i] = Weight(
            upper=weight.data_ptr(),
            lower=weight.lower.data_ptr(),
            gradient=gradient.data_ptr(),
            states=(c_void_p * 3)(*(state.data_ptr() for state in states[i])),
            step=steps[i].data_ptr() if steps else None,
            size=weight.numel(),
            is_first=first[i] if first else False,
        )
    return structs, len(weights)


LIBRARY = KernelLibrary(
    name="split-weights",
    sources=SOURCES,
    extension=SplitSteps.extension,
    depends_on=(torch.__version__.partition("+")[0],),  # the CPU's part is the same in builds with CUDA
)


def load_split_steps(env: Mapping[str, str]) -> SplitSteps:
    """Load the kernels, compiling them once per host. Raises InputError without a compiler, RunError if it fails."""
    path = ensure_compiled(LIBRARY.extension, LIBRARY.path(env), env)
    steps: SplitSteps = load_kernels(SplitSteps, path)
    return steps


class SplitOptimizer(Optimizer):
    """Base class of an optimizer of torch's that also updates split weights; it replaces the class `plain`."""

    plain: ClassVar[type[Optimizer]]
    split_steps: SplitSteps
    split_weights: tuple[Tensor, ...]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients; return the closure's loss, None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "grad_scale", None) is not None:
            raise RuntimeError("GradScaler is for float16: remove it, as bfloat16 has float32's range")
        update = self.split_steps.sgd if self.plain is SGD else self.split_steps.adam
        gradients = []
        known = (isinstance(p, SplitParameter) for group in self.param_groups for p in group["params"])
        if any(isinstance(p, SplitParameter) for p in self.split_weights) and not any(known):
            raise RuntimeError(f"the optimizer's weights were replaced, as by DeepSpeed: leave {REQUESTED_BY} out")
        for group in self.param_groups:
            weights = [p for p in group["params"] if isinstance(p, SplitParameter) and p.grad is not None]
            if weights:
                has_state = self.plain is not SGD or group["momentum"]
                update(group, weights, [self.state[p] if has_state else {} for p in weights])
            gradients += [(weight, weight.grad) for weight in weights]
        try:
            for weight, _ in gradients:
                weight.grad = None  # the plain step passes over parameters without a gradient
            getattr(self.plain.step, "__wrapped__", self.plain.step)(self)  # without hooks, which this step has called
        finally:
            for weight, gradient in gradients:
                weight.grad = gradient
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; that of split weights stays float32, which torch would round."""
        self.plain.load_state_dict(self, state_dict)
        keep_precision(self, state_dict)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Copies and pickles are of the plain class, as those of split weights are float32."""
        return object.__new__, (self.plain,), self.__getstate__()


def keep_precision(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Put the state of split weights from a state dict that was loaded in the place of what torch has rounded."""
    numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, weight in zip(numbers, weights, strict=True):
        if isinstance(weight, SplitParameter):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    optimizer.state[weight][name] = value.detach().float().clone()


@cache
def _with_splits(kind: type[Optimizer]) -> type[SplitOptimizer]:
    """Return the class derived from SGD, Adam or AdamW; it has the same name, as checkpoints store it."""
    return type(kind.__name__, (SplitOptimizer, kind), {"plain": kind})


def check_optimizer(optimizer: Optimizer | None) -> None:
    """Raise InputError if an optimizer cannot update split weights."""
    kinds = "SGD, Adam, AdamW, Lars or Lamb"
    if optimizer is None:
        raise InputError(f"{REQUESTED_BY} needs the optimizer, which updates the weights: pass it, too")
    if isinstance(optimizer, SplitOptimizer) or getattr(type(optimizer), "updates_split_weights", False):
        return
    if type(optimizer) not in (SGD, Adam, AdamW):
        raise InputError(
            f"{REQUESTED_BY} has no kernel for {type(optimizer).__module__}.{type(optimizer).__name__}: use {kinds}, "
            "or leave master_weights out"
        )
    for group in optimizer.param_groups:
        options = [name for name in OTHER_ARITHMETIC if group.get(name)]
        options += ["fused=False"] if group.get("fused") is False else []
        if options:
            raise InputError(f"{REQUESTED_BY} updates weights as fused=True does: leave {options[0]} out")
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise InputError(f"{REQUESTED_BY}: the optimizer's step was replaced: call cputrain.optimize before that")


def update_splits(optimizer: Optimizer, steps: SplitSteps) -> None:
    """Let an optimizer that `check_optimizer` accepts update split weights; it stays the same object."""
    optimizer.split_steps = steps  # type: ignore[attr-defined]
    if type(optimizer) not in (SGD, Adam, AdamW):
        return
    weights = (p for group in optimizer.param_groups for p in group["params"])
    optimizer.split_weights = tuple(p for p in weights if isinstance(p, SplitParameter))  # type: ignore[attr-defined]
    optimizer.__class__ = _with_splits(type(optimizer))  # type: ignore[arg-type]
    optimizer._patch_step_function()
    if vars(optimizer).pop("step", None) is not None:  # a scheduler's, that notes the call and calls the old step

        def step(*arguments: Any, **options: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return type(optimizer).step(optimizer, *arguments, **options)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign]
