"""Read weights from files of cputrain and other trainers, load them into a network, download torchvision's."""

import hashlib
import json
import re
import urllib.error
import warnings
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.wording import first_named, plural
from cputrain.checkpoint.files import MODEL, SUFFIX, is_checkpoint, read_tensors
from cputrain.files import check_downloaded
from cputrain.manifest import EMA, read_file, read_manifest
from cputrain.models.settings import TIMM, TORCHVISION
from cputrain.models.vision import import_torchvision

# Keys under which training programs save their networks, in order of preference: averaged weights first, because these
# programs evaluate them and timm's load_checkpoint prefers them.
KEYS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict", "model_state", "module")
AVERAGE = re.compile(r"(?:^|[^a-z])(?:ema|swa|avg|averaged?)(?:[^a-z]|$)", re.IGNORECASE)
NO_WEIGHTS = re.compile(
    "optim|grad|exp_avg|momentum", re.IGNORECASE
)  # keys of moments and gradients, which have the names and shapes of weights
MAX_NESTING = 3  # deepest nesting of the weights, as in checkpoint.model.state_dict
# Auxiliary classifiers of torchvision's GoogLeNet and Inception v3, which are only used in training.
AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
# Names that wrappers insert before a network, or a part of it such as VGG's features in pytorch/examples:
# torch.compile, DDP and DataParallel, FSDP, activation checkpointing.
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
DISTRIBUTED = ".metadata"  # file of torch.distributed.checkpoint
# Hugging Face's sharded weights: model-00001-of-00002.safetensors, and an index from weights to files.
INDEX, PART = ".index.json", re.compile(r"-\d+-of-\d+\.\w+$")
STEPS = "num_batches_tracked"  # batch-norm buffer that is not used here and missing in old files
# Types of plain values that are saved beside weights, such as a program's arguments, paths and numpy scalars; loading
# them runs no code. Some have different names in different releases of Python and numpy.
_SCALAR, _ARRAY = np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]  # such as the state of numpy's generator
PLAIN_VALUES: list[Any] = [
    *(Namespace, np.dtype, _SCALAR, (_SCALAR, "numpy.core.multiarray.scalar")),
    *(np.ndarray, _ARRAY, (_ARRAY, "numpy.core.multiarray._reconstruct")),
    *((PosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),
    *{type(np.dtype(kind)) for kind in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?US"},
]

SAVE_ONE = "save the one to load in a separate file"
Shapes = dict[str, tuple[int, ...]]

# torchvision's GoogLeNet and Inception v3 convert ImageNet's normalization to the one by 0.5 with which their weights
# were trained (transform_input=True). The option is not in the state dict.
HALF_NORMALIZED = ("googlenet-", "inception_v3_google-")
HALF = (0.5, 0.5, 0.5)
HASH = re.compile(r"-([0-9a-f]{8,})\.")  # first digits of the SHA-256 in a file's name
CHUNK_BYTES = 1 << 20  # read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights by name, their key in the file ("state_dict", "model.state_dict", or "" if the file has nothing else),
    and whether they are a moving average."""

    tensors: dict[str, Tensor]
    key: str = ""
    averaged: bool = False


def read_weights(path: Path) -> tuple[Weights, ...]:
    """Read weights from a checkpoint folder, a safetensors file, or a torch.save file, which may have several sets;
    they are returned in order of preference for evaluation. Raises InputError if there are none."""
    if path.is_dir():
        if (path / DISTRIBUTED).is_file():
            convert = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
            raise InputError(f"{path} is a torch.distributed checkpoint: convert it with {convert} {path} FILE")
        indices = sorted(path.glob(f"*{INDEX}"))
        if not is_checkpoint(path) and (inside := indices or sorted(filter(_may_be_weights, path.iterdir()))):
            raise InputError(
                f"{path} is a folder but not a checkpoint of cputrain: name its file of weights, "
                f"{first_named(list(map(str, inside)))}"
            )
        manifest = read_manifest(path)
        name = EMA if EMA in manifest.files else MODEL
        check_downloaded(path / name)
        return (Weights(tensors=read_file(path, manifest, name)[0], key=name, averaged=name == EMA),)
    if path.is_file():
        check_downloaded(path)
    if path.suffix == SUFFIX:
        return (Weights(tensors=read_tensors(path)[0]),)
    if path.name.endswith(INDEX):
        return (Weights(tensors=_read_parts(path)),)
    state = read_state(path)
    swapped = _is_swapped(state)
    found = [
        Weights(tensors=tensors, key=key, averaged=key == "state_dict" if swapped else AVERAGE.search(key) is not None)
        for key, tensors in _places(state)
    ]
    if not found:
        raise InputError(
            f"{path} has no weights, only {first_named(list(map(str, state))) or 'an empty dict'}: save a state dict"
        )
    return tuple(sorted(found, key=_order))


def _read_parts(index: Path) -> dict[str, Tensor]:
    """Read the weights of all files that an index names, from the index's folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [index.parent / Path(name).name for name in names]
    except OSError as error:
        raise InputError(f"cannot read {index}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InputError(f"{index} has no valid weight_map: download it again") from None
    tensors: dict[str, Tensor] = {}
    for file in files:
        for weights in read_weights(file):
            tensors |= weights.tensors
    return tensors


def _may_be_weights(path: Path) -> bool:
    return path.suffix in (SUFFIX, ".pth", ".pt", ".bin", ".ckpt", ".tar") and path.is_file()


def _places(state: Mapping[Any, Any], way: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the dicts of tensors in a file with their keys."""
    if tensors := {name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)}:
        yield ".".join(way), tensors
    for name, value in state.items():
        if isinstance(name, str) and isinstance(value, dict) and len(way) < MAX_NESTING and not NO_WEIGHTS.search(name):
            yield from _places(value, (*way, name))


def _is_swapped(state: Mapping[str, Any]) -> bool:
    """Return whether the moving average was saved as state_dict, as by MMEngine's EMAHook, which saves the trained
    weights as ema_state_dict, and by Lightning's WeightAveraging."""
    about = state.get("meta")
    by_mmengine = "ema_state_dict" in state and isinstance(about, dict) and "mmengine_version" in about
    return by_mmengine or "averaging_state" in state


def _order(weights: Weights) -> tuple[int, int]:
    """Sort key: averaged weights first; then known keys, weights without a key, unknown keys."""
    first = weights.key.partition(".")[0]
    usual = KEYS.index(first) if first in KEYS else len(KEYS)
    return (0 if weights.averaged else 1 if first in KEYS else 3 if first else 2), usual


def read_state(path: Path) -> dict[str, Any]:
    """Read a dict that torch.save wrote, without running code in it. Raises InputError."""
    try:
        with torch.serialization.safe_globals(PLAIN_VALUES), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript, which _unreadable reports
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  the unpickler may raise anything on a file of another format
        raise InputError(_unreadable(path, error)) from None
    if not isinstance(state, dict):
        raise InputError(f"{path} contains a {type(state).__name__} instead of weights: save a state dict")
    return state


def _unreadable(path: Path, error: Exception) -> str:
    """Return a line that says why torch cannot load a file."""
    code = re.search(r"(?:GLOBAL|unrecognized function|unsupported class) (\S+)", str(error))
    if code:
        return (
            f"{path} would run code ({code[1]}) when loaded: use a file that has only weights; if you trust this one, "
            "load it with torch.load(FILE, weights_only=False) in the program that wrote it, and torch.save the "
            "network's state_dict()"
        )
    if isinstance(error, OSError):
        return f"cannot read {path}: {error.strerror}"
    if "TorchScript" in str(error):
        return f"{path} is a TorchScript archive: torch.save the state_dict() of torch.jit.load(FILE)"
    return f"{path} is not a file of weights, or is damaged: name a checkpoint, a safetensors file or a state dict"


def load_initial_weights(model: nn.Module, path: Path) -> str:
    """Load weights from a checkpoint or another program's file; return a line that says which were loaded.

    If a file has several sets of weights, the first that fits the network is loaded. Prefixes that programs put before
    the network's names are removed. Only the last layer may differ in shape, for other classes; it keeps its initial
    values. Raises InputError that names the differing keys.
    """
    initial = model.state_dict()
    head = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]
    tried = [_fit(weights, initial, head) for weights in read_weights(path)]
    fitting = [fit for fit in tried if not fit.problem]
    if not fitting:
        nearest = min(tried, key=lambda fit: fit.differing)
        if PART.search(path.name):
            raise InputError(f"model.weights={path} is only a part of the weights: name the {INDEX[1:]} file beside it")
        raise InputError(f"model.weights={path}{_place(nearest.weights)}: {nearest.problem}")
    taken, *others = fitting
    if unknown := [fit.weights.key for fit in others if _order(fit.weights) == _order(taken.weights)]:
        places = first_named([taken.weights.key, *unknown])
        raise InputError(f"model.weights={path} has the network several times, as {places}: {SAVE_ONE}")
    model.load_state_dict({**initial, **taken.tensors})
    return _describe(path, taken, tried)


def _place(weights: Weights) -> str:
    return f", key {weights.key}" if weights.key else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Result of matching weights with a network: tensors by the network's names; last-layer weights of other shapes,
    which keep their initial values; the problem if they do not fit, and the number of differing keys."""

    weights: Weights
    match: "Match"
    tensors: Mapping[str, Tensor]
    reinitialized: Sequence[str] = ()
    problem: str = ""
    differing: int = 0


def _fit(weights: Weights, initial: Mapping[str, Tensor], head: str) -> Fit:
    match = match_names(weights.tensors, [name for name in initial if not name.endswith(STEPS)])
    saved = {name: weights.tensors[theirs] for name, theirs in match.names.items()}
    problem = _tensor_problem({name: value for name, value in saved.items() if name in initial})
    if match.places:
        problem = f"has the network several times, as {first_named(match.places)}: {SAVE_ONE}"
    if problem:
        return Fit(weights=weights, match=match, tensors={}, problem=problem)
    reshaped = [name for name in initial if name in saved and saved[name].shape != initial[name].shape]
    reinitialized = [name for name in reshaped if name.rpartition(".")[0] == head]
    absent = {name for name in initial.keys() - saved.keys() if not name.endswith(STEPS)}
    differing = sorted(absent | (saved.keys() - initial.keys()) | set(reshaped) - set(reinitialized))
    if differing:
        plain = {name: value for name, value in saved.items() if not value.is_nested}  # others have no shape
        problem = describe_difference(differing, shapes(plain), shapes(initial))
    tensors = {name: value for name, value in saved.items() if name not in reinitialized}
    return Fit(
        weights=weights,
        match=match,
        tensors=tensors,
        reinitialized=reinitialized,
        problem=problem,
        differing=len(differing),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Names in a file by the network's names; prefixes and wrappers removed from them; unused names in the file; where
    the network is found, if several times."""

    names: dict[str, str]
    removed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


def match_names(saved: Collection[str], expected: Sequence[str]) -> Match:
    """Match the names in a file with the network's names.

    Wrappers' names are removed, and a prefix of all names, such as Lightning's `model.`, or one prefix of the last
    layer and one of all others, such as MMPretrain's `head.` and `backbone.`. Auxiliary classifiers are ignored if the
    network has none.
    """
    alone = not any(name.startswith(AUXILIARY) for name in expected)
    unwrapped = {_unwrapped(name): name for name in saved}
    views = [{name: name for name in saved}, *([unwrapped] if len(unwrapped) == len(saved) else [])]
    for names in views:
        placements = _placements(names, expected)
        if len(placements) > 1:
            return Match(names={}, places=tuple(f"{prefix}*" for prefix, _ in placements))
        if placements:
            prefixes = sorted(set(placements[0]), key=len, reverse=True)  # model.backbone. before model.
            words = {word for short, name in names.items() if short != name for word in name.split(".")}
            of_it = {
                name.removeprefix(prefix): own
                for name, own in names.items()
                if (prefix := next(filter(name.startswith, prefixes), None)) is not None
            }
            taken = {name: own for name, own in of_it.items() if not (alone and name.startswith(AUXILIARY))}
            return Match(
                names=taken,
                removed=tuple(filter(None, (*(f"{word}." for word in WRAPPERS if word in words), *prefixes))),
                left_out=tuple(name for name in names.values() if name not in set(taken.values())),
            )
    return Match(names=views[-1])


def _unwrapped(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)


def _placements(names: Collection[str], expected: Sequence[str]) -> list[tuple[str, str]]:
    """Return all pairs of prefixes (network, last layer), often equal, under which all `expected` names are found."""
    if whole := _prefixes(names, expected):
        return [(prefix, prefix) for prefix in whole]
    head = expected[-1].rpartition(".")[0]
    last = [name for name in expected if name.rpartition(".")[0] == head]
    others = [name for name in expected if name.rpartition(".")[0] != head]
    return [(prefix, own) for prefix in _prefixes(names, others) for own in _prefixes(names, last)] if others else []


def _prefixes(names: Collection[str], expected: Sequence[str]) -> list[str]:
    """Return the prefixes under which all `expected` names are found; only the empty prefix if it is one of them."""
    first = expected[0]
    found = [name.removesuffix(first) for name in names if name == first or name.endswith(f".{first}")]
    whole = [prefix for prefix in found if all(f"{prefix}{name}" in names for name in expected)]
    return [""] if "" in whole else whole


def _tensor_problem(tensors: Mapping[str, Tensor]) -> str:
    """Return the problem of the first tensor that is not a dense, finite tensor of real numbers, "" if none. Integers
    and 8-bit floats are refused because they are usually quantized weights with separate scales."""
    values = {name: value for name, value in tensors.items() if not name.endswith(STEPS)}
    odd = ((name, _unusable_kind(value)) for name, value in values.items())
    if cause := next(
        (f"{name} is {kind}: save it as a dense tensor of real numbers" for name, kind in odd if kind), ""
    ):
        return cause
    diverged = (name for name, value in values.items() if not value.float().isfinite().all())
    return next((f"{name} contains NaN or Inf: use the weights of an earlier step" for name in diverged), "")


def _unusable_kind(value: Tensor) -> str | None:
    """Describe a tensor that cannot be copied into a weight; None if it can."""
    if value.is_nested:
        return "nested"
    if hasattr(value, "placements"):
        return "a DTensor, split over ranks (save full_tensor())"
    if value.is_meta:
        return "without values (on the meta device)"
    if value.is_complex() or value.is_quantized:
        return "complex" if value.is_complex() else "quantized"
    if value.layout != torch.strided:
        return str(value.layout).removeprefix("torch.").replace("sparse_coo", "sparse")
    if not value.is_floating_point() or value.itemsize < 2:
        return f"of {str(value.dtype).removeprefix('torch.')}"
    return None


def _describe(path: Path, taken: Fit, tried: Sequence[Fit]) -> str:
    """Return a line about loaded weights: their key, removed prefixes, and what was not loaded."""
    weights, match = taken.weights, taken.match
    parts = [f"weights of {path}"]
    if weights.key:
        parts.append(f"key {weights.key}{' (moving average)' if weights.averaged else ''}")
    if others := [fit.weights.key for fit in tried if fit is not taken and not fit.problem]:
        parts.append(f"not {first_named(others)} (to load it, save it in a separate file)")
    unfit = [f"{fit.weights.key} ({fit.problem})" for fit in tried if fit.weights.averaged and fit.problem]
    if unfit and not weights.averaged:
        parts.append(f"not {unfit[0]}")
    if match.removed:
        parts.append(f"names without {' and '.join(match.removed)}")
    if match.left_out:
        parts.append(f"ignored {first_named(match.left_out)}")
    if taken.reinitialized:
        parts.append(f"newly initialized {', '.join(taken.reinitialized)}")
    return ", ".join(parts)


def shapes(state: Mapping[str, Tensor]) -> Shapes:
    """Return the shape of each weight."""
    return {name: tuple(value.shape) for name, value in state.items()}


def describe_difference(names: list[str], saved: Shapes, model: Shapes) -> str:
    """Describe the weights `names`, which differ between a file and a model."""
    name = names[0]
    return (
        f"weights of another model ({plural(len(names), 'key')} different, first {name}, "
        f"{saved.get(name, 'absent')} in the file and {model.get(name, 'absent')} in the model)"
    )


def normalization_of(file: Path) -> str | None:
    """Return the data.mean and data.std settings that a file of torchvision's weights needs, None for the defaults."""
    halves = f"[{','.join(map(str, HALF))}]"
    return f"data.mean={halves} data.std={halves}" if file.name.startswith(HALF_NORMALIZED) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A file of pretrained weights: its URL, its path in torch's cache, the first digits of its SHA-256.

    `name` is torchvision's, such as IMAGENET1K_V2; `accuracy` is the published top-1 in percent, None if there is none.
    """

    name: str
    url: str
    path: Path
    digits: str
    accuracy: float | None

    @property
    def remedy(self) -> str:
        """How to download the file by hand."""
        return f"on a machine with internet access, download {self.url} to {self.path}"


def find_pretrained(network: str, weights: str | None = None, mirror: str | None = None) -> Pretrained:
    """Find pretrained weights of a torchvision network, by default its best; `mirror` is a URL with the same files.

    Raises InputError if the network or the weights are unknown.
    """
    if network.startswith(TIMM):
        name = network.removeprefix(TIMM)
        raise InputError(
            f"{network} is not torchvision's: download model.safetensors of {name} from https://huggingface.co/timm "
            "and set model.weights to it"
        )
    models: Any = import_torchvision("models")
    name = network.removeprefix(TORCHVISION)
    known = models.list_models(module=models)
    if name not in known:
        near = ", ".join(get_close_matches(name, known, n=3, cutoff=0.4) or known[:5])
        raise InputError(f"torchvision has no weights for a classifier {name!r} (did you mean {near}?)")
    kinds = {each.name: each for each in models.get_model_weights(name)}
    chosen = weights or models.get_model_weights(name).DEFAULT.name
    if chosen not in kinds:
        raise InputError(f"torchvision has no weights {chosen!r} for {name}: choose from {', '.join(kinds)}")
    value = kinds[chosen].value
    file = value.url.rpartition("/")[2]
    digits = HASH.search(file)
    measured = value.meta.get("_metrics", {}).get("ImageNet-1K", {}).get("acc@1")
    return Pretrained(
        name=chosen,
        url=f"{mirror.rstrip('/')}/{file}" if mirror else value.url,
        path=Path(torch.hub.get_dir()) / "checkpoints" / file,
        digits=digits[1] if digits else "",
        accuracy=measured,
    )


def fetch(pretrained: Pretrained) -> bool:
    """Download the weights if missing and verify their checksum; return True if they were downloaded.

    Raises RunError if the existing file is damaged, the download fails, or its checksum is wrong.
    """
    if pretrained.path.is_file():
        found = _sha256(pretrained.path)
        if not found.startswith(pretrained.digits):
            raise RunError(
                f"{pretrained.path} is damaged, its SHA-256 begins with {found[: len(pretrained.digits)]} instead of "
                f"{pretrained.digits}: remove it, then {pretrained.remedy}"
            )
        return False
    try:
        pretrained.path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(pretrained.url, str(pretrained.path), pretrained.digits or None)
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise RunError(f"cannot download the weights ({reason}): {pretrained.remedy}") from None
    except RuntimeError:  # raised by torch if the checksum is wrong
        raise RunError(
            f"{pretrained.url} is not the expected file, its SHA-256 does not begin with {pretrained.digits}: "
            f"{pretrained.remedy}"
        ) from None
    return True


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
