"""The command line as a user meets it: exit status, one line, nothing written."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cputrain.affinity import bound_plan
from cputrain.affinity.topology.sysfs import read_machine
from cputrain.cli import main
from cputrain.mpi.supervise.run import free_port
from tests.support.commands import CORES, PYTHON, here, mpi_path, refused
from tests.support.forked import in_fork
from tests.support.images import survey, write_images


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "words",
    [("plan",), ("launch", "--ppn", "1", "--", "true"), ("import", "--", "torchrun", "t.py")],
    ids=lambda w: w[0],
)
def test_commands_without_a_recipe_import_neither_torch_nor_pydantic(words: tuple[str, ...], tmp_path: Path) -> None:
    code = (
        "import sys; from cputrain.cli import main; main(sys.argv[1:]); "
        "print([m for m in ('torch', 'numpy', 'pydantic', 'matplotlib') if m in sys.modules], file=sys.stderr)"
    )
    argv = [sys.executable, "-c", code, *words]
    result = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stderr.strip().splitlines()[-1] == "[]"


def test_a_command_s_options_need_no_numpy() -> None:
    code = "import sys; from cputrain.cli import main; main(['watch', '--help']); assert 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_plan_with_a_recipe_imports_no_torch() -> None:
    code = (
        "import sys; from cputrain.cli import main; "
        "main(['plan', 'resnet50-skx-256node', '--machine', 'skx-8160-2s', '--nodes', '256']); "
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "False"


def test_plan_shows_this_machine() -> None:
    result = here("plan")
    assert result.returncode == 0
    for part in ("package 0", "compute CPUs", "environment", "OMP_NUM_THREADS=", "why", "workers per host"):
        assert part in result.stdout
    data = json.loads(here("plan", "--format", "json").stdout)
    assert data["machine"]["cores"] >= CORES and data["workers"] and data["reasons"]


def test_plan_of_the_256_node_run(golden) -> None:
    result = here("plan", "resnet50-skx-256node", "--machine", "skx-8160-2s", "--nodes", "256")
    start = "cputrain/affinity/start.py"
    text = result.stdout.rstrip("\n").replace(PYTHON, "PYTHON")
    text = text.replace(shlex.quote(f"{Path(__file__).parents[2]}/{start}"), f"ROOT/{start}")
    golden("plan-resnet50-skx-256node.txt", text)
    for shown in ("96 x 256 = 24,576", "1,280,000 / 24,576 = 52.08", "= 9.6, x 0.5 = 4.8", "mpirun -np 512 -ppn 2 "):
        assert shown in result.stdout


def test_plan_options_win_over_the_recipe() -> None:
    arguments = (
        "--machine",
        "skx-8160-2s",
        "--ppn",
        "4",
        "--comm-cores",
        "2",
        "--loader-cores",
        "0",
        "--format",
        "json",
    )
    data = json.loads(here("plan", "resnet50-skx-256node", *arguments).stdout)
    assert [worker["intra_op"] for worker in data["workers"]] == [10] * 4
    env = here("plan", "--machine", "pack:1 core:4", "--format", "env").stdout
    assert env.count("export OMP_NUM_THREADS=1") == 4  # no size in the text: memory limits nothing
    command = here("plan", "--machine", "skx-8160-2s", "--hosts", "a,b", "--format", "command").stdout
    assert "-np 4 -ppn 2" in command and "MASTER_ADDR a" in command


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("plan", "demo-digit"), "unknown recipe 'demo-digit': did you mean demo-digits?"),
        (("plan", "--machine", "skx-9999"), "machine 'skx-9999' is not in the catalog (nearest are skx-8180-8s"),
        (("plan", "--machine", "skx-8160-2s", "--ppn", "64"), "--ppn 64 needs 64 cores; host skx-8160-2s has 48"),
        (("plan", "--ppn", "none"), "'none' is neither auto nor a number"),
        (("plan", "--hosts", "a,a"), "contain a twice"),
        (("plan", "--hosts", "a,b", "--nodes", "3"), "--nodes 3, but the list contains 2 hosts"),
        (("plan", "--nodes", "99999999999"), "--nodes 99999999999 is more than 200,000, the limit for a job"),
        (("plan", "--ppn", "\u00b2"), "is neither auto nor a number from 1 to 999,999"),
        (("plan", "--ppn", "9" * 5000), "is neither auto nor a number from 1 to 999,999"),
        (("launch", "--nodes", "2", "--", "true"), "launch needs host names"),
        (("launch", "--pnn", "2", "--", "true"), "No such option --pnn: did you mean --ppn?"),
        (("plan", "--bind", "launcher", "--format", "command"), "--bind launcher needs a launcher"),
        (("plan", "demo-digits", "--bind", "launcher"), "--bind launcher needs a launcher"),
        (("plan", "--nod", "2"), "No such option --nod: did you mean --nodes?"),
        (("train", "imagefolder", "--ppn", "2"), "No such option --ppn: did you mean plan.ppn=VALUE?"),
        (("train", "imagefolder", "--frob"), "No such option --frob. See cputrain train --help"),
        (("launch",), "Missing argument"),
        (("train", "imagefolder"), "no data.path"),
        (("train", "imagefolder", "data.path=nowhere"), "data folder nowhere does not exist"),
        (
            ("train", "imagefolder", "data.path=images", f"plan.ppn={CORES + 1}"),
            f"plan.ppn={CORES + 1} needs {CORES + 1} cores",
        ),
        (("train", "imagefolder", "data.path=images", "schedule.peak_rate=-1"), "schedule.peak_rate must be 0 or more"),
        (
            ("train", "imagefolder", "data.path=images", "batch.locl=3"),
            "unknown key 'batch.locl': did you mean 'batch.local'?",
        ),
        (("train", "imagefolder", "data.path=images", "epochs=ten"), "epochs must be a whole number, not ten"),
        (("train", "imagefolder", "data.path=images", "optim.name=lars"), "set schedule.peak_rate to a rate for"),
        (("train", "imagefolder", "data.path=images", "batch.global=9999"), "batch.global=9,999 is more than the 36"),
        (("train", "demo-digits"), "make it with `cputrain prepare digits data/digits-folder data/digits`"),
        (("eval", "imagefolder", "data.path=synthetic", "--checkpoint", "x.pt"), "has random labels"),
        (("train", "imagefolder", "data.path=empty"), "train has no class folders"),
        (("train", "imagefolder", "data.path=extra"), "val has classes that train/ lacks, class9"),
        (("train", "imagefolder", "data.path=images", "batch.local=100"), "set batch.local to "),
        (("train", "imagefolder", "data.path=images", "--resume"), "contains no run"),
        (("eval", "imagefolder", "--checkpoint", "absent.pt"), "checkpoint absent.pt does not exist"),
        (("report", "images"), "contains no run"),
        (
            ("prepare", "imagefolder", "images", "images"),
            "images has other files, train, val: prepare into a new folder",
        ),
        (("prepare", "imagefolder", "nowhere", "out"), "data folder nowhere does not exist"),
        (("frobnicate",), "No such command"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    write_images(tmp_path / "images")
    write_images(tmp_path / "extra")
    (tmp_path / "extra/val/class9").mkdir()
    for split in ("train", "val"):
        (tmp_path / "empty" / split).mkdir(parents=True)
    before = files(tmp_path)
    assert expected in refused(here(*arguments, cwd=tmp_path))
    assert files(tmp_path) == before


def test_plan_and_a_dry_run_warn_of_a_rate_tuned_for_another_batch() -> None:
    lars = ("resnet50-mlperf-32768", "data.path=synthetic")
    planned = here("plan", *lars, "--machine", "skx-8160-2s", "--nodes", "4", "--ppn", "2")
    expected = (
        "tuned for a global batch of 32,768 images, but this job's is 512: set batch.global=32768, or tune schedule"
    )
    assert planned.returncode == 0 and f"\nwarning: schedule.peak_rate=21.2 was {expected}" in planned.stdout
    small = ("model.name=resnet18", "data.crop=32", "plan.ppn=1", "batch.global=32768")
    whole = here("train", *lars, *small, "--dry-run")
    assert whole.returncode == 0 and "warning: schedule" not in whole.stdout
    assert "32768 images on 1 worker, in 512 accumulation steps of at most 64 images (batch.local=64)" in whole.stdout


def test_plan_of_a_recipe_whose_data_is_elsewhere(tmp_path: Path) -> None:
    result = here("plan", "demo-digits", cwd=tmp_path)
    assert result.returncode == 0 and "data/digits, which does not exist here" in result.stdout


@pytest.mark.parametrize("form", ["text", "json", "yaml", "env", "command", "svg"])
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("batch.local=512", "needs 262,144 images per step, but an epoch has 60,000: set batch.local to 117 or less"),
        ("optim.name=lars", "needs a scaling rule for the learning rate, but optim.name=lars has none"),
    ],
)
def test_plan_refuses_a_recipe_in_every_format_and_prints_nothing(
    form: str, setting: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ("--machine", "skx-8160-2s", "--nodes", "256", "--ppn", "2")
    assert main(["plan", "mnist-linear-study", *machine, "--format", form, setting, "schedule.peak_rate=auto"]) == 2
    printed = capsys.readouterr()
    assert told in printed.err and not printed.out


def test_a_dry_run_of_a_training_names_keys_of_its_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = read_machine(Path("/")).allowed_cores[0].pus
    monkeypatch.setattr(bound_plan, "find_neighbors", lambda _env: (bound_plan.Neighbor(pid=7, pus=taken),))
    assert main(["train", "linear-regression", "plan.ppn=1", "plan.threads=1", "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "in use by process 7 " in shown and ("plan.share=true avoids it" in shown) == (CORES > 1)


def test_more_workers_than_images_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=2, train=1, val=1)
    found = refused(here("plan", "imagefolder", "data.path=images", "--nodes", "3", "--ppn", "1", cwd=tmp_path))
    assert "3 workers need at least 3 images, but train/ has 2" in found


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("precious")
    arguments = ("train", "imagefolder", "data.path=images", "output=mine", "batch.local=2")
    assert "contains other files but no run" in refused(here(*arguments, "--overwrite", cwd=tmp_path))
    assert (tmp_path / "mine/thesis.tex").read_text() == "precious"


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    before = files(tmp_path)
    result = here("train", "imagefolder", "data.path=images", "batch.local=2", "--dry-run", cwd=tmp_path)
    assert result.returncode == 0 and "steps per epoch" in result.stdout and "workers per host" in result.stdout
    assert here("launch", "--dry-run", "--", "true", cwd=tmp_path).returncode == 0
    assert files(tmp_path) == before


def test_prepare_packs_real_digits_through_an_image_folder(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'cputrain[demo]'")
    result = here("prepare", "digits", "folder", "packed", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "train 1,442 images" in result.stdout and "val 355 images" in result.stdout
    assert (tmp_path / "packed/manifest.json").is_file()
    found = survey(str(tmp_path / "folder"))
    assert found.classes == tuple("0123456789") and (found.train, found.val) == (1442, 355)
    pixels = np.asarray(Image.open(tmp_path / "folder/train/0/0000.png"))
    assert pixels.shape == (8, 8) and pixels.max() == 239  # 15 of 16 shades of gray


def test_help_names_every_command() -> None:
    text = here("--help").stdout
    for name in ("plan", "launch", "train", "eval", "prepare", "report"):
        assert f"\n  {name} " in text
        assert here(name, "--help").returncode == 0


def test_hostfiles_of_another_launcher_are_converted_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("h1 slots=2\nh2 slots=2\n")
    plan = ("plan", "--machine", "skx-8160-2s", "--hostfile", "theirs")
    written = here(*plan, "--launcher", "mpich", "--write", "job", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert "the hostfile is in Open MPI's format (h1 slots=4) and was converted for MPICH" in written.stderr
    assert (tmp_path / "job/hosts").read_text() == "h1:2\nh2:2\n"
    assert "ppn=4, but h1 has 2 slots" in refused(here(*plan, "--ppn", "4", cwd=tmp_path))
    for text, expected in (
        ("", "contains no hosts"),
        ("h1 slots=2\nh2:2\n", "mixes two formats"),
        ("h1 slo", "'slo' is not slots=N"),
    ):
        (tmp_path / "theirs").write_text(text)
        assert expected in refused(here(*plan, cwd=tmp_path))
    for names in ("a;b", "$(x)", "a,a", "-oX"):
        refused(here("plan", "--machine", "skx-8160-2s", f"--hosts={names}", cwd=tmp_path))


def test_what_a_written_plan_takes_for_granted_is_said_with_what_to_give(tmp_path: Path) -> None:
    plan = ("plan", "--machine", "skx-8160-2s")
    written = here(*plan, "--nodes", "4", "--write", "job", cwd=tmp_path)
    assert written.stderr == (
        "assumed: hosts named node001 to node004 (change with --hosts or --hostfile), Intel MPI (change with "
        "--launcher), fabric opa (change with --fabric)\n"
    )
    printed = here(*plan, "--hosts", "n1,n2", "--format", "command", cwd=tmp_path)
    assert printed.stderr.startswith("assumed: Intel MPI (change with --launcher), fabric opa (change")
    named = here(*plan, "--hosts", "n1,n2", "--launcher", "mpich", "--fabric", "ib", "--write", "two", cwd=tmp_path)
    assert named.returncode == 0 and named.stderr == ""


def test_a_dry_run_needs_none_of_its_hosts(tmp_path: Path) -> None:
    launch = ("launch", "--dry-run", "--hosts", "n1.invalid,n2.invalid", "--launcher", "mpich", "--", "true")
    shown = here(*launch, cwd=tmp_path, **mpi_path("mpich"))
    assert shown.returncode == 0 and shown.stderr == ""
    assert "--report-to ADDRESS:PORT" in shown.stdout and "MASTER_ADDR n1.invalid" in shown.stdout
    assert [*tmp_path.iterdir()] == []


def test_an_exported_rendezvous_is_kept_or_rejected() -> None:
    launch = ("launch", "--dry-run", "--hosts", "127.0.0.2,127.0.0.3", "--launcher", "mpich", "--", "true")
    path = mpi_path("mpich")
    expected = here(*launch, **path, MASTER_ADDR="n1-ib", MASTER_PORT="1234").stdout
    assert "-genv MASTER_ADDR n1-ib -genv MASTER_PORT 1234 " in expected
    assert "MASTER_PORT=0 is not a TCP port" in refused(here(*launch, **path, MASTER_PORT="0"))


def test_a_rank_cannot_share_the_host() -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    assert "--share applies to a whole job, but this launch is rank 0 of 1" in refused(
        here("launch", "--share", "--", "true", **rank)
    )


def test_a_rank_names_an_unknown_network_before_it_reads_the_data(tmp_path: Path) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    settings = ("model.name=torchvision:resnet5o", "data.path=absent", f"output={tmp_path}/run")
    done = in_fork("train", "imagefolder", *settings, cwd=tmp_path, **rank, MASTER_PORT=str(free_port()))
    assert "torchvision:resnet5o is not a classifier of torchvision (did you mean resnet50" in refused(done)


@pytest.mark.parametrize(
    "words", [("launch", "--", "true"), ("train", "imagefolder", "data.path=synthetic"), ("doctor",)]
)
def test_a_working_folder_that_has_been_deleted_is_refused_in_a_line(words: tuple[str, ...], tmp_path: Path) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    argv = ("sh", "-c", script, "sh", sys.executable, "-I", "-m", "cputrain", *words)
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert refused(done) == "cputrain: the working directory has been deleted: change to one that exists"
