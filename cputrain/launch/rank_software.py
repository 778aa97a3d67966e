"""What a launch knows of the software in its ranks: packages that all hosts need in the same version, how compiling
looks in a stack, and what to do about modules of Intel's time."""

from mpi.supervise.exits import JobFailedError

COMPARED_PACKAGES = ("cputrain", "torch", "torchvision", "oneccl-devel", "impi-rt")
COMPILING = ("/native_build.py:", "/cpp_extension.py:", "/torch/_inductor/")
"""In a line of a Python stack: the rank compiles our parts or torch's, and has not started yet."""

# Modules that scripts import, as their error names them -> what to do without them.
ABSENT_MODULES = {
    **dict.fromkeys(
        ("oneccl_bindings_for_pytorch", "torch_ccl"),
        'pip install "cputrain[compat]" provides it, or remove the import: init_process_group("ccl") needs none',
    ),
    "intel_extension_for_pytorch": "remove the import: it ended at PyTorch 2.8, for which there is cputrain[ipex]",
}


def with_absent_module(error: JobFailedError) -> JobFailedError:
    """The error of a job, with a line about a module that the failed rank has missed, where we know what to do."""
    for module, advice in ABSENT_MODULES.items():
        if any(line.endswith(f"No module named '{module}'") for line in error.tail):
            return error.advised(f"{module}: {advice}")
    return error
