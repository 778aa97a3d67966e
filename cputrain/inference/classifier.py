"""A checkpoint that is ready to classify images, as an evaluation does: with its weights, crop and normalization."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from affinity.errors import InputError
from cputrain.checkpoints.manifest import MANIFEST, MODEL, NetworkRecord, read_manifest
from cputrain.data.pixels.crops import center_crop
from cputrain.data.pixels.decode import Decode, Pixels, choose_decoder
from cputrain.data.pixels.normalize import choose_normalize
from cputrain.models.build import build_model
from cputrain.recipe.loading import recipe_of, tuples
from cputrain.recipe.schema import ModelSection, Recipe
from cputrain.training.engine import (
    DTYPES,
    autocast,
    choose_engine,
    evaluation_network,
    network_input,
    prepare_model,
)
from cputrain.training.saving.restore import load_eval_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """A network with the weights that an evaluation uses, and the recipe that it was trained by.

    `network` takes normalized images, (N, 3, crop, crop), and returns logits, (N, outputs). `read` decodes encoded
    images into an output (N, crop, crop, 3), with the center crop of an evaluation, and returns each one's error.
    """

    checkpoint: Path
    step: int
    record: NetworkRecord
    recipe: Recipe
    network: nn.Module
    decode: Decode
    normalize: Callable[[Tensor], Tensor]

    def read(self, encoded: Sequence[bytes], _numbers: Sequence[int], out: Pixels) -> list[str | None]:
        """Decode and crop images; each image's error, or None."""
        crop = center_crop(self.record.resize, self.record.crop)
        return self.decode(encoded, [crop] * len(encoded), out)

    def logits(self, images: Tensor) -> Tensor:
        """Cropped images, (N, crop, crop, 3) uint8 -> logits, (N, outputs) float32."""
        precision = self.recipe.precision
        with torch.inference_mode(), autocast(precision):
            outputs: Tensor = self.network(network_input(self.normalize(images), precision))
        return outputs.float()

    def class_name(self, output: int) -> str:
        """The name of the class of an output; a network may have more outputs than there are classes."""
        return self.record.classes[output] if output < len(self.record.classes) else f"output {output}"


def load_classifier(checkpoint: Path, env: Mapping[str, str]) -> Classifier:
    """Load a checkpoint. Raises InputError for what is no checkpoint, damaged, or not of a classifier of images."""
    network, record, recipe, step = load_network(checkpoint)
    engine = choose_engine("auto", recipe.precision, env)  # the training's own may need what is not installed here
    prepare_model(network, engine, recipe.precision)
    network.eval()
    return Classifier(
        checkpoint=checkpoint,
        step=step,
        record=record,
        recipe=recipe,
        network=evaluation_network(network, engine, recipe.precision),
        decode=choose_decoder(recipe.data.decoder, env)[0],
        normalize=choose_normalize(record.mean, record.std, recipe.data.decoder, env),
    )


def _model_section(record: NetworkRecord, checkpoint: Path) -> ModelSection:
    try:
        return ModelSection.model_validate(tuples(record.model))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        why = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{checkpoint / MANIFEST}: the network's {place} is wrong: {why}") from None


def load_network(checkpoint: Path, *, trained: bool = True) -> tuple[nn.Module, NetworkRecord, Recipe, int]:
    """A checkpoint's network in evaluation, as torch builds it; what it takes, its recipe, and the steps trained.

    Its weights are in the data type of the recipe's precision, and random without `trained`. Raises InputError for what
    is no checkpoint, damaged, or not of a classifier of images.
    """
    manifest = read_manifest(checkpoint)
    record, recipe = manifest.network, recipe_of(manifest.recipe, checkpoint / MANIFEST)
    if not record.model:
        raise InputError(f"{checkpoint} is of a network of your own code: load {MODEL} in it into that network")
    if record.features is not None:
        raise InputError(f"{checkpoint} is of a network for points: name a checkpoint of a classifier of images")
    network = build_model(_model_section(record, checkpoint), len(record.classes), record.crop)
    network.to(DTYPES[recipe.precision])
    if trained:
        load_eval_model(checkpoint, network)
    return network.eval(), record, recipe, manifest.step
