"""A trained network as an image classifier, and its export to TorchScript, ONNX, state dict and safetensors.

An exported file is loaded again, and its logits are compared with those of the original network.
"""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import errors_name
from cputrain.affinity.wording import plural
from cputrain.checkpoint.files import MANIFEST, MODEL, SUFFIX, read_tensors, write_tensors
from cputrain.data.formats.dataset import ImageFiles, Images
from cputrain.data.from_settings import open_data
from cputrain.data.loader import choose_normalize, decoded_batches
from cputrain.data.order import SequentialSampler
from cputrain.data.pixels import Decode, Pixels, center_crop, choose_decoder
from cputrain.data.settings import DataSettings
from cputrain.kernels.plan import WINOGRAD, Gain, plan_kernels
from cputrain.manifest import NetworkRecord, first_error, read_manifest
from cputrain.models.networks import build_model
from cputrain.models.weights import read_state
from cputrain.recipe.loading import recipe_of, tuples
from cputrain.recipe.schema import ModelSection, Recipe
from cputrain.training.engine import (
    DTYPES,
    autocast,
    choose_engine,
    evaluation_network,
    prepare_model,
    target_for,
    to_weight_dtype,
    with_winograd,
)
from cputrain.training.snapshot import load_eval_model

logger = logging.getLogger(__name__)
METADATA_FILE = "cputrain.json"  # in a TorchScript archive
INPUT, OUTPUT = "images", "logits"

Forward = Callable[[Tensor], Tensor]
"""Normalized inputs, (N, ...) float32 -> logits, (N, outputs), computed from an exported file."""

COMPARED = 8  # images
# Largest difference of a logit, relative to the largest logit, that rounding explains: folded batch-norm and another
# order of float32 sums; bfloat16 has 8 bits, and the exported network computes in float32.
TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bf16": 5e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """A network with the weights that an evaluation uses, and its recipe.

    `network` takes normalized images, (N, 3, crop, crop), and returns logits, (N, outputs). `read` decodes encoded
    images into an output, (N, crop, crop, 3), with an evaluation's center crop, and returns each image's error.
    """

    checkpoint: Path
    step: int
    record: NetworkRecord
    recipe: Recipe
    network: nn.Module
    decode: Decode
    normalize: Callable[[Tensor], Tensor]

    def read(self, encoded: Sequence[bytes], _numbers: Sequence[int], out: Pixels) -> list[str | None]:
        """Decode and crop images; return each image's error, or None."""
        return self.decode(encoded, center_crop(self.record.resize, self.record.crop), out)

    def logits(self, images: Tensor) -> Tensor:
        """Compute logits, (N, outputs) float32, from cropped images, (N, crop, crop, 3) uint8."""
        precision = self.recipe.precision
        with torch.inference_mode(), autocast(precision):
            outputs: Tensor = self.network(to_weight_dtype(self.normalize(images), precision))
        return outputs.float()

    def class_name(self, output: int) -> str:
        """Return the class name of an output; a network may have more outputs than there are classes."""
        return self.record.classes[output] if output < len(self.record.classes) else f"output {output}"


def load_classifier(checkpoint: Path, env: Mapping[str, str]) -> Classifier:
    """Load a checkpoint; layers that its training computed by Winograd's algorithm are so here too if this CPU can.

    Raises InputError if it is not a checkpoint, damaged, or not an image classifier's.
    """
    network, record, recipe, step = load_network(checkpoint)
    engine = choose_engine("auto", recipe.precision, env)  # the training's engine may not be available here
    stored = read_manifest(checkpoint).training.winograd
    if stored:
        engine = with_winograd(engine, recipe.model.winograd, recipe.precision, env)
    plan = None
    if engine.kernels is not None:
        if stored and (why := engine.kernels.missing.get(WINOGRAD)):
            logger.warning("cputrain: convolutions stay direct: %s", why)
        gains: dict[str, Gain] = dict.fromkeys(stored or (), (None, "as in training"))
        plan = plan_kernels(network, target_for(recipe.precision), gains, engine.kernels.missing)
    prepare_model(network, engine, recipe.precision, plan)
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
        place, first = first_error(error)
        why = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{checkpoint / MANIFEST}: the network's {place} is wrong: {why}") from None


def load_network(checkpoint: Path, *, trained: bool = True) -> tuple[nn.Module, NetworkRecord, Recipe, int]:
    """Return a checkpoint's network in evaluation mode, as torch builds it, its record, recipe, and steps trained.

    The weights have the data type of the recipe's precision; they are random without `trained`. Raises InputError if it
    is not a checkpoint, damaged, or not an image classifier's.
    """
    manifest = read_manifest(checkpoint)
    record, recipe = manifest.network, recipe_of(manifest.recipe, checkpoint / MANIFEST)
    if not record.model:
        raise InputError(f"{checkpoint} contains a network from user code: load its {MODEL} in that code")
    if record.features is not None:
        raise InputError(f"{checkpoint} contains a network for points: give a checkpoint of an image classifier")
    network = build_model(_model_section(record, checkpoint), len(record.classes), record.crop)
    network.to(DTYPES[recipe.precision])
    if trained:
        load_eval_model(checkpoint, network)
    return network.eval(), record, recipe, manifest.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Most likely classes of an image with their probabilities (0 to 1), highest first; or its error."""

    image: str
    top: tuple[tuple[str, float], ...]
    error: str | None = None


def predict(
    classifier: Classifier,
    paths: Sequence[str],
    *,
    top: int,
    batch: int,
    threads: int = 1,
    cpus: tuple[int, ...] = (),
) -> Iterator[Prediction]:
    """Yield one prediction for each path, in order, with the `top` most likely classes.

    Each forward pass takes `batch` images while `threads` threads on `cpus` (() = any) decode the next ones.
    """
    images = ImageFiles(paths, [0] * len(paths))
    shares = SequentialSampler(images=len(paths), batch_size=batch, rank=0, world_size=1).batches()
    side = classifier.record.crop
    batches = decoded_batches(images, shares, classifier.read, side=side, threads=threads, cpus=cpus)
    for share, decoded in zip(shares, batches, strict=True):
        probabilities = torch.softmax(classifier.logits(decoded.images).double(), dim=1)
        highest, outputs = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
        problems = iter(decoded.damaged)
        rows = zip(share.tolist(), decoded.weights.tolist(), outputs.tolist(), highest.tolist(), strict=True)
        for number, weight, numbers, values in rows:
            if weight:
                names = map(classifier.class_name, numbers)
                yield Prediction(image=paths[number], top=tuple(zip(names, values, strict=True)))
            else:
                problem = next(problems).removeprefix(f"{paths[number]}: ")
                yield Prediction(image=paths[number], top=(), error=problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """An export format: its file suffixes, the usual one first.

    `write` writes a network in evaluation mode, an example input and metadata texts to a file. `open` returns a
    function that computes logits from that file; a state dict is loaded into the given network, which has to match.
    """

    suffixes: tuple[str, ...]
    write: Callable[[nn.Module, Tensor, Mapping[str, str], Path], None]
    open: Callable[[Path, nn.Module], Forward]


def _write_safetensors(network: nn.Module, _inputs: Tensor, about: Mapping[str, str], path: Path) -> None:
    write_tensors(path, network.state_dict(), {"format": "pt", **about})


def _open_safetensors(path: Path, network: nn.Module) -> Forward:
    network.load_state_dict(read_tensors(path)[0])
    return network


def _write_state_dict(network: nn.Module, _inputs: Tensor, _about: Mapping[str, str], path: Path) -> None:
    out = io.BytesIO()  # torch.save into a file raises RuntimeError on a full disk
    torch.save(network.state_dict(), out)
    path.write_bytes(out.getbuffer())


def _open_state_dict(path: Path, network: nn.Module) -> Forward:
    network.load_state_dict(read_state(path))
    return network


def _write_torchscript(network: nn.Module, inputs: Tensor, about: Mapping[str, str], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's deprecation of TorchScript; the user asked for it
        traced: Any = torch.jit.trace(network, inputs, check_trace=False)  # type: ignore[no-untyped-call]
        with path.open("wb") as file:  # torch cannot open paths that are not UTF-8
            torch.jit.save(traced, file, _extra_files={METADATA_FILE: json.dumps(dict(about), indent=1)})


def _open_torchscript(path: Path, _network: nn.Module) -> Forward:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with path.open("rb") as file:
            loaded: Forward = torch.jit.load(file, map_location="cpu")  # type: ignore[no-untyped-call]
    return loaded


def _write_onnx(network: nn.Module, inputs: Tensor, about: Mapping[str, str], path: Path) -> None:
    onnx = _onnx_package("onnx")
    _onnx_package("onnxscript")
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            network,
            (inputs,),
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: batch},),
            dynamo=True,
            verbose=False,
        )
    model = program.model_proto
    onnx.helper.set_model_props(model, dict(about))
    onnx.save(model, path)


def _open_onnx(path: Path, _network: nn.Module) -> Forward:
    runtime = _onnx_package("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])

    def run(inputs: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: inputs.numpy()})[0])

    return run


def _onnx_package(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise InputError(f"export to onnx needs {name}; run pip install 'cputrain[onnx]'") from None


FORMATS = {
    "safetensors": Format(suffixes=(SUFFIX,), write=_write_safetensors, open=_open_safetensors),
    "state-dict": Format(suffixes=(".pt", ".pth"), write=_write_state_dict, open=_open_state_dict),
    "torchscript": Format(suffixes=(".torchscript", ".ts"), write=_write_torchscript, open=_open_torchscript),
    "onnx": Format(suffixes=(".onnx",), write=_write_onnx, open=_open_onnx),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """Result of an export: number of parameters and buffers, of images compared, and the largest difference of a logit,
    relative to the largest logit."""

    tensors: int
    images: int
    difference: float


def choose_format(file: Path, name: str | None) -> str:
    """Return the named format, or else the one of the file's suffix. Raises InputError for an unknown suffix."""
    by_suffix = {suffix: each for each, known in FORMATS.items() for suffix in known.suffixes}
    if name is None and file.suffix not in by_suffix:
        suffixes = ", ".join(f"{suffix} ({each})" for suffix, each in by_suffix.items())
        raise InputError(f"{file}: the suffix decides the format; give one of {suffixes}, or --to FORMAT")
    return name or by_suffix[file.suffix]


def export(
    checkpoint: Path, file: Path, format_name: str, env: Mapping[str, str], images: Sequence[str] = ()
) -> ExportResult:
    """Export the weights that an evaluation of the checkpoint uses: the moving average if it has one.

    The file's logits for COMPARED images, from `images` or the checkpoint's validation images, are compared with an
    evaluation's. Raises InputError if the checkpoint is damaged or there are no images to compare, RunError if the
    logits differ.
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
        with errors_name(file):
            inputs_as_trained = inputs.to(next(network.parameters()).dtype)
            FORMATS[format_name].write(network, inputs_as_trained, about(record, step), partial)
        difference = _difference(partial, format_name, checkpoint, inputs, expected)
        if not difference <= TOLERANCE[recipe.precision]:
            raise RunError(
                f"{file} is not written, as its logits differ from an evaluation's by {difference:.2g} of the largest "
                f"one, more than the {TOLERANCE[recipe.precision]:g} that rounding explains"
            )
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return ExportResult(tensors=len(network.state_dict()), images=len(pixels), difference=difference)


def about(record: NetworkRecord, step: int) -> dict[str, str]:
    """Return metadata texts about a network: its recipe section, classes and normalization."""
    values = {"step": step, **record.model_dump(mode="json")}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return texts | {
        "input": f"images: (N, 3, {record.crop}, {record.crop}) float32, red, green and blue from 0 to 1, minus mean, "
        f"divided by std; the center of the image whose short side is scaled to {record.resize} pixels, bilinear",
        "output": "logits: (N, classes) float32",
    }


def _difference(path: Path, format_name: str, checkpoint: Path, inputs: Tensor, expected: Tensor) -> float:
    """Return the largest difference of a logit, relative to the largest logit; the batch sizes differ from the size
    used for writing, and one batch is a single image."""
    fresh = load_network(checkpoint, trained=False)[0]
    inputs = inputs.to(next(fresh.parameters()).dtype) if format_name in ("safetensors", "state-dict") else inputs
    run = FORMATS[format_name].open(path, fresh)
    with torch.inference_mode():
        found = torch.cat([run(inputs[:1]), run(inputs[1:])]).float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _read_images(classifier: Classifier, named: Sequence[str]) -> Tensor:
    """Read the pixels of up to COMPARED readable images, (n, crop, crop, 3) uint8."""
    images: Images = ImageFiles(named, [0] * len(named)) if named else _validation_images(classifier.recipe.data)
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
            f"comparing logits needs two images, but only {plural(len(found), 'image')} can be read: give others with "
            "--images"
        )
    chosen = np.linspace(0, len(found) - 1, min(len(found), COMPARED)).astype(int)
    return torch.from_numpy(np.concatenate([found[number] for number in chosen]))


def _validation_images(data: DataSettings) -> Images:
    if data.generated:
        raise InputError("the checkpoint was trained on generated data: give images to compare logits with --images")
    try:
        return open_data(data).val
    except InputError as error:
        raise InputError(f"{error}; or give images to compare logits with --images FOLDER") from None
