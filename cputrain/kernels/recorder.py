"""Record the operators that torch computes in this thread, by name and arguments, with the kernels that computed them.

Native code (native/recorder.cpp) observes each operator and sums its times, so that memory stays bounded; torch's
profiler keeps every event, and must not stop inside one.
"""

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cputrain.kernels.build import KERNELS, KernelLibrary
from cputrain.native_build import NativeExtension, ensure_compiled, loading

SOURCE = KERNELS / "recorder.cpp"
REQUESTED_BY, ALTERNATIVE = "the recorder of operators", "use torch.profiler"
DTYPES = {  # of the C++ part
    **{"Float": "float32", "Double": "float64", "BFloat16": "bfloat16", "Half": "float16"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's shape, strides and type, such as "bfloat16"."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


Argument = TensorType | tuple["Argument", ...] | int | bool | str | None
"""A tensor, a list, a number (floats are 1: no shape depends on them), or None if it is missing or unknown."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator, such as "aten::add" and "Tensor", and its arguments."""

    name: str
    overload: str
    arguments: tuple[Argument, ...]


@dataclass(slots=True)
class Spent:
    """Calls with the same arguments: their number, their time, and the kernels of ours that computed some of them."""

    count: int = 0
    ns: int = 0
    kernels: set[str] = field(default_factory=set)


def _compile(cxx: str, output: Path) -> tuple[str, ...]:
    folder = Path(torch.__file__).parent
    paths = (f"-I{folder / 'include'}", f"-L{folder / 'lib'}")
    # NDEBUG as torch itself: without it its classes have other members.
    options = ("-std=c++20", "-O1", "-fPIC", "-shared", "-DNDEBUG", "-DAT_PER_OPERATOR_HEADERS")
    return (cxx, *options, *paths, str(SOURCE), "-ltorch_cpu", "-lc10", "-o", str(output))


LIBRARY = KernelLibrary(
    name="recorder",
    sources=(SOURCE,),
    extension=NativeExtension(
        title="the recorder of operators", requested_by=REQUESTED_BY, alternative=ALTERNATIVE, argv=_compile
    ),
    depends_on=(torch.__version__.partition("+")[0],),  # the CPU's part is the same in builds with CUDA
)


def compiled_recorder(env: Mapping[str, str]) -> Path:
    """Compile the recorder once per host, unless the wheel has it. Raises InputError without a C++ compiler, RunError
    if compilation fails."""
    return ensure_compiled(LIBRARY.extension, LIBRARY.path(env), env)


class Recorder:
    """The recorder of this process, which records one thread at a time."""

    def __init__(self, path: Path) -> None:
        with loading(path, REQUESTED_BY, ALTERNATIVE):
            self._code = ctypes.PyDLL(str(path))
        self._code.begin_recording.argtypes = [ctypes.c_double, ctypes.c_double]
        self._code.recorded.restype = ctypes.c_char_p

    def begin(self, after_s: float = 0.0, seconds: float = 1e9) -> None:
        """Record this thread anew, for `seconds` from `after_s` after its first operator on."""
        self._code.begin_recording(after_s, after_s + seconds)

    def end(self) -> None:
        """Record no more; what was recorded stays."""
        self._code.end_recording()

    @property
    def is_in_time(self) -> bool:
        """Whether what the thread computes is recorded now."""
        return int(self._code.recording_stage()) == 1

    @property
    def is_over(self) -> bool:
        """Whether the time of the recording is over."""
        return int(self._code.recording_stage()) > 1

    def recorded(self) -> dict[str, Any]:
        """Return JSON values: skipped_s, recorded_s (from the first operator to the last one's end) and calls."""
        values: dict[str, Any] = json.loads(self._code.recorded())
        return values


@cache
def load_recorder(path: Path) -> Recorder:
    """Load the recorder, once in a process."""
    return Recorder(path)


def calls_of(rows: Sequence[Mapping[str, Any]]) -> dict[Call, Spent]:
    """Return the calls that a recorder has recorded."""
    return {
        Call(row["name"], row["overload"], tuple(map(_argument, row["arguments"]))): Spent(
            row["count"], row["ns"], set(row["kernels"])
        )
        for row in rows
    }


def _argument(value: Any) -> Argument:
    if isinstance(value, dict):
        dtype = DTYPES.get(value["dtype"])
        return None if dtype is None else TensorType(tuple(value["shape"]), tuple(value["strides"]), dtype)
    if isinstance(value, list):
        return tuple(map(_argument, value))
    return value if isinstance(value, int | str) else None
