"""Files of a checkpoint, without pickle: safetensors with a CRC-32C for every tensor, and checkpoint.json, whose own
checksum and those of the other files are in it; and the folder of checkpoints: their names, which of them are complete,
and how one replaces another or is removed.

The command line uses this module to find checkpoints; only functions that read or write tensors import torch and numpy.
"""

import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import google_crc32c

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import write_bytes
from cputrain.affinity.wording import plural
from cputrain.checksums import CHUNK_BYTES, crc32c_of, crc32c_of_file, crc32c_of_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

MANIFEST = "checkpoint.json"
# Whose state a checkpoint has: `cputrain train`'s, which evaluates and resumes it, or a loop's, by AsyncCheckpoint.
TRAINER_FORMAT: Final = "cputrain checkpoint"
LOOP_FORMAT: Final = "cputrain AsyncCheckpoint"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
SUFFIX = ".safetensors"
CHECKSUMS = "crc32c"  # header entry with a JSON object of tensor name -> CRC-32C
ALIGNMENT = 8
MAX_BYTES = 64 << 20
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

T = TypeVar("T")
BEST = "best"
REPLACED = ".replaced"
NUMBERED = re.compile(r"step-\d{7,}")


class DamagedError(InputError):
    """The file cannot be read, or its bytes differ from those written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and CRC-32C of a file."""

    bytes: int
    crc32c: int


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's own state."""
    return f"rank-{rank:05d}{SUFFIX}"


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint folder."""
    # Not Path.is_file, which raises if a word is too long for a path.
    return os.path.isfile(path / MANIFEST)  # noqa: PTH113


def content_text(content: Mapping[str, Any]) -> str:
    """Return the text of checkpoint.json. Raises ValueError for values that JSON cannot represent."""
    return json.dumps({"crc32c": crc32c_of_json(content), "checkpoint": content}, indent=1)


def write_content(folder: Path, content: Mapping[str, Any]) -> None:
    """Write checkpoint.json with its own checksum; it is the last file of a checkpoint to be written."""
    write_bytes(folder / MANIFEST, content_text(content).encode())


def read_content(folder: Path) -> Any:
    """Read the content of checkpoint.json. Raises InputError if the folder is not a checkpoint, DamagedError if it is
    damaged."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(_no_checkpoint(folder, "is a file" if folder.exists() else "does not exist"))
    if not path.is_file():
        raise DamagedError(_no_checkpoint(folder, f"has no {MANIFEST}"))
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DamagedError(f"{path} has {path.stat().st_size:,} bytes, more than a manifest's {MAX_BYTES:,}")
        data = json.loads(path.read_bytes())
        content, intact = data["checkpoint"], data["crc32c"] == crc32c_of_json(data["checkpoint"])
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror}") from None
    except (LookupError, TypeError, ValueError, RecursionError):
        raise DamagedError(f"{path} is damaged: it is not the JSON of a checkpoint") from None
    if not intact:
        raise DamagedError(f"{path} is damaged: its checksum is wrong")
    return content


def _no_checkpoint(path: Path, why: str) -> str:
    return (
        f"{path} {why}, so it is not a checkpoint: give a run folder or one of its checkpoints; to start from a file "
        "of weights, set model.weights"
    )


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
        if expected is not None and file_record(path) != expected:
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


def file_record(path: Path) -> FileRecord:
    """Return the current size and checksum of a file."""
    size, crc = crc32c_of_file(path)
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
    checksums = json.loads(metadata.get(CHECKSUMS, "{}"))
    if not isinstance(checksums, dict):
        raise ValueError("its checksums are not a JSON object")
    for name, value in tensors.items():
        if name in checksums and checksums[name] != crc32c_of(_row_major(value)):
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


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after a step."""
    return f"step-{step:07d}"


def partial_name(step: int) -> str:
    """Return the name of a checkpoint that is being written."""
    return f".{checkpoint_name(step)}.partial"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a numbered checkpoint was saved."""
    return int(checkpoint.name.removeprefix(".").removesuffix(REPLACED).removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """List the numbered checkpoints, oldest first, including damaged ones and those being replaced during a crash."""
    checkpoints = [path for path in folder.glob("step-*") if NUMBERED.fullmatch(path.name) and path.is_dir()]
    replaced = ((path, _name_of_replaced(path)) for path in folder.glob(f".step-*{REPLACED}"))
    lost = [path for path, before in replaced if NUMBERED.fullmatch(before.name) and not before.exists()]
    return sorted((*checkpoints, *lost), key=step_of)


def load_newest_intact(
    folder: Path, load: Callable[[Path], T], gather: Callable[[object], list[Any]], remedy: str
) -> tuple[T, dict[str, str]] | None:
    """Load the newest checkpoint that every rank can load; return it with the problems of newer, damaged ones by name.

    Returns None if there are none. `load` raises DamagedError for a damaged one; `gather` returns every rank's value.
    All ranks must call this. Raises InputError on every rank if all are damaged, or if `load` raises it; `remedy` is
    what to do then.
    """
    names = gather([path.name for path in list_checkpoints(folder)])[0]
    damaged: dict[str, str] = {}
    for name in reversed(names):
        damage, refusal, loaded = "", "", None
        try:
            loaded = load(folder / name)
        except DamagedError as error:
            damage = str(error)
        except InputError as error:
            refusal = str(error)
        problems = gather((damage, refusal))
        if refusals := [refusal for _, refusal in problems if refusal]:
            raise InputError(refusals[0])
        damages = [damage for damage, _ in problems if damage]
        if loaded is not None and not damages:
            return loaded, damaged
        damaged[name] = damages[0]
    if damaged:
        count, newest = plural(len(damaged), "checkpoint"), next(iter(damaged.values()))
        raise InputError(
            f"none of the {count} in {folder} can be used, the newest because {newest}: restore one from a copy, or "
            f"{remedy}"
        )
    return None


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


def remove_checkpoint(path: Path) -> None:
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
            remove_checkpoint(old)


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
