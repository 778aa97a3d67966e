"""Choose and apply the kernels of a network, in any training loop."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cputrain.affinity.errors import InputError, RunError
from cputrain.kernels import evidence
from cputrain.kernels.batchnorm import Kernels, load
from cputrain.kernels.batchnorm_comparison import verify_kernels
from cputrain.kernels.convolution import (
    ConvolutionKernels,
    ConvolutionShape,
    load_convolutions,
    native_weight_gradients,
    pointwise_as_matmul,
    use_winograd,
    winograd_shapes,
)
from cputrain.kernels.measure import measured_gains
from cputrain.kernels.plan import (
    BATCHNORM,
    FUSED,
    PRODUCT,
    SPLIT,
    WEIGHT_GRADIENT,
    WINOGRAD,
    KernelPlan,
    Target,
    explain_network,
    plan_kernels,
    rule,
    with_split_weights,
)
from cputrain.kernels.rewriting import fuse_forwards, fused_forwards, replace_norms
from cputrain.kernels.split_optimizers import check_optimizer, load_split_steps, update_splits
from cputrain.kernels.split_weights import join_weights, split_weights

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)
Choose = Literal["rules", "measure"] | KernelPlan
MasterWeights = Literal["split"] | None
PLAN = "_cputrain_kernel_plan"
"""Attribute of an optimized network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedKernels:
    """The compiled kernels of this process, and why some are missing, by their names in a plan."""

    norms: Kernels | None
    convolutions: ConvolutionKernels | None
    errors: Mapping[str, InputError | RunError]

    @property
    def missing(self) -> dict[str, str]:
        """The reasons as text."""
        return {name: str(error) for name, error in self.errors.items()}


def load_for(target: Target, env: Mapping[str, str], *, winograd: bool) -> LoadedKernels:
    """Load the kernels that a plan for this target may use, compiling them if necessary."""
    errors: dict[str, InputError | RunError] = {}
    norms = convolutions = None
    try:
        norms = verify_kernels(load(env), env)
    except (InputError, RunError) as error:
        errors |= dict.fromkeys((BATCHNORM, FUSED), error)
    amx = "AMX" in target.instructions
    if winograd or (target.is_bf16 and not amx and "AVX512_BF16" in target.instructions):
        try:
            convolutions = load_convolutions(env)
        except (InputError, RunError) as error:
            errors |= dict.fromkeys((WINOGRAD, WEIGHT_GRADIENT), error)
    return LoadedKernels(norms=norms, convolutions=convolutions, errors=errors)


def convolutions_channels_last(network: nn.Module) -> None:
    """Store the weights of 2-D convolutions channels-last, as the kernels and oneDNN need them, but not parts of larger
    buffers, in which DeepSpeed updates them, nor shards of FSDP2, which keeps views of them."""
    for layer in network.modules():
        if isinstance(layer, _ConvNd):
            for weight in layer.parameters():  # also below a parametrization
                sharded = is_traceable_wrapper_subclass(weight)
                # 4 as channels_last requires; other parameters may be viewed in another shape
                if weight.ndim == 4 and not sharded and weight.untyped_storage().nbytes() == weight.nbytes:
                    # `to`, as `contiguous` keeps the strides of 1 x 1 kernels, which gradients do not have
                    weight.data = weight.data.to(memory_format=torch.channels_last)


def apply_plan(network: nn.Module, plan: KernelPlan, loaded: LoadedKernels) -> None:
    """Replace the layers of a plan, except by kernels that are not loaded. Raises InputError if it has a layer that the
    network lacks, and changes nothing then."""
    names = dict(network.named_modules())
    if unknown := [choice.layer for choice in plan.replaced if choice.layer not in names]:
        raise InputError(f"the kernel plan is of another network, which has a layer {unknown[0]}: plan this one")
    convolutions_channels_last(network)
    if loaded.norms is not None:
        replace_norms(network, list(plan.layers(BATCHNORM)), loaded.norms)
        fused = [names[name] for name in plan.layers(FUSED)]
        traced = all(module in plan.forwards for module in fused)  # a plan of another process has no traces
        forwards = plan.forwards if traced else fused_forwards(network)
        fuse_forwards({module: forwards[module] for module in fused if module in forwards})
    for name in plan.layers(PRODUCT):
        pointwise_as_matmul(names[name])
    if loaded.convolutions is not None:
        for name in plan.layers(WEIGHT_GRADIENT):
            native_weight_gradients(names[name], loaded.convolutions)
        for name in plan.layers(WINOGRAD):
            use_winograd(names[name], loaded.convolutions)
    split_weights(network, plan.layers(SPLIT))


def agree_on_plan(plan: KernelPlan, missing: Mapping[str, str]) -> KernelPlan:
    """Return the plan without kernels that are missing here or, in a process group, rank 0's without those that any
    rank misses; all ranks must call this."""
    first, lacking = plan, dict(missing)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, (plan.as_json(), dict(missing)))
        first = KernelPlan.from_json(by_rank[0][0])
        lacking = {kernel: f"rank {rank}: {why}" for rank, (_, no) in enumerate(by_rank) for kernel, why in no.items()}
    dropped = tuple(replace(item, why=lacking[item.kernel]) for item in first.replaced if item.kernel in lacking)
    used = tuple(item for item in first.replaced if item.kernel not in lacking)
    return replace(first, replaced=used, kept=(*first.kept, *dropped), forwards=plan.forwards)


@overload
def optimize(
    model: M,
    optimizer: None = None,
    *,
    dtype: torch.dtype = ...,
    sample_input: Any = None,
    choose: Choose = "rules",
    master_weights: None = None,
) -> M: ...


@overload
def optimize(
    model: M,
    optimizer: Optimizer,
    *,
    dtype: torch.dtype = ...,
    sample_input: Any = None,
    choose: Choose = "rules",
    master_weights: MasterWeights = None,
) -> tuple[M, Optimizer]: ...


def optimize(
    model: M,
    optimizer: Optimizer | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    sample_input: Any = None,
    choose: "Literal['rules', 'measure'] | KernelPlan" = "rules",
    master_weights: Literal["split"] | None = None,
) -> M | tuple[M, Optimizer]:
    """Let native kernels compute the layers of a network, in any loop. Returns model, or (model, optimizer) if given.

    Batch-norm, ReLU and the addition of the residual become one layer where the forward pass is known from a trace.
    With sample_input, an input of the network as in a step (N images), 3 x 3 convolutions use Winograd's algorithm
    where it is faster; its rounding errors are 1e-5 of the largest value, torch's 1e-6. dtype=torch.bfloat16 is for
    training under torch.autocast("cpu", torch.bfloat16): weights stay float32, their gradients get kernels, too.

    The model itself is changed. Parameters and their names, state dicts, hooks, `isinstance` and an existing optimizer
    stay valid. torch.optim's SGD, Adam and AdamW become fused. What cannot be replaced faithfully stays torch's:
    `explain(model)` names it; `restore(model)` undoes all. In a process group, all ranks must call this, before
    DistributedDataParallel.

    `choose`: "rules" for this CPU, from our measurements; "measure", some seconds, kept for the next start on this
    host; or the KernelPlan of another process, `cputrain.kernels.apply.plan_of(model)`.

    `master_weights="split"`, with dtype=torch.bfloat16: the weights that autocast would cast are bfloat16, and so are
    their gradients. The rest of their float32 values is kept beside them, so that torch.optim's SGD, Adam and AdamW,
    and Lars and Lamb update them as in float32, bit for bit. State dicts, copies and pickles have the float32 values.

    Raises InputError if an argument is not as described.
    """
    if isinstance(model, DistributedDataParallel):
        raise InputError("model is in DistributedDataParallel already: call cputrain.optimize(model) before it")
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InputError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if not isinstance(choose, KernelPlan) and choose not in ("rules", "measure"):
        raise InputError(f'choose={choose!r}: give "rules", "measure" or a KernelPlan')
    if master_weights not in (None, "split"):
        raise InputError(f'master_weights={master_weights!r}: give "split", or None for float32 weights')
    if master_weights and dtype != torch.bfloat16:
        raise InputError(f'master_weights="split" needs dtype=torch.bfloat16, not {dtype}')
    if master_weights:
        check_optimizer(optimizer)
    _check_parameters(model)
    if PLAN in vars(model):
        restore(model)
    target, env = Target.here(dtype), os.environ
    steps = load_split_steps(env) if master_weights else None
    winograd = isinstance(choose, KernelPlan) and bool(choose.layers(WINOGRAD))
    loaded = load_for(target, env, winograd=winograd or sample_input is not None)
    plan = choose if isinstance(choose, KernelPlan) else _make_plan(model, target, sample_input, choose, loaded, env)
    if optimizer is not None and steps is not None and not plan.layers(SPLIT):
        plan = with_split_weights(plan, model, [value for group in optimizer.param_groups for value in group["params"]])
    plan = agree_on_plan(plan, loaded.missing)
    if why := next((why for why in loaded.missing.values()), ""):
        logger.warning("cputrain.optimize: torch's layers stay: %s", why)
    apply_plan(model, plan, loaded)
    setattr(model, PLAN, replace(plan, forwards={}))
    if optimizer is None:
        return model
    fuse_optimizer(optimizer)
    if steps is not None:
        update_splits(optimizer, steps)
    return model, optimizer


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise InputError(f"{name} is not initialized: call model(example) once before cputrain.optimize(model)")
        if not parameter.is_cpu:
            raise InputError(
                f"{name} is on {parameter.device}: move the model to the CPU before cputrain.optimize(model)"
            )


def _make_plan(
    model: nn.Module, target: Target, sample_input: Any, choose: str, loaded: LoadedKernels, env: Mapping[str, str]
) -> KernelPlan:
    shapes: dict[str, ConvolutionShape] = {}
    images = 1
    if sample_input is not None and loaded.convolutions is not None:
        images = len(sample_input) if isinstance(sample_input, Tensor) else 1
        shapes = winograd_shapes(model, sample_input)
    gain = rule(target, images)
    if choose == "measure" and loaded.convolutions is not None and shapes:
        gain = measured_gains(set(shapes.values()), images, target, loaded.convolutions, env)
    return plan_kernels(model, target, {name: gain(shape) for name, shape in shapes.items()}, loaded.missing)


def fuse_optimizer(optimizer: Optimizer) -> bool:
    """Let torch's own SGD, Adam or AdamW update each weight in one pass. Returns whether it does."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        return False
    for group in optimizer.param_groups:
        simple = not group.get("differentiable") and not group.get("capturable") and group.get("fused") is not False
        real = all(
            value.is_cpu
            and value.is_floating_point()
            and value.layout is torch.strided
            and not is_traceable_wrapper_subclass(value)  # DTensor has no fused kernels
            for value in group["params"]
        )
        if not (simple and real) or isinstance(group["lr"], Tensor) or group.get("foreach"):
            return False
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    optimizer.defaults |= {"fused": True, "foreach": False}
    if _as_parameters not in optimizer._optimizer_step_pre_hooks.values():
        optimizer.register_step_pre_hook(_as_parameters)
    return True


def _as_parameters(optimizer: Optimizer, *_: Any) -> None:
    """Store gradients and state in the memory order of the parameters, by which torch's fused kernels compute."""
    for parameter in (value for group in optimizer.param_groups for value in group["params"]):
        strides = parameter.stride()
        if parameter.grad is not None and parameter.grad.is_sparse:
            for group in optimizer.param_groups:
                group["fused"] = False  # as there is no fused kernel
            return
        if parameter.grad is not None and parameter.grad.stride() != strides:
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != strides:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def plan_of(model: nn.Module) -> KernelPlan | None:
    """Return the plan that a network was optimized with, None if it was not."""
    return cast(KernelPlan | None, vars(model).get(PLAN))


def explain(model: nn.Module) -> None:
    """Print which kernels compute which layers of a network, why, and which layers torch computes."""
    print(explain_network(model, plan_of(model)))


def restore(model: nn.Module) -> None:
    """Undo `optimize`: all layers get the classes back that they had. Weights and statistics stay."""
    evidence.restore(model)
    join_weights(model)
    vars(model).pop(PLAN, None)
