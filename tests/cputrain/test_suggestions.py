"""Habits from other launchers and trainers: understood, or answered with our word for it in one line."""

import json
import os
import re
import shlex
import sys
from difflib import get_close_matches
from pathlib import Path

import click
import pytest

from cputrain.cli import COMMANDS, group
from cputrain.cli.words import missing_argument, tables
from cputrain.recipe.keys import TRAIN_OPTIONS, all_keys, other_names
from tests.support.commands import here, refused
from tests.support.forked import in_fork
from tests.support.images import write_images


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run x.py", "No such command 'run': did you mean cputrain launch or cputrain train? See cputrain --help"),
        ("validate r", "did you mean cputrain eval?"),
        ("torchrun x.py", "did you mean cputrain import or cputrain launch?"),
        ("k8s r", "did you mean cputrain job kubernetes?"),
        ("help plan", "No such command 'help': did you mean cputrain --help? See cputrain --help"),
        ("version", "did you mean cputrain --version or cputrain env?"),
        ("plot runs/a", "No such command 'plot': did you mean cputrain report? See cputrain --help"),
        ("job --nodes 2 slurm", "put options after the command, as in cputrain job slurm --nodes. See cputrain job"),
        ("job -n=2 slurm", "put options after the command, as in cputrain job slurm -n. See cputrain job --help"),
        ("bench --steps 2 model", "as in cputrain bench model --steps. See cputrain bench --help"),
        ("launch -n=x x.py", "'x' is neither auto nor a number from 1"),
        ("trian r", "did you mean cputrain train?"),
        ("xyzzy", "No such command 'xyzzy'. See cputrain --help"),
        ("launch --batch-size 4 x.py", "No such option --batch-size: did you mean --local-batch?"),
        ("launch --lr 0.1 x.py", "did you mean cputrain train RECIPE schedule.peak_rate=VALUE?"),
        ("launch --gpus 4 x.py", "did you mean --ppn?"),
        (
            "launch --bind-to core x.py",
            "Open MPI has it; here: the plan binds the ranks: cputrain plan shows how; --bind",
        ),
        ("launch --bind-to core x.py", "--bind launcher leaves binding to the launcher, and --ppn 1 gives one rank"),
        ("launch --map-by socket x.py", "mpirun of Open MPI has it; here: --ppn N, --threads N."),
        ("launch --hepl", "No such option --hepl: did you mean --help? See cputrain launch --help"),
        ("plan --svg", "did you mean --format svg?"),
        ("plan --json", "did you mean --format json?"),
        ("recipes --csv", "No such option --csv. See cputrain recipes --help"),
        ("train imagefolder --data photos", "did you mean data.path=VALUE?"),
        ("train", "Missing argument 'RECIPE': cputrain recipes lists the shipped recipes. See cputrain train --help"),
        ("launch", "give a program, as in cputrain launch x.py. See cputrain launch --help"),
        ("watch", "Missing argument 'RUN': give the folder of a run. See cputrain watch --help"),
        ("job slurm", "Missing option '--time': give a time limit, as in --time 2:00:00."),
        ("recipes serach", "contains 'serach': did you mean cputrain recipes search?"),
        (
            "recipes serach resnet",
            "No such command 'serach': did you mean cputrain recipes search? See cputrain recipes",
        ),
        ("bench foo", "'foo': give comm, data, memory, model, operators or optimizer. See cputrain bench --help"),
        ("doctor affinty", "did you mean cputrain doctor affinity? See cputrain doctor --help"),
        ("lr_find r", "did you mean cputrain find-lr?"),
        ("resume r", "did you mean cputrain train RUN --resume?"),
        ("job slurm --time 1:00:00 python x.py", "python is a program, not a recipe: put -- before it: -- python x.py"),
        ("job pbs --time 1:00:00 x.py", "x.py is a program, not a recipe: put -- before it: -- x.py"),
        ("launch nonesuch.py", "script nonesuch.py does not exist: give an existing one"),
        ("launch -- python nonesuch.py", "script nonesuch.py does not exist"),
        ("launch demo-digits", "demo-digits is a recipe, not a program: train it with cputrain train demo-digits"),
        ("launch -- nonesuch", "nonesuch is not a program on PATH"),
        ("job sulrm", "No such command 'sulrm': did you mean cputrain job slurm? See cputrain job --help"),
        ("predict runs/a", "Missing argument 'IMAGE...|FOLDER...': give images or folders of images. See cputrain"),
        ("eval", "'RECIPE|RUN|CHECKPOINT': give the folder of a run or one of its checkpoints; a"),
        (
            "prepare imagefolder",
            "'SRC': give a folder or an archive of images, and OUT, a new folder.",
        ),
        ("prepare imagefolder a", "Missing argument 'OUT': give a new folder. See cputrain prepare --help"),
        ("launch --hostfile none x.py", "hostfile none: No such file or directory: give a file with one host per line"),
        ("job kubernetes linear-regression", "Missing option '--image': give the container image, as in --image "),
        ("plan --machine zzz", "machine 'zzz' is not in the catalog: cputrain machines lists all of them; or give a"),
        ("launch --standalone x.py", "torchrun has it; here: one host is the default. See cputrain launch --help"),
        ("launch --rdzv-backend c10d x.py", "torchrun has it; here: launch is called once, for all hosts."),
        ("launch --memory-allocator jemalloc x.py", "ipexrun has it; here: --allocator."),
        ("launch -np 4 --hosts n1,n2 x.py", "-np or --np is the total number of ranks in other launchers"),
        ("launch --instance 0 x.py", "--instance selects some of several copies"),
        ("launch --instances 2 --ppn 2 x.py", "--instances already sets the number of workers: remove --ppn"),
        ("launch --cores 9000 x.py", "CPUs 9000 of host"),
        ("launch --cores x x.py", "give CPUs as in 0-15,32"),
        ("train demo-digits --batch-size 4", "did you mean batch.local=VALUE or batch.global=VALUE?"),
        ("train demo-digits --gpus 4", "did you mean plan.ppn=VALUE?"),
        ("train demo-digits --lr 1", "did you mean schedule.peak_rate=VALUE?"),
        ("train demo-digits lr=1", "did you mean 'schedule.peak_rate'?"),
        ("train demo-digits batchsize=16", "did you mean 'batch.local' or 'batch.global'?"),
        ("train imagefolder pretrained=true", "did you mean 'model.weights'?"),
        ("train imagefolder image_size=64", "did you mean 'data.crop'?"),
        ("train imagefolder amp=true", "did you mean 'precision'?"),
        ("train imagefolder data=photos", "data is a section: did you mean data.path=photos?"),
        ("train demo-digits batch-size=16", "did you mean 'batch.local' or 'batch.global'?"),
        ("train demo-digits batchSize=16", "did you mean 'batch.local' or 'batch.global'?"),
        ("train demo-digits weightdecay=1", "did you mean 'optim.weight_decay'?"),
        ("train demo-digits optim.weight-decay=1", "did you mean 'optim.weight_decay'?"),
        ("train demo-digits --batchsize 4", "did you mean batch.local=VALUE or batch.global=VALUE?"),
        ("train demo-digits resume=true", "did you mean the option --resume of cputrain train?"),
        ("train demo-digits overwrite=1", "did you mean the option --overwrite of cputrain train?"),
        ("train demo-digits dry_run=true", "did you mean the option --dry-run of cputrain train?"),
        ("train demo-digits no-verify=true", "did you mean the option --no-verify of cputrain train?"),
        ("plan demo-digits nodes=2", "did you mean the option --nodes 2 of cputrain plan?"),
        ("plan demo-digits machine=knl-7250-quad-cache", "the option --machine knl-7250-quad-cache of cputrain plan?"),
        ("plan demo-digits ppn=2", "did you mean 'plan.ppn'?"),
        ("simulate resnet50-skx-256node rate=2", "did you mean the option --rate 2 of cputrain simulate?"),
        ("job slurm demo-digits time=1:00:00 nodes=2", "the option --time 1:00:00 of cputrain job slurm?"),
        ("job pbs demo-digits --time 1 nodes=2", "did you mean the option --nodes 2 of cputrain job pbs?"),
        ("eval demo-digits no_verify=1", "no_verify=1 is no key of a recipe: did you mean the option --no-verify of"),
        ("train demo-digits nodes=2", "unknown key 'nodes': known keys: name, model"),
        ("train demo-digits model.name=vit_b_16", "did you mean torchvision:vit_b_16 or timm:vit_b_16?"),
        ("train demo-digits model.name=convnext_tiny.fb_in22k", "did you mean timm:convnext_tiny.fb_in22k?"),
        ("train demo-digits model.name=resnet5", "did you mean resnet50, torchvision:resnet5 or timm:resnet5?"),
        ("train demo-digits num_workers=1", "did you mean 'plan.ppn' or 'plan.loader_cores'?"),
        ("train demo-digits plan.cores=a", "bad range 'a' in CPU list 'a'"),
        ("job slurm demo-digits --time 1 --walltime 1", "did you mean --time?"),
    ],
)
def test_a_word_of_other_programs_is_answered_with_ours(words: str, expected: str) -> None:
    line = refused(here(*words.split()))
    assert expected in line and "\n" not in line


def test_options_that_are_taken_for_keys_exist() -> None:
    train = group.get_command(click.Context(group), "train")
    assert train is not None
    options = {word for each in train.params for word in each.opts}
    assert {f"--{each}" for each in TRAIN_OPTIONS} <= options and not {*TRAIN_OPTIONS} & {*all_keys()}


def test_what_is_no_recipe_is_answered_with_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text("epochs: 1\n")
    (tmp_path / "x.py").touch()
    for words, expected in {
        "launch photos": "photos is a folder, not a program",
        "launch -- python0 x.py": "python0 is not a program here: remove it, and cputrain's Python runs the .py script",
        "plan x.py": "x.py is a Python script, not a recipe: start it with cputrain launch x.py",
        "plan run": "run is the folder of a run: give its recipe, run/recipe.yaml",
        "plan nowhere/x.yaml": "recipe file nowhere/x.yaml not found: give an existing file, or a name that cputrain",
        "plan zzz": "unknown recipe 'zzz': cputrain recipes lists all of them, or give a .yaml file",
        "plan mnist": "did you mean mnist-sgd",
        "train photos": "cputrain train imagefolder data.path=photos trains on the images in it",
        "eval nonesuch": "'nonesuch' is neither a run folder nor a recipe: cputrain recipes lists all of them",
        "eval runs/nonesuch": "'runs/nonesuch' is neither a run folder nor a recipe",
        "train imagefolder data.path=nophotos": "exist: give one with CLASS/*, or train/CLASS/* and val/CLASS/*",
        "data verify photos": "as in cputrain prepare imagefolder photos OUT; cputrain data info photos describes it",
        "data verify nophotos": "data folder nophotos does not exist: give the output of cputrain prepare",
    }.items():
        assert expected in refused(here(*words.split())), words


def test_a_program_of_an_environment_that_is_not_activated_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    line = refused(here("launch", "--ppn", "1", "--", "cputrain", "keys"))
    beside = shlex.quote(str(Path(sys.executable).parent / "cputrain"))
    assert line.endswith(f"cputrain is not on PATH, but in cputrain's environment: activate it, or give {beside}")


def test_a_name_that_is_too_long_for_a_file_or_empty_is_refused_in_a_line() -> None:
    for name in ("plan", "train", "eval", "simulate", "sweep"):
        line = refused(here(name, "x" * 300))
        assert "cputrain recipes lists all of them" in line, name
        assert "the recipe name is empty" in refused(here(name, "")), name
        assert "x.yaml not found: give an existing file" in refused(here(name, f"{'x' * 300}.yaml")), name
    for words in (("report",), ("watch",), ("data", "info")):
        assert "xxx... is too long for a file name; use a shorter one" in refused(here(*words, "x" * 300)), words


def test_a_folder_is_offered_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "run/checkpoints/step-0000001"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-0000001/checkpoint.json").write_text("{}")
    (tmp_path / "run/recipe.yaml").write_text("epochs: 1\n")
    write_images(tmp_path / "photos")
    expected = "is a folder, not a recipe: cputrain recipes lists those included"
    assert f"empty {expected}" in refused(here("plan", "empty")) and f". {expected}" in refused(here("plan", "."))
    for words in ("photos", "photos/train"):
        assert f"data.path={words} trains on the images" in refused(here("plan", words))
    said = "step-0000001 is a checkpoint: give the recipe of its run, run/recipe.yaml"
    assert said in refused(here("plan", "run/checkpoints/step-0000001"))


def all_commands() -> dict[str, click.Command]:
    """Each command by its words, those of groups among them."""
    found: dict[str, click.Command] = {}

    def add(words: str, command: click.Command) -> None:
        found[words] = command
        for name in command.list_commands(click.Context(command)) if isinstance(command, click.Group) else ():
            inner = command.get_command(click.Context(command), name)
            assert inner is not None
            add(f"{words} {name}".strip(), inner)

    add("", group)
    return found


def test_a_missing_argument_of_every_command_is_answered_with_what_to_give() -> None:
    for words, command in all_commands().items():
        for param in command.params:
            if param.required:
                context = click.Context(command, info_name=f"cputrain {words}")
                line = missing_argument(click.MissingParameter(ctx=context, param=param))
                assert re.search(r"^Missing (argument|option) '[^']+': .+[.] See ", line), line


def test_what_is_suggested_exists() -> None:
    commands = all_commands()
    options = {word for command in commands.values() for param in command.params for word in param.opts}
    group_options = {word for param in group.get_params(click.Context(group)) for word in param.opts}
    assert {option for meant in tables()["options"].values() for option in meant} <= options
    assert {command.partition(" RUN")[0] for meant in tables()["commands"].values() for command in meant} <= {
        *commands,
        *group_options,
    }
    assert {key for keys in other_names().values() for key in keys} <= set(all_keys())


def test_what_resembles_a_command_s_name_is_in_no_table() -> None:
    assert [
        word
        for word, meant in tables()["commands"].items()
        if get_close_matches(word, COMMANDS, n=2, cutoff=0.6) == meant
    ] == []


PRINT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK")
shown = [sys.argv[1:], sys.executable, *map(os.environ.get, names), len(os.sched_getaffinity(0))]
os.write(1, json.dumps(shown).encode() + b"\\n")
"""


def printed(*words: str, cwd: Path) -> list[list[object]]:
    ran = in_fork("launch", *words, cwd=cwd)
    assert ran.returncode == 0, ran.stderr
    return sorted(json.loads(line.partition("] ")[2]) for line in ran.stdout.splitlines() if line.startswith("["))


def test_a_python_file_and_a_module_run_under_this_python(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(PRINT)
    expected = [["--lr", "1"], sys.executable, "0", "1", "0", "0"]
    assert printed("--nproc-per-node", "1", "x.py", "--lr", "1", cwd=tmp_path)[0][:6] == expected
    assert printed("-np", "1", "-m", "x", "--lr", "1", cwd=tmp_path)[0][:6] == expected


def test_instances_know_nothing_of_each_other_and_have_cores_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(PRINT)
    cpu = str(min(os.sched_getaffinity(0)))
    assert printed("--instances", "latency", "--cores", cpu, "x.py", cwd=tmp_path) == [
        [[], sys.executable, None, None, None, None, 1]
    ]
    cores = len(json.loads(here("plan", "--ppn", "1", "--format", "json").stdout)["machine"]["core_list"])
    if cores < 2:
        pytest.skip(reason="needs two cores")
    both = printed("--instances", "2", "x.py", cwd=tmp_path)
    assert [line[2:6] for line in both] == [[None] * 4] * 2
    shown = here("launch", "--instances", "2", "--instance", "1", "--dry-run", "x.py", cwd=tmp_path)
    assert shown.returncode == 0 and "--local-rank 1" in shown.stdout and "--local-rank 0" not in shown.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--hosts", "n1:2,n2:2"),
        ("-H", "n1:2,n2:2"),
        ("--hosts", "n1,n2", "-ppn", "2"),
        ("--nnodes", "2", "--nproc-per-node", "2"),
        ("--num_nodes=2", "--nproc_per_node=2"),
        ("-host", "n1,n2", "-perhost", "2"),
        ("-H=n1:2,n2:2",),
    ],
    ids=" ".join,
)
def test_the_sizes_of_other_launchers_are_those_of_ours(words: tuple[str, ...]) -> None:
    planned = here("plan", "--machine", "skx-8160-2s", *words, "--format", "command")
    assert planned.returncode == 0 and "mpirun -np 4 -ppn 2 " in planned.stdout, planned.stderr
