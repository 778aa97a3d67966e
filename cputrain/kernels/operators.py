"""Kernels below torch's CPU operators, for every program of this process: `cputrain.kernels.enable()`.

They are registered for the CPU under torch's own operators (native/operators.cpp), so that modules, autograd, hooks,
pickles and torch.compile stay what they are. What they do not cover goes on to torch's kernels.
"""

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cputrain.affinity.errors import InputError, RunError
from cputrain.kernels.build import KERNELS, KernelLibrary, library_options
from cputrain.native_build import NativeExtension, ensure_compiled, loading
from cputrain.variables import KERNELS_VARIABLE

SOURCES = tuple(KERNELS / name for name in ("operators.cpp", "depthwise.hpp", "vectors.hpp", "rows.hpp", "values.hpp"))
REQUESTED_BY, ALTERNATIVE = "kernels of operators", f"set {KERNELS_VARIABLE}=off"
# Largest error, of the largest value: in float32 as torch's own, in bfloat16 half a unit in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
# Kernel size, stride and dilation of layers that are compared: each way through the kernels, and one of torch's.
CHECKED = ((3, 1, 1), (3, 2, 1), (5, 1, 1), (5, 2, 2), (7, 1, 1))

_loaded: dict[Path, ctypes.PyDLL] = {}


def enable(env: Mapping[str, str] = os.environ) -> str:
    """Compile the kernels once per host, compare them with float64 and register them; return a line that names them.

    They compute depthwise convolutions (their gradients in float32 and bfloat16) and, on CPUs without AVX-512,
    bfloat16 convolutions, products of matrices and attention's gradients, in float32 and rounded once. Errors are no
    larger than torch's own. Every thread of the process uses them until `disable()`; calling this twice changes
    nothing. All ranks of a job must do the same.

    Raises InputError without a C++ compiler, RunError if compilation or the comparison fails; torch's kernels are then
    in place.
    """
    path = LIBRARY.path(env)
    if path not in _loaded:
        _loaded[path] = _checked(ensure_compiled(LIBRARY.extension, path, env))
    _loaded[path].set_operators(1)
    slow = "" if _has_avx512() else ", and bfloat16 in float32 as this CPU has no AVX-512"
    return f"kernels below torch's operators: depthwise convolutions{slow} ({ALTERNATIVE} for torch's own)"


def disable() -> None:
    """Take the kernels away: torch's operators are used again. Without `enable` before, nothing changes."""
    for library in _loaded.values():
        library.set_operators(0)


def calls() -> tuple[int, int]:
    """Return how often the kernels have computed a depthwise convolution (or gradients of one), and how often bfloat16
    in float32."""
    libraries = _loaded.values()
    return sum(lib.calls_of_depthwise() for lib in libraries), sum(lib.calls_in_float32() for lib in libraries)


def enable_if_requested(env: Mapping[str, str]) -> None:
    """Do what CPUTRAIN_KERNELS says, at `import torch`; rank 0 prints it. A failure is a line, and torch's operators
    stay."""
    value = env.get(KERNELS_VARIABLE, "off")
    if value == "off":
        return
    try:
        if value != "auto":
            raise InputError(f"{KERNELS_VARIABLE}={value}: give auto or off")
        line = enable(env)
        if env.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:  # not in its loader processes
            print(f"cputrain: {line}", file=sys.stderr)
    except (InputError, RunError) as error:
        print(f"cputrain: torch's operators stay in place: {error}", file=sys.stderr)


def _checked(path: Path) -> ctypes.PyDLL:
    """Load the kernels and compare them."""
    with loading(path, REQUESTED_BY, ALTERNATIVE):
        library = ctypes.PyDLL(str(path))  # registration needs the interpreter's lock; the kernels do not
    for function in (library.calls_of_depthwise, library.calls_in_float32):
        function.restype = ctypes.c_int64
    library.set_operators(1)
    try:
        _check(library)
    finally:
        library.set_operators(0)
    return library


def _command(cxx: str, output: Path) -> tuple[str, ...]:
    root = Path(torch.__file__).parent
    include = (f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", "-DAT_PER_OPERATOR_HEADERS")
    libraries = (f"-L{root}/lib", "-ltorch_cpu", "-lc10")
    return (cxx, *library_options(), *include, str(SOURCES[0]), *libraries, "-o", str(output))


LIBRARY = KernelLibrary(
    name="operators",
    sources=SOURCES,
    extension=NativeExtension(
        title="kernels of operators", requested_by=REQUESTED_BY, alternative=ALTERNATIVE, argv=_command
    ),
    depends_on=(torch.__version__.partition("+")[0],),  # the CPU's part is the same in builds with CUDA
)


def _has_avx512() -> bool:
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def _check(library: ctypes.PyDLL) -> None:
    """Raise RunError if the registered kernels are not used, or differ from float64 by more than their tolerance."""
    before = library.calls_of_depthwise()
    generator = torch.Generator().manual_seed(1)
    for dtype, tolerance in TOLERANCE.items():
        for size, stride, dilation in CHECKED:
            images = torch.randn(2, 24, 13, 11, generator=generator).to(dtype)
            weight = torch.randn(24, 1, size, size, generator=generator).to(dtype)
            settings: dict[str, Any] = {"stride": stride, "padding": size // 2, "dilation": dilation, "groups": 24}
            shape = functional.conv2d(images.double(), weight.double(), **settings).shape
            scale = torch.randn(shape, generator=generator).to(dtype)
            results = (
                _results(images, weight, scale, settings),
                _results(images.double(), weight.double(), scale.double(), settings),
            )
            for made, exact in zip(*results, strict=True):
                error = float((made.double() - exact).abs().max() / exact.abs().max())
                if not error <= tolerance:
                    raise RunError(
                        f"{REQUESTED_BY}: a {size} x {size} depthwise convolution of stride {stride} in {dtype} "
                        f"differs from float64 by {error:.1e} on this CPU, more than {tolerance:.1e}: {ALTERNATIVE}"
                    )
    if library.calls_of_depthwise() == before:
        raise RunError(f"{REQUESTED_BY}: torch {torch.__version__} does not call registered kernels: {ALTERNATIVE}")


def _results(images: Tensor, weight: Tensor, scale: Tensor, settings: dict[str, Any]) -> tuple[Tensor, ...]:
    """Output, and gradients of images and weight for the outputs' gradient `scale`."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        leaves = images.detach().requires_grad_(), weight.detach().requires_grad_()
        made = functional.conv2d(*leaves, **settings)
        return made.detach(), *torch.autograd.grad(made, leaves, scale)
