"""The training and validation data, and how images are cropped and augmented."""

from typing import Annotated, Literal

from pydantic import Field

from cputrain.recipe.schema.base import Positive, Section

SYNTHETIC, LINE, OWN = "synthetic", "line", "own"


class AugmentSection(Section):
    """Random changes to a training image after it is cropped, drawn anew for each image and epoch; 0 turns one off."""

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
    """Standard deviation of AlexNet's color noise, a factor. The noise follows the principal components of ImageNet's
    colors; Krizhevsky et al. 2012 (4.1) use 0.1."""
    randaugment: Annotated[int, Field(ge=0, le=10)] = 0
    """Number of RandAugment's operations on each image, drawn from torchvision's 14 (Cubuk et al. 2020; usually 2).
    They follow the changes above."""
    randaugment_magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength of RandAugment's operations, in steps from 0 (none) to 30."""
    mixup: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Parameter alpha of mixup (Zhang et al. 2018; usually 0.2). The images of a worker's batch and their labels are
    averaged in pairs, by weights from a Beta(alpha, alpha) distribution."""
    cutmix: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Parameter alpha of CutMix (Yun et al. 2019; usually 1). A rectangle of each image is replaced by that of another
    image, and its label in proportion. With mixup too, each batch is mixed by one of the two."""


class DataSection(Section):
    """The training and validation data, and how images are read, cropped and normalized."""

    path: str | None = None
    """Folder of the images: train/CLASS/* and val/CLASS/*, CLASS/* alone, shards, tar files, Parquet or TFRecords.
    Three words stand for other data: synthetic (random pixels, neither decoded nor evaluated, to measure throughput)
    and line (points of y = 2 x + 1 with noise, for linear regression) are generated, own are the samples that a script
    gives to cputrain.train; a folder of that name is ./own; null: set it on the command line."""
    prepare: str | None = None
    """Command that creates the data, printed where data.path is missing. {path} in it stands for data.path; null: no
    command."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of the training images that is used for validation instead, drawn from each class in proportion. It is
    the same in every training, whatever its seed. null: none where the data has validation images of its own, otherwise
    0.2. With a number, these become the test images."""
    label_column: str | None = None
    """Column of Parquet files that has the labels; null: the only one that can be it."""
    crop: Positive = 224
    """Side of the square images that the network gets, in pixels."""
    resize: Positive | None = None
    """Short side, in pixels, to which an image is scaled before a square is cropped from it. It applies to evaluation
    and to train_crop=random; null: crop x 256 / 224."""
    train_crop: Literal["random_resized", "random"] = "random_resized"
    """How training images are cropped. random_resized: a region of random area and aspect ratio, scaled to a square
    (Szegedy et al. 2014); random: a square at a random place, of the image scaled to `resize`."""
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
    """Folder on a local disk of each host, to which one worker of the host copies the shards. Training starts at once
    from data.path and switches to the copies, which are deleted at the end; null: no copies."""
    block_mib: Annotated[float, Field(ge=0)] = 0.0
    """Size in MiB of the pieces in which shards are read. Parallel file systems read large pieces faster; each worker
    keeps one piece in memory for every image of its batch. 0 reads every image by itself."""
    decoder: Literal["auto", "turbo", "pillow"] = "auto"
    """JPEG decoder: turbo (libjpeg-turbo 3) or pillow. turbo decodes only the cropped region of an image; auto takes
    turbo where it can be compiled, otherwise Pillow."""
    on_error: Literal["skip", "raise"] = "skip"
    """What to do with an image that cannot be decoded. skip: remove it from its batch, with a warning and a count;
    raise: end the training with an error."""
    max_damaged: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest fraction of a split's images that may be damaged with on_error=skip; one image may be in any case, unless
    it is 0. With more of them, or none that can be read, the training or evaluation ends with an error."""
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
        """Whether the data is generated from the seed, or a script's own, rather than read from data.path."""
        return self.path in (SYNTHETIC, LINE, OWN)

    @property
    def kind(self) -> str:
        """The kind of data, as outputs and events name it."""
        return {SYNTHETIC: "synthetic data", LINE: "points", OWN: "samples"}.get(self.path or "", "images")

    @property
    def unit(self) -> str:
        """The word for samples."""
        return {LINE: "points", OWN: "samples"}.get(self.path or "", "images")

    @property
    def short_side(self) -> int:
        """Pixels of the short side from which squares are cropped."""
        return self.resize or round(self.crop * 256 / 224)
