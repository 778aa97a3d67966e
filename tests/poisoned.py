"""`cputrain train` whose network loses all numbers on rank 1, once: python -m tests.poisoned STEP train ..."""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from cputrain import train
from cputrain.cli import main

build = train.build_model


class Poison(nn.Module):
    """Zeros, and NaN in its `step`-th forward pass of training."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.passes = step, 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        lost = self.training and self.passes in (self.step, self.step + 1)  # once more to find the layer
        return images + (torch.nan if lost and os.environ["RANK"] == "1" else 0.0)


def poisoned(*arguments: Any) -> nn.Module:
    model = build(*arguments)
    model.relu = nn.Sequential(model.relu, Poison(int(sys.argv[1])))
    return model


train.build_model = poisoned
sys.exit(main(sys.argv[2:]))
