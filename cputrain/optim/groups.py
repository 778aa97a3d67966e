"""The base class of the optimizers defined here: one update per parameter group."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class GroupOptimizer(Optimizer):
    """An optimizer that updates, group by group, the parameters that have gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients; return the closure's loss, None without a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params, [p.grad for p in params])
        return loss

    def _state_of(self, params: list[Tensor], name: str, initial: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The state tensor `name` of each parameter; `initial` makes it at the parameter's first step."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = initial(p)
        return [self.state[p][name] for p in params]

    @abstractmethod
    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Update a group's parameters, of which there is at least one."""


def check_not_negative(**options: float) -> None:
    """Raise ValueError for a negative option, as torch's optimizers do."""
    for name, value in options.items():
        if value < 0:
            raise ValueError(f"{name}={value}: must not be negative")
