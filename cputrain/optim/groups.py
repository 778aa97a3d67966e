"""The base class of the optimizers defined here: one update per parameter group."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

FEW_DIGITS = (torch.bfloat16, torch.float16)
# Norms of float32 outside these may have lost squares to underflow or overflow.
SAFE_NORMS = (1e-12, 1e18)


class GroupOptimizer(Optimizer):
    """An optimizer that updates, group by group, the parameters that have gradients.

    bfloat16 and float16 parameters are updated in float32, and so is their state: increments of less than their last
    digit add up.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises ValueError for a wrong option or a parameter of complex numbers, and adds none then."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        wrong = [p.dtype for p in self.param_groups[-1]["params"] if not p.is_floating_point()]
        if wrong:
            self.param_groups.pop()
            raise ValueError(f"{type(self).__name__} takes floating-point parameters, found one of {wrong[0]}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients; return the closure's loss, None without a closure.

        Raises RuntimeError for a sparse gradient, before any parameter is updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for p in chain.from_iterable(trained):
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} takes dense gradients, that of a parameter of shape {tuple(p.shape)} is "
                    "sparse: make it dense (torch.nn.Embedding(sparse=False)), or use torch.optim.SparseAdam for it"
                )
        for group, params in zip(self.param_groups, trained, strict=True):
            if params:
                wide = [widened(p) for p in params]
                self._step_group(group, [self.state[p] for p in params], wide, [widened(p.grad) for p in params])
                for p, updated in zip(params, wide, strict=True):
                    if updated is not p:
                        p.copy_(updated)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state; that of bfloat16 and float16 parameters keeps its digits, which torch's own rounds."""
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, p in zip(numbers, params, strict=True):
            saved = state_dict["state"].get(number, {}) if p.dtype in FEW_DIGITS else {}
            for name, value in saved.items():
                if isinstance(value, Tensor):
                    self.state[p][name] = value.detach().to(torch.float32, copy=True)

    @abstractmethod
    def _check(self, options: dict[str, Any]) -> None:
        """Raise ValueError for a wrong option of a group."""

    @abstractmethod
    def _step_group(
        self, group: dict[str, Any], states: list[dict[str, Any]], params: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Update the parameters of a group that have gradients, of which there is at least one."""


def state_of(
    states: Sequence[dict[str, Any]], params: Sequence[Tensor], name: str, initial: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """The state tensor `name` of each parameter; `initial` makes it at the parameter's first step."""
    for state, p in zip(states, params, strict=True):
        if name not in state:
            state[name] = initial(p)
    return [state[name] for state in states]


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """The Euclidean norm of each tensor, also where float32 cannot hold the squares."""
    found = torch.stack([norm.double() for norm in torch._foreach_norm(list(tensors))]).tolist()
    least, most = SAFE_NORMS
    return [
        norm if least <= norm <= most else float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        for tensor, norm in zip(tensors, found, strict=True)
    ]


def check_not_negative(**options: float) -> None:
    """Raise ValueError for an option that is negative or not finite."""
    for name, value in options.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value}: must be 0 or more, and finite")


def check_below_one(**options: float) -> None:
    """Raise ValueError for an option that is not in [0, 1)."""
    for name, value in options.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value}: must be 0 or more, and less than 1")


def widened(tensor: Tensor) -> Tensor:
    """A tensor in float32 where its type has fewer digits; else itself."""
    return tensor.float() if tensor.dtype in FEW_DIGITS else tensor
