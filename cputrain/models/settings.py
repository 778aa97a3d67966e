"""Settings of a network: its name, batch-norm and initial weights."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Lt

from cputrain.settings import Positive

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
TORCHVISION, TIMM = "torchvision:", "timm:"  # prefixes of other libraries' networks


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The network, its batch-norm and its initial weights."""

    name: str = "resnet50"
    """Name of the network. resnet18, resnet34, resnet50, resnet101, resnet152 and alexnet are torchvision's; alexnet-bn
    adds batch-norm after each convolution; lenet and mnist-cnn: two convolutions and two linear layers, mnist-cnn with
    more channels; linear: one layer; torchvision:NAME and timm:NAME: any other classifier of torchvision or timm."""
    classes: Positive | None = None
    """Number of outputs of the network, at least the number of classes in the data; null: that number."""
    resnet_version: Literal["v1.5", "v1"] = "v1.5"
    """Where a block of resnet50, resnet101 or resnet152 halves the image. v1.5: in its 3 x 3 convolution (torchvision);
    v1: in its first 1 x 1 convolution (He et al. 2016)."""
    bn_decay: Annotated[float, Gt(0), Lt(1)] = 0.9
    """Fraction of batch-norm's running statistics kept in each step: 1 minus torch's momentum. Published runs use 0.9
    or 0.95."""
    bn_stats: Literal["local", "sync", "running"] = "local"
    """Statistics with which batch-norm normalizes in training. local: of each worker's images; sync: of all workers'
    images (SyncBatchNorm); running: the running statistics, which then stay frozen."""
    bn_ghost_batch: Positive | None = None
    """Images in a ghost batch: the part of a worker's batch that batch-norm normalizes separately (Hoffer et al. 2017).
    For bn_stats=local; null: the worker's whole batch."""
    zero_gamma: Literal["none", "last_of_block", "last_of_stage", "auto"] = "none"
    """Batch-norm layers of a resnet whose gamma starts at 0, so that their blocks start as identities. last_of_block:
    the last layer of every residual block (Goyal et al. 2017, 5.1); last_of_stage: only the last layer of each stage's
    last block; none: no layer; auto: last_of_block for a resnet, none for any other network."""
    weights: str | None = None
    """File of the initial weights: a checkpoint, a state dict, or another program's checkpoint (timm, Lightning, ...).
    Averaged weights are used if the file has them. A last layer of another size keeps its random weights; null: all
    weights start random."""
    winograd: Literal["auto", "off"] = "auto"
    """Winograd convolutions (Lavin and Gray 2016) in 3 x 3 layers of stride 1, with engine=native. auto: in the layers
    that they make faster, as measured at the first start on a machine; rounding errors are 1e-5 of the largest value,
    against 1e-6 with direct convolutions; off: in no layer."""
    freeze_to: str | None = None
    """Name of the last frozen layer, as in layer3 or layer4.0. All layers up to and including it keep their initial
    weights; null: all layers are trained."""

    @property
    def zeroed_gamma(self) -> str:
        """The meaning of `zero_gamma` for this network."""
        if self.zero_gamma != "auto":
            return self.zero_gamma
        return "last_of_block" if self.name in RESNETS else "none"
