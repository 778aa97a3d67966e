"""The network."""

import re
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from cputrain.recipe.schema.base import Positive, Section, misfit

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
OWN = (*RESNETS, "alexnet", "alexnet-bn", "lenet", "mnist-cnn", "linear")
TORCHVISION = "torchvision:"


class ModelSection(Section):
    """The network."""

    name: str = "resnet50"
    """resnet18, 34, 50, 101, 152 and alexnet: torchvision's; alexnet-bn: with batch-norm after each convolution;
    lenet and mnist-cnn: two convolutions and two layers, small and wider; linear: one layer; or torchvision:NAME, any
    of its classifiers."""
    classes: Positive | None = None
    """Outputs; null: as many as the data has classes."""
    stride: Literal["v1.5", "v1"] = "v1.5"
    """Of resnet50 and deeper, where a block halves the image: in its 3 x 3 convolution (v1.5, torchvision's) or in its
    first 1 x 1 (v1, He et al. 2016)."""
    bn_decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of the running statistics that a step keeps (torch's momentum is 1 - this); published: 0.95."""
    bn_stats: Literal["local", "sync", "running"] = "local"
    """What batch-norm normalises by in training: each worker's own images, all workers', or the running statistics as
    they are, which then stay."""
    bn_stats_batch: Positive | None = None
    """Of bn_stats=local: a worker's images are cut into parts of so many, each normalised by itself; null: not."""
    zero_gamma: Literal["none", "last_of_block", "last_of_stage"] = "none"
    """Of resnets: start the last batch-norm of each residual block (Goyal et al. 2017, 5.1), or of each stage's last
    block, at 0: they begin as identities."""
    weights: str | None = None
    """A file of weights to start from: a checkpoint of ours or a state dict; a head of another size starts anew."""
    freeze_to: str | None = None
    """All layers up to and with the one of this name (as in layer3 or layer4.0) stay as they are."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in OWN or re.fullmatch(TORCHVISION + r"[a-z]\w*", name):
            return name
        near = get_close_matches(name, OWN, n=1, cutoff=0.5)
        known = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(OWN)}, {TORCHVISION}NAME"
        raise ValueError(f"no such network: {known}")

    @model_validator(mode="after")
    def _options_fit(self) -> "ModelSection":
        if self.zero_gamma != "none" and self.name not in RESNETS:
            raise misfit(
                f"model.zero_gamma={self.zero_gamma} is an option of {', '.join(RESNETS)}, not of {self.name}: "
                "set model.zero_gamma=none",
                "model.name",
                "model.zero_gamma",
            )
        if self.stride != "v1.5" and self.name not in RESNETS[2:]:
            raise misfit(
                f"model.stride={self.stride} is an option of {', '.join(RESNETS[2:])}, not of {self.name}: "
                "set model.stride=v1.5",
                "model.name",
                "model.stride",
            )
        if self.bn_stats_batch is not None and self.bn_stats != "local":
            raise misfit(
                f"model.bn_stats_batch={self.bn_stats_batch} is an option of model.bn_stats=local, not of "
                f"{self.bn_stats}: set model.bn_stats_batch=null",
                "model.bn_stats",
                "model.bn_stats_batch",
            )
        return self
