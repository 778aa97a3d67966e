"""Weight and gradient norms of each layer: the table that shows why large batches need a rate for each layer."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from cputrain.optim.groups import norms, widened
from cputrain.optim.lars import Lars, trust_ratios


@torch.no_grad()
def layer_ratios(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """|w|, |g|, |w| / |g| and LARS' trust ratio of each trained parameter before its update, in the model's order.

    As in You et al. 2018, Table 3. `ratio` is None where |g| is 0, `trust` where the optimizer is not LARS.
    """
    named = {p: name for name, p in model.named_parameters() if p.grad is not None}
    trust: dict[Any, float] = {}
    if isinstance(optimizer, Lars):
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            trust |= dict(zip(params, trust_ratios(group, params, [p.grad for p in params]), strict=True))
    rows = []
    for p, name in named.items():
        weights, gradients = norms([widened(p), widened(p.grad)])  # type: ignore[arg-type]
        rows.append(
            {
                "layer": name,
                "weights": weights,
                "gradients": gradients,
                "ratio": weights / gradients if gradients else None,
                "trust": trust.get(p),
            }
        )
    return rows
