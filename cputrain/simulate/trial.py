"""A short training of a recipe on this host, with generated images, for its images/s."""

import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

from affinity.errors import RunError
from affinity.planner.plan_file import PLAN_FILE, read_plan
from cputrain.recipe.loading import load_recipe
from cputrain.runs.events import read_events
from cputrain.simulate.measured import Measurement, versions
from cputrain.simulate.setup import setup_of

WARM_UP = 2  # steps that are not counted: the first ones allocate memory and make oneDNN's code


def measured_rate(name: str, settings: tuple[str, ...], steps: int) -> Measurement:
    """Train a recipe on this host for `steps` counted steps. Raises InputError for a wrong recipe, RunError where the
    training fails."""
    recipe = load_recipe(name, (*settings, "data.path=synthetic"))
    with tempfile.TemporaryDirectory() as folder:
        own = ("data.path=synthetic", f"max_steps={steps + WARM_UP}", f"output={folder}/run")
        command = [sys.executable, "-m", "cputrain", "train", name, *settings, *own]
        ended = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            last = ended.stderr.strip().splitlines()[-1:] or ["no message"]
            raise RunError(f"the training of {name} failed: {last[0].removeprefix('cputrain: ')}")
        events = list(read_events(Path(folder) / "run"))
        plan = read_plan(Path(folder) / "run" / PLAN_FILE)
    rates = [event["images_per_s"] for event in events if event["event"] == "step"][WARM_UP:]
    setup = setup_of(recipe, plan, None)
    return Measurement(
        model=plan.machine.model,
        cores=len(plan.machine.allowed_cores),
        network=recipe.model.name,
        crop=recipe.data.crop,
        precision=recipe.precision,
        optimizer=recipe.optim.name,
        local_batch=setup.local_batch,
        workers=setup.workers,
        threads=setup.threads,
        comm_cores=setup.comm_cores,
        loader_cores=setup.loader_cores,
        backend=next(event["backend"] for event in events if event["event"] == "start"),
        images_per_s=median(rates),
        low=min(rates),
        high=max(rates),
        date=date.today().isoformat(),
        versions=versions(),
    )
