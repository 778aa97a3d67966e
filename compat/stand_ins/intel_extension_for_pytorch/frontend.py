"""`optimize` with the arguments of IPEX 2.8, and its switches of float32 precision, over cputrain and PyTorch."""

import copy
import logging
import os
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import cputrain
from cputrain import InputError
from cputrain.kernels.folding import fold_batchnorms
from cputrain.kernels.operators import enable_if_requested
from cputrain.kernels.split_optimizers import check_optimizer
from cputrain.variables import KERNELS_VARIABLE

logger = logging.getLogger(__name__)

LEVELS = ("O0", "O1")
PRECISIONS = ("matmul", "conv", "rnn")  # of torch.backends.mkldnn


def optimize(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    optimizer: Optimizer | None = None,
    level: str = "O1",
    inplace: bool = False,
    conv_bn_folding: bool | None = None,
    linear_bn_folding: bool | None = None,
    weights_prepack: bool | None = None,
    replace_dropout_with_identity: bool | None = None,
    optimize_lstm: bool | None = None,
    split_master_weight_for_bf16: bool | None = None,
    fuse_update_step: bool | None = None,
    auto_kernel_selection: bool | None = None,
    sample_input: Any = None,
    graph_mode: bool | None = None,
    concat_linear: bool | None = None,
) -> Any:
    """Optimize a model for training, with its optimizer, or a model in evaluation mode for inference, without one.

    Returns the model, or (model, optimizer) if an optimizer is given: copies, unless `inplace`.

    Done by `cputrain.optimize`: dtype (None or torch.float32, torch.bfloat16), level ("O0" changes nothing), inplace,
    conv_bn_folding (inference), split_master_weight_for_bf16, sample_input. Harmless, as nothing depends on them here:
    linear_bn_folding, weights_prepack, replace_dropout_with_identity, optimize_lstm, fuse_update_step (updates are
    always fused), auto_kernel_selection, concat_linear. Refused, with what to do: graph_mode=True, dtype=torch.float16.

    As the original, it replaces torch's operators in the whole process (`cputrain.kernels.enable`), unless the launcher
    or the variable CPUTRAIN_KERNELS has decided that.

    Raises cputrain.InputError, a line, for what cannot be done.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return model if optimizer is None else (model, optimizer)
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if model.training and optimizer is None:
        raise InputError("the model is in training mode: pass optimizer=, or call model.eval() first for inference")
    if not model.training and optimizer is not None:
        raise InputError("the model is in evaluation mode: call model.train() first, or leave optimizer out")
    if level not in LEVELS:
        raise InputError(f"level={level!r}: give 'O0', which changes nothing, or 'O1'")
    if dtype == torch.float16:
        raise InputError("dtype=torch.float16: CPUs train in bfloat16, so give dtype=torch.bfloat16")
    if graph_mode:
        raise InputError("graph_mode=True: leave it out, and call torch.compile(model) on the result")
    if level == "O0":
        return model if optimizer is None else (model, optimizer)
    if KERNELS_VARIABLE not in os.environ:
        _enable_kernels()
    if not inplace:
        model, optimizer = _copied(model, optimizer)
    dtype = dtype or torch.float32
    if isinstance(sample_input, tuple | list):
        sample_input = sample_input[0] if len(sample_input) == 1 else None
    options: dict[str, Any] = {"dtype": dtype, "sample_input": sample_input}
    if optimizer is None:
        cputrain.optimize(model, **options)
        return model if conv_bn_folding is False else _folded(model, dtype)
    if dtype == torch.bfloat16 and split_master_weight_for_bf16 is not False and fuse_update_step is not False:
        options["master_weights"] = _master_weights(optimizer)
    return cputrain.optimize(model, optimizer, **options)


@cache  # one line of output
def _enable_kernels() -> None:
    enable_if_requested({**os.environ, KERNELS_VARIABLE: "auto"})


def _copied(model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
    """Copy a model, and an optimizer that is then of the copy's parameters; others that it has are not copied."""
    if optimizer is None:
        return copy.deepcopy(model), None
    own = {id(weight) for weight in model.parameters()}
    others = [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) not in own]
    both: tuple[nn.Module, Optimizer] = copy.deepcopy((model, optimizer), {id(weight): weight for weight in others})
    return both


def _master_weights(optimizer: Optimizer) -> str | None:
    try:
        check_optimizer(optimizer)
    except InputError as error:
        logger.warning("ipex.optimize: weights stay float32, cast by autocast: %s", error)
        return None
    return "split"


def _folded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Fold batch-norm into convolutions if oneDNN computes them in this dtype here."""
    supported = torch.backends.mkldnn.is_available() and (
        dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return fold_batchnorms(model, dtype) if supported else model


class FP32MathMode(IntEnum):
    """How float32 convolutions and matrix products are computed: in float32, or rounded to TF32 or bfloat16."""

    FP32 = 0
    TF32 = 1
    BF32 = 2


def set_fp32_math_mode(mode: FP32MathMode = FP32MathMode.FP32, device: str = "cpu") -> None:
    """Let oneDNN round the factors of float32 products to bfloat16 (BF32), or not (FP32). TF32 is for GPUs: a warning.

    These are torch.backends.mkldnn.matmul.fp32_precision, of conv and of rnn.
    """
    _check_device(device)
    if mode not in (FP32MathMode.FP32, FP32MathMode.BF32):
        logger.warning("set_fp32_math_mode: CPUs have FP32MathMode.FP32 and BF32, not %r: nothing is changed", mode)
        return
    for name in PRECISIONS:
        getattr(torch.backends.mkldnn, name).fp32_precision = "bf16" if mode == FP32MathMode.BF32 else "ieee"


def get_fp32_math_mode(device: str = "cpu") -> FP32MathMode:
    """Return the mode that `set_fp32_math_mode` or torch.backends has set."""
    _check_device(device)
    found = {getattr(torch.backends.mkldnn, name).fp32_precision for name in PRECISIONS}
    return FP32MathMode.BF32 if "bf16" in found else FP32MathMode.FP32


def _check_device(device: str) -> None:
    if device != "cpu":
        raise InputError(
            f"device={device!r}: the stand-in of cputrain-compat is for 'cpu'; for GPUs use torch.backends"
        )
    if not hasattr(torch.backends.mkldnn, "matmul"):
        raise InputError(
            f"torch {torch.__version__} has no switch of float32 precision for CPUs: use torch 2.9 or newer"
        )


def enable_onednn_fusion(enabled: bool) -> None:
    """Do nothing: fusions are chosen by `optimize`."""


def enable_auto_channels_last() -> None:
    """Do nothing: `optimize` always stores convolutions' weights channels-last."""


def disable_auto_channels_last() -> None:
    """Do nothing: `optimize` always stores convolutions' weights channels-last, with the same results."""
