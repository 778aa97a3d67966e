"""Run one of our modules isolated from the user's sources: python -I start.py MODULE ARGUMENT...

python -I start.py --json PIECE...: the pieces make up a JSON list of the module and its arguments.

Our processes import from the standard library and from folders with installed packages only, never from the working
directory or a source folder on PYTHONPATH, whose random.py or mpi/ would shadow ours. The environment is unchanged, so
that a program that they exec or start finds its modules as usual.
"""

import os
import site
import sys

HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
JSON = "--json"
PIECE = 100_000  # characters of an argument; Linux takes 131,071 bytes
INSTALLED = (".dist-info", ".egg-info", ".egg-link")


def isolated_command(module: str) -> tuple[str, ...]:
    """Return the command that runs one of our modules under this Python, unbuffered; append its arguments.

    Isolated mode (-I) exists longer than -P and PYTHONSAFEPATH, and applies before Python imports anything.
    """
    return (sys.executable, "-Iu", os.path.abspath(__file__), module)


def packed_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return an isolated command with its module and all arguments in a few tokens of JSON, for launchers that take a
    limited number of tokens."""
    import json

    start = len(isolated_command("")) - 1
    packed = json.dumps(command[start:])
    return (*command[:start], JSON, *(packed[i : i + PIECE] for i in range(0, len(packed), PIECE)))


def isolate() -> None:
    """Restrict this process's imports to the standard library and installed packages.

    To be called before any other import; os, site and sys are already imported by Python itself.
    """
    env = os.environ
    paths = [os.path.abspath(path) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    library = os.path.dirname(os.__file__)
    paths_of_user = {path for path in paths if not path.startswith(library)}
    if not sys.flags.isolated:
        first = () if getattr(sys.flags, "safe_path", False) else sys.path[:1]  # the script's or working directory
        sys.path[:] = [path for path in sys.path[len(first) :] if path not in paths_of_user]
    elif "PYTHONNOUSERSITE" not in env and sys.base_prefix in site.PREFIXES:
        user = site.getusersitepackages()
        if os.path.isdir(user):
            site.addsitedir(user)
    if HOME not in sys.path:  # before other installations of cputrain, after the standard library
        standard = [i for i, path in enumerate(sys.path) if path in (library, os.path.join(library, "lib-dynload"))]
        sys.path.insert(standard[-1] + 1 if standard else 0, HOME)
    sys.path += [folder for folder in paths if folder not in sys.path and _has_packages(folder)]


def _has_packages(folder: str) -> bool:
    """Whether packages are installed in a folder, as by pip --target, Spack or EasyBuild."""
    try:
        return any(name.endswith(INSTALLED) for name in os.listdir(folder))
    except OSError:  # Python ignores such a folder, too
        return False


if __name__ == "__main__":
    isolate()
    import runpy

    del sys.argv[0]
    if sys.argv[0] == JSON:
        import json

        sys.argv[:] = json.loads("".join(sys.argv[1:]))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
