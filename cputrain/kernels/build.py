"""Compile the kernels for this CPU, or take the wheel's; load them, and remember which were right in a comparison."""

import ctypes
import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from cputrain.affinity.errors import RunError
from cputrain.affinity.filesystem import write_bytes
from cputrain.native_build import NativeExtension, checksum_file, ensure_compiled, is_intact, library_path, loading

KERNELS = Path(__file__).parent / "native"
COMPILED = Path(__file__).parent / "compiled"  # in a wheel of `make release`
CPUINFO = Path("/proc/cpuinfo")
NATIVE = "-march=native"


def library_options() -> tuple[str, ...]:
    """Return the compiler options of all kernels, for this CPU."""
    # By default, compilers use 256-bit vectors on AVX-512, with which bfloat16 runs at 0.8 to 0.9 times the speed.
    wide = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
    return ("-std=c++20", "-O3", NATIVE, *wide, "-fPIC", "-shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSet:
    """Instructions for which a wheel has compiled kernels: the flags of a CPU that has them, the compiler's options."""

    name: str
    flags: frozenset[str]
    options: tuple[str, ...]


AVX2 = frozenset(("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
INSTRUCTION_SETS = (  # the first one that a CPU has is used
    InstructionSet(name="avx512_bf16", flags=AVX512 | {"avx512_bf16"}, options=("-march=x86-64-v4", "-mavx512bf16")),
    InstructionSet(name="avx512", flags=AVX512, options=("-march=x86-64-v4",)),
    InstructionSet(name="avx2", flags=AVX2, options=("-march=x86-64-v3",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLibrary:
    """Kernels compiled into one library from `sources`; `depends_on` are texts that its code depends on, too."""

    name: str
    sources: tuple[Path, ...]
    extension: NativeExtension
    depends_on: tuple[str, ...] = ()

    def path(self, env: Mapping[str, str]) -> Path:
        """Return the path of the library: the one in the wheel for this CPU, else one in the cache, to be compiled."""
        flags = cpu_flags()
        best = next((each for each in INSTRUCTION_SETS if each.flags.issubset(flags.split())), None)
        if best is not None and is_intact(compiled := self.compiled_path(best)):
            return compiled
        return library_path(self.name, (*self._parts(), flags), env)

    def compiled_path(self, instructions: InstructionSet) -> Path:
        """Return the path of the library that a wheel has for these instructions."""
        key = hashlib.sha256("\n".join(self._parts()).encode()).hexdigest()[:16]
        return COMPILED / f"{self.name}-{key}" / f"{instructions.name}.so"

    def compile_for(self, instructions: InstructionSet, env: Mapping[str, str]) -> None:
        """Compile the library for a wheel. Raises the errors of `ensure_compiled`."""
        argv, parts = self.extension.argv, self.extension.parts

        def for_these(command: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(each for word in command for each in (instructions.options if word == NATIVE else (word,)))

        extension = replace(
            self.extension,
            argv=lambda cxx, output: for_these(argv(cxx, output)),
            parts=lambda cxx, output: tuple(map(for_these, parts(cxx, output))),
        )
        ensure_compiled(extension, self.compiled_path(instructions), env)

    def _parts(self) -> tuple[str, ...]:
        """Texts of all that the code depends on but the CPU and where the sources are."""
        texts = (path.read_text(encoding="utf-8") for path in self.sources)
        commands = (*self.extension.parts("", Path("x")), self.extension.argv("", Path("x")))
        words = (word for command in commands for word in command if os.sep not in word)
        return (*texts, *words, platform.machine(), *self.depends_on)


def cpu_flags() -> str:
    """Return the line of /proc/cpuinfo with the CPU's flags, "" if there is none."""
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


@dataclass(frozen=True, slots=True)
class RightKernels:
    """The names of compiled kernels that were right in a comparison, as lines of a file in the cache.

    Later processes need not compare them again.
    """

    file: Path

    @classmethod
    def of(cls, name: str, library: Path, comparison: Iterable[Path], env: Mapping[str, str]) -> "RightKernels":
        """Those of the compiled library `name` on this type of CPU with this torch; `comparison` are the files that
        compare."""
        code = (path.read_text(encoding="utf-8") for path in comparison)
        depends_on = (checksum_file(library).read_text(encoding="ascii"), torch.__version__, cpu_flags(), *code)
        return cls(library_path(f"{name}-right", depends_on, env).with_suffix(".txt"))

    def names(self) -> tuple[str, ...]:
        """Return the names, none if no process has compared the kernels."""
        return tuple(self.file.read_text(encoding="utf-8").splitlines()) if self.file.exists() else ()

    def write(self, names: tuple[str, ...]) -> None:
        """Replace the names. Without a writable cache, the next process compares again."""
        with suppress(OSError):
            write_bytes(self.file, "".join(f"{name}\n" for name in names).encode())
