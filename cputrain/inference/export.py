"""Export of a checkpoint's network, compared with an evaluation's logits before the file gets its name."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from affinity.errors import InputError, RunError
from affinity.wording import counted
from cputrain.checkpoints.manifest import NetworkRecord
from cputrain.data.formats.dataset import ImageFiles, Images
from cputrain.data.from_recipe import open_recipe_data
from cputrain.inference.classifier import Classifier, load_classifier, load_network
from cputrain.inference.export_formats import FORMATS
from cputrain.recipe.schema import Recipe

COMPARED = 8  # images
# The largest difference of a logit, relative to the largest logit, that rounding explains: folded batch-norm and
# another order of sums in float32; bfloat16 has 8 bits, and the exported network computes in float32.
TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bf16": 5e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: parameters and buffers, images compared, and the largest difference of a logit, relative to the
    largest logit."""

    tensors: int
    images: int
    difference: float


def choose_format(file: Path, name: str | None) -> str:
    """The format of that name, or else the one of the file's suffix. Raises InputError for an unknown suffix."""
    by_suffix = {suffix: each for each, known in FORMATS.items() for suffix in known.suffixes}
    if name is None and file.suffix not in by_suffix:
        suffixes = ", ".join(f"{suffix} ({each})" for suffix, each in by_suffix.items())
        raise InputError(f"{file}: the suffix decides the format: give one of {suffixes}, or --to FORMAT")
    return name or by_suffix[file.suffix]


def export(
    checkpoint: Path, file: Path, format_name: str, env: Mapping[str, str], images: Sequence[str] = ()
) -> Exported:
    """Write the weights that an evaluation of the checkpoint uses, of the moving average if it has one.

    The file's logits for COMPARED images, `images` or some of the checkpoint's validation images, are compared with
    those of an evaluation. Raises InputError for a damaged checkpoint, or where there are no images to compare with;
    RunError where the logits differ.
    """
    classifier = load_classifier(checkpoint, env)
    network, record, recipe, step = load_network(checkpoint)
    pixels = _read_images(classifier, images)
    expected = classifier.logits(pixels)
    inputs = classifier.normalize(pixels)
    if recipe.precision == "float64" and format_name in ("torchscript", "onnx"):
        network = network.float()
    partial = file.with_name(f".{file.name}.partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        FORMATS[format_name].write(network, inputs.to(next(network.parameters()).dtype), about(record, step), partial)
        difference = _difference(partial, format_name, checkpoint, inputs, expected)
        if not difference <= TOLERANCE[recipe.precision]:
            raise RunError(
                f"{file} is not written: its logits differ from an evaluation's by {difference:.2g} of the largest "
                f"one, more than the {TOLERANCE[recipe.precision]:g} that rounding explains"
            )
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return Exported(tensors=len(network.state_dict()), images=len(pixels), difference=difference)


def about(record: NetworkRecord, step: int) -> dict[str, str]:
    """Texts about a network, for a file's metadata: its section of the recipe, classes and normalization."""
    values = {"step": step, **record.model_dump(mode="json")}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return texts | {
        "input": f"images: (N, 3, {record.crop}, {record.crop}) float32, red, green and blue from 0 to 1, minus mean, "
        f"divided by std; the center of the image whose short side is scaled to {record.resize} pixels, bilinear",
        "output": "logits: (N, classes) float32",
    }


def _difference(path: Path, format_name: str, checkpoint: Path, inputs: Tensor, expected: Tensor) -> float:
    """The largest difference of a logit, relative to the largest logit; the batch is of another size than when the file
    was written, once of one image."""
    fresh = load_network(checkpoint, trained=False)[0]
    inputs = inputs.to(next(fresh.parameters()).dtype) if format_name in ("safetensors", "state-dict") else inputs
    run = FORMATS[format_name].open(path, fresh)
    with torch.inference_mode():
        found = torch.cat([run(inputs[:1]), run(inputs[1:])]).float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _read_images(classifier: Classifier, named: Sequence[str]) -> Tensor:
    """The pixels of images that can be read, (n, crop, crop, 3) uint8, n <= COMPARED."""
    images: Images = ImageFiles(named, [0] * len(named)) if named else _validation_images(classifier.recipe)
    side, found = classifier.record.crop, []
    for number in np.linspace(0, len(images) - 1, min(len(images), 4 * COMPARED)).astype(int).tolist():
        pixels = np.empty((1, side, side, 3), dtype=np.uint8)
        try:
            problem = classifier.read([images.read(number)], [number], pixels)[0]
        except OSError as error:
            problem = str(error)
        if problem is None:
            found.append(pixels)
    if len(found) < 2:
        raise InputError(
            f"comparing logits takes two images, and {counted(len(found), 'image')} can be read: name others with "
            "--images"
        )
    chosen = np.linspace(0, len(found) - 1, min(len(found), COMPARED)).astype(int)
    return torch.from_numpy(np.concatenate([found[number] for number in chosen]))


def _validation_images(recipe: Recipe) -> Images:
    if recipe.data.generated:
        raise InputError("the checkpoint was trained on generated data: name images to compare logits with by --images")
    try:
        return open_recipe_data(recipe).val
    except InputError as error:
        raise InputError(f"{error}: or name images to compare logits with by --images FOLDER") from None
