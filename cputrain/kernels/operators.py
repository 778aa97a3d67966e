"""Kernels below torch's CPU operators, for every program of this process: `cputrain.kernels.enable()`.

They are registered for the CPU under torch's own operators (native/operators.cpp), so that modules, autograd, hooks,
pickles and torch.compile stay what they are. What they do not cover goes on to torch's kernels.
"""

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from pathlib import Path

import torch

from cputrain.affinity.errors import InputError, RunError
from cputrain.kernels import operators_table
from cputrain.kernels.build import KERNELS, KernelLibrary, RightKernels, library_options
from cputrain.kernels.operators_table import TABLE, Kernel, wrong_result
from cputrain.native_build import NativeExtension, ensure_compiled, loading, object_file
from cputrain.variables import KERNELS_VARIABLE

OPERATORS, CODE = KERNELS / "operators.cpp", KERNELS / "operator_kernels.cpp"
HEADERS = (
    *("operators.hpp", "convolution_operators.hpp", "depthwise_operators.hpp", "grouped_operators.hpp"),
    *("pointwise_operators.hpp", "norm_operators.hpp", "product_operators.hpp", "attention_operators.hpp"),
    *("amx_products.hpp", "operator_kernels.hpp", "depthwise.hpp", "depthwise_direct.hpp", "grouped.hpp"),
    *("batch_norm.hpp", "attention.hpp", "transpose.hpp", "backward.hpp", "forward.hpp", "vectors.hpp"),
    *("patch_operators.hpp", "unwritten_operators.hpp", "activations.hpp", "rows.hpp", "values.hpp"),
)
SOURCES = (OPERATORS, CODE, *(KERNELS / name for name in HEADERS))
REQUESTED_BY, ALTERNATIVE = "kernels of operators", f"set {KERNELS_VARIABLE}=off"


def enable(env: Mapping[str, str] = os.environ) -> str:
    """Compile the kernels once per host, compare them with float64 and register them; return a line that names them.

    They are those of `operators_table.TABLE`; one that gives wrong results on this CPU is left out and named. Errors
    are no larger than torch's own. Every thread of the process uses them until `disable()`; calling this twice changes
    nothing. All ranks of a job must do the same.

    Raises InputError without a C++ compiler, RunError if compilation fails or no kernel is left; torch's kernels are
    then in place.
    """
    path = LIBRARY.path(env)
    if path not in _loaded:
        _loaded[path] = _checked(ensure_compiled(LIBRARY.extension, path, env), env)
    library = _loaded[path]
    library.register(library.kernels)
    covered = ", ".join(kernel.covers for kernel in library.kernels)
    return "; ".join((f"kernels below torch's operators: {covered} ({ALTERNATIVE} for torch's own)", *left_out()))


def disable() -> None:
    """Take the kernels away: torch's operators are used again. Without `enable` before, nothing changes."""
    for library in _loaded.values():
        library.register(())


def registered() -> bool:
    """Return whether kernels are registered."""
    return any(library.registered for library in _loaded.values())


def left_out() -> list[str]:
    """Return a line for each kernel that is wrong on this CPU and therefore not registered."""
    wrong = {name: reason for library in _loaded.values() for name, reason in library.left_out.items()}
    return [f"left out: {name} ({reason})" for name, reason in wrong.items()]


def kernels_setting(env: Mapping[str, str]) -> str | None:
    """Return CPUTRAIN_KERNELS, "auto" or "off"; None if it is not set. Raises InputError for another value."""
    value = env.get(KERNELS_VARIABLE)
    if value not in (None, "auto", "off"):
        raise InputError(f"{KERNELS_VARIABLE}={value}: give auto or off")
    return value


@contextmanager
def registration_restored() -> Iterator[None]:
    """Register at the end the kernels that are registered now, and no others."""
    before = {path: library.registered for path, library in _loaded.items()}
    try:
        yield
    finally:
        for path, library in _loaded.items():
            library.register(before.get(path, ()))


def calls() -> dict[str, int]:
    """Return how many calls of torch's operators each kernel has computed."""
    return {kernel.name: sum(library.calls(kernel) for library in _loaded.values()) for kernel in TABLE}


def enable_if_requested(env: Mapping[str, str]) -> None:
    """Do what CPUTRAIN_KERNELS says, at `import torch`; rank 0 prints it. A failure is a line, and torch's operators
    stay."""
    try:
        if kernels_setting(env) != "auto":
            return
        line = enable(env)
        if env.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:  # not in its loader processes
            print(f"cputrain: {line}", file=sys.stderr)
    except (InputError, RunError) as error:
        print(f"cputrain: torch's operators stay in place: {error}", file=sys.stderr)


@dataclass
class _Library:
    """The loaded code, the kernels that are right on this CPU, those registered, and why others are left out."""

    code: ctypes.PyDLL
    kernels: tuple[Kernel, ...] = ()
    registered: tuple[Kernel, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.code.kernel_name.restype = ctypes.c_char_p
        self.code.kernel_calls.restype = ctypes.c_int64
        self.code.set_kernels.argtypes = [ctypes.c_uint64]
        names = takewhile(bool, map(self.code.kernel_name, count()))
        self.numbers = {name.decode(): number for number, name in enumerate(names)}

    def register(self, kernels: tuple[Kernel, ...]) -> None:
        """Register these kernels, and no others."""
        self.code.set_kernels(sum(1 << self.numbers[kernel.name] for kernel in kernels))
        self.registered = kernels

    def calls(self, kernel: Kernel) -> int:
        return int(self.code.kernel_calls(self.numbers[kernel.name]))


_loaded: dict[Path, _Library] = {}


def _checked(path: Path, env: Mapping[str, str]) -> _Library:
    """Load the kernels, and compare each alone unless it was right in an earlier process on this type of CPU."""
    with loading(path, REQUESTED_BY, ALTERNATIVE):
        library = _Library(ctypes.PyDLL(str(path)))  # registration needs the interpreter's lock; the kernels do not
    right_before = RightKernels.of(LIBRARY.name, path, (Path(operators_table.__file__),), env)
    known = right_before.names()
    for kernel in TABLE:
        if kernel.applies():
            wrong = "" if kernel.name in known else _wrong(kernel, library)
            if wrong:
                library.left_out[kernel.name] = wrong
            else:
                library.kernels += (kernel,)
    if not library.kernels:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in library.left_out.items())
        raise RunError(f"{REQUESTED_BY}: none is right on this CPU ({reasons}): {ALTERNATIVE}")
    right = tuple(kernel.name for kernel in library.kernels)
    if right != known:
        right_before.write(right)
    return library


def _wrong(kernel: Kernel, library: _Library) -> str:
    """Compare a kernel with float64; say what is wrong, "" if it is right."""
    library.register((kernel,))
    try:
        return wrong_result(kernel, partial(library.calls, kernel))
    finally:
        library.register(())


def _compile(cxx: str, output: Path) -> tuple[tuple[str, ...], ...]:
    """The code with all optimization, and apart from it what torch's headers make slow to compile."""
    include = Path(torch.__file__).parent / "include"
    # As torch itself is compiled: without NDEBUG its classes have other members.
    options = (f"-I{include}", f"-I{include}/torch/csrc/api/include", "-DNDEBUG", "-DAT_PER_OPERATOR_HEADERS")
    commands = (
        (cxx, "-std=c++20", "-O1", "-fPIC", *options, str(OPERATORS)),
        (cxx, *(option for option in library_options() if option != "-shared"), str(CODE)),
    )
    return tuple((*command, "-c", "-o", str(object_file(output, number))) for number, command in enumerate(commands))


def _link(cxx: str, output: Path) -> tuple[str, ...]:
    libraries = (f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10")
    return (cxx, "-shared", *(str(object_file(output, number)) for number in range(2)), *libraries, "-o", str(output))


LIBRARY = KernelLibrary(
    name="operators",
    sources=SOURCES,
    extension=NativeExtension(
        title="kernels of operators", requested_by=REQUESTED_BY, alternative=ALTERNATIVE, argv=_link, parts=_compile
    ),
    depends_on=(torch.__version__.partition("+")[0],),  # the CPU's part is the same in builds with CUDA
)
