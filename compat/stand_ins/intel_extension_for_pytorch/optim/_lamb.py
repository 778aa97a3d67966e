"""IPEX's LAMB, over cputrain.Lamb."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

import cputrain


class Lamb(cputrain.Lamb):
    """cputrain.Lamb with IPEX's defaults; `fused` changes nothing."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        fused: bool = False,
    ) -> None:
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)
