"""The network and its initial weights."""

import re
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from cputrain.recipe.schema.base import Positive, Section, misfit

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
OWN = (*RESNETS, "alexnet", "alexnet-bn", "lenet", "mnist-cnn", "linear")
TORCHVISION = "torchvision:"


class ModelSection(Section):
    """The network, its batch-norm and the weights that it starts from."""

    name: str = "resnet50"
    """Name of the network. resnet18, resnet34, resnet50, resnet101, resnet152 and alexnet are torchvision's; alexnet-bn
    adds batch-norm after each convolution; lenet and mnist-cnn: two convolutions and two linear layers, mnist-cnn with
    more channels; linear: one layer; torchvision:NAME: any other classifier of torchvision."""
    classes: Positive | None = None
    """Number of outputs of the network; null: the number of classes in the data. It cannot be smaller than that."""
    resnet_version: Literal["v1.5", "v1"] = "v1.5"
    """Where a block of resnet50, resnet101 or resnet152 halves the image. v1.5: in its 3 x 3 convolution (torchvision);
    v1: in its first 1 x 1 convolution (He et al. 2016)."""
    bn_decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Fraction of batch-norm's running statistics kept in each step: 1 minus torch's momentum. Published runs use 0.9
    or 0.95."""
    bn_stats: Literal["local", "sync", "running"] = "local"
    """Statistics by which batch-norm normalizes in training. local: of each worker's own images; sync: of all workers'
    images (SyncBatchNorm); running: the running statistics, which then stay frozen."""
    bn_ghost_batch: Positive | None = None
    """Images in a ghost batch: the part of a worker's batch that batch-norm normalizes by itself (Hoffer et al. 2017).
    For bn_stats=local; null: the worker's whole batch."""
    zero_gamma: Literal["none", "last_of_block", "last_of_stage"] = "none"
    """Batch-norm layers of a resnet whose gamma starts at 0, so that their blocks start as identities. last_of_block:
    the last layer of every residual block (Goyal et al. 2017, 5.1); last_of_stage: only that of each stage's last
    block; none: no layer."""
    weights: str | None = None
    """File of the initial weights: a checkpoint, a state dict, or another program's checkpoint (timm, Lightning, ...).
    Averaged weights are taken where there are some. A last layer of another size keeps its random weights; null: all
    weights start random."""
    freeze_to: str | None = None
    """Name of the last frozen layer, as in layer3 or layer4.0. All layers up to and including it keep their initial
    weights; null: all layers are trained."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in OWN or re.fullmatch(TORCHVISION + r"[a-z]\w*", name):
            return name
        near = get_close_matches(name, OWN, n=1, cutoff=0.5)
        known = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(OWN)}, {TORCHVISION}NAME"
        raise ValueError(f"unknown network: {known}")

    @model_validator(mode="after")
    def _options_fit(self) -> "ModelSection":
        if self.zero_gamma != "none" and self.name not in RESNETS:
            raise misfit(
                f"model.zero_gamma={self.zero_gamma} is an option of {', '.join(RESNETS)}, not of {self.name}: "
                "set model.zero_gamma=none",
                "model.name",
                "model.zero_gamma",
            )
        if self.resnet_version != "v1.5" and self.name not in RESNETS[2:]:
            raise misfit(
                f"model.resnet_version={self.resnet_version} is an option of {', '.join(RESNETS[2:])}, not of "
                f"{self.name}: set model.resnet_version=v1.5",
                "model.name",
                "model.resnet_version",
            )
        if self.bn_ghost_batch is not None and self.bn_stats != "local":
            raise misfit(
                f"model.bn_ghost_batch={self.bn_ghost_batch} is an option of model.bn_stats=local, not of "
                f"{self.bn_stats}: set model.bn_ghost_batch=null",
                "model.bn_stats",
                "model.bn_ghost_batch",
            )
        return self
