"""The fast decoder: libjpeg-turbo, found on this machine, and native/pixels.cpp around it, compiled on first use."""

import ctypes
import ctypes.util
import hashlib
import platform
import threading
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_void_p
from importlib import metadata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from cputrain.data.views import Look
from cputrain.native_build import Part, cache_folder, ensure_compiled

SOURCES = tuple(Path(__file__).parent / "native" / name for name in ("pixels.cpp", "cut.hpp"))
FUNCTIONS = (
    "tj3Init",
    "tj3Destroy",
    "tj3Get",
    "tj3DecompressHeader",
    "tj3SetCroppingRegion",
    "tj3Decompress8",
    "tj3GetErrorStr",
)


NO_VIEW = (0,) * 10  # as many as pixels.cpp's View has


class Handle:
    """A thread's decoder and its buffers."""

    def __init__(self, native: ctypes.CDLL, table: ctypes.Array[c_void_p]) -> None:
        self._close = native.pixels_close
        self.pointer = c_void_p(native.pixels_open(table))

    def __del__(self) -> None:
        self._close(self.pointer)


class Decoder:
    """A decoder that any number of threads may use at once."""

    def __init__(self, library: str, native: Path, table: ctypes.Array[c_void_p]) -> None:
        self.path = library
        self._table = table
        self._native = ctypes.CDLL(str(native))
        self._native.pixels_open.restype = c_void_p
        self._native.pixels_close.argtypes = (c_void_p,)
        self._sizes = ctypes.PyDLL(str(native)).pixels_sizes  # too short to let others have the interpreter meanwhile
        self._mine = threading.local()

    def decode(self, encoded: Sequence[bytes], looks: Sequence[Look], places: NDArray[np.uint8]) -> list[bool]:
        """Write what is wanted of each JPEG into its place of `places`, (n, side, side, 3).

        False for each that is none, damaged, or of a kind that this cannot do. Several at a time: other threads have
        the interpreter while they are decoded.
        """
        count, side = len(encoded), places.shape[1]
        assert places.shape == (count, side, side, 3) and places.flags.c_contiguous
        data, lengths = (c_char_p * count)(*encoded), (c_size_t * count)(*map(len, encoded))
        sizes = (c_int * (2 * count))()
        self._sizes(count, data, lengths, sizes)
        views: list[int] = []
        for look, width, height in zip(looks, sizes[::2], sizes[1::2], strict=True):
            view = look(width, height) if width else None
            views += (*view.box, *view.size, *view.at, view.side, view.flip) if view else NO_VIEW
        done = (c_ubyte * count)()
        mine = self._mine.__dict__
        handle = mine.get("handle") or mine.setdefault("handle", Handle(self._native, self._table))
        self._native.pixels_decode(
            *(handle.pointer, count, data, lengths),
            *((c_int * len(views))(*views), side, c_void_p(places.ctypes.data), done),
        )
        return [bool(each) for each in done]


def load(env: Mapping[str, str]) -> Decoder:
    """The decoder, compiled if that is not done.

    Raises InputError where libjpeg-turbo 3 or a compiler is missing, RunError where the compiler fails.
    """
    library = find_library()
    turbo = ctypes.CDLL(library)
    table = (c_void_p * len(FUNCTIONS))(*(ctypes.cast(getattr(turbo, name), c_void_p).value for name in FUNCTIONS))
    return Decoder(library, ensure_built(env), table)


def ensure_built(env: Mapping[str, str]) -> Path:
    """The compiled native part. Raises InputError or RunError as ensure_compiled does."""
    return ensure_compiled(PART, built_path(env), env)


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
    return (cxx, "-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", str(SOURCES[0]), "-o", str(output))


PART = Part(
    title="the image decoder",
    asked="data.decoder=turbo",
    otherwise="set data.decoder=pillow",
    argv=command_line,
)


def built_path(env: Mapping[str, str]) -> Path:
    """Where the compiled part lies: a name made of all that it depends on."""
    parts = (*(path.read_text() for path in SOURCES), platform.machine())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder(env) / f"pixels-{platform.machine()}-{key}" / "pixels.so"
