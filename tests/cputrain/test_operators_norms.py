"""Batch-norm below torch's operators: torch's results, to rounding, whatever its tensors are."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cputrain
from cputrain.kernels.operators import calls

pytestmark = pytest.mark.slow
EPS, MOMENTUM = 1e-5, 0.1


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    cputrain.kernels.enable()
    yield
    cputrain.kernels.disable()


def results(x: Tensor, grad: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = EPS) -> list[Tensor]:
    """Outputs, saved and running statistics, and gradients."""
    running = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    if x.dtype == torch.float64:
        running = running[0].double(), running[1].double()
    made = torch.ops.aten.native_batch_norm(x, weight, bias, *running, True, MOMENTUM, eps)
    gradients = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, *running, *made[1:], True, eps, [True, weight is not None, weight is not None]
    )
    return [*made, *running, *(value for value in gradients if value is not None)]


@settings(deadline=None, max_examples=int(os.environ.get("CPUTRAIN_FUZZ", "100")))
@given(
    count=st.sampled_from([1, 2, 5]),
    channels=st.sampled_from([1, 7, 8, 31, 33, 64, 127, 128, 200]),
    sides=st.tuples(*(st.integers(1, 13),) * 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    mean=st.sampled_from([0.0, 1.0, 1000.0]),
    affine=st.booleans(),
    layout=st.sampled_from(["images", "gradients", "both"]),
)
def test_batch_norm_is_right_in_every_shape(
    count: int, channels: int, sides: tuple[int, int], dtype: torch.dtype, mean: float, affine: bool, layout: str
) -> None:
    """Errors from float64 are at most torch's or a rounding of the result, in torch's types and memory formats."""
    if count * sides[0] * sides[1] == 1:
        return
    generator = torch.Generator().manual_seed(channels)
    shape = (count, channels, *sides)
    x = (torch.randn(shape, generator=generator) + mean).to(dtype)
    grad = torch.randn(shape, generator=generator).to(dtype)
    if layout != "gradients":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout != "images":
        grad = grad.contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(channels, generator=generator) for _ in range(2)) if affine else (None, None)
    made = results(x, grad, weight, bias)
    exact = results(x.double(), grad.double(), *(None if v is None else v.double() for v in (weight, bias)))
    cputrain.kernels.disable()
    theirs = results(x, grad, weight, bias)
    cputrain.kernels.enable()
    for ours, torchs, value in zip(made, theirs, exact, strict=True):
        scale = float(value.abs().max().clamp(min=1.0))  # sums of values of about 1 may cancel
        error, allowed = (float((result.double() - value).abs().max()) for result in (ours, torchs))
        assert error <= allowed + scale * (2**-8 if ours.dtype == torch.bfloat16 else 2e-6)
        assert (ours.dtype, ours.shape) == (torchs.dtype, torchs.shape)
        assert ours.dim() == 1 or ours.stride() == torchs.stride()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["x", "grad"])
def test_nan_and_inf_stay_in_their_channel(value: float, place: str) -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(2, 20, 5, 5).contiguous(memory_format=torch.channels_last) for _ in range(2)]
    tensors[place == "grad"][1, 17, 2, 2] = value
    made = results(*tensors, torch.ones(20), torch.zeros(20))
    cputrain.kernels.disable()
    for ours, theirs in zip(made, results(*tensors, torch.ones(20), torch.zeros(20)), strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("kind", ["float64", "evaluation", "contiguous", "bfloat16 weights", "no eps"])
def test_what_is_not_covered_is_torch_s_bit_for_bit(kind: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 20, 5, 5).contiguous(memory_format=torch.channels_last)
    weight, bias, eps = torch.rand(20), torch.rand(20), 0.0 if kind == "no eps" else EPS
    if kind == "float64":
        x, weight, bias = x.double(), weight.double(), bias.double()
    elif kind == "contiguous":
        x = x.contiguous()
    elif kind == "bfloat16 weights":
        x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()

    def compute() -> list[Tensor]:
        if kind == "evaluation":
            layer = nn.BatchNorm2d(20).eval()
            leaf = x.detach().requires_grad_()
            return [layer(leaf), *torch.autograd.grad(layer(leaf).square().sum(), leaf)]
        if kind == "bfloat16 weights":
            return [torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)]
        return results(x, x, weight, bias, eps)

    before = calls()
    made = compute()
    assert calls() == before
    cputrain.kernels.disable()
    for ours, theirs in zip(made, compute(), strict=True):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7)) and ours.stride() == theirs.stride()


def test_threads_do_not_change_a_bit() -> None:
    torch.manual_seed(1)
    x, grad = (torch.randn(4, 40, 33, 33).contiguous(memory_format=torch.channels_last) for _ in range(2))
    used, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(results(x, grad, torch.ones(40), torch.zeros(40)))
    finally:
        torch.set_num_threads(used)
    assert all(map(torch.equal, made[0], made[1])) and all(map(torch.equal, made[0], made[2]))


def test_layers_count_their_batches_and_have_second_derivatives() -> None:
    torch.manual_seed(1)
    layer, x = nn.BatchNorm2d(8), torch.randn(3, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    before = calls()["batch-norm"]
    layer(x.requires_grad_()).square().sum().backward()
    assert calls()["batch-norm"] == before + 2 and layer.num_batches_tracked == 1
    first = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), x)[0]
    layer.double()
    doubles = x.detach().double().requires_grad_()
    first = torch.autograd.grad(layer(doubles).pow(3).sum(), doubles, create_graph=True)[0]
    exact = torch.autograd.grad(first.square().sum(), doubles)[0]
    assert float((second - exact).abs().max()) <= 1e-4 * float(exact.abs().max())
