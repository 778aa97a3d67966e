"""Compile all native code for this CPU into the user's cache, which its first uses would do otherwise.

`make` runs this after the installation: python -m tools.compile_native. What cannot be compiled is a line, and no
failure: each part says at its use what it needs, and most have a substitute.
"""

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from cputrain.affinity.errors import InputError, RunError
from cputrain.comm.ccl.environment import ensure_extension, find_libraries
from cputrain.data import pixels
from cputrain.kernels import batchnorm, convolution, operators, recorder, split_optimizers
from cputrain.native_build import ensure_compiled

KERNELS = tuple(module.LIBRARY for module in (operators, recorder, convolution, batchnorm, split_optimizers))
Compile = Callable[[Mapping[str, str]], object]


def backend(env: Mapping[str, str]) -> object:
    """Compile oneCCL's backend, which takes longest."""
    return ensure_extension(find_libraries(env), env)


def decoder(env: Mapping[str, str]) -> object:
    """Compile what decodes and scales images."""
    return ensure_compiled(pixels.EXTENSION, pixels.decoder_path(env), env)


def kernels(env: Mapping[str, str]) -> object:
    """Compile the kernels."""
    return [ensure_compiled(library.extension, library.path(env), env) for library in KERNELS]


def main(env: Mapping[str, str]) -> None:
    """Compile in parallel; print why something cannot be compiled."""
    parts: tuple[Compile, ...] = (backend, kernels, decoder)
    with ThreadPoolExecutor() as threads:
        for line in filter(None, threads.map(lambda part: _problem(part, env), parts)):
            print(line, file=sys.stderr)


def _problem(part: Compile, env: Mapping[str, str]) -> str:
    try:
        part(env)
    except (InputError, RunError) as error:
        return f"not compiled yet: {error}"
    return ""


if __name__ == "__main__":
    main(os.environ)
