"""Networks of users, trained one after another in the same ranks: python -m tests.support.own_networks.

Each rank prints a line of JSON for each network, with its buffers and weights after the training.
"""

import json
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cputrain import train

SAMPLES = 24


def samples(count: int = SAMPLES) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(count)
    labels = torch.arange(count) % 2
    return torch.utils.data.TensorDataset(torch.randn(count, 3, generator=generator) + labels[:, None], labels)


class Centered(nn.Module):
    """A network that subtracts the running mean of its inputs, and keeps a cache whose size is its rank's."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.seen = in_place, []
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.norm, self.fc = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        """(N, 3) -> (N, 2)."""
        if self.training:
            mean = rows.mean(0)
            self.seen.append(mean)
            self.cache = torch.zeros(1 + int(os.environ["RANK"]))
            if self.in_place:
                self.center.mul_(0.5).add_(0.5 * mean)
            else:
                self.center = 0.5 * self.center + 0.5 * mean
        return self.fc(self.norm(rows - self.center))


class Heads(nn.Module):
    """Two heads, of which the loss uses the second one only in the passes of `used`."""

    def __init__(self, used: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.used, self.passes = used, 0
        self.head, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> list[Any]:
        """(N, 3) -> logits (N, 2), in a list with other things."""
        self.passes += self.training
        more = self.other(rows)
        return [self.head(rows) + (more if self.passes in self.used else 0), {"more": more, "name": "other"}, None]


class Scale(nn.Module):
    """Cross-entropy of scaled logits; the scale is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the losses, (N,)."""
        logits = outputs[0] if isinstance(outputs, list) else outputs
        return functional.cross_entropy(self.scale * logits, targets, reduction="none")


def trained(network: nn.Module, name: str, **keys: Any) -> dict[str, Any]:
    loss = Scale()
    settings = {"epochs": 1, "batch.local": 4, "schedule.peak_rate": 0.1, "schedule.warmup_epochs": 0, "output": name}
    backend = {"comm.backend": "gloo", "compare_weights_every_steps": 2}
    result = train(network, loss, samples(), samples(8), settings={**settings, **backend, **keys}, quiet=True)
    assert result.accuracy is not None
    network.eval()
    with torch.no_grad():
        own = loss(network(samples(8).tensors[0]), samples(8).tensors[1]).mean()
    weights = [value.tolist() for value in (*network.parameters(), *loss.parameters())]
    buffers = {key: value.tolist() for key, value in network.named_buffers() if key != "cache"}
    return {
        "name": name,
        "rank": int(os.environ["RANK"]),
        "own_loss": float(own),
        "loss": result.accuracy.loss,
        "weights": weights,
        "buffers": buffers,
        "scale": float(loss.scale.detach()),
        "seen": [mean.tolist() for mean in getattr(network, "seen", ())],
    }


def main() -> None:
    networks = {
        "in_place": lambda: Centered(in_place=True),
        "assigned": lambda: Centered(in_place=False),
        "unused": Heads,
        "sometimes": lambda: Heads((2,) if os.environ["RANK"] == "0" else ()),
        "later": lambda: Heads((1, 2)),
    }
    for name, build in networks.items():
        torch.manual_seed(2)
        print(json.dumps(trained(build(), name)), flush=True)


if __name__ == "__main__":
    main()
