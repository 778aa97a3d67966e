"""bfloat16 weights whose float32 values are kept exactly ("split master weights"): a weight is the float32 value,
rounded to bfloat16, and 16 bits beside it hold the rest. Networks of such weights under autocast cast no weights, and
take no more memory than in float32.

An optimizer updates the float32 values, with torch's own kernels (native/split_weights.cpp); state dicts, copies and
pickles have them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cputrain.affinity.errors import InputError
from cputrain.checksums import in_memory_order
from cputrain.kernels.evidence import departure

HALF = 0x8000  # of the last bit of a bfloat16, in the bits of a float32
LAYERS: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear, nn.Bilinear),
            *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        ),
        ("weight", "bias"),
    ),
    nn.MultiheadAttention: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"),
}
"""Layers, and their parameters, that torch.autocast casts to bfloat16 at each use."""


class SplitParameter(nn.Parameter):
    """A bfloat16 parameter, and in `lower` (int16, in the same memory order) what its float32 value has more.

    The bits of the float32 value are those of the bfloat16, followed by 16 zeros, plus `lower`. A parameter becomes
    one by a change of its class, so that it stays the one that optimizers and networks know.
    """

    lower: Tensor

    @torch.no_grad()
    def joined(self) -> Tensor:
        """Return the float32 values. Raises InputError after a conversion to another dtype, which has lost them."""
        if self.dtype != torch.bfloat16:
            raise InputError(
                f"a split weight was converted to {self.dtype}: call cputrain.restore(model) before you convert a model"
            )
        bits = self.data.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(self.lower)
        return bits.view(torch.float32)

    def detach(self) -> Tensor:
        """Return the float32 values, for averages and logs that read weights so; the bfloat16 ones where a repeated
        forward pass (torch.utils.checkpoint) saves what a layer has used."""
        saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return self.data if saving else self.joined()

    def copy_(self, source: Tensor, non_blocking: bool = False) -> "SplitParameter":
        """Take other values, of which `load_state_dict` makes use."""
        exact = source.joined() if isinstance(source, SplitParameter) else source.detach().float()
        upper, lower = split(exact.expand(self.shape))
        super().copy_(upper, non_blocking)
        self.lower.copy_(lower)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return the float32 weight, as a network that is copied has its own optimizer, or is an average."""
        memo[id(self)] = nn.Parameter(self.joined(), self.requires_grad)
        return cast(nn.Parameter, memo[id(self)])

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return torch._utils._rebuild_parameter, (self.joined(), self.requires_grad, {})


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 values as bfloat16, rounded to nearest (ties away from zero), and the int16 rest of their bits.

    A NaN becomes the default one.
    """
    bits = torch.where(values.isnan(), torch.nan, values).view(torch.int32)
    upper = ((bits + HALF) >> 16).to(torch.int16)
    return upper.view(torch.bfloat16), (bits << 16 >> 16).to(torch.int16)


def weights_of(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a layer that autocast casts, by name; none if it is of no such class."""
    kind = next((kind for kind in LAYERS if isinstance(layer, kind)), None)
    found = {name: layer._parameters.get(name) for name in LAYERS[kind]} if kind else {}
    return {name: weight for name, weight in found.items() if weight is not None}


def divisible(network: nn.Module, trained: Collection[Tensor], refused: Mapping[str, str]) -> dict[str, str]:
    """Return the layers whose weights autocast casts, by name, with why they must stay float32, "" if they need not.

    `trained` are the optimizer's parameters; `refused` has the reasons that are known, by layer.
    """
    uses = Counter(id(weight) for module in network.modules() for weight in module._parameters.values())
    numbers = {id(weight) for weight in trained}

    def obstacle(name: str, layer: nn.Module, weights: Iterable[nn.Parameter]) -> str:
        if type(layer) not in LAYERS:
            return f"{type(layer).__name__}, not a layer of torch"
        if name in refused or (changed := departure(layer)):
            return refused.get(name) or changed
        for weight in weights:
            if weight.dtype != torch.float32 or type(weight) is not nn.Parameter:
                return f"a weight is {weight.dtype}" if weight.dtype != torch.float32 else "not an ordinary parameter"
            if uses[id(weight)] > 1:
                return "a weight is shared with another layer"
            if id(weight) not in numbers:
                return "not trained by the optimizer"
            if not torch.ops.aten.is_non_overlapping_and_dense(weight):
                return "a weight is not dense in memory"
        return ""

    return {
        name: obstacle(name, layer, weights.values())
        for name, layer in network.named_modules()
        if (weights := weights_of(layer))
    }


@torch.no_grad()
def split_weights(network: nn.Module, names: Iterable[str]) -> None:
    """Split the weights of layers by name. In a process group all ranks must call this, and get rank 0's weights, as
    DistributedDataParallel would otherwise give them the bfloat16 values only."""
    in_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    for layer in map(network.get_submodule, names):
        for weight in weights_of(layer).values():
            if in_group:
                dist.broadcast(in_memory_order(weight.data), 0)
            gradient, weight.grad = weight.grad, None
            weight.data, lower = split(weight.data)
            weight.__class__ = SplitParameter
            cast(SplitParameter, weight).lower = lower
            weight.grad = None if gradient is None else gradient.to(torch.bfloat16)
        layer._register_state_dict_hook(_save_joined)  # type: ignore[no-untyped-call]


@torch.no_grad()
def join_weights(network: nn.Module) -> None:
    """Give all split weights of a network their float32 values and class back."""
    for layer in network.modules():
        for weight in weights_of(layer).values():
            if isinstance(weight, SplitParameter):
                gradient, weight.grad = weight.grad, None
                weight.data = weight.joined()
                del weight.lower
                cast(Any, weight).__class__ = nn.Parameter
                weight.grad = None if gradient is None else gradient.float()
        for number, hook in list(layer._state_dict_hooks.items()):
            if hook is _save_joined:
                del layer._state_dict_hooks[number]


def _save_joined(layer: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Put the float32 weights of a layer in the place of the bfloat16 ones in a state dict."""
    for name, weight in layer._parameters.items():
        if isinstance(weight, SplitParameter) and state[prefix + name] is weight:  # with keep_vars, else detached
            state[prefix + name] = weight.joined()
