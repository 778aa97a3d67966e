"""Make a release: python -m tools.release [--untagged]

Checks the version, writes the manual pages, builds sdist and wheel into dist/, and a wheel for this architecture that
has the kernels compiled; checks their contents, installs the wheel into a new environment and runs it there, uses the
compiled kernels without a compiler, and builds the documentation. --untagged works at any commit.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

from cputrain import __version__
from cputrain.kernels.build import COMPILED, INSTRUCTION_SETS
from tools.compile_native import KERNELS
from tools.man_pages import main as write_man_pages

ROOT = Path(__file__).parents[1]
PACKAGE = "cputrain"
BESIDE = ("_cputrain_autoload.py", "_cputrain_command.py")
HEAVY = ("torch", "torchvision")  # gigabytes, and not needed by the commands in TRIED
IN_WHEEL = {
    "affinity": "cputrain/affinity",
    "mpi": "cputrain/mpi",
    "configs/machines": "cputrain/machines",
    "configs/recipes": "cputrain/recipes",
}
TRIED = (
    ("--version",),
    ("plan",),
    ("plan", "resnet50-skx-256node", "--machine", "skx-8160-2s", "--nodes", "256"),
    ("recipes",),
    ("keys", "optim"),
    ("launch", "--dry-run", "--", "true"),
    ("job", "slurm", "imagefolder", "data.path=synthetic", "--nodes", "2", "--time", "1:00:00"),
)
# A process without a compiler and with an empty cache prints where its kernels are.
WITHOUT_COMPILER = """
import cputrain
from cputrain.kernels import batchnorm, convolution, operators, recorder, split_optimizers
cputrain.kernels.enable()
recorder.load_recorder(recorder.compiled_recorder({}))
kernels = batchnorm.load({}), convolution.load_convolutions({}), split_optimizers.load_split_steps({})
print(*(kernel.path for kernel in kernels), operators.LIBRARY.path({}), recorder.LIBRARY.path({}), sep="\\n")
"""


class ReleaseError(Exception):
    """The reason why there is no release."""


def main(arguments: list[str]) -> int:
    """Make the release; print the problem and return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("--untagged", action="store_true", help="try the release at any commit")
    options = parser.parse_args(arguments)
    try:
        check_version(ROOT)
        if not options.untagged:
            check_tag(ROOT)
        release()
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def check_version(root: Path) -> None:
    """Raise ReleaseError if a file has another version than the code."""
    found = {
        "CITATION.cff": r"^version: (.+)$",
        "compat/pyproject.toml": r'^version = "(.+)"$',
        "pyproject.toml": r'^compat = \["cputrain-compat==(.+)"\]$',
    }
    for name, pattern in found.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None or match[1] != __version__:
            raise ReleaseError(
                f"{name} has version {match and match[1]}, cputrain/__init__.py {__version__}: make them equal"
            )


def check_tag(root: Path) -> None:
    """Raise ReleaseError unless the commit is clean, its tag is the version, and the changelog has its date."""
    if changed := _git(root, "status", "--porcelain"):
        raise ReleaseError(f"{changed.splitlines()[0].strip()} is not committed: commit it, or remove it")
    tags = _git(root, "tag", "--points-at", "HEAD").split()
    if f"v{__version__}" not in tags:
        raise ReleaseError(f"this commit has the tags {tags}: git tag v{__version__}, or set __version__")
    if not re.search(
        rf"^## {re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)$",
        (root / "CHANGELOG.md").read_text(encoding="utf-8"),
        re.M,
    ):
        raise ReleaseError(f"CHANGELOG.md has no heading `## {__version__} (YYYY-MM-DD)`: write the date")


def release() -> None:
    """Build, check, install and document."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    write_man_pages(ROOT / "man")
    for source in (ROOT, ROOT / "compat"):
        _run(sys.executable, "-m", "build", "--outdir", str(dist), str(source))
    wheel = next(path for path in dist.iterdir() if path.name.startswith("cputrain-") and path.suffix == ".whl")
    compiled = build_compiled(dist)
    built = sorted(dist.iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built))
    sdist = next(path for path in built if path.name == f"cputrain-{__version__}.tar.gz")
    check_contents(wheel, sdist, _git(ROOT, "ls-files").splitlines())
    with tempfile.TemporaryDirectory(prefix="cputrain-release-") as folder:
        try_wheel(wheel, Path(folder))
        try_compiled(compiled, Path(folder, "compiled"))
    _run(sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "docs", "docs/_build/html")
    print("\n".join(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.2f} MB" for path in built))
    print(f"upload with: twine upload dist/*{__version__}*")


def build_compiled(dist: Path) -> Path:
    """Build the wheel whose kernels are compiled, for each set of instructions and this torch; return its path."""
    shutil.rmtree(COMPILED, ignore_errors=True)
    try:
        for library in KERNELS:
            for instructions in INSTRUCTION_SETS:
                print(f"compiling {library.name} for {instructions.name}", flush=True)
                library.compile_for(instructions, os.environ)
        _run(sys.executable, "-m", "build", "--wheel", "--outdir", str(dist), str(ROOT))
    finally:
        shutil.rmtree(COMPILED, ignore_errors=True)  # a checkout compiles its own
    return next(path for path in dist.glob("cputrain-*.whl") if "manylinux" in path.name)


def try_compiled(wheel: Path, folder: Path) -> None:
    """Use a wheel's compiled kernels with this environment's torch. Raises ReleaseError if another file is used."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    env = {"PATH": "/nowhere", "CPUTRAIN_CACHE": str(folder / "cache"), "PYTHONPATH": str(folder)}
    words = (sys.executable, "-c", WITHOUT_COMPILER)
    done = subprocess.run(words, cwd=folder, env=env, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    for path in done.stdout.splitlines():
        if not path.startswith(f"{folder}/cputrain/kernels/compiled/"):
            raise ReleaseError(f"{wheel.name}: {path} is used in place of its compiled kernels")
        print(f"{path.removeprefix(f'{folder}/')}: used")


def check_contents(wheel: Path, sdist: Path, tracked: list[str]) -> None:
    """Raise ReleaseError if a tracked file is missing in wheel or sdist, or the wheel contains other files."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    links = {f"{PACKAGE}/{name}" for name in IN_WHEEL}  # exist only in the checkout
    expected = {name for name in tracked if name.partition("/")[0] in (PACKAGE, *BESIDE)} - links
    for name in tracked:
        for folder, inside in IN_WHEEL.items():
            if name.startswith(f"{folder}/"):
                expected.add(f"{inside}/{name.removeprefix(f'{folder}/')}")
    if missing := sorted(expected - in_wheel):
        raise ReleaseError(f"{wheel.name} lacks {', '.join(missing[:5])}")
    allowed = (f"{PACKAGE}/", *BESIDE, f"{PACKAGE}-{__version__}.data/data/share/man/man1/")
    if foreign := sorted(name for name in in_wheel if not name.startswith(allowed)):
        raise ReleaseError(f"{wheel.name} also contains {', '.join(foreign[:5])}")
    if not any(name.endswith("/man1/cputrain-plan.1") for name in in_wheel):
        raise ReleaseError(f"{wheel.name} has no manual pages: python -m tools.man_pages man")
    if missing := sorted({name for name in tracked if not name.startswith(".git")} - links - in_sdist):
        raise ReleaseError(f"{sdist.name} lacks {', '.join(missing[:5])}")


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install the wheel with its dependencies except torch and torchvision, and run commands in an empty folder. Raises
    CalledProcessError if a command fails, ReleaseError if it prints another version."""
    environment, here = folder / "venv", folder / "here"
    here.mkdir()
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    light = [each for each in requirements(wheel) if re.split(r"[^\w-]", each)[0] not in HEAVY]
    _run(str(python), "-m", "pip", "install", "--quiet", *light)
    _run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    for words in TRIED:
        done = subprocess.run(
            [environment / "bin/cputrain", *words],
            cwd=here,
            check=True,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        if words == ("--version",) and __version__ not in done.stdout:
            raise ReleaseError(f"the installed cputrain --version prints {done.stdout!r}")
        print(f"cputrain {' '.join(words)}: ok")
    if left := sorted(path.name for path in here.iterdir()):
        raise ReleaseError(f"the commands have left {', '.join(left)} in their folder")


def requirements(wheel: Path) -> list[str]:
    """Return the packages that a wheel requires without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return [each for each in metadata.get_all("Requires-Dist") or [] if "extra ==" not in each]


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=root,
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    return done.stdout.strip()


def _run(*words: str) -> None:
    print("$", *words, flush=True)
    subprocess.run(words, cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
