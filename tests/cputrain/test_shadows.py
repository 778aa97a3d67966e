"""Folders of users whose modules have the names of ours, of the standard library or of what we need."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.affinity.start import isolated_command
from tests.support.ccl_jobs import needs_ccl, unmeasured_cache
from tests.support.commands import launchers, mpi_path

BIN = Path(sys.executable).parent
START = isolated_command("x")[2]
STANDARD = ("calendar", "platform", "random", "statistics", "token", "tempfile", "shlex", "queue", "selectors")
NEEDED = ("click", "numpy", "psutil", "pydantic", "yaml", "rich", "sitecustomize", "usercustomize")
SHOWS_ITS_PLACE = """
import json, os, sys
names = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "PYTHONSTARTUP")
print(json.dumps([sys.path, sys.flags.isolated, {name: os.environ.get(name) for name in names}]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with packages mpi/ and affinity/, and a file of every other name that ends whoever imports it."""
    for package in ("mpi", "affinity"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("WHOSE = 'the user'\n")
    for name in (*STANDARD, *NEEDED):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the {name}.py of the user was imported')\n")
    return tmp_path


def run(folder: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "CPUTRAIN_CACHE": str(folder / "cache"), **env}
    return subprocess.run(argv, cwd=folder, env=given, capture_output=True, text=True)


def run_well(folder: Path, *argv: str, **env: str) -> str:
    done = run(folder, *argv, **env)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


LAUNCH = ("launch", "--ppn", "1", "--", "sh", "-c", "echo well")


@pytest.mark.parametrize("command", [("plan",), LAUNCH, pytest.param(("recipes",), marks=pytest.mark.long)])
@pytest.mark.parametrize("program", [(f"{BIN}/cputrain",), (sys.executable, "-m", "cputrain")])
def test_commands_import_nothing_of_the_working_folder(
    folder: Path, command: tuple[str, ...], program: tuple[str, ...]
) -> None:
    assert run_well(folder, *program, *command)


@pytest.mark.parametrize("command", [("plan",), LAUNCH, pytest.param(("doctor",), marks=pytest.mark.long)])
def test_commands_import_nothing_of_pythonpath(folder: Path, command: tuple[str, ...]) -> None:
    (folder / "sitecustomize.py").unlink()  # Python itself imports it there, before the console script
    (folder / "usercustomize.py").unlink()
    done = run(folder, f"{BIN}/cputrain", *command, PYTHONPATH=str(folder))
    assert "of the user" not in done.stdout + done.stderr and "Traceback" not in done.stderr, done.stderr
    assert command == ("doctor",) or done.returncode == 0, done.stderr


SCRIPTS = {  # of installers; older pip's imports re, and so what that needs, before anything of ours
    "uv, pip 25.3": "import sys\nfrom _cputrain_command import main\nsys.exit(main())\n",
    "pip 25.0": "import re\nimport sys\nfrom _cputrain_command import main\nsys.exit(main())\n",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_command_starts_beside_files_of_the_names_of_the_whole_standard_library(
    script: str, tmp_path: Path
) -> None:
    """All but those that Python, or the script, has imported before our first line."""
    (tmp_path / "cputrain").write_text(SCRIPTS[script])
    first = SCRIPTS[script].partition("from _cputrain")[0]
    loaded = run_well(tmp_path, sys.executable, "-c", f"{first}print(*sys.modules)").split()
    names = {*sys.stdlib_module_names, "cputrain", "affinity", "mpi"} - {*sys.builtin_module_names, *loaded}
    assert {"typing", "contextlib", "importlib", "random", "runpy", "pathlib"} < names
    assert script == "pip 25.0" or {"re", "enum", "functools", "types"} < names
    (tmp_path / "user").mkdir()
    for name in names:
        (tmp_path / "user" / f"{name}.py").write_text(f"raise SystemExit('the {name}.py of the user was imported')\n")
    words = (sys.executable, f"{tmp_path}/cputrain", "plan", "--machine", "pack:1 core:4 pu:1")
    assert "4 cores" in run_well(tmp_path, *words, PYTHONPATH=str(tmp_path / "user"))


@pytest.mark.parametrize("launcher", launchers("openmpi", "mpich"))
def test_ranks_start_by_every_launcher_in_such_a_folder(folder: Path, launcher: str) -> None:
    name = "openmpi" if launcher == "openmpi4" else launcher
    options = ("--launcher", name, "--ppn", "1", "--output", "out")
    argv = (f"{BIN}/cputrain", "launch", *options, "--", "sh", "-c", "echo rank $RANK of $PYTHONPATH")
    path = mpi_path(launcher)["PATH"]
    (folder / "sitecustomize.py").unlink()
    (folder / "usercustomize.py").unlink()
    assert f"rank 0 of {folder}" in run_well(folder, *argv, PATH=path, PYTHONPATH=str(folder))


@pytest.mark.long
def test_a_training_runs_in_such_a_folder(folder: Path) -> None:
    """Its ranks start again bound, import torch, and write a run and its page."""
    recipe = ("imagefolder", "data.path=synthetic", "data.train_images=4", "batch.local=4", "data.crop=28")
    network = ("model.name=lenet", "model.zero_gamma=none", "engine=eager", "data.decoder=pillow", "comm.backend=gloo")
    settings = (*recipe, *network, "plan.ppn=1", "epochs=1", "schedule.warmup_epochs=0", "output=run")
    run_well(folder, f"{BIN}/cputrain", "train", *settings)
    assert (folder / "run/report.html").is_file()


@pytest.mark.parametrize("how", ["script", "-m", "-c"])
def test_a_program_of_the_user_has_the_path_that_plain_python_gives_it(tmp_path: Path, how: str) -> None:
    (tmp_path / "shows").mkdir()
    (tmp_path / "shows/place.py").write_text(SHOWS_ITS_PLACE)
    words = {"script": ("shows/place.py",), "-m": ("-m", "shows.place"), "-c": ("-c", SHOWS_ITS_PLACE)}[how]
    env = {"PYTHONPATH": f"{tmp_path}/one:{tmp_path}/two", "PYTHONSTARTUP": f"{tmp_path}/none.py"}
    plain = run_well(tmp_path, sys.executable, *words, **env)
    launched = run_well(tmp_path, f"{BIN}/cputrain", "launch", "--ppn", "1", "--", sys.executable, *words, **env)
    assert json.loads(launched.removeprefix("[0] ")) == json.loads(plain)


def test_torch_can_be_imported_beside_files_of_our_names(folder: Path) -> None:
    for each in (*STANDARD, *NEEDED):  # torch itself imports some of them
        (folder / f"{each}.py").unlink()
    for package in ("mpi", "affinity"):
        shutil.rmtree(folder / package)
    for name in ("cputrain", "mpi", "affinity"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the {name}.py of the user was imported')\n")
    (folder / "train.py").write_text("import torch; print('imported', torch.__version__)\n")
    assert run_well(folder, sys.executable, "train.py").startswith("imported 2.")


@pytest.mark.long
@needs_ccl
def test_ccl_tells_whose_module_is_in_its_place(folder: Path) -> None:
    for each in (*STANDARD, *NEEDED):
        (folder / f"{each}.py").unlink()
    group = "dist.init_process_group('ccl', rank=0, world_size=1, store=dist.HashStore())"
    (folder / "train.py").write_text(f"import affinity, mpi, torch.distributed as dist\n{group}; print('joined')\n")
    cache = unmeasured_cache(folder / "cache")
    out = run_well(folder, sys.executable, "train.py", **cache)
    assert out.endswith("joined\n"), "affinity and mpi are anybody's names"
    (folder / "cputrain.py").write_text("")
    code = f"import cputrain, torch.distributed as dist\n{group}\n"
    failed = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    last = failed.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ccl: cputrain cannot be loaded: ") and last.endswith(": rename it"), last
    assert f"{folder}/cputrain.py has the name of a package of cputrain" in last


def test_packages_that_only_pythonpath_or_the_user_s_folder_has_are_found(folder: Path) -> None:
    """As pip --target, Spack and EasyBuild install, and pip --user: sources on PYTHONPATH are not imported."""
    python = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")  # outside a venv
    target = folder / "target"
    user = folder / "user" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    for place in (target, user, folder):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"in_{place.name.replace('-', '_')}.py").write_text("print('found')")
    (target / "brought-1.0.dist-info").mkdir()
    env = {"PYTHONPATH": f"{folder}:{target}", "PYTHONUSERBASE": str(folder / "user")}
    words = (python, "-Iu", START)
    assert run_well(folder, *words, "in_target", **env) == "found\n"
    assert run_well(folder, *words, "in_site_packages", **env) == "found\n"
    for module, without in ((f"in_{folder.name}", {}), ("in_site_packages", {"PYTHONNOUSERSITE": "1"})):
        assert f"No module named {module}" in run(folder, *words, module, **env, **without).stderr


def test_our_own_processes_ignore_another_python_s_home(folder: Path) -> None:
    assert "core" in run_well(folder, *isolated_command("cputrain.affinity"), "plan", PYTHONHOME="/nowhere")


@pytest.mark.parametrize("minor", [10, 12, 13])
def test_other_pythons_start_our_modules_as_well(folder: Path, minor: int) -> None:
    """Python 3.10 has neither -P nor PYTHONSAFEPATH. A Python without our packages gets as far as the first of them."""
    folders = [f"{home}/bin" for home in Path.home().glob(f".pyenv/versions/3.{minor}.*")]
    python = shutil.which(f"python3.{minor}", path=":".join((*folders, "/usr/bin", "/usr/local/bin")))
    if python is None:
        pytest.skip(reason=f"needs Python 3.{minor}")
    here = ("-Iu", START, "affinity", "plan", "--machine", "pack:1 core:4 pu:1")
    done = run(folder, python, *here, PYTHONPATH=str(folder))
    assert "core" in done.stdout or done.stderr.endswith("No module named 'msgspec'\n"), done.stderr


def test_scripts_of_jobs_start_our_modules_apart_from_the_folder(folder: Path) -> None:
    script = run_well(folder, f"{BIN}/cputrain", "job", "slurm", "imagefolder", "--nodes", "2", "--time", "1:00:00")
    start = next(line for line in script.splitlines() if line.startswith("start="))
    words = 'python -I "$start" affinity read'
    path = f"{BIN}:{os.environ['PATH']}"
    for name in ("sitecustomize.py", "usercustomize.py", *("affinity/__init__.py", "mpi/__init__.py")):
        (folder / name).unlink()
    assert "cores" in run_well(folder, "bash", "-euc", f"{start}\n{words}", PATH=path, PYTHONPATH=str(folder))
    ours = [line for line in script.splitlines() if "python" in line and not line.startswith(("#", "start="))]
    assert len(ours) == 4 and all('python -I "$start" ' in line for line in ours)
