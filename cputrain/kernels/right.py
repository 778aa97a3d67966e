"""Which compiled kernels were right in a comparison, so that later processes need not compare them again."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from cputrain.affinity.filesystem import write_bytes
from cputrain.kernels.build import cpu_flags
from cputrain.native_build import checksum_file, library_path


@dataclass(frozen=True, slots=True)
class RightKernels:
    """The names of the kernels that were right, as lines of a file in the cache."""

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
