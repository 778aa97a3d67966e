"""checkpoint.json of `cputrain train`: the network, the state of the training, and its recipe."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cputrain.affinity.errors import InputError
from cputrain.checkpoint.files import (
    LOOP_FORMAT,
    MANIFEST,
    MODEL,
    TRAINER_FORMAT,
    DamagedError,
    FileRecord,
    read_content,
    read_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor

EMA = "ema.safetensors"
LOSS = "loss.safetensors"  # of a loss that has parameters or buffers
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Pixels = Annotated[int, Field(ge=0, le=4096)]  # the side of an image
Finite = Annotated[float, Field(allow_inf_nan=False)]
Divisor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FileName = Annotated[str, Field(pattern=r"^(model|ema|loss|optimizer|rank-\d+)\.safetensors$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NetworkRecord(_Record):
    """The network and its input: with this and model.safetensors a checkpoint can be used without its run.

    `model` is the recipe's section, empty for a network defined in user code. An image is scaled to a short side of
    `resize` pixels and center-cropped to `crop` x `crop`; values from 0 to 1, minus `mean`, divided by `std`.
    `features` is the length of a row, for data other than images.
    """

    model: dict[str, Any]
    classes: tuple[str, ...]
    features: int | None
    crop: Pixels
    resize: Pixels
    mean: tuple[Finite, Finite, Finite]
    std: tuple[Divisor, Divisor, Divisor]


class ScaleRecord(_Record):
    """Workers, images per step, training images and classes in one start of a training."""

    workers: Positive
    global_batch: Count
    train_images: Count
    classes: Count


class OptimizerRecord(_Record):
    """The optimizer's name, the options of its parameter groups with parameter names, and its non-tensor values by
    parameter."""

    name: str
    groups: tuple[dict[str, Any], ...]
    values: dict[str, dict[str, Any]]


class TrainingRecord(_Record):
    """State of a training.

    `epoch_done`: the epoch that ends with this step was evaluated and logged. `own_statistics`: a resumed rank reads
    the batch-norm statistics from its own file, else their mean from model.safetensors. `bucket_mib` is the size of
    DDP's gradient buckets; `first_loss` and `diverged` belong to the warning about a diverging loss; `rollbacks` counts
    rollbacks to each checkpoint; `winograd` names the layers computed by Winograd's algorithm, None if it is not used;
    `operators`: whether kernels below torch's operators were used, None in earlier versions.
    """

    epoch_done: bool
    own_statistics: bool
    best_score: float | None
    bucket_mib: float
    winograd: tuple[str, ...] | None = None
    operators: bool | None = None
    first_loss: float | None
    diverged: bool
    rollbacks: dict[str, int]
    optimizer: OptimizerRecord


class Manifest(_Record):
    """Content of checkpoint.json."""

    format: Literal["cputrain checkpoint"] = TRAINER_FORMAT
    version: Literal[1] = 1
    cputrain: str
    step: Count
    network: NetworkRecord
    scale: ScaleRecord
    training: TrainingRecord
    recipe: dict[str, Any]
    files: dict[FileName, FileRecord]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises InputError if it is not a checkpoint, DamagedError if it is damaged."""
    content = read_content(folder)
    if isinstance(content, dict) and content.get("format") == LOOP_FORMAT:
        raise InputError(
            f"{folder} was saved by AsyncCheckpoint, without a recipe: name its {MODEL} where weights are wanted"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        place, first = first_error(error)
        path = folder / MANIFEST
        raise InputError(f"{path} is damaged or from another version of cputrain ({place}: {first['msg']})") from None


def first_error(error: ValidationError) -> tuple[str, Mapping[str, Any]]:
    """Return the place of the first error, such as "optimizer.name", and pydantic's description of it."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), first


def read_file(folder: Path, manifest: Manifest, name: str) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Read the tensors and the metadata of one of a checkpoint's files. Raises DamagedError."""
    record = manifest.files.get(name)
    if record is None:
        raise DamagedError(f"{folder} is damaged: it has no {name}")
    return read_tensors(folder / name, record)
