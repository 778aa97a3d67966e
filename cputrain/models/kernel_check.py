"""A check of the compiled batch-norm kernels: a small layer, forward and backward, beside its formula in float64."""

from functools import cache

import torch
from torch import Tensor

from affinity.errors import RunError
from cputrain.models.batchnorm_kernels import DTYPES, Kernels
from cputrain.models.batchnorm_relu import FusedBatchNorm2d, second_use

SHAPE = (4, 35, 5, 5)  # more rows than are summed in float32, and channels that no vector length divides
NEAR_ZERO = 1e-2  # of ReLU's input, where rounding may decide whether it is cut
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the largest value; 100 and 8 times rounding


def checked(kernels: Kernels) -> Kernels:
    """The kernels, once they have computed what they should; checked once in a process.

    Raises RunError where a value differs by more than rounding: compiled by a broken compiler, or for another CPU.
    """
    if wrong := _difference(kernels):
        raise RunError(
            f"engine=native: the compiled kernels compute wrongly ({wrong}): remove {kernels.path.parent} and set CXX "
            "to another compiler, or set engine=eager"
        )
    return kernels


@cache
def _difference(kernels: Kernels) -> str:
    """The first result that is wrong, "" where none is."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(SHAPE[1], generator=generator) for _ in range(2))
    given = [torch.randn(SHAPE, generator=generator).to(memory_format=torch.channels_last) for _ in range(3)]
    with torch.inference_mode(False), torch.enable_grad():
        for dtype in DTYPES:
            images, added, gradient = (each.to(dtype) for each in given)
            for residual in (None, added):
                layer = FusedBatchNorm2d(SHAPE[1])
                layer.kernels, layer.relu = kernels, True
                layer.load_state_dict({**layer.state_dict(), "weight": weight, "bias": bias})
                expected, kept = _by_formula(layer, images, residual, gradient)
                got = _by_kernels(layer, images, residual, gradient * kept)
                for name, value in expected.items():
                    off = float((got[name].double() - value.view_as(got[name])).abs().max() / value.abs().max())
                    if not off <= ALLOWED[dtype]:  # NaN neither
                        return f"{name} in {str(dtype).removeprefix('torch.')} is {off:.1g} off"
    return ""


def _by_formula(
    layer: FusedBatchNorm2d, images: Tensor, residual: Tensor | None, gradient: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Output, gradients and running statistics of a new layer in float64, and the values whose gradient was used.

    Operator by operator, as torch's batch_norm starts threads.
    """
    assert layer.momentum is not None
    x, weight, bias = (each.detach().double().requires_grad_() for each in (images, layer.weight, layer.bias))
    added = torch.zeros_like(x) if residual is None else residual.double()
    added.requires_grad_()
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = (x - mean).square().mean((0, 2, 3), keepdim=True)
    before = (x - mean) / (variance + layer.eps).sqrt() * weight.view(-1, 1, 1) + bias.view(-1, 1, 1) + added
    outputs, kept = before.relu(), before.detach().abs() > NEAR_ZERO
    outputs.backward(gradient.double() * kept)  # type: ignore[no-untyped-call]
    values = images.numel() / images.shape[1]
    found = {
        "output": outputs.detach(),
        "gradient": x.grad,
        "gradient of the residual": None if residual is None else added.grad,
        "gradient of the weight": weight.grad,
        "gradient of the bias": bias.grad,
        "running mean": layer.momentum * mean.detach(),
        "running variance": 1 - layer.momentum + layer.momentum * values / (values - 1) * variance.detach(),
    }
    return {name: value for name, value in found.items() if value is not None}, kept


def _by_kernels(
    layer: FusedBatchNorm2d, images: Tensor, residual: Tensor | None, gradient: Tensor
) -> dict[str, Tensor]:
    """The same of the layer itself."""
    x, added = images.clone().requires_grad_(), None if residual is None else residual.clone().requires_grad_()
    outputs = layer(x, added)
    uses = [outputs] if added is None else [outputs, second_use(outputs)]
    torch.autograd.backward(uses, [gradient / len(uses)] * len(uses))
    found = {
        "output": outputs.detach(),
        "gradient": x.grad,
        "gradient of the residual": None if added is None else added.grad,
        "gradient of the weight": layer.weight.grad,
        "gradient of the bias": layer.bias.grad,
        "running mean": layer.running_mean,
        "running variance": layer.running_var,
    }
    return {name: value for name, value in found.items() if value is not None}
