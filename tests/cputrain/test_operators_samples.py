"""torch's own samples of the operators that have kernels below them, and its checks of their derivatives."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cputrain

pytestmark = [pytest.mark.slow, pytest.mark.long]
NAMES = (
    *(f"nn.functional.conv{axes}d" for axes in (1, 2, 3)),
    *(f"nn.functional.conv_transpose{axes}d" for axes in (1, 2, 3)),
    *("nn.functional.batch_norm", "native_batch_norm", "nn.functional.instance_norm"),
    *("mm", "bmm", "addmm", "baddbmm", "matmul", "nn.functional.linear", "nn.functional.scaled_dot_product_attention"),
)
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    cputrain.kernels.enable()
    yield
    cputrain.kernels.disable()


def operators(name: str) -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [operator for operator in op_db if operator.name == name]


def tensors_of(values: Any) -> list[Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, Tensor)]


def results(function: Callable[..., Any], sample: Any) -> list[Tensor]:
    """Results, and the gradients of all inputs."""
    leaves = [value for value in tensors_of((sample.input, sample.args, sample.kwargs)) if value.requires_grad]
    torch.manual_seed(1)  # dropout
    made = list(tensors_of(function(sample.input, *sample.args, **sample.kwargs)))
    wanted = [value for value in made if value.requires_grad and value.numel()]
    if not (leaves and wanted):
        return made
    gradients = torch.autograd.grad(wanted, leaves, [torch.ones_like(value) for value in wanted], allow_unused=True)
    return [*(value.detach() for value in made), *(value for value in gradients if value is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_of_torch_s_samples(name: str, dtype: torch.dtype) -> None:
    """As torch's own to rounding, in its types, shapes and strides."""
    compared = 0
    for operator in operators(name):
        for sample in operator.sample_inputs("cpu", dtype, requires_grad=True):
            made = results(operator.op, sample)
            cputrain.kernels.disable()
            theirs = results(operator.op, sample)
            cputrain.kernels.enable()
            assert len(made) == len(theirs)
            for ours, torchs in zip(made, theirs, strict=True):
                assert (ours.shape, ours.dtype, ours.stride()) == (torchs.shape, torchs.dtype, torchs.stride())
                scale = float(torchs.double().nan_to_num(0, 0, 0).abs().max()) if torchs.numel() else 0.0
                torch.testing.assert_close(
                    ours.double(), torchs.double(), rtol=0, atol=4 * ROUNDING[dtype] * max(scale, 1e-3), equal_nan=True
                )
                compared += 1
    assert compared


@pytest.mark.parametrize("name", NAMES)
def test_torch_s_gradcheck_of_its_samples(name: str) -> None:
    """Numerical first and second derivatives in float64, which our operators hand on to torch's."""
    for operator in operators(name):
        if not operator.supports_autograd:
            continue
        for sample in list(operator.sample_inputs("cpu", torch.float64, requires_grad=True))[:6]:
            leaves = [value for value in tensors_of((sample.input, sample.args, sample.kwargs)) if value.requires_grad]
            if not leaves or sum(value.numel() for value in leaves) > 400:
                continue

            def function(*_: Tensor, operator: Any = operator, sample: Any = sample) -> Any:
                torch.manual_seed(1)
                made = tensors_of(operator.op(sample.input, *sample.args, **sample.kwargs))
                return tuple(value for value in made if value.requires_grad)

            assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
