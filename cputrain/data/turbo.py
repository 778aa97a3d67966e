"""The fast decoder: libjpeg-turbo, found on this machine, and native/pixels.cpp around it, compiled on first use."""

import ctypes
import ctypes.util
import hashlib
import platform
import threading
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from importlib import metadata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from cputrain.compiled import Part, cache_folder, ensure_compiled
from cputrain.data.views import Look

SOURCE = Path(__file__).parent / "native" / "pixels.cpp"
FUNCTIONS = (
    "tj3Init",
    "tj3Destroy",
    "tj3Set",
    "tj3Get",
    "tj3DecompressHeader",
    "tj3SetCroppingRegion",
    "tj3Decompress8",
)


class Box(ctypes.Structure):
    """pixels.cpp's Region."""

    _fields_ = (("x", c_int), ("y", c_int), ("width", c_int), ("height", c_int))


class NativeView(ctypes.Structure):
    """pixels.cpp's View."""

    _fields_ = (
        ("box", Box),
        ("width", c_int),
        ("height", c_int),
        ("x", c_int),
        ("y", c_int),
        ("side", c_int),
        ("flip", c_int),
    )


class Handle:
    """A thread's decoder and its buffers."""

    def __init__(self, native: ctypes.CDLL, table: ctypes.Array[c_void_p]) -> None:
        self._close = native.pixels_close
        self.pointer = c_void_p(native.pixels_open(table))
        self.width, self.height = c_int(), c_int()

    def __del__(self) -> None:
        self._close(self.pointer)


class Decoder:
    """A decoder that any number of threads may use at once."""

    def __init__(self, library: str, native: ctypes.CDLL, table: ctypes.Array[c_void_p]) -> None:
        self.path = library
        self._native, self._table = native, table
        self._mine = threading.local()

    def decode(self, data: bytes, look: Look, place: NDArray[np.uint8]) -> bool:
        """Write what is wanted of a JPEG into `place`, (side, side, 3). False where it is not one that this can do."""
        mine = self._mine.__dict__
        handle = mine.get("handle") or mine.setdefault("handle", Handle(self._native, self._table))
        size = byref(handle.width), byref(handle.height)
        if not self._native.pixels_size(handle.pointer, data, len(data), *size):
            return False
        view = look(handle.width.value, handle.height.value)
        native = NativeView(Box(*view.box), *view.size, *view.at, view.side, view.flip)
        assert place.shape == (view.side, view.side, 3) and place.flags.c_contiguous
        return bool(self._native.pixels_decode(handle.pointer, data, len(data), byref(native), place.ctypes.data))


def load(env: Mapping[str, str]) -> Decoder:
    """The decoder, compiled if that is not done.

    Raises InputError where libjpeg-turbo 3 or a compiler is missing, RunError where the compiler fails.
    """
    library = find_library()
    turbo = ctypes.CDLL(library)
    native = ctypes.CDLL(str(ensure_compiled(PART, built_path(env), env)))
    native.pixels_open.restype = c_void_p
    native.pixels_size.argtypes = (c_void_p, c_char_p, c_size_t, POINTER(c_int), POINTER(c_int))
    native.pixels_decode.argtypes = (c_void_p, c_char_p, c_size_t, POINTER(NativeView), c_void_p)
    native.pixels_close.argtypes = (c_void_p,)
    table = (c_void_p * len(FUNCTIONS))(*(ctypes.cast(getattr(turbo, name), c_void_p).value for name in FUNCTIONS))
    return Decoder(library, native, table)


def find_library() -> str:
    """libturbojpeg of release 3 or later: that of the PyPI package turbojpeg, or the system's. Raises InputError."""
    packaged = next((str(path) for path in _packaged() if _has_all(str(path))), None)
    if packaged:
        return packaged
    system = ctypes.util.find_library("turbojpeg")
    if system and _has_all(system):
        return system
    older = f"{system} is older" if system else "found none"
    raise InputError(f"data.decoder=turbo: it needs libjpeg-turbo 3, {older}: pip install 'cputrain[turbo]'")


def _has_all(library: str) -> bool:
    try:
        found = ctypes.CDLL(library)
    except OSError:
        return False
    return all(hasattr(found, name) for name in FUNCTIONS)


def _packaged() -> list[Path]:
    try:
        files = metadata.files("turbojpeg") or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name.startswith("libturbojpeg")]


def command_line(cxx: str, output: Path) -> tuple[str, ...]:
    """The tokens that compile the native part."""
    # No contraction: multiplying and adding are rounded each, as where the processor has no fused form.
    return (cxx, "-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", str(SOURCE), "-o", str(output))


PART = Part(
    title="the image decoder",
    asked="data.decoder=turbo",
    otherwise="set data.decoder=pillow",
    argv=command_line,
)


def built_path(env: Mapping[str, str]) -> Path:
    """Where the compiled part lies: a name made of all that it depends on."""
    key = hashlib.sha256("\n".join((SOURCE.read_text(), platform.machine())).encode()).hexdigest()[:16]
    return cache_folder(env) / f"pixels-{platform.machine()}-{key}" / "pixels.so"
