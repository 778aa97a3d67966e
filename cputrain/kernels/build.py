"""Compile the kernels for this CPU, and load them."""

import ctypes
import platform
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from cputrain.affinity.errors import RunError
from cputrain.native_build import NativeExtension, library_path, loading

KERNELS = Path(__file__).parent / "native"
CPUINFO = Path("/proc/cpuinfo")


def library_options() -> tuple[str, ...]:
    """Return the compiler options of all kernels, for this CPU."""
    # By default, compilers use 256-bit vectors on AVX-512, with which bfloat16 runs at 0.8 to 0.9 times the speed.
    wide = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
    return ("-std=c++20", "-O3", "-march=native", *wide, "-fPIC", "-shared")


def kernels_path(name: str, sources: tuple[Path, ...], command: tuple[str, ...], env: Mapping[str, str]) -> Path:
    """Return the path of compiled kernels, which depend on sources, command line and CPU flags."""
    texts = (path.read_text(encoding="utf-8") for path in sources)
    return library_path(name, (*texts, *command, platform.machine(), _cpu_flags()), env)


def _cpu_flags() -> str:
    lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def kernels_extension(title: str, argv: Callable[[str, Path], tuple[str, ...]]) -> NativeExtension:
    """Describe kernels that the command `argv` compiles."""
    return NativeExtension(title=title, requested_by="native kernels", alternative="use torch's layers", argv=argv)


class NativeKernels:
    """A loaded library; copies of networks share it."""

    extension: ClassVar[NativeExtension]

    def __init__(self, path: Path) -> None:
        self.path = path
        with loading(path, self.extension.requested_by, self.extension.alternative):
            self._library = ctypes.CDLL(str(path))

    def __reduce__(self) -> tuple[Any, ...]:
        return load_kernels, (type(self), self.path)

    def check(self, wrong: str) -> None:
        """Raise RunError if a check has found a wrong result."""
        if wrong:
            raise RunError(
                f"native kernels: {self.extension.title} give wrong results ({wrong}): remove {self.path.parent} and "
                "set CXX to another compiler, or use torch's layers"
            )

    def function(self, name: str, *arguments: Any, result: Any = None) -> Any:
        """Return a function of the library with arguments and result of these ctypes."""
        function = getattr(self._library, name)
        function.argtypes, function.restype = arguments, result
        return function


@cache
def load_kernels(kind: type[NativeKernels], path: Path) -> Any:
    """Load the library of this kind, once in a process."""
    return kind(path)
