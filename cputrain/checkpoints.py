"""Checkpoints as files, without a network and without pickle: their places in a run's folder, checkpoint.json (what one
is of, where its training was, checksums of its files), and safetensors with the CRC-32C of every tensor.

The command line finds checkpoints by this: torch and numpy are imported by what reads or writes tensors alone.
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
from cputrain.files import write_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

BEST = "best"
REPLACED = ".replaced"
NUMBERED = re.compile(r"step-\d{7,}")


def name_of(step: int) -> str:
    """The name of the checkpoint after a step."""
    return f"step-{step:07d}"


def partial_name(step: int) -> str:
    """The name of a checkpoint that is being written."""
    return f".{name_of(step)}.partial"


def step_of(checkpoint: Path) -> int:
    """The step after which a numbered checkpoint was saved."""
    return int(checkpoint.name.removeprefix(".").removesuffix(REPLACED).removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The numbered checkpoints, oldest first, damaged ones included, and those that were being replaced at a crash."""
    found = [path for path in folder.glob("step-*") if NUMBERED.fullmatch(path.name) and path.is_dir()]
    replaced = ((path, _name_of_replaced(path)) for path in folder.glob(f".step-*{REPLACED}"))
    lost = [path for path, before in replaced if NUMBERED.fullmatch(before.name) and not before.exists()]
    return sorted((*found, *lost), key=step_of)


def put_in_place(partial: Path, path: Path) -> None:
    """Give a checkpoint that is written its name. One of that name is replaced: where a crash leaves neither,
    `list_checkpoints` finds it, and `restore_replaced` gives it its name again."""
    _sync(partial)
    replaced = path.with_name(f".{path.name}{REPLACED}")
    if path.exists() or path.is_symlink():
        _delete(replaced)
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    _delete(replaced)


def restore_replaced(folder: Path) -> None:
    """Give a checkpoint its name again that was being replaced when the host crashed; remove one that was replaced."""
    for replaced in folder.glob(f".*{REPLACED}"):
        path = _name_of_replaced(replaced)
        if path.exists():
            _delete(replaced)
        else:
            replaced.rename(path)


def _name_of_replaced(path: Path) -> Path:
    return path.with_name(path.name.removeprefix(".").removesuffix(REPLACED))


def _delete(path: Path) -> None:
    """Delete a checkpoint that has lost its name; of a link to one elsewhere only the link.

    What the file system refuses stays, and the next start tries again: a file on NFS that another process still reads
    is no reason to end a training.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that no half of it is ever found."""
    gone = path.with_name(f".{path.name}.removed.partial")
    _delete(gone)
    path.rename(gone)
    _delete(gone)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it counts no more; its new path."""
    aside = path.with_name(f"{path.name}.damaged")
    _delete(aside)
    return path.rename(aside)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all numbered checkpoints but the newest `keep` and the best one."""
    best = (folder / BEST).resolve()
    for old in list_checkpoints(folder)[:-keep]:
        if old.resolve() != best:
            remove(old)


def remove_partial(folder: Path) -> None:
    """Remove what an earlier start has left unfinished."""
    restore_replaced(folder)
    for partial in folder.glob(".*.partial"):
        _delete(partial)


def set_best(path: Path) -> None:
    """Make BEST, beside a checkpoint, a link to it; a copy where the file system has no links."""
    best, partial = path.with_name(BEST), path.with_name(f".{BEST}.partial")
    with suppress(FileNotFoundError):
        partial.unlink()
    try:
        partial.symlink_to(path.name)
    except OSError:
        shutil.copytree(path, partial)
    if best.is_dir() and not best.is_symlink():
        put_in_place(partial, best)
    else:
        partial.replace(best)


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a crash of the host."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError:  # some network file systems refuse it for folders
        pass
    finally:
        os.close(opened)


MANIFEST = "checkpoint.json"
MODEL, EMA, OPTIMIZER = "model.safetensors", "ema.safetensors", "optimizer.safetensors"
MAX_BYTES = 64 << 20
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Pixels = Annotated[int, Field(ge=0, le=4096)]  # the side of an image
Finite = Annotated[float, Field(allow_inf_nan=False)]
Divisor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FileName = Annotated[str, Field(pattern=r"^(model|ema|optimizer|rank-\d+)\.safetensors$")]


class DamagedError(InputError):
    """A file that cannot be read, or whose bytes are not those that were written."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """The size and the CRC-32C of a file."""

    bytes: Count
    crc32c: Count


class NetworkRecord(_Record):
    """What the network is and takes: with this and model.safetensors a checkpoint can be used without its run.

    `model` is the recipe's section, empty for a network of a user's own code. An image is scaled to a short side of
    `resize` pixels, its center cut out, `crop` pixels high and wide; values from 0 to 1, minus `mean`, divided by
    `std`. `features`: the length of a row, for data that are no images.
    """

    model: dict[str, Any]
    classes: tuple[str, ...]
    features: int | None
    crop: Pixels
    resize: Pixels
    mean: tuple[Finite, Finite, Finite]
    std: tuple[Divisor, Divisor, Divisor]


class ScaleRecord(_Record):
    """Workers, images per step, training images and classes of one start of a training."""

    workers: Positive
    global_batch: Count
    train_images: Count
    classes: Count


class OptimizerRecord(_Record):
    """The optimizer's name, the options of its parameter groups with the parameters' names, and its values that are no
    tensors, by parameter."""

    name: str
    groups: tuple[dict[str, Any], ...]
    values: dict[str, dict[str, Any]]


class TrainingRecord(_Record):
    """Where a training was.

    `epoch_done`: the epoch that ends with this step has been evaluated and logged. `own_statistics`: a resumed rank has
    the batch-norm statistics of its own file; otherwise their mean, in model.safetensors. `bucket_mib` is the size of
    DDP's gradient buckets, `first_loss` and `diverged` belong to the warning of a diverging loss, `rollbacks` counts
    those to each checkpoint. `winograd` names the layers that Winograd's algorithm computed, None where none were
    chosen.
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
    """The content of checkpoint.json."""

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
    """Write checkpoint.json with its own checksum, as the last of a checkpoint's files."""
    write_text(folder / MANIFEST, manifest_text(manifest))


def manifest_text(manifest: Manifest) -> str:
    """The text of checkpoint.json. Raises ValueError for what JSON has not."""
    content = manifest.model_dump(mode="json")
    return json.dumps({"crc32c": checksum(content), "checkpoint": content}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises InputError for another folder or file, DamagedError for a damaged one."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(_no_checkpoint(folder, "is a file" if folder.exists() else "is not there"))
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
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{path} is of another version of cputrain, or damaged ({place}: {first['msg']})") from None


def rank_file(rank: int) -> str:
    """The name of the file of a rank's own state."""
    return f"rank-{rank:05d}.safetensors"


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint's folder."""
    # os.path's: a word may be too long for a path, at which Path.is_file raises.
    return os.path.isfile(path / MANIFEST)  # noqa: PTH113


def _no_checkpoint(path: Path, why: str) -> str:
    return (
        f"{path} {why}, so it is not a checkpoint: name a run's folder or one of its checkpoints; to start from a file "
        "of weights, set model.weights"
    )


def checksum(content: Any) -> int:
    """The CRC-32C of a JSON value, however it is laid out."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return int(google_crc32c.value(text.encode()))


SUFFIX = ".safetensors"
CHECKSUMS = "crc32c"  # the header's entry with a JSON object of tensor name -> CRC-32C
CHUNK_BYTES = 1 << 20  # of one checksum or write: between two of them other threads run
ALIGNMENT = 8
DTYPES = {  # torch's names -> those of safetensors
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
    """Write tensors and synchronize the file with its disk; `metadata` is text by key. Raises OSError naming the file.

    Layouts other than row-major (channels-last) become row-major. To be called in a thread of its own: copies run in
    that thread alone and without the interpreter's lock.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    arrays = {name: _row_major(tensors[name]) for name in order}
    checksums = {name: _sum_of_bytes(array) for name, array in arrays.items()}
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
    """The tensors of a file and its metadata, both verified: the whole file where `expected` is given, every tensor
    that has a checksum otherwise. Raises DamagedError."""
    from safetensors import SafetensorError

    try:
        if stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):  # it might be read for ever
            raise DamagedError(f"{path} is a pipe or a device: put a file in its place")
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
    """The tensors and the metadata of one of a checkpoint's files. Raises DamagedError."""
    record = manifest.files.get(name)
    if record is None:
        raise DamagedError(f"{folder} is damaged: it has no {name}")
    return read_tensors(folder / name, record)


def file_sum(path: Path) -> FileRecord:
    """The size and checksum of a file as it is."""
    crc = size = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            crc, size = google_crc32c.extend(crc, piece), size + len(piece)
    return FileRecord(bytes=size, crc32c=crc)


def _load(path: Path) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    from safetensors import safe_open

    # by its number: safetensors opens no path that is not UTF-8
    with path.open("rb") as opened, safe_open(f"/proc/self/fd/{opened.fileno()}", framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118  no mapping


def _row_major(tensor: "Tensor") -> "NDArray[np.uint8]":
    """A tensor's values in row-major order, as bytes."""
    import numpy as np
    import torch

    plain = tensor.detach()
    plain = plain.view(torch.int16) if plain.dtype in (torch.bfloat16, torch.float16) else plain
    return np.ascontiguousarray(plain.numpy()).reshape(-1).view(np.uint8)


def _sum_of_bytes(array: "NDArray[np.uint8]") -> int:
    crc = 0
    for begin in range(0, len(array), CHUNK_BYTES):
        crc = google_crc32c.extend(crc, array[begin : begin + CHUNK_BYTES].tobytes())
    return crc


def _wrong_tensor(tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> str | None:
    """The name of a tensor that has another checksum than the header."""
    known = json.loads(metadata.get(CHECKSUMS, "{}"))
    if not isinstance(known, dict):
        raise ValueError("its checksums are not a JSON object")
    for name, value in tensors.items():
        if name in known and known[name] != _sum_of_bytes(_row_major(value)):
            return name
    return None


def _damage(path: Path, expected: FileRecord) -> str:
    """What differs in a file with another checksum: its size, a tensor, or its header."""
    from safetensors import SafetensorError

    size = path.stat().st_size
    if size != expected.bytes:
        return f"it has {size:,} of {expected.bytes:,} bytes"
    try:
        wrong = _wrong_tensor(*_load(path))
    except (SafetensorError, ValueError):
        wrong = None
    return f"the checksum of {wrong} is wrong" if wrong else "the checksum of its header is wrong"
