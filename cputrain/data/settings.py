"""Settings of the image pipeline: where the data is, and how images are read, cropped, changed and normalized."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from cputrain.settings import Fraction, Positive, Rate

SYNTHETIC, LINE, USER_SAMPLES = "synthetic", "line", "own"
TrainCrop = Literal["random_resized", "random"]


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Ranges of the random changes to a training image, drawn anew for each image; 0 turns a change off."""

    rotate: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """Largest rotation, as a fraction of a full turn. The angle is uniform in both directions: 0.05 is up to 18 degrees
    left or right."""
    zoom: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Largest change of scale, as a fraction. 0.2 scales the image by a uniform factor between 0.8 and 1.2."""
    shift: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Largest shift, as a fraction of the image's side. Horizontal and vertical shifts are drawn separately, in both
    directions."""
    brightness: Fraction = 0.0
    """Largest change of brightness, as a fraction. 0.2 multiplies it by a uniform factor between 0.8 and 1.2."""
    contrast: Fraction = 0.0
    """Largest change of contrast, as a fraction. 0.2 multiplies it by a uniform factor between 0.8 and 1.2."""
    saturation: Fraction = 0.0
    """Largest change of color saturation, as a fraction. 0.2 multiplies it by a uniform factor between 0.8 and 1.2."""
    lighting: Rate = 0.0
    """Standard deviation of AlexNet's color noise, as a factor. The noise follows the principal components of
    ImageNet's colors; Krizhevsky et al. 2012 (4.1) use 0.1."""
    randaugment: Annotated[int, Ge(0), Le(10)] = 0
    """Number of RandAugment operations on each image, drawn from torchvision's 14 (Cubuk et al. 2020; usually 2). They
    are applied after the changes above."""
    randaugment_magnitude: Annotated[int, Ge(0), Le(30)] = 9
    """Strength of RandAugment operations, in steps from 0 (none) to 30."""

    def __bool__(self) -> bool:
        """Return whether any change is on."""
        return any(getattr(self, field.name) for field in fields(Augmentation) if field.name != "randaugment_magnitude")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The training and validation data, and how images are read, cropped and normalized."""

    path: str | None = None
    """Folder of the images: train/CLASS/* and val/CLASS/*, CLASS/* alone, shards, tar files, Parquet or TFRecords.
    Three words select other data. synthetic: random pixels, neither decoded nor evaluated, to measure throughput; line:
    points of y = 2 x + 1 with noise, for linear regression; own: the samples that a script passes to cputrain.train (a
    folder of such a name is ./own); null: set it on the command line."""
    prepare: str | None = None
    """Command that creates the data, printed if data.path does not exist. {path} in it is replaced by data.path; null:
    no command."""
    val_fraction: Annotated[float, Gt(0), Lt(1)] | None = None
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
    train_crop: TrainCrop = "random_resized"
    """How training images are cropped. random_resized: a region of random area and aspect ratio, scaled to a square
    (Szegedy et al. 2014); random: a square at a random position in the image scaled to `resize`."""
    min_crop_area: Annotated[float, Gt(0), Le(1)] = 0.08
    """Smallest area of a random_resized crop, as a fraction of the image's area."""
    max_crop_aspect: Annotated[float, Ge(1)] = 4 / 3
    """Largest aspect ratio of a random_resized crop: its long side divided by its short side."""
    augment: Augmentation = Augmentation()
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
    block_mib: Rate = 0.0
    """Size in MiB of the blocks in which shards are read. Parallel file systems read large blocks faster; each worker
    keeps one block in memory for every image of its batch. 0 reads images individually."""
    decoder: Literal["auto", "turbo", "pillow"] = "auto"
    """JPEG decoder: turbo (libjpeg-turbo 3) or pillow. turbo decodes only the cropped region of an image; auto: turbo
    if it can be compiled, otherwise pillow."""
    on_error: Literal["skip", "raise"] = "skip"
    """What to do with an image that cannot be decoded. skip: remove it from its batch, with a warning and a count;
    raise: end the training with an error."""
    max_damaged: Fraction = 0.01
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
