"""IPEX's LARS, over cputrain.Lars: v = momentum v + d, w -= lr t v (variant "nus")."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

import cputrain

NORMS = (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
RENAMED = {"eeta": "trust_coefficient", "epsilon": "eps", "lars": "adapt"}


class Lars(cputrain.Lars):
    """cputrain.Lars with IPEX's names and defaults; a group with lars=False has neither ratio nor weight decay."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        options: dict[str, Any] = {"momentum": momentum, "weight_decay": weight_decay, "eps": epsilon}
        super().__init__(params, lr, variant="nus", trust_coefficient=eeta, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with IPEX's names of options."""
        group = {RENAMED.get(name, name): value for name, value in param_group.items()}
        super().add_param_group({**group, "weight_decay": 0} if group.get("adapt") is False else group)


def create_optimizer_lars(
    model: nn.Module, lr: float, momentum: float, weight_decay: float, bn_bias_separately: bool, epsilon: float
) -> Lars:
    """Return Lars for a model; with bn_bias_separately, norms and biases have neither trust ratio nor weight decay."""
    options: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "epsilon": epsilon}
    if not bn_bias_separately:
        return Lars(model.parameters(), **options)
    norms = [weight for layer in model.modules() if isinstance(layer, NORMS) for weight in layer._parameters.values()]
    of_norms = {id(weight) for weight in norms}
    named = [(name, weight) for name, weight in model.named_parameters() if id(weight) not in of_norms]
    groups = [
        {"params": [weight for name, weight in named if "bias" not in name]},
        {"params": [weight for weight in norms if weight is not None], "lars": False},
        {"params": [weight for name, weight in named if "bias" in name], "lars": False},
    ]
    return Lars([group for group in groups if group["params"]], **options)
