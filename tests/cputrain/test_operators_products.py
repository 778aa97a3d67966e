"""Convolutions of one tap, transposed products and attention's gradients below torch's operators: torch's results, to
rounding, whatever their tensors are."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import cputrain
from cputrain.kernels.operators import calls
from cputrain.kernels.operators_table import TABLE, has_avx512

pytestmark = pytest.mark.slow
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3}
APPLIES = {kernel.name: kernel.applies() for kernel in TABLE}
ON_AMX = APPLIES["bfloat16 on AMX"]
EXAMPLES = settings(deadline=None, max_examples=int(os.environ.get("CPUTRAIN_FUZZ", "100")))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    cputrain.kernels.enable()
    yield
    cputrain.kernels.disable()


def by_torch(compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    cputrain.kernels.disable()
    try:
        return compute()
    finally:
        cputrain.kernels.enable()


def assert_near(results: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for result, value in zip(results, exact, strict=True):
        # Of values of about 1, as sums may cancel.
        assert float((result.double() - value).abs().max()) <= tolerance * max(1.0, float(value.abs().max()))


def assert_same_memory_format(results: list[Tensor], others: list[Tensor]) -> None:
    for result, other in zip(results, others, strict=True):
        assert (result.dtype, result.shape) == (other.dtype, other.shape)
        for memory_format in (torch.contiguous_format, *([torch.channels_last] if result.dim() == 4 else [])):
            assert result.is_contiguous(memory_format=memory_format) == other.is_contiguous(memory_format=memory_format)


def convolution(x: Tensor, w: Tensor, bias: Tensor, grad: Tensor, *options: object) -> list[Tensor]:
    gradients = torch.ops.aten.convolution_backward(grad, x, w, [w.shape[0]], *options, [True, True, True])
    return [torch.ops.aten.convolution(x, w, bias, *options), *gradients]


@EXAMPLES
@given(
    count=st.sampled_from([1, 2, 5]),
    channels=st.tuples(*(st.sampled_from([1, 3, 16, 24, 33, 64]),) * 2),
    sides=st.tuples(*(st.integers(1, 31),) * 2),
    stride=st.tuples(*(st.sampled_from([1, 1, 2, 3]),) * 2),
    dtype=DTYPES,
    last=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_convolutions_of_one_tap_are_right_in_every_shape_and_layout(
    count: int,
    channels: tuple[int, int],
    sides: tuple[int, int],
    stride: tuple[int, int],
    dtype: torch.dtype,
    last: tuple[bool, bool, bool],
) -> None:
    """Outputs and gradients against float64, in the memory format that torch's own have."""
    inputs, outputs = channels
    options = (stride, (0, 0), (1, 1), False, [0, 0], 1)
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(count, inputs, *sides, generator=generator).to(dtype)
    w = torch.randn(outputs, inputs, 1, 1, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    shape = (count, outputs, *((side - 1) // step + 1 for side, step in zip(sides, stride, strict=True)))
    grad = torch.randn(shape, generator=generator).to(dtype)
    x, w, grad = (
        value.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)
        for value, is_last in zip((x, w, grad), last, strict=True)
    )
    before = calls()
    results = convolution(x, w, bias, grad, *options)
    if dtype == torch.float32 and x.is_contiguous(memory_format=torch.channels_last):
        counted = calls()["pointwise"] - before["pointwise"]
        assert counted == APPLIES["pointwise"] * (1 + (stride == (1, 1)))
    theirs = by_torch(lambda: convolution(x, w, bias, grad, *options))
    assert_same_memory_format(results, theirs)
    exact = convolution(x.double(), w.double(), bias.double(), grad.double(), *options)
    for result, other, value in zip(results, theirs, exact, strict=True):
        error, torch_s = (float((tensor.double() - value).abs().max()) for tensor in (result, other))
        assert error <= max(2 * torch_s, TOLERANCE[dtype] * max(1.0, float(value.abs().max())))


@EXAMPLES
@given(
    count=st.sampled_from([1, 3]),
    group=st.tuples(st.sampled_from([2, 3, 4, 8, 12]), st.sampled_from([1, 2, 4, 8])),
    groups=st.sampled_from([2, 3, 4, 6, 8]),
    side=st.integers(3, 13),
    stride=st.sampled_from([1, 2]),
    dtype=DTYPES,
)
def test_merged_groups_give_each_weight_s_gradient(
    count: int, group: tuple[int, int], groups: int, side: int, stride: int, dtype: torch.dtype
) -> None:
    inputs, outputs = group
    options = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], groups)
    generator = torch.Generator().manual_seed(groups)
    x = torch.randn(count, inputs * groups, side, side, generator=generator).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    w = torch.randn(outputs * groups, inputs, 3, 3, generator=generator).to(dtype)
    grad = torch.randn(torch.ops.aten.convolution(x, w, None, *options).shape, generator=generator).to(dtype)
    bias = torch.zeros(len(w)).to(dtype)
    results = convolution(x, w, bias, grad, *options)
    assert_near(results, convolution(x.double(), w.double(), bias.double(), grad.double(), *options), TOLERANCE[dtype])
    assert_same_memory_format(results, by_torch(lambda: convolution(x, w, bias, grad, *options)))


@EXAMPLES
@given(
    rows=st.sampled_from([1, 15, 16, 33, 70, 256, 300]),
    columns=st.sampled_from([8, 31, 65, 256, 265]),
    summed=st.sampled_from([1, 33, 63, 64, 97, 200]),
    first=st.sampled_from(["transposed", "part", "dense"]),
    dtype=DTYPES,
)
def test_products_are_right_however_the_first_matrix_is_stored(
    rows: int, columns: int, summed: int, first: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    stored = torch.randn(summed, rows + 5, generator=generator).to(dtype)
    matrix = {"transposed": stored[:, :rows].contiguous().t(), "part": stored[:, 3 : rows + 3].t()}.get(
        first, stored[:, :rows].t().contiguous()
    )
    other = torch.randn(summed, columns, generator=generator).to(dtype)
    before = calls()["bfloat16 on AMX"]
    result = matrix @ other
    large = min(rows, columns) >= 16 and max(rows, columns) >= 256 and summed >= 64
    if dtype == torch.bfloat16 and ON_AMX:
        assert calls()["bfloat16 on AMX"] - before == (large and first != "dense")
    assert_near([result], [matrix.double() @ other.double()], TOLERANCE[dtype])


def attention(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, **options: object) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    result = functional.scaled_dot_product_attention(*leaves, **options)  # type: ignore[arg-type]
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


def heads(sizes: tuple[int, int, int, int], generator: torch.Generator, *, packed: bool) -> list[Tensor]:
    """Query, key and value as parts of one tensor, as most networks have them, or each by itself."""
    batch, count, tokens, size = sizes
    if not packed:
        return [torch.randn(sizes, generator=generator).bfloat16() for _ in range(3)]
    joined = torch.randn(batch, tokens, 3, count, size, generator=generator).bfloat16()
    return [part.transpose(1, 2) for part in joined.unbind(2)]


@EXAMPLES
@given(
    sizes=st.tuples(
        st.sampled_from([1, 2]),
        st.sampled_from([1, 3]),
        st.sampled_from([2, 3, 16, 49, 63, 64, 65, 130, 197]),
        st.sampled_from([2, 8, 18, 32, 64, 80]),
    ),
    keys=st.sampled_from([None, None, 2, 31, 100]),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.5]),
    packed=st.booleans(),
)
def test_attention_s_gradients_are_right_in_every_shape(
    sizes: tuple[int, int, int, int], keys: int | None, causal: bool, scale: float | None, packed: bool
) -> None:
    """Against float64, and in torch's memory."""
    generator = torch.Generator().manual_seed(sizes[2])
    query, key, value = heads(sizes, generator, packed=packed)
    if keys is not None:
        _, key, value = heads((*sizes[:2], keys, sizes[3]), generator, packed=packed)
    grad = torch.randn(query.shape, generator=generator).bfloat16()
    options = {"is_causal": causal, "scale": scale}
    exact = attention(query.double(), key.double(), value.double(), grad.double(), **options)
    before = calls()["bfloat16 on AMX"]
    results = attention(query, key, value, grad, **options)
    assert not ON_AMX or calls()["bfloat16 on AMX"] == before + 1
    theirs = by_torch(lambda: attention(query, key, value, grad, **options))
    least = 2 * TOLERANCE[torch.bfloat16] * max(float(tensor.abs().max()) for tensor in exact)
    for result, other, right in zip(results, theirs, exact, strict=True):
        error, torch_s = (float((tensor.double() - right).abs().max()) for tensor in (result, other))
        assert error <= max(least, 2 * torch_s)
    assert [result.stride() for result in results] == [other.stride() for other in theirs]


@pytest.mark.parametrize(
    "kind",
    [
        *("float32", "heads shared"),
        *(["mask", "odd head size", "long"] if has_avx512() else []),  # without it, bfloat16 is computed in float32
    ],
)
def test_attention_that_is_not_covered_is_torch_s_bit_for_bit(kind: str) -> None:
    torch.manual_seed(1)
    tokens, size = 2049 if kind == "long" else 20, 9 if kind == "odd head size" else 16
    query, key, value, grad = (torch.randn(1, 2, tokens, size).bfloat16() for _ in range(4))
    options: dict[str, object] = {}
    if kind == "float32":
        query, key, value, grad = (tensor.float() for tensor in (query, key, value, grad))
    elif kind == "mask":
        options["attn_mask"] = torch.randn(20, 20).bfloat16()
    elif kind == "heads shared":
        key, value, options["enable_gqa"] = key[:, :1], value[:, :1], True
    before = calls()["bfloat16 on AMX"]
    results = attention(query, key, value, grad, **options)
    if kind != "heads shared":  # torch repeats them before
        assert calls()["bfloat16 on AMX"] == before
        assert all(map(torch.equal, results, by_torch(lambda: attention(query, key, value, grad, **options))))


@pytest.mark.parametrize(
    ("place", "number"),
    [
        (place, number)
        for place in range(4)
        for number in (float("nan"), float("inf"))
        if ON_AMX or (place, number) != (1, float("inf"))  # torch's own gradients of an infinite key differ
    ],
)
def test_nan_and_inf_reach_what_they_reach_in_float64(place: int, number: float) -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(1, 2, 70, 16).bfloat16() for _ in range(4)]
    tensors[place][0, 1, 65, 3] = number
    for result, exact in zip(attention(*tensors), attention(*(tensor.double() for tensor in tensors)), strict=True):
        assert torch.equal(result.isfinite(), exact.isfinite())


def fill_free_memory_with_nan() -> None:
    """So that a result which is not written shows."""
    for size in (2**power for power in range(8, 20)):
        blocks = [torch.full((size,), float("nan"), dtype=torch.bfloat16) for _ in range(20)]
        del blocks


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "line", "volume"])
def test_filter_taps_that_meet_only_padding_have_no_gradient(layout: str, transposed: bool, groups: int) -> None:
    axes = {"line": 1, "volume": 3}.get(layout, 2)
    x, w = torch.randn(2, 32, *(1,) * axes).bfloat16(), torch.randn(32, 32 // groups, *(3,) * axes).bfloat16()
    if layout == "channels last":
        x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
    options = ([2] * axes, [1] * axes, [1] * axes, transposed, [0] * axes, groups)
    grad = torch.randn_like(x)
    fill_free_memory_with_nan()
    results = convolution(x, w, torch.zeros(32).bfloat16(), grad, *options)
    exact = convolution(*(tensor.double() for tensor in (x, w, torch.zeros(32), grad)), *options)
    assert_near(results, exact, TOLERANCE[torch.bfloat16])
    taps = results[2].flatten(2)
    assert not taps[..., : taps.shape[2] // 2].any()


# oneDNN's convolutions in float32 for AVX2 depend on the number of threads.
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("columns", "taps", "padding"), [(1, 3, 1), (2, 2, 0), (3, 5, 1)])
def test_outputs_of_one_column_at_a_stride_are_written(columns: int, taps: int, padding: int, groups: int) -> None:
    x, w = torch.randn(2, 32, 9, columns).bfloat16(), torch.randn(32, 32 // groups, 1, taps).bfloat16()
    options = ([1, 2], [0, padding], [1, 1], False, [0, 0], groups)
    grad, bias = torch.randn(2, 32, 9, 1).bfloat16(), torch.randn(32).bfloat16()
    fill_free_memory_with_nan()
    results = convolution(x, w, bias, grad, *options)
    exact = convolution(*(tensor.double() for tensor in (x, w, bias, grad)), *options)
    assert_near(results, exact, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, *([torch.float32] if has_avx512() else [])])
def test_threads_do_not_change_a_bit_of_what_torch_s_products_do_not(dtype: torch.dtype) -> None:
    """Sums over all places are torch's, whose bits depend on the number of threads; those over channels do not."""
    torch.manual_seed(1)
    x = torch.randn(8, 72, 14, 14).to(dtype).contiguous(memory_format=torch.channels_last)
    w, grad = torch.randn(40, 72, 1, 1).to(dtype), torch.randn(8, 40, 14, 14).to(dtype)
    options = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    tensors = [torch.randn(3, 4, 70, 32).to(dtype) for _ in range(4)]
    used, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append([*convolution(x, w, torch.zeros(40).to(dtype), grad, *options)[:2], *attention(*tensors)])
    finally:
        torch.set_num_threads(used)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_convolutions_stay_float32_where_products_may_be_bfloat16() -> None:
    """torch.backends.mkldnn.matmul.fp32_precision is about products; a convolution's precision is its own, if torch
    computes it by oneDNN, as it does with several threads."""
    torch.set_num_threads(2)
    torch.manual_seed(1)
    x = torch.randn(8, 64, 14, 14).contiguous(memory_format=torch.channels_last)
    w, grad = torch.randn(64, 64, 1, 1), torch.randn(8, 64, 14, 14)
    options = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        results = convolution(x, w, torch.zeros(64), grad, *options)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    exact = convolution(x.double(), w.double(), torch.zeros(64).double(), grad.double(), *options)
    assert_near(results, exact, TOLERANCE[torch.float32])
