"""Several consecutive trainings in the same ranks, which start once: python -m tests.support.trainings JSON.

JSON is a list of {"recipe", "settings", "port", "poison"}; `poison` is the forward pass in which rank 1 gets NaN, or 0.
Among the settings, --resume resumes, and --signal=N sends rank 0 the preemption signal when step N is logged, so that
the next step is the last; --speedup=X replaces the measurement of precision=auto on any CPU, without X by a failure.
`trained` starts this with `cputrain launch`. FAULT_RANK in the environment injects a fault.
"""

import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cputrain.affinity.rank import rank_from_env
from cputrain.launch.rank_process import StartOptions, bind_rank, run_rank
from cputrain.mpi.supervise.run import free_port
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.request import request_of
from tests.support.commands import PPN
from tests.support.forked import Process, in_fork
from tests.support.injection import FAULTS

LENET = ("model.name=lenet", "model.zero_gamma=none", "data.crop=28")  # 1 % of resnet18's parameters and time
RESNET18 = ("model.name=resnet18", "model.zero_gamma=last_of_block", "data.crop=32")
SMALL = (
    "data.path=images",
    *LENET,
    *("batch.local=6", "epochs=2", "schedule.warmup_epochs=1", f"plan.ppn={PPN}", "output=run"),
)


def until_logged(run: Path, event: str, process: subprocess.Popen[Any] | Process | None = None) -> None:
    """Wait until a run has such an event; its process, if given, must not end before."""
    events = run / "events.jsonl"
    deadline = time.monotonic() + 300
    while not (events.is_file() and f'"{event}"' in events.read_text(encoding="utf-8")):
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.01)


def raw_events(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run as its file has them."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def trained(
    place: Path, ppn: int, *trainings: Sequence[str], poison: int = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Train each (recipe, setting, ...) in turn, with `ppn` forked ranks of one thread in the folder `place`."""
    specs = [{"recipe": t[0], "settings": t[1:], "port": str(free_port()), "poison": poison} for t in trainings]
    ranks = ("--", sys.executable, "-m", "tests.support.trainings", json.dumps(specs))
    many = ("--oversubscribe",) if ppn > PPN else ()
    launch = ("launch", "--ppn", str(ppn), "--threads", "1", *many)
    return in_fork(*launch, *ranks, cwd=place, PYTHONPATH=str(Path(__file__).parents[2]), **env)


def main(trainings: list[dict[str, Any]]) -> None:
    if "FAULT_RANK" in os.environ:
        runpy.run_path(str(FAULTS))
    from cputrain.training.session import start_session
    from cputrain.training.trainer import train_rank

    rank = rank_from_env(os.environ)
    assert rank is not None
    for training in trainings:
        flags = [setting for setting in training["settings"] if setting.startswith("--")]
        recipe = load_recipe(training["recipe"], [each for each in training["settings"] if each not in flags])
        os.environ["MASTER_PORT"] = training["port"]
        context = bind_rank(request_of(recipe), rank, os.environ, share=False, check=True)
        options = StartOptions(resume="--resume" in flags)
        poison(training["poison"])
        values = {name: value for name, _, value in (flag.partition("=") for flag in flags)}
        send_signal(int(values.get("--signal", 0)))
        if "--speedup" in values:
            set_speedup(values["--speedup"])
        session = partial(start_session, context, recipe, measured=True, resume=options.resume)
        run_rank(rank, lambda: train_rank(session(), options))  # noqa: B023  called at once
        faulthandler.cancel_dump_traceback_later()  # normally a rank ends with its group, but this one continues
        print(f"trained {recipe.name}", flush=True)


def send_signal(step: int) -> None:
    """Send this process the preemption signal when a step is logged; 0: never."""
    from cputrain.mpi.supervise.signals import PREEMPTION_SIGNAL
    from cputrain.training.watchers.log import TrainingLog

    def log_step(self: TrainingLog, done: int, *arguments: Any) -> None:
        PLAIN_STEP[0](self, done, *arguments)
        if done == step and os.environ["RANK"] == "0":
            signal.raise_signal(PREEMPTION_SIGNAL)

    PLAIN_STEP.append(TrainingLog.after_step)
    TrainingLog.after_step = log_step


PLAIN_STEP: list[Any] = []


def set_speedup(value: str) -> None:
    """Let this CPU have instructions for bfloat16, and steps in it a speedup; "": measuring it fails."""
    from cputrain.training import precision

    precision.instructions_missing = lambda _isa: ""
    precision.step_speedup = lambda _trial: float(value)


def poison(step: int) -> None:
    """Make networks return NaN on rank 1 in a given forward pass of a training, after their relu."""
    import torch
    from torch import nn

    from cputrain.models.networks import build_model
    from cputrain.training import session

    class Poison(nn.Module):
        passes = 0

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.passes += self.training
            poisoned = self.training and self.passes in (step, step + 1)  # the second pass searches for the layer
            return images + (torch.nan if poisoned and os.environ["RANK"] == "1" else 0.0)

    def poisoned(*arguments: Any) -> nn.Module:
        model = build_model(*arguments)
        model.relu = nn.Sequential(model.relu, Poison())
        return model

    session.build_model = poisoned if step else build_model


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
