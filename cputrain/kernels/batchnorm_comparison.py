"""The comparison of the batch-norm kernels with formulas in float64."""

from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from cputrain.kernels import activations, batchnorm
from cputrain.kernels.activations import KINDS, SLOPE, Activation
from cputrain.kernels.batchnorm import LIBRARY, FusedBatchNorm2d, Kernels, residual_alias
from cputrain.kernels.build import RightKernels
from cputrain.kernels.evidence import DTYPES, VALUES

SHAPE = (4, 35, 5, 5)  # more rows than a block summed in float32; 35 is not a multiple of any vector length
CHECKED = (
    *("output", "gradient", "gradient of the residual", "gradient of the weight", "gradient of the bias"),
    *("running mean", "running variance"),
)
BENDS = (-3.0, 0.0, 3.0, 6.0)  # of the activations
NEAR_BEND = 2e-2  # activations' inputs nearer to a bend are not compared, as rounding may decide on which side they are
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # error relative to the largest value, 100 and 8 times rounding
# If it changes, they are compared again.
CODE = tuple(Path(file) for file in (__file__, batchnorm.__file__, activations.__file__))


def verify_kernels(kernels: Kernels, env: Mapping[str, str]) -> Kernels:
    """Check the kernels against formulas, unless they were right in an earlier process on this type of CPU, and return
    them.

    Raises RunError if a value differs by more than rounding, because of a broken compiler or another CPU's code.
    """
    right = RightKernels.of(LIBRARY.name, kernels.path, CODE, env)
    if LIBRARY.name not in right.names():
        kernels.check(_difference(kernels))
        right.write((LIBRARY.name,))
    return kernels


@cache
def _difference(kernels: Kernels) -> str:
    """Describe the first wrong result, "" if all are correct."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(SHAPE[1], generator=generator, **VALUES) for _ in range(2))
    maps = [torch.randn(SHAPE, generator=generator, **VALUES).to(memory_format=torch.channels_last) for _ in range(3)]
    with torch.inference_mode(False), torch.enable_grad():
        for dtype, name, with_residual in product(DTYPES, KINDS, (False, True)):
            images, added, gradient = (tensor.to(dtype) for tensor in maps)
            residual, activation = added if with_residual else None, Activation(name, SLOPE)
            layer = FusedBatchNorm2d(SHAPE[1], **VALUES)
            layer.kernels, layer.activation = kernels, activation
            layer.load_state_dict({**layer.state_dict(), "weight": weight, "bias": bias})
            expected, compared = _reference(layer, activation, images, residual, gradient)
            got = _native(layer, images, residual, gradient * compared)
            for what, value in expected.items():
                off = float((got[what].double() - value.view_as(got[what])).abs().max() / value.abs().max())
                if not off <= ALLOWED[dtype]:  # also true for NaN
                    return f"{what} with {name} in {str(dtype).removeprefix('torch.')} is {off:.1g} off"
    return ""


def _reference(
    layer: FusedBatchNorm2d, activation: Activation, images: Tensor, residual: Tensor | None, gradient: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute output, gradients and running statistics of a new layer in float64; also return the mask of values whose
    gradient was used. It uses elementary operators because torch's batch_norm starts threads.
    """
    assert layer.momentum is not None
    x, weight, bias = (value.detach().double().requires_grad_() for value in (images, layer.weight, layer.bias))
    added = torch.zeros_like(x) if residual is None else residual.double()
    added.requires_grad_()
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = (x - mean).square().mean((0, 2, 3), keepdim=True)
    before = (x - mean) / (variance + layer.eps).sqrt() * weight.view(-1, 1, 1) + bias.view(-1, 1, 1) + added
    distances = [(before.detach() - bend).abs() for bend in BENDS]
    outputs, compared = activation(before), torch.stack(distances).amin(0) > NEAR_BEND
    outputs.backward(gradient.double() * compared)  # type: ignore[no-untyped-call]
    count = images.numel() / images.shape[1]
    running_mean = layer.momentum * mean.detach()
    running_var = 1 - layer.momentum + layer.momentum * count / (count - 1) * variance.detach()
    of_residual = None if residual is None else added.grad
    values = _by_name(outputs.detach(), x.grad, of_residual, weight.grad, bias.grad, running_mean, running_var)
    return values, compared


def _by_name(*values: Tensor | None) -> dict[str, Tensor]:
    return {name: value for name, value in zip(CHECKED, values, strict=True) if value is not None}


def _native(layer: FusedBatchNorm2d, images: Tensor, residual: Tensor | None, gradient: Tensor) -> dict[str, Tensor]:
    """Compute the same values with the layer."""
    x, added = images.clone().requires_grad_(), None if residual is None else residual.clone().requires_grad_()
    outputs = layer(x, added)
    uses = [outputs] if added is None else [outputs, residual_alias(outputs)]
    torch.autograd.backward(uses, [gradient / len(uses)] * len(uses))
    of_residual = None if added is None else added.grad
    gradients = x.grad, of_residual, layer.weight.grad, layer.bias.grad
    return _by_name(outputs.detach(), *gradients, layer.running_mean, layer.running_var)
