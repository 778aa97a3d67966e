"""The start of our own processes: python -I start.py MODULE ARGUMENT..., as `python -m MODULE ARGUMENT...` would.

They import from the standard library and from folders where packages are installed: never from the working folder or a
folder of sources on PYTHONPATH, whose random.py or mpi/ would come first. The environment stays as it is, so that a
program that they become or start finds its own modules as under plain Python.
"""

import os
import site
import sys

HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
INSTALLED = (".dist-info", ".egg-info", ".egg-link")


def own_program(module: str) -> tuple[str, ...]:
    """The command that runs a module of ours under this Python, its output unbuffered; arguments follow.

    Isolated mode is older than -P and PYTHONSAFEPATH, and Python applies it before it imports anything.
    """
    return (sys.executable, "-Iu", os.path.abspath(__file__), module)


def isolate() -> None:
    """Let this process import from the standard library and installed packages only.

    It is called before anything else is imported; os, site and sys have been imported by Python itself.
    """
    env = os.environ
    given = [os.path.abspath(path) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    library = os.path.dirname(os.__file__)
    named = {path for path in given if not path.startswith(library)}
    if not sys.flags.isolated:
        first = () if getattr(sys.flags, "safe_path", False) else sys.path[:1]  # the script's, or working, folder
        sys.path[:] = [path for path in sys.path[len(first) :] if path not in named]
    elif "PYTHONNOUSERSITE" not in env and sys.base_prefix in site.PREFIXES:
        user = site.getusersitepackages()
        if os.path.isdir(user):
            site.addsitedir(user)
    if HOME not in sys.path:  # before other installations of ours, behind the standard library
        standard = [i for i, path in enumerate(sys.path) if path in (library, os.path.join(library, "lib-dynload"))]
        sys.path.insert(standard[-1] + 1 if standard else 0, HOME)
    sys.path += [folder for folder in given if folder not in sys.path and _has_packages(folder)]


def _has_packages(folder: str) -> bool:
    """Whether packages have been installed into a folder, as by pip --target, Spack or EasyBuild."""
    try:
        return any(name.endswith(INSTALLED) for name in os.listdir(folder))
    except OSError:  # Python passes over such a folder, too
        return False


if __name__ == "__main__":
    isolate()
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
