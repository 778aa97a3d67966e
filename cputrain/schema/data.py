"""The images, and what is done to them."""

from typing import Annotated, Literal

from pydantic import Field

from cputrain.schema.base import Positive, Section


class AugmentSection(Section):
    """What is done to a training image after its part is cut out; each is drawn anew for each image and epoch."""

    rotate: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Turned by up to this share of a full turn, either way."""
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Scaled by a factor of up to this much above or below 1."""
    shift: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Moved by up to this share of the side, in both directions."""
    brightness: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Brightness times a factor of up to this much above or below 1."""
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Contrast likewise."""
    saturation: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Saturation likewise."""
    lighting: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the noise along ImageNet's principal colours (Krizhevsky et al. 2012, 4.1: 0.1)."""


class DataSection(Section):
    """The images."""

    path: str | None = None
    """A folder with train/CLASS/* and val/CLASS/*, one that `cputrain prepare` wrote, or one of TFRecords."""
    crop: Positive = 224
    """Side of the square that the network sees, in pixels."""
    resize: Positive | None = None
    """Short side before the centre crop in evaluation and plain training parts, pixels; null: crop x 256 / 224."""
    min_area: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest share of an image's area that a training crop covers."""
    max_aspect: Annotated[float, Field(ge=1)] = 4 / 3
    """Largest ratio of a training crop's sides before it is scaled to a square."""
    part: Literal["scale_aspect", "plain"] = "scale_aspect"
    """What a training image shows: a part of random area and aspect, or a square of the image scaled to `resize`."""
    augment: AugmentSection = AugmentSection()
    flip: bool = True
    """Mirror half of the training images, left to right."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Subtracted from the channels (red, green, blue, each 0 to 1)."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """The channels are divided by this afterwards."""
    stage: str | None = None
    """A folder on each host's own disk: one worker copies the shards there while all begin to train from data.path."""
    block_mib: Annotated[float, Field(ge=0)] = 0.0
    """Shards are read in pieces of so many MiB, as parallel file systems want it; each worker keeps one for each image
    of its batch in memory. 0: every image by itself."""
    decoder: Literal["auto", "turbo", "pillow"] = "auto"
    """turbo: libjpeg-turbo 3 decodes no more of a JPEG than is needed; auto: turbo where it can be had, else Pillow."""
    on_error: Literal["skip", "raise"] = "skip"
    """What an image that cannot be decoded does: it is named, counted and left out, or it ends the training."""
    remainder: Literal["drop", "spread"] = "drop"
    """Images that fill no global batch: drop leaves them to the next epoch's permutation; spread takes one step more,
    and all of the epoch's steps are a little smaller."""
    train_images: Positive | None = None
    """How many images train/ holds, for plans made where the data is not at hand; a training counts them."""
    images_per_epoch: Positive | None = None
    """How many images count as one epoch; null: all of train/."""

    @property
    def short_side(self) -> int:
        """Pixels of the short side that crops are taken from."""
        return self.resize or round(self.crop * 256 / 224)
