"""One training at a time in a run's folder."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.manifest import ScaleRecord
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.resume import check_folder, recipe_text
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import LOCK, check_unlocked, continues_run, locked, make_folder
from cputrain.variables import is_restarted, lock_name_in
from tests.support.commands import here

SCALE = ScaleRecord(workers=1, global_batch=4, train_images=12, classes=2)
HOLDER = """
import sys, time
from pathlib import Path
from cputrain.runs.folder import locked
with locked(Path(sys.argv[1]), job="123"):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe("linear-regression", (f"output={tmp_path}/run",))


def test_a_second_training_is_refused_until_the_first_has_ended_however_it_ended(recipe: Recipe) -> None:
    folder = recipe.folder
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"locked\n"
        in_use = f"run is in use: process {first.pid} on {socket.gethostname()} is training there"
        for resume in (False, True):
            with pytest.raises(InputError, match=in_use):
                check_folder(recipe, SCALE, resume=resume, overwrite=not resume)
        result = here("train", "linear-regression", f"output={folder}", "--overwrite")
        assert result.returncode == 2 and in_use in result.stderr
        for env in ({"SLURM_RESTART_COUNT": "1"}, {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "new"}):
            requeued = {**env, "SLURM_JOB_ID": "123"}
            with locked(folder, restarted=is_restarted(requeued), job=lock_name_in(requeued)):
                pass  # who restarts a job knows that the attempt before has ended
            other = {**env, "SLURM_JOB_ID": "124"}
            (folder / LOCK).write_text('{"host": "h", "pid": 1, "job": "123"}')
            with pytest.raises(InputError, match="is in use: process 1 on h"):
                check_unlocked(folder, restarted=is_restarted(other), job=lock_name_in(other))
        assert not is_restarted({"SLURM_RESTART_COUNT": "0", "SLURM_JOB_ID": "123"})
        first.kill()
    check_unlocked(folder)
    with locked(folder), pytest.raises(InputError, match="is in use"), locked(folder):
        pass


def test_a_restart_overwrites_an_older_run_and_continues_the_job_s_own(recipe: Recipe) -> None:
    folder = recipe.folder
    make_folder(recipe.folder, recipe_text(recipe), overwrite=False)
    first = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "b"}
    second = {**first, "TORCHELASTIC_RESTART_COUNT": "1"}
    for job, continued in (("a", False), ("b", True)):
        (folder / "environment.json").write_text(json.dumps({"job": job}))
        assert not continues_run(folder, first, overwrite=True)
        assert continues_run(folder, second, overwrite=True) is continued
        assert continues_run(folder, second, overwrite=False)
    (folder / "environment.json").write_text(json.dumps({"job": "123"}))
    for job, continued in (("123", True), ("124", False)):
        requeued = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": "1"}
        assert continues_run(folder, requeued, overwrite=True) is continued
    # torchrun's jobs have no name of their own.
    (folder / "environment.json").write_text(json.dumps({"job": ""}))
    assert continues_run(folder, {**second, "TORCHELASTIC_RUN_ID": "none"}, overwrite=True)
