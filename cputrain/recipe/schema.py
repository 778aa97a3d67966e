"""Recipe schema: every section and key, with its type, default and limits. The docstring below a key documents it."""

import re
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cputrain.affinity.planner.request import CPUS, NUMBER, RECIPE_OPTIONS, Option
from cputrain.affinity.topology.machine import parse_list
from cputrain.affinity.wording import join_or
from cputrain.predict.layers import NETWORKS

MOST = 10**10  # limit of every count: larger ones are typing errors, which would only fail later
Positive = Annotated[int, Field(ge=1, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]
MISFIT = "misfit"
# Terminals interpret control characters, and no file name has NUL. The surrogates from U+DC80 to U+DCFF stand for bytes
# that are not UTF-8, which file names may contain.
NO_NAME = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")
NO_TEXT = re.compile(rf"{NO_NAME.pattern}|[\udc80-\udcff]")
PATHS = ("path", "stage_dir", "weights", "output")


class Section(BaseModel):
    """A group of recipe keys; it is frozen, and unknown keys are errors.

    The docstring below a field is its description in the reference and in error messages. Its first sentence defines
    the value and its unit, and must be readable on its own.
    """

    # keys.py reads the docstrings, because pydantic would parse this file once per class on every import.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any, about: ValidationInfo) -> Any:
        unfit = NO_NAME if about.field_name in PATHS else NO_TEXT
        if isinstance(value, str) and (found := unfit.search(value)):
            raise ValueError(f"it has {found[0]!a}, which is a control character or not UTF-8; remove it")
        return value


def misfit(message: str, *keys: str) -> PydanticCustomError:
    """Return the error for values that are valid individually but contradict each other.

    `keys` are the dotted keys involved; the message points to the first of them that the user has set.
    """
    return PydanticCustomError(MISFIT, "{message}", {"message": message, "keys": keys})


class PhaseSection(Section):
    """Settings that replace the recipe's from an epoch on. A null key keeps the value of the previous phase."""

    from_epoch: NotNegative
    """First epoch of the phase, counted from 0. Phases are listed in the order of their epochs."""
    crop: Positive | None = None
    """Side of the training images in pixels, in place of data.crop. Evaluation keeps data.crop; null: no change."""
    train_crop: Literal["random_resized", "random"] | None = None
    """How training images are cropped, in place of data.train_crop; null: no change."""
    weight_decay: Rate | None = None
    """Weight decay factor, in place of optim.weight_decay; null: no change."""
    restart_rate: Rate | None = None
    """Learning rate at which the schedule restarts at the phase's first step. From there it decays to 0 at the last
    step of the training, as a polynomial of power restart_power; null: the schedule continues."""
    restart_power: Annotated[float, Field(gt=0)] = 2.0
    """Power of the polynomial decay after restart_rate. 1 is a linear decay; without restart_rate it has no effect."""


SYNTHETIC, LINE, USER_SAMPLES = "synthetic", "line", "own"


class AugmentSection(Section):
    """Random changes to a training image after cropping, drawn anew for each image and epoch; 0 turns a change off."""

    rotate: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest rotation, as a fraction of a full turn. The angle is uniform in both directions: 0.05 is up to 18 degrees
    left or right."""
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Largest change of scale, as a fraction. 0.2 scales the image by a uniform factor between 0.8 and 1.2."""
    shift: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Largest shift, as a fraction of the image's side. Horizontal and vertical shifts are drawn separately, in both
    directions."""
    brightness: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest change of brightness, as a fraction. 0.2 multiplies it by a uniform factor between 0.8 and 1.2."""
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest change of contrast, as a fraction. 0.2 multiplies it by a uniform factor between 0.8 and 1.2."""
    saturation: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest change of color saturation, as a fraction. 0.2 multiplies it by a uniform factor between 0.8 and 1.2."""
    lighting: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of AlexNet's color noise, as a factor. The noise follows the principal components of
    ImageNet's colors; Krizhevsky et al. 2012 (4.1) use 0.1."""
    randaugment: Annotated[int, Field(ge=0, le=10)] = 0
    """Number of RandAugment operations on each image, drawn from torchvision's 14 (Cubuk et al. 2020; usually 2). They
    are applied after the changes above."""
    randaugment_magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength of RandAugment operations, in steps from 0 (none) to 30."""
    mixup: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Parameter alpha of mixup (Zhang et al. 2018; usually 0.2). The images of a worker's batch and their labels are
    averaged in pairs, by weights from a Beta(alpha, alpha) distribution."""
    cutmix: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Parameter alpha of CutMix (Yun et al. 2019; usually 1). A rectangle of each image is replaced by the same
    rectangle of another image, and the labels are mixed in proportion. With mixup, each batch uses one of the two."""


class DataSection(Section):
    """The training and validation data, and how images are read, cropped and normalized."""

    path: str | None = None
    """Folder of the images: train/CLASS/* and val/CLASS/*, CLASS/* alone, shards, tar files, Parquet or TFRecords.
    Three words select other data. synthetic: random pixels, neither decoded nor evaluated, to measure throughput; line:
    points of y = 2 x + 1 with noise, for linear regression; own: the samples that a script passes to cputrain.train (a
    folder of such a name is ./own); null: set it on the command line."""
    prepare: str | None = None
    """Command that creates the data, printed if data.path does not exist. {path} in it is replaced by data.path; null:
    no command."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of the training images to use for validation, drawn from each class in proportion. All trainings draw
    the same images, whatever their seed, and the data's own validation images become the test images. null: none if
    the data has validation images, otherwise 0.2."""
    label_column: str | None = None
    """Column of Parquet files that has the labels; null: the only suitable column."""
    crop: Positive = 224
    """Side of the network's square input images, in pixels."""
    resize: Positive | None = None
    """Short side, in pixels, to which an image is scaled before a square is cropped from it. It applies to evaluation
    and to train_crop=random; null: crop x 256 / 224."""
    train_crop: Literal["random_resized", "random"] = "random_resized"
    """How training images are cropped. random_resized: a region of random area and aspect ratio, scaled to a square
    (Szegedy et al. 2014); random: a square at a random position in the image scaled to `resize`."""
    min_crop_area: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest area of a random_resized crop, as a fraction of the image's area."""
    max_crop_aspect: Annotated[float, Field(ge=1)] = 4 / 3
    """Largest aspect ratio of a random_resized crop: its long side divided by its short side."""
    augment: AugmentSection = AugmentSection()
    flip: bool = True
    """Whether training images are mirrored, left to right, with a probability of one half."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Means of the red, green and blue channels, on a scale of 0 to 1, subtracted from every pixel. The default is
    ImageNet's."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Standard deviations of the red, green and blue channels, on a scale of 0 to 1. Pixels are divided by them after
    the mean is subtracted; the default is ImageNet's."""
    stage_dir: str | None = None
    """Folder on a local disk of each host, to which one worker per host copies the shards. Training starts immediately
    from data.path and switches to the copies, which are deleted at the end; null: no copies."""
    block_mib: Annotated[float, Field(ge=0)] = 0.0
    """Size in MiB of the blocks in which shards are read. Parallel file systems read large blocks faster; each worker
    keeps one block in memory for every image of its batch. 0 reads images individually."""
    decoder: Literal["auto", "turbo", "pillow"] = "auto"
    """JPEG decoder: turbo (libjpeg-turbo 3) or pillow. turbo decodes only the cropped region of an image; auto: turbo
    if it can be compiled, otherwise pillow."""
    on_error: Literal["skip", "raise"] = "skip"
    """What to do with an image that cannot be decoded. skip: remove it from its batch, with a warning and a count;
    raise: end the training with an error."""
    max_damaged: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest fraction of a split's images that may be damaged with on_error=skip. One damaged image is always allowed,
    unless max_damaged is 0. With more, or if no image can be read, the training or evaluation ends with an error."""
    last_batch: Literal["drop", "spread"] = "drop"
    """What to do with the images of an epoch that are too few for another global batch. drop: skip them in this
    epoch (each epoch draws a new order); spread: add one step and make all steps of the epoch slightly smaller."""
    train_images: Positive | None = None
    """Number of training images, for plans made on a machine without the data. A training counts the images itself. For
    generated data it sets the number; null: 1,281,167 synthetic images, or 100 points."""
    images_per_epoch: Positive | None = None
    """Number of training images that count as one epoch; null: all of them. It cannot exceed the images in train/."""

    @property
    def generated(self) -> bool:
        """Whether the data is generated from the seed or passed by a script, rather than read from data.path."""
        return self.path in (SYNTHETIC, LINE, USER_SAMPLES)

    @property
    def kind(self) -> str:
        """The kind of data, as named in outputs and events."""
        return {SYNTHETIC: "synthetic data", LINE: "points", USER_SAMPLES: "samples"}.get(self.path or "", "images")

    @property
    def unit(self) -> str:
        """The word for samples in outputs."""
        return {LINE: "points", USER_SAMPLES: "samples"}.get(self.path or "", "images")

    @property
    def short_side(self) -> int:
        """Pixels of the short side from which squares are cropped."""
        return self.resize or round(self.crop * 256 / 224)


RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
OWN_NETWORKS = tuple(sorted(file.stem for file in NETWORKS.glob("*.json")))
TORCHVISION, TIMM = "torchvision:", "timm:"
LIBRARY_NETWORK = re.compile(rf"{TORCHVISION}[a-z]\w*|{TIMM}[a-z]\w*(\.\w+)?")


class ModelSection(Section):
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
    bn_decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
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

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in OWN_NETWORKS or LIBRARY_NETWORK.fullmatch(name):
            return name
        near = get_close_matches(name, OWN_NETWORKS, n=1, cutoff=0.5)
        libraries = [f"{library}{name}" for library in (TORCHVISION, TIMM)]
        meant = [*near, *filter(LIBRARY_NETWORK.fullmatch, libraries)]
        known = f"did you mean {join_or(meant)}?" if meant else f"known are {join_or(OWN_NETWORKS)}"
        raise ValueError(f"unknown network, {known}")

    @model_validator(mode="after")
    def _options_fit(self) -> "ModelSection":
        if self.zero_gamma not in ("none", "auto") and self.name not in RESNETS:
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


Decay = Annotated[float, Field(ge=0, lt=1)]
OptimizerName = Literal[
    "sgd",
    "momentum",
    "lars",
    "lamb",
    "adam",
    "adamw",
    "rmsprop",
    "adagrad",
    "adadelta",
    "adagrad_da",
]

# The optimizers that use each option; others would silently ignore it.
OPTIMIZERS_WITH = {
    "momentum": ("momentum", "lars", "rmsprop"),
    "nesterov": ("momentum", "lars"),
    "beta1": ("adam", "adamw", "lamb"),
    "beta2": ("adam", "adamw", "lamb"),
    "alpha": ("rmsprop",),
    "rho": ("adadelta",),
    "epsilon": ("lars", "lamb", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "adagrad_da"),
    "lars_variant": ("lars",),
    "trust_coefficient": ("lars",),
    "trust_clip": ("lars",),
    "momentum_correction": ("lars",),
    "adapt_bn_and_bias": ("lars", "lamb"),
}
LEAST_EPSILON = 1.2e-38
"""The smallest normal number of float32: a smaller epsilon is 0 in torch's optimizers, where 0 / 0 is NaN."""


class OptimSection(Section):
    """The optimizer. An option that the chosen optimizer does not use is an error."""

    name: OptimizerName = "momentum"
    """Name of the optimizer. sgd: plain stochastic gradient descent; momentum: the same with momentum; lars: momentum
    with layer-wise learning rates (You et al. 2017); lamb: Adam with layer-wise learning rates (You et al. 2020);
    adagrad_da: Adagrad by dual averaging (Duchi et al. 2011); adam, adamw, rmsprop, adagrad and adadelta are
    torch's."""
    scale_rate_by: Literal["auto", "batch", "workers", "none"] = "auto"
    """How schedule.peak_rate is scaled to the job. batch: from schedule.reference_batch to the job's global batch, by
    the optimizer's scaling rule; workers: multiplied by the number of workers (Horovod's lr * hvd.size()); none: not at
    all. auto: batch for peak_rate=auto, none for a number."""
    momentum: Decay = 0.9
    """Momentum coefficient: the fraction of the last update added to the next one. For momentum, lars and rmsprop."""
    nesterov: bool = False
    """Whether to use Nesterov momentum. For momentum and lars."""
    weight_decay: Rate = 5e-5
    """Weight decay: the factor of the L2 penalty that is added to the gradients. adamw and lamb subtract it from the
    weights instead (decoupled), adagrad_da adds it to the function that it minimizes; 0 turns it off."""
    decay_bn_and_bias: bool = True
    """Whether weight_decay also applies to batch-norm parameters and biases. In timm's networks these include position
    embeddings and class tokens."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of the gradient over all layers. Larger gradients are scaled down to it; null: no clipping."""
    beta1: Decay = 0.9
    """Decay factor of the running mean of the gradients, per step. For adam, adamw and lamb."""
    beta2: Decay = 0.999
    """Decay factor of the running mean of the squared gradients, per step. For adam, adamw and lamb."""
    alpha: Decay = 0.99
    """Decay factor of the running mean of the squared gradients, per step. For rmsprop."""
    rho: Decay = 0.9
    """Decay factor of the running means of squared gradients and squared updates, per step. For adadelta; Zeiler 2012
    uses 0.95."""
    epsilon: Rate | Auto = "auto"
    """Small number added to the denominator of the update to avoid division by 0. auto: 0 for lars, 1e-6 for lamb,
    1e-10 for adagrad_da, and torch's default for adam, adamw, rmsprop, adagrad and adadelta, which need a value above
    0; sgd and momentum do not use it."""
    lars_variant: Literal["caffe", "timm", "nus"] = "caffe"
    """Where lars multiplies by learning rate and trust ratio. caffe: both before momentum (Intel Caffe, MLPerf's
    TensorFlow); timm: the trust ratio before, the learning rate after; nus: both after (NUS, Intel's MLPerf
    PyTorch)."""
    trust_coefficient: Annotated[float, Field(gt=0)] = 0.001
    """Trust coefficient: the factor of each layer's ratio of weight norm to gradient norm. For lars."""
    trust_clip: bool = False
    """Whether to limit each layer's learning rate to the schedule's. For lars."""
    momentum_correction: bool = False
    """Whether momentum is rescaled when the learning rate changes (Goyal et al. 2017, section 3). For lars with
    lars_variant=caffe."""
    adapt_bn_and_bias: bool = False
    """Whether the parameters of decay_bn_and_bias also get layer-wise learning rates, as in Intel Caffe but not in
    MLPerf. For lars and lamb."""

    @model_validator(mode="after")
    def _options_are_read(self) -> "OptimSection":
        fields = type(self).model_fields
        for option, optimizers in OPTIMIZERS_WITH.items():
            if self.name not in optimizers and getattr(self, option) != fields[option].default:
                raise misfit(
                    f"optim.{option} is an option of {join_or(optimizers)}, not of {self.name}: remove it",
                    f"optim.{option}",
                    "optim.name",
                )
        if self.nesterov and not self.momentum:
            raise misfit(
                "optim.nesterov needs momentum, and optim.momentum is 0: set it above 0, or remove optim.nesterov",
                "optim.nesterov",
                "optim.momentum",
            )
        divides = self.name in OPTIMIZERS_WITH["epsilon"] and self.name not in ("lars", "lamb", "adagrad_da")
        if divides and self.epsilon != "auto" and self.epsilon < LEAST_EPSILON:
            raise misfit(
                f"optim.epsilon={self.epsilon:g} turns weights without a gradient into NaN in {self.name}: set it to "
                f"{LEAST_EPSILON} or more, or to auto",
                "optim.epsilon",
                "optim.name",
            )
        if self.momentum_correction and self.lars_variant != "caffe":
            raise misfit(
                f"optim.momentum_correction is an option of optim.lars_variant=caffe, not of {self.lars_variant}: "
                "remove it",
                "optim.momentum_correction",
                "optim.lars_variant",
            )
        return self


class BatchSection(Section):
    """Images per step: either local x workers x accumulation, or a fixed global batch for any number of workers."""

    local: Positive = 32
    """Images in one backward pass of one worker. With batch.global it is the upper limit instead."""
    accumulation: Positive = 1
    """Gradient accumulation steps: backward passes of each worker whose gradients are summed before one update."""
    global_: Positive | None = Field(default=None, alias="global")
    """Images in one step over all workers. Workers get equal shares (up to one image, if it does not divide evenly) and
    accumulate gradients as often as batch.local requires; null: local x workers x accumulation. Setting it on the
    command line discards the recipe's batch.accumulation."""

    @model_validator(mode="after")
    def _accumulation_is_decided_once(self) -> "BatchSection":
        if self.global_ is not None and self.accumulation != 1:
            raise misfit(
                f"batch.global={self.global_} already decides the gradient accumulation steps: remove "
                f"batch.accumulation={self.accumulation}",
                "batch.accumulation",
                "batch.global",
            )
        return self


class EvaluateSection(Section):
    """Evaluation on all validation images: exact loss, top-1 and top-5 accuracy."""

    every_epochs: Positive | None = 1
    """Number of epochs between evaluations; null: once, after the last epoch."""
    batch: Positive | None = None
    """Images in one forward pass of one worker during evaluation; null: batch.local."""


class CheckpointSection(Section):
    """Checkpoints of the training state, from which `cputrain train --resume` continues."""

    every_epochs: Positive | None = 1
    """Number of epochs between checkpoints. A checkpoint is also saved before every evaluation, so that its failure
    loses nothing, and after the last step; null: only these."""
    every_minutes: Annotated[float, Field(gt=0)] | None = 5.0
    """Minutes between checkpoints within an epoch: the most that a crash can cost, unless one step takes longer. They
    are written in the background; null: none."""
    every_steps: Positive | None = None
    """Number of steps between checkpoints within an epoch, in place of every_minutes; null: none."""
    keep: Positive = 2
    """Number of checkpoints to keep: the newest ones. The best one (checkpoints/best) is kept in addition. With 1,
    there is no older one to fall back to if a file is damaged."""


class CommSection(Section):
    """Communication of gradients between the workers."""

    backend: Literal["auto", "ccl", "gloo", "mpi"] = "auto"
    """Backend of torch.distributed: ccl (oneCCL), gloo, or mpi, which only torch built from source with MPI has. auto:
    ccl if every rank can use it, otherwise gloo."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a rank waits for the others in a collective operation before it fails."""
    bucket_mib: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Size in MiB of the gradient buckets of DDP, each of which is one all-reduce. auto: computed from all-reduce times
    measured at the start of the training."""
    compression: Literal["none", "bf16"] = "none"
    """Number format of the gradients in transit. bf16 halves the traffic: it sends bfloat16 and adds the rounding error
    to the next step's gradients; none sends them as they are."""
    find_unused_parameters: bool = False
    """Search in every pass for parameters that the loss does not depend on, as DDP's option of this name. The search
    starts by itself if the first batch has such parameters: set it to true if only later batches do."""


def _cpus(value: str) -> str:
    if value != "all" and not parse_list(value):
        raise ValueError("give all, or a list of CPUs as in 0-15,32")
    return value


def _plan_key(option: Option) -> tuple[Any, Any]:
    """Return the type and the field of a planning option."""
    values: Any = Literal.__getitem__(option.choices) if option.choices else bool
    if option.kind == NUMBER:
        values = Annotated[int, Field(ge=option.least, le=MOST)] | Auto
    elif option.kind == CPUS:
        values = Annotated[str, AfterValidator(_cpus)]
    return values, Field(default=option.default, description=option.manual)


if TYPE_CHECKING:

    class PlanSection(Section):
        """The keys of the planning options."""

        def __init__(self, **keys: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    PlanSection = create_model(
        "PlanSection",
        __base__=Section,
        __module__=__name__,
        __doc__="Requests to the planner of workers, threads and cores; auto leaves a choice to the planner.",
        **{option.name: _plan_key(option) for option in RECIPE_OPTIONS},
    )


class ScheduleSection(Section):
    """The learning rate of each step: a linear warm-up from start_rate to peak_rate, then a decay."""

    name: Literal["linear", "poly", "poly_from_start", "steps", "cosine", "constant"] = "linear"
    """Decay of the learning rate after the warm-up. linear: a straight line to end_rate; poly: a polynomial of the
    remaining steps (MLPerf); poly_from_start: the same, but counted from step 0 (Intel Caffe); steps: multiplied by
    milestone_factor at each milestone; cosine: half a cosine; constant: no decay."""
    start_rate: Rate = 0.0
    """Learning rate of the first step, at which the warm-up starts. It is not scaled with batch or workers, and has no
    effect without a warm-up."""
    peak_rate: Rate | Auto = "auto"
    """Learning rate at the end of the warm-up, before optim.scale_rate_by. auto: by the optimizer's scaling rule, which
    for momentum is 0.1 x global batch / 256; lars, adagrad, adadelta and adagrad_da have no rule and need a number."""
    auto_rate_factor: Annotated[float, Field(gt=0)] = 1.0
    """Factor by which the learning rate of peak_rate=auto is multiplied. Setting peak_rate to a number on the command
    line resets it to 1."""
    reference_batch: Positive | None = None
    """Global batch, in images, for which a numeric peak_rate was tuned. A job with another global batch prints a
    warning, or scales the rate (optim.scale_rate_by=batch). Setting peak_rate on the command line resets it to null
    (unknown)."""
    end_rate: Rate = 0.0
    """Learning rate after the last step. For linear, poly, poly_from_start and cosine."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 5.0
    """Length of the warm-up in epochs, which may be fractional. 0 starts at the peak rate; it cannot exceed epochs."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """Power of the polynomial decay. For poly and poly_from_start; 1 is a straight line."""
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = (30.0, 60.0, 80.0)
    """Epochs after which the learning rate is multiplied by milestone_factor. For steps; milestones after the last
    epoch have no effect."""
    milestone_factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor by which the learning rate is multiplied at each milestone. For steps."""

    @model_validator(mode="after")
    def _rate_options_fit(self) -> "ScheduleSection":
        if self.peak_rate == "auto" and self.reference_batch is not None:
            raise misfit(
                f"schedule.reference_batch={self.reference_batch} needs a numeric schedule.peak_rate, which is auto: "
                "remove it, or set schedule.peak_rate",
                "schedule.reference_batch",
                "schedule.peak_rate",
            )
        if self.peak_rate != "auto" and self.auto_rate_factor != 1.0:
            raise misfit(
                f"schedule.auto_rate_factor={self.auto_rate_factor:g} applies to schedule.peak_rate=auto only, which "
                f"is {self.peak_rate:g}: remove it",
                "schedule.auto_rate_factor",
                "schedule.peak_rate",
            )
        return self


class SweepSection(Section):
    """The trainings of `cputrain sweep`: this recipe with other settings. `cputrain train` ignores the section."""

    grid: dict[str, tuple[str | int | float | bool | None, ...]] = Field(default={})
    """Values to try for each key, as in {batch.local: [32, 64]}. Every combination of the values is trained; empty: no
    grid."""
    runs: tuple[str, ...] = ()
    """Settings to use together, as in "optim.name=sgd schedule.peak_rate=0.5". Each entry is combined with every point
    of the grid; empty: the recipe's own settings."""


__all__ = [
    "AugmentSection",
    "BatchSection",
    "CheckpointSection",
    "CommSection",
    "DataSection",
    "EvaluateSection",
    "ModelSection",
    "OptimSection",
    "PhaseSection",
    "PlanSection",
    "Recipe",
    "ScheduleSection",
    "SweepSection",
]


class Recipe(Section):
    """The settings of a training: what it computes, and how it runs."""

    name: str = "training"
    """Name of the training, in outputs, reports and the default output folder."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    phases: tuple[PhaseSection, ...] = ()
    """Changes of crops, weight decay and learning rate from given epochs on; empty: the same settings in all epochs."""
    epochs: Positive = 90
    """Number of passes over the training images."""
    max_steps: Positive | None = None
    """Number of steps after which the training stops early, for trials. The learning-rate schedule still spans all
    epochs; null: no limit."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 1
    """Random seed of the initial weights, the order of the images and their augmentation."""
    loss: Literal["cross_entropy", "mse"] = "cross_entropy"
    """Loss that the training minimizes. cross_entropy: softmax cross-entropy with the label; mse: mean squared
    difference between the outputs and the label's one-hot vector, or y for data.path=line."""
    label_smoothing: Fraction = 0.0
    """Fraction of each label that is spread evenly over all classes (Szegedy et al. 2016, section 7). 0: no
    smoothing."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay factor of an exponential moving average (EMA) of the weights, per step. The averaged weights are evaluated
    and saved in addition to the trained weights; null: no average."""
    precision: Literal["float32", "bf16", "float64"] = "float32"
    """Number format of the computation. bf16: convolutions and matrix products in bfloat16 (autocast), weights in
    float32; float64: to check exactness."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """What to do when a loss or gradient becomes NaN or infinite. stop: end the training with an error; skip: make no
    update in this step; rollback: reload the last checkpoint's weights and continue with the next images."""
    log_norms_every_steps: Positive | None = None
    """Number of steps between records of every layer's weight norm, gradient norm and trust ratio in events.jsonl;
    null: no records."""
    compare_weights_every_steps: Positive | None = 100
    """Number of steps between comparisons of the workers' weights and optimizer state; null: none. They must be
    identical bit for bit: a difference, as from faulty memory or a faulty processor, ends the training. They are also
    compared before every checkpoint."""
    log: tuple[Literal["csv", "mlflow", "mlperf", "tensorboard", "wandb"], ...] = ()
    """Formats in which the run is logged in addition to events.jsonl, in its folder metrics/. csv: steps.csv and
    epochs.csv; mlperf: lines in the format of MLPerf's rules; tensorboard: scalars; mlflow, wandb: parameters, metrics
    and report to the experiment tracker that its own variables name. tensorboard, mlflow and wandb need the extra of
    that name, as in cputrain[mlflow]; empty: none."""
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    comm: CommSection = CommSection()
    engine: Literal["auto", "native", "eager", "compile", "ipex"] = "auto"
    """How torch runs the network, always channels-last and with oneDNN. eager: operator by operator; native: with
    kernels of cputrain, compiled once, that fuse batch-norm, residual and ReLU, and for evaluation with batch-norm
    folded into the convolutions; compile: torch.compile; ipex: Intel's extension for PyTorch, for torch 2.8. auto:
    native, or eager without a C++ compiler or for a network of your own without Conv2d and BatchNorm2d layers, unless
    `cputrain tune` found another engine faster on this machine; a training does not measure them itself."""
    plan: PlanSection = PlanSection()
    sweep: SweepSection = SweepSection()
    output: str = ""
    """Folder of the run: its events, checkpoints, logs and report; empty: runs/NAME."""

    @model_validator(mode="after")
    def _epochs_fit(self) -> "Recipe":
        warmup = self.schedule.warmup_epochs
        if warmup > self.epochs:
            raise misfit(
                f"schedule.warmup_epochs={warmup:g} is longer than epochs={self.epochs}: "
                f"set schedule.warmup_epochs to {self.epochs} or less, or epochs to {ceil(warmup)} or more",
                "epochs",
                "schedule.warmup_epochs",
            )
        starts = [phase.from_epoch for phase in self.phases]
        if starts != sorted(set(starts)):
            raise misfit(f"phases start at epochs {starts}: list them in order, each from a later epoch", "phases")
        if starts and starts[-1] >= self.epochs:
            raise misfit(
                f"the last phase starts at epoch {starts[-1]} (counted from 0), but epochs={self.epochs}: remove it, "
                f"or set epochs to {starts[-1] + 1} or more",
                "epochs",
                "phases",
            )
        return self

    @model_validator(mode="after")
    def _loss_fits(self) -> "Recipe":
        regression = self.data.path == LINE
        required: dict[str, tuple[object, object]] = {
            "model.name": (self.model.name, "linear"),
            "model.classes": (self.model.classes or 1, 1),
            "loss": (self.loss, "mse"),
            "label_smoothing": (self.label_smoothing, 0.0),
        }
        for key, (value, right) in required.items():
            if regression and value != right:
                raise misfit(
                    f"data.path={LINE} is linear regression, which does not work with {key}={value}: set {key}={right}",
                    "data.path",
                    key,
                )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output or f"runs/{self.name}")
