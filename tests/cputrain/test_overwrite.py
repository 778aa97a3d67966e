"""What --overwrite removes: a run's own files, in a folder that is marked as a run's, and nothing else."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from cputrain.affinity.errors import InputError
from cputrain.manifest import ScaleRecord
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.resume import check_folder, recipe_text
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import locked, make_folder

SCALE = ScaleRecord(workers=1, global_batch=4, train_images=12, classes=2)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe("imagefolder", (f"output={tmp_path}/run", "data.path=images"))


@pytest.fixture
def run(recipe: Recipe) -> Path:
    """A run with a checkpoint and a log."""
    make_folder(recipe.folder, recipe_text(recipe), overwrite=False)
    for name in ("checkpoints/step-0000001/model.safetensors", "logs/rank-0.log"):
        (recipe.folder / name).parent.mkdir(parents=True)
        (recipe.folder / name).write_text("old")
    return recipe.folder


def overwrite(recipe: Recipe) -> None:
    check_folder(recipe, SCALE, resume=False, overwrite=True)
    make_folder(recipe.folder, recipe_text(recipe), overwrite=True)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_replaced_and_what_else_is_there_stays(recipe: Recipe, run: Path) -> None:
    (run / "notes.txt").write_text("mine")
    overwrite(recipe)
    assert files(run) == {".cputrain-run", "recipe.yaml", "notes.txt"}


def test_a_foreign_folder_with_a_recipe_loses_nothing(recipe: Recipe) -> None:
    folder = recipe.folder
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: mine\n")
    (folder / "checkpoints/thesis.pt").write_text("years of work")
    for resume, flag in ((False, True), (False, False), (True, False)):
        with pytest.raises(InputError, match=r"contains other files but no run|contains no run"):
            check_folder(recipe, SCALE, resume=resume, overwrite=flag)
    make_folder(folder, recipe_text(recipe), overwrite=True)
    assert (folder / "checkpoints/thesis.pt").read_text() == "years of work"


def test_links_to_scratch_are_followed_for_a_run_s_own_files(recipe: Recipe, run: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (run / "checkpoints").rename(scratch)
    (run / "checkpoints").symlink_to(scratch)
    (scratch / "of another run").mkdir()
    (scratch / "best").symlink_to("step-0000001")
    overwrite(recipe)
    assert (run / "checkpoints").resolve() == scratch
    assert [path.name for path in scratch.iterdir()] == ["of another run"]
    assert files(run) == {".cputrain-run", "recipe.yaml"}


def test_links_that_lead_nowhere_are_refused_before_anything_is_removed(recipe: Recipe, run: Path) -> None:
    before = files(run)
    (run / "usage").symlink_to("/gone/usage")
    with pytest.raises(InputError, match=r"run/usage is a link to /gone/usage, which does not exist: mount it"):
        overwrite(recipe)
    assert files(run) == before
    (run / "usage").unlink()
    (run / "plan.json").symlink_to(run / "logs")
    with pytest.raises(InputError, match=r"plan.json is a link to the folder .*/logs: remove the link"):
        overwrite(recipe)
    assert files(run) == before


@pytest.mark.parametrize("name", ["report.html", "events.jsonl", "checkpoints", "metrics", "usage"])
def test_a_file_in_place_of_a_folder_and_the_other_way_round_are_refused_before_a_run_goes_on(
    recipe: Recipe, run: Path, name: str
) -> None:
    """The report is written after the last step."""
    make_folder(recipe.folder, recipe_text(recipe), overwrite=False)
    path = run / name
    if path.exists():
        path.rename(run / "away")
    path.mkdir() if "." in name else path.touch()
    found = "a folder" if "." in name else "a file"
    with pytest.raises(InputError, match=rf"{path} is {found}: move it away"):
        check_folder(recipe, SCALE, resume=True, overwrite=False)
    overwrite(recipe)
    assert not path.exists()
    if "." not in name:
        path.symlink_to("/gone")
        with pytest.raises(InputError, match=rf"{path} is a broken link: move it away"):
            check_folder(recipe, SCALE, resume=True, overwrite=False)


BEGUN = '{"event": "start", "time": 1.0, "data": "images", "backend": "gloo", "bindings": []}\n'


def test_a_run_without_a_step_is_no_obstacle_to_another(recipe: Recipe) -> None:
    """Damaged weights or images end a run after its folder was made."""
    make_folder(recipe.folder, recipe_text(recipe), overwrite=False)
    run = recipe.folder
    (run / "notes.txt").write_text("mine")
    (run / "logs").mkdir()
    (run / "logs/rank-0.log").write_text("not a file of weights")
    (run / "events.jsonl").write_text(BEGUN)
    other = recipe.model_copy(update={"seed": 7})
    for resume in (True, False):
        found = check_folder(other, SCALE, resume=resume, overwrite=False)
        assert found == f"{run} starts over, as the run in it had not trained a step"
    make_folder(other.folder, recipe_text(other), overwrite=False, resume=True)
    assert (run / "logs/rank-0.log").is_file(), "a restart keeps its earlier attempts' logs"
    make_folder(other.folder, recipe_text(other), overwrite=False)
    assert files(run) == {".cputrain-run", "recipe.yaml", "notes.txt"}


STEP = '{"event": "step", "time": 1.0, "step": 1, "epoch": 1, "loss": 1, "rate": 1, "images_per_s": 1}\n'


@pytest.mark.parametrize(
    "line", [STEP, '{"event": "step"}\n', "\0\0\n", '{"event": "of a later version", "time": 1}\n']
)
def test_a_run_that_may_have_trained_a_step_is_kept(recipe: Recipe, line: str) -> None:
    make_folder(recipe.folder, recipe_text(recipe), overwrite=False)
    (recipe.folder / "events.jsonl").write_text(BEGUN + line)
    for other in (recipe, recipe.model_copy(update={"seed": 7})):
        with pytest.raises(InputError, match=r"contains a run of (this recipe: add|another recipe \(seed: 1 -> 7\))"):
            check_folder(other, SCALE, resume=False, overwrite=False)
        make_folder(other.folder, recipe_text(other), overwrite=False)
        assert (recipe.folder / "events.jsonl").read_text() == BEGUN + line


@pytest.mark.parametrize(
    ("options", "of_command", "of_script"),
    [
        ({}, "add --resume or --overwrite, or set", "add resume=True or overwrite=True, or set"),
        (
            {"resume": True, "overwrite": True},
            "--resume and --overwrite",
            "resume=True and overwrite=True",
        ),
        ({"seed": 2}, "or add --overwrite to delete", "or add overwrite=True to delete"),
        (
            {"resume": True, "seed": 2},
            "^--resume: seed: 1 -> 2 would",
            "^resume=True: seed: 1 -> 2 would",
        ),
        ({"resume": True, "output": "new"}, "^--resume: .* remove --resume", "^resume=True: .* remove resume=True"),
    ],
)
def test_messages_name_options_of_the_command_or_arguments_of_a_script(
    options: dict[str, Any], of_command: str, of_script: str, recipe: Recipe, run: Path
) -> None:
    flags = {name: options.get(name, False) for name in ("resume", "overwrite")}
    changed = {"seed": options.get("seed", 1), "output": options.get("output", recipe.output)}
    own = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": "own"})})
    for each, told in ((recipe, of_command), (own, of_script)):
        shutil.rmtree(run)
        make_folder(each.folder, recipe_text(each), overwrite=False)
        (run / "checkpoints/step-0000001").mkdir(parents=True)
        with pytest.raises(InputError, match=told):
            check_folder(each.model_copy(update=changed), SCALE, **flags)


def test_a_checkpoint_or_a_training_of_another_process_is_kept(recipe: Recipe, run: Path) -> None:
    with pytest.raises(InputError, match="contains a run of this recipe: add --resume or --overwrite"):
        check_folder(recipe, SCALE, resume=False, overwrite=False)
    shutil.rmtree(run / "checkpoints")
    with locked(run), pytest.raises(InputError, match="is in use: process"):
        check_folder(recipe, SCALE, resume=False, overwrite=False)
    assert "starts over" in check_folder(recipe, SCALE, resume=False, overwrite=False)


def test_an_interrupted_removal_leaves_a_folder_that_can_be_used(recipe: Recipe, run: Path) -> None:
    (run / "recipe.yaml").unlink()  # it goes last
    with pytest.raises(InputError, match="contains no run"):
        check_folder(recipe, SCALE, resume=True, overwrite=False)
    assert check_folder(recipe, SCALE, resume=False, overwrite=False) == ""
    make_folder(recipe.folder, recipe_text(recipe), overwrite=False)
    assert files(run) == {".cputrain-run", "recipe.yaml"}


def test_a_start_that_was_killed_before_the_mark_was_written_does_not_take_the_folder(recipe: Recipe) -> None:
    recipe.folder.mkdir()
    (recipe.folder / "..cputrain-run.4711.partial").write_text("cputrain")
    assert check_folder(recipe, SCALE, resume=False, overwrite=False) == ""
    (recipe.folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="contains other files but no run"):
        check_folder(recipe, SCALE, resume=False, overwrite=False)
