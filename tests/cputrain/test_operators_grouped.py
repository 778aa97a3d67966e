"""Grouped convolutions below torch's operators: torch's results, to rounding, whatever their tensors are."""

import os
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cputrain
from cputrain.kernels.operators import calls
from cputrain.kernels.operators_table import has_amx, has_avx512

pytestmark = pytest.mark.slow
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3}
PAIRS = st.tuples(*(st.sampled_from([1, 2, 3]),) * 2)


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    cputrain.kernels.enable()
    yield
    cputrain.kernels.disable()


def expected_calls(x: Tensor, w: Tensor, groups: int, *, unwritten: bool) -> int:
    """How many calls ours compute: output and gradients; with AVX-512 as those of larger groups, outputs on AMX, where
    oneDNN leaves none `unwritten`."""
    inputs = w.shape[1]
    if not x.is_contiguous(memory_format=torch.channels_last):
        return 0
    if not has_avx512():
        return 2 if inputs in (8, 16, 24) or (inputs == 4 and groups != 3) else 0

    def can_merge(channels: int) -> bool:
        return any(groups % merged == 0 for merged in range(2, channels // inputs + 1))

    if x.dtype == torch.float32:
        return int(can_merge(16))
    if not has_amx():
        return 0
    maps = inputs <= 8 and can_merge(32) and x[:, 0].numel() >= 1024
    return int(maps and not unwritten) + int(maps or can_merge(16))


def results(x: Tensor, w: Tensor, bias: Tensor, grad: Tensor, options: tuple[object, ...]) -> list[Tensor]:
    gradients = torch.ops.aten.convolution_backward(grad, x, w, [w.shape[0]], *options, [True, True, True])
    return [torch.ops.aten.convolution(x, w, bias, *options), *gradients]


@settings(deadline=None, max_examples=int(os.environ.get("CPUTRAIN_FUZZ", "100")))
@given(
    count=st.sampled_from([1, 2, 5]),
    each=st.sampled_from([2, 3, 4, 6, 8, 16, 24]),
    groups=st.sampled_from([2, 3, 4]),
    sides=st.tuples(*(st.sampled_from([*range(1, 18), 33]),) * 2),
    kernel=PAIRS,
    stride=PAIRS,
    padding=st.tuples(*(st.integers(0, 3),) * 2),
    dilation=PAIRS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    last=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_grouped_convolutions_are_right_in_every_shape_and_layout(
    count: int,
    each: int,
    groups: int,
    sides: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    dtype: torch.dtype,
    last: tuple[bool, bool, bool],
) -> None:
    """Outputs and gradients against float64, in the memory format that torch's own have."""
    # oneDNN itself may end with signal 11 in other shapes (docs/known-issues.md).
    dilation = (1 if kernel[0] == 2 else dilation[0], dilation[1])
    padding = tuple(min(padding[axis], (kernel[axis] - 1) * dilation[axis] // 2) for axis in (0, 1))
    channels = each * groups
    options = (stride, padding, dilation, False, [0, 0], groups)
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(count, channels, *sides, generator=generator).to(dtype)
    w = torch.randn(channels, each, *kernel, generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype)
    try:
        shape = torch.ops.aten.convolution(x.double(), w.double(), None, *options).shape
    except RuntimeError as error:  # a kernel larger than the image: the same error
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            torch.ops.aten.convolution(x, w, bias, *options)
        return
    grad = torch.randn(shape, generator=generator).to(dtype)
    x, w, grad = (
        value.contiguous(memory_format=torch.channels_last if one else torch.contiguous_format)
        for value, one in zip((x, w, grad), last, strict=True)
    )
    exact = results(x.double(), w.double(), bias.double(), grad.double(), options)
    before = calls()["grouped"]
    made = results(x, w, bias, grad, options)
    column = shape[3] == 1 and stride[1] > 1
    assert calls()["grouped"] == before + expected_calls(x, w, groups, unwritten=column)
    cputrain.kernels.disable()
    theirs = results(x, w, bias, grad, options)
    cputrain.kernels.enable()
    for number, (ours, value, torchs) in enumerate(zip(made, exact, theirs, strict=True)):
        assert float((ours.double() - value).abs().max()) <= TOLERANCE[dtype] * float(value.abs().max())
        assert (ours.dtype, ours.shape) == (torchs.dtype, torchs.shape)
        # Torch's weight gradients without oneDNN, of one image on one thread, have others in dimensions of one value.
        some = [axis for axis, size in enumerate(ours.shape) if size > 1 or number != 2]
        assert [ours.stride(axis) for axis in some] == [torchs.stride(axis) for axis in some]


@pytest.mark.parametrize("each", [4, 8, 16])
@pytest.mark.parametrize("last", [True, False])
def test_gradients_are_right_whichever_are_wanted(each: int, last: bool) -> None:
    torch.manual_seed(1)
    channels = 4 * each
    format_ = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(2, channels, 23, 23).bfloat16().contiguous(memory_format=torch.channels_last)
    grad = torch.randn(2, channels, 23, 23).bfloat16().contiguous(memory_format=format_)
    w = torch.randn(channels, each, 3, 3).bfloat16()
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 4)
    exact = results(x.double(), w.double(), torch.zeros(channels).double(), grad.double(), options)[1:]
    for wanted in product((True, False), repeat=3):
        made = torch.ops.aten.convolution_backward(grad, x, w, [channels], *options, list(wanted))
        for ours, value, is_wanted in zip(made, exact, wanted, strict=True):
            if is_wanted:
                torch.testing.assert_close(ours.double(), value, rtol=0, atol=5e-3 * float(value.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["x", "w", "grad"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_reach_what_torch_lets_them_reach(dtype: torch.dtype, place: str, value: float) -> None:
    torch.manual_seed(1)
    tensors = {"x": torch.randn(2, 32, 23, 23), "w": torch.randn(32, 8, 3, 3), "grad": torch.randn(2, 32, 23, 23)}
    tensors[place].view(-1)[77] = value
    x, w, grad = (tensor.to(dtype).contiguous(memory_format=torch.channels_last) for tensor in tensors.values())
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 4)
    made = results(x, w, torch.zeros(32, dtype=dtype), grad, options)
    cputrain.kernels.disable()
    for ours, theirs in zip(made, results(x, w, torch.zeros(32, dtype=dtype), grad, options), strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize(
    "kind",
    [
        *("float64", "groups of 5", "transposed", "three axes", "no images", "contiguous"),
        *([] if has_avx512() else ["more outputs"]),
    ],
)
def test_what_is_not_covered_is_torch_s_bit_for_bit(kind: str) -> None:
    torch.manual_seed(1)
    layer = nn.Conv2d(16, 32 if kind == "more outputs" else 16, 3, padding=1, groups=2)
    x = torch.randn(2, 16, 9, 9)
    if kind != "contiguous":
        x = x.contiguous(memory_format=torch.channels_last)
    if kind == "float64":
        layer, x = layer.double(), x.double()
    elif kind == "groups of 5":
        layer, x = nn.Conv2d(20, 20, 3, groups=4), torch.randn(2, 20, 9, 9)
    elif kind == "transposed":
        layer = nn.ConvTranspose2d(16, 16, 3, groups=2)
    elif kind == "three axes":
        layer, x = nn.Conv3d(16, 16, 3, groups=2), torch.randn(2, 16, 5, 5, 5)
    elif kind == "no images":
        x = x[:0]

    def compute() -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        made = layer(leaf)
        return [made, *torch.autograd.grad(made.square().sum(), [leaf, *layer.parameters()])]

    before = calls()["grouped"]
    made = compute()
    assert calls()["grouped"] == before
    cputrain.kernels.disable()
    for ours, theirs in zip(made, compute(), strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_threads_do_not_change_a_bit() -> None:
    torch.manual_seed(1)
    x, w, grad = torch.randn(5, 48, 20, 20), torch.randn(48, 24, 3, 3), torch.randn(5, 48, 20, 20)
    x = x.contiguous(memory_format=torch.channels_last)
    used, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(results(x, w, torch.zeros(48), grad, ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)))
    finally:
        torch.set_num_threads(used)
    for other in made[1:]:
        assert all(map(torch.equal, made[0][:3], other[:3]))


@pytest.mark.parametrize(
    "shapes", [((32, 4, 3, 3), (32,)), ((30, 8, 3, 3), (30,)), ((32, 8, 3, 3), (31,)), ((32, 8, 3, 3), (32, 1))]
)
def test_weights_and_biases_of_wrong_shapes_have_torch_s_errors(shapes: tuple[tuple[int, ...], ...]) -> None:
    images = torch.randn(2, 32, 23, 23, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    tensors = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    errors = []
    for change in (cputrain.kernels.enable, cputrain.kernels.disable):
        change()
        with pytest.raises(RuntimeError) as caught:
            torch.conv2d(images, *tensors, padding=1, groups=4)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
