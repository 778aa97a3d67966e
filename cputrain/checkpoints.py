"""Checkpoint files, without the network and without pickle: their names in a run folder, checkpoint.json (network,
training state, checksums of the files), and safetensors with a CRC-32C for every tensor.

The command line uses this module to find checkpoints; only functions that read or write tensors import torch and numpy.
"""

import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import google_crc32c
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cputrain.affinity.errors import InputError
from cputrain.files import CHUNK_BYTES, crc32c_of, write_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

BEST = "best"
REPLACED = ".replaced"
NUMBERED = re.compile(r"step-\d{7,}")


def name_of(step: int) -> str:
    """Return the name of the checkpoint after a step."""
    return f"step-{step:07d}"


def partial_name(step: int) -> str:
    """Return the name of a checkpoint that is being written."""
    return f".{name_of(step)}.partial"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a numbered checkpoint was saved."""
    return int(checkpoint.name.removeprefix(".").removesuffix(REPLACED).removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """List the numbered checkpoints, oldest first, including damaged ones and those being replaced during a crash."""
    found = [path for path in folder.glob("step-*") if NUMBERED.fullmatch(path.name) and path.is_dir()]
    replaced = ((path, _name_of_replaced(path)) for path in folder.glob(f".step-*{REPLACED}"))
    lost = [path for path, before in replaced if NUMBERED.fullmatch(before.name) and not before.exists()]
    return sorted((*found, *lost), key=step_of)


def publish_checkpoint(partial: Path, path: Path) -> None:
    """Give a written checkpoint its name, replacing one of that name. If a crash interrupts this, `list_checkpoints`
    still finds the old one, and `restore_replaced` restores its name."""
    _sync(partial)
    replaced = path.with_name(f".{path.name}{REPLACED}")
    if path.exists() or path.is_symlink():
        _delete(replaced)
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    _delete(replaced)


def restore_replaced(folder: Path) -> None:
    """Restore the name of a checkpoint that was being replaced during a crash; delete one that has been replaced."""
    for replaced in folder.glob(f".*{REPLACED}"):
        path = _name_of_replaced(replaced)
        if path.exists():
            _delete(replaced)
        else:
            replaced.rename(path)


def _name_of_replaced(path: Path) -> Path:
    return path.with_name(path.name.removeprefix(".").removesuffix(REPLACED))


def _delete(path: Path) -> None:
    """Delete a checkpoint that has been renamed; if it is a symbolic link, delete only the link.

    Files that the file system refuses to delete are left for the next start: a file on NFS that another process still
    reads must not end a training.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that a partly deleted one is never found."""
    gone = path.with_name(f".{path.name}.removed.partial")
    _delete(gone)
    path.rename(gone)
    _delete(gone)


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is no longer found; return its new path."""
    aside = path.with_name(f"{path.name}.damaged")
    _delete(aside)
    return path.rename(aside)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all numbered checkpoints except the newest `keep` and the best one."""
    best = (folder / BEST).resolve()
    for old in list_checkpoints(folder)[:-keep]:
        if old.resolve() != best:
            remove(old)


def remove_partial(folder: Path) -> None:
    """Remove unfinished checkpoints of an earlier start."""
    restore_replaced(folder)
    for partial in folder.glob(".*.partial"):
        _delete(partial)


def set_best(path: Path) -> None:
    """Link BEST to a checkpoint in the same folder; copy it if the file system has no links."""
    best, partial = path.with_name(BEST), path.with_name(f".{BEST}.partial")
    with suppress(FileNotFoundError):
        partial.unlink()
    try:
        partial.symlink_to(path.name)
    except OSError:
        shutil.copytree(path, partial)
    if best.is_dir() and not best.is_symlink():
        publish_checkpoint(partial, best)
    else:
        partial.replace(best)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to disk, so that they survive a crash of the host."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError:  # some network file systems cannot sync folders
        pass
    finally:
        os.close(opened)


MANIFEST = "checkpoint.json"
MODEL, EMA, OPTIMIZER = "model.safetensors", "ema.safetensors", "optimizer.safetensors"
LOSS = "loss.safetensors"  # of a loss that has parameters or buffers
MAX_BYTES = 64 << 20
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Pixels = Annotated[int, Field(ge=0, le=4096)]  # the side of an image
Finite = Annotated[float, Field(allow_inf_nan=False)]
Divisor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FileName = Annotated[str, Field(pattern=r"^(model|ema|loss|optimizer|rank-\d+)\.safetensors$")]


class DamagedError(InputError):
    """The file cannot be read, or its bytes differ from those written."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """Size and CRC-32C of a file."""

    bytes: Count
    crc32c: Count


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
    rollbacks to each checkpoint; `winograd` names the layers computed by Winograd's algorithm, None if it is not used.
    """

    epoch_done: bool
    own_statistics: bool
    best_score: float | None
    bucket_mib: float
    winograd: tuple[str, ...] | None = None
    first_loss: float | None
    diverged: bool
    rollbacks: dict[str, int]
    optimizer: OptimizerRecord


class Manifest(_Record):
    """Content of checkpoint.json."""

    format: Literal["cputrain checkpoint"] = "cputrain checkpoint"
    version: Literal[1] = 1
    cputrain: str
    step: Count
    network: NetworkRecord
    scale: ScaleRecord
    training: TrainingRecord
    recipe: dict[str, Any]
    files: dict[FileName, FileRecord]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write checkpoint.json with its own checksum; it is the last file of a checkpoint to be written."""
    write_text(folder / MANIFEST, manifest_text(manifest))


def manifest_text(manifest: Manifest) -> str:
    """Return the text of checkpoint.json. Raises ValueError for values that JSON cannot represent."""
    content = manifest.model_dump(mode="json")
    return json.dumps({"crc32c": checksum(content), "checkpoint": content}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises InputError if it is not a checkpoint, DamagedError if it is damaged."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(_no_checkpoint(folder, "is a file" if folder.exists() else "does not exist"))
    if not path.is_file():
        raise DamagedError(_no_checkpoint(folder, f"has no {MANIFEST}"))
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DamagedError(f"{path} has {path.stat().st_size:,} bytes, more than a manifest's {MAX_BYTES:,}")
        data = json.loads(path.read_bytes())
        content, intact = data["checkpoint"], data["crc32c"] == checksum(data["checkpoint"])
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror}") from None
    except (LookupError, TypeError, ValueError, RecursionError):
        raise DamagedError(f"{path} is damaged: it is not the JSON of a checkpoint") from None
    if not intact:
        raise DamagedError(f"{path} is damaged: its checksum is wrong")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        place, first = first_error(error)
        raise InputError(f"{path} is damaged or from another version of cputrain ({place}: {first['msg']})") from None


def first_error(error: ValidationError) -> tuple[str, Mapping[str, Any]]:
    """Return the place of the first error, such as "optimizer.name", and pydantic's description of it."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), first


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's own state."""
    return f"rank-{rank:05d}.safetensors"


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint folder."""
    # Not Path.is_file, which raises if a word is too long for a path.
    return os.path.isfile(path / MANIFEST)  # noqa: PTH113


def _no_checkpoint(path: Path, why: str) -> str:
    return (
        f"{path} {why}, so it is not a checkpoint: give a run folder or one of its checkpoints; to start from a file "
        "of weights, set model.weights"
    )


def checksum(content: Any) -> int:
    """Return the CRC-32C of a JSON value, independent of its layout."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return int(google_crc32c.value(text.encode()))


SUFFIX = ".safetensors"
CHECKSUMS = "crc32c"  # header entry with a JSON object of tensor name -> CRC-32C
ALIGNMENT = 8
DTYPES = {  # torch's names -> safetensors' names
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> FileRecord:
    """Write tensors and fsync the file; `metadata` is text by key. Raises OSError naming the file.

    Other memory formats, such as channels-last, become row-major. Call it in a separate thread: copies run in that
    thread without the interpreter's lock.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    arrays = {name: _row_major(tensors[name]) for name in order}
    checksums = {name: crc32c_of(array) for name, array in arrays.items()}
    header: dict[str, object] = {"__metadata__": {**metadata, CHECKSUMS: json.dumps(checksums)}}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": DTYPES[str(tensors[name].dtype).removeprefix("torch.")],
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + len(array)],
        }
        offset += len(array)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    crc, size = google_crc32c.value(head), len(head) + offset
    try:
        with path.open("wb") as file:
            file.write(head)
            for array in arrays.values():
                for begin in range(0, len(array), CHUNK_BYTES):
                    piece = array[begin : begin + CHUNK_BYTES].tobytes()
                    crc = google_crc32c.extend(crc, piece)
                    file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return FileRecord(bytes=size, crc32c=crc)


def read_tensors(path: Path, expected: FileRecord | None = None) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """Read a file's tensors and metadata and verify them: the whole file if `expected` is given, else every tensor that
    has a checksum. Raises DamagedError."""
    from safetensors import SafetensorError

    try:
        if stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):  # reading might never end
            raise DamagedError(f"{path} is a pipe or a device: replace it with a file")
        if expected is not None and file_sum(path) != expected:
            raise DamagedError(f"{path} is damaged: {_damage(path, expected)}")
        tensors, metadata = _load(path)
        wrong = _wrong_tensor(tensors, metadata) if expected is None else None
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"{path} is not a safetensors file, or its header is damaged: {error}") from None
    if wrong:
        raise DamagedError(f"{path} is damaged: the checksum of {wrong} is wrong")
    return tensors, metadata


def read_file(folder: Path, manifest: Manifest, name: str) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """Read the tensors and the metadata of one of a checkpoint's files. Raises DamagedError."""
    record = manifest.files.get(name)
    if record is None:
        raise DamagedError(f"{folder} is damaged: it has no {name}")
    return read_tensors(folder / name, record)


def file_sum(path: Path) -> FileRecord:
    """Return the current size and checksum of a file."""
    crc = size = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            crc, size = google_crc32c.extend(crc, piece), size + len(piece)
    return FileRecord(bytes=size, crc32c=crc)


def _load(path: Path) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    from safetensors import safe_open

    # By descriptor, as safetensors cannot open paths that are not UTF-8.
    with path.open("rb") as opened, safe_open(f"/proc/self/fd/{opened.fileno()}", framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118  no mapping


def _row_major(tensor: "Tensor") -> "NDArray[np.uint8]":
    """Return a tensor's values in row-major order, as bytes."""
    import numpy as np
    import torch

    plain = tensor.detach()
    plain = plain.view(torch.int16) if plain.dtype in (torch.bfloat16, torch.float16) else plain
    return np.ascontiguousarray(plain.numpy()).reshape(-1).view(np.uint8)


def _wrong_tensor(tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> str | None:
    """Return the name of a tensor whose checksum differs from the header; None if all match."""
    known = json.loads(metadata.get(CHECKSUMS, "{}"))
    if not isinstance(known, dict):
        raise ValueError("its checksums are not a JSON object")
    for name, value in tensors.items():
        if name in known and known[name] != crc32c_of(_row_major(value)):
            return name
    return None


def _damage(path: Path, expected: FileRecord) -> str:
    """Describe how a file differs from its record: its size, a tensor, or the header."""
    from safetensors import SafetensorError

    size = path.stat().st_size
    if size != expected.bytes:
        return f"it has {size:,} of {expected.bytes:,} bytes"
    try:
        wrong = _wrong_tensor(*_load(path))
    except (SafetensorError, ValueError):
        wrong = None
    return f"the checksum of {wrong} is wrong" if wrong else "the checksum of its header is wrong"
