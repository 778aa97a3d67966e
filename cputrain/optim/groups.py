"""What our optimizers share: a step is each parameter group's own."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class GroupOptimizer(Optimizer):
    """An optimizer that updates the parameters of each group that have gradients, group by group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients; returns the closure's loss, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params, [p.grad for p in params])
        return loss

    def _state_of(self, params: list[Tensor], name: str, first: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """A tensor that is kept for each parameter, made by `first` at its first step."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = first(p)
        return [self.state[p][name] for p in params]

    @abstractmethod
    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Update a group's parameters, of which there is one at least."""
