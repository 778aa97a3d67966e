"""cputrain.train: a network, loss and data of one's own, alone and on several ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cputrain import train
from cputrain.affinity.errors import InputError
from cputrain.affinity.rank import Rank
from cputrain.cli import main
from cputrain.training.user_code import _user_recipe, note_on_ppn
from tests.support.commands import cputrain
from tests.support.forked import ended, forked, in_fork
from tests.support.trainings import PPN, raw_events

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
ROOT = Path(__file__).parents[2]
OF_RANKS = ("launch", "--ppn", "2", "--threads", "1", *(() if PPN == 2 else ("--oversubscribe",)), "--", sys.executable)


def final(folder: Path) -> dict[str, Tensor]:
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    return load_file(checkpoint / "model.safetensors")


def test_the_documented_example_trains_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{ROOT}:{EXAMPLES}"
    whole = in_fork(*OF_RANKS, "-m", "waveforms", "output=whole", cwd=tmp_path, PYTHONPATH=path)
    assert whole.returncode == 0, whole.stderr + whole.stdout
    assert "72 steps, top-1 " in whole.stdout and "300 samples, each once" in whole.stdout
    events = raw_events(tmp_path / "whole")
    assert events[-1]["top1"] > 90 and events[0]["workers"] == 2 and events[0]["data"] == "samples"
    assert {event["event"] for event in events} >= {"start", "step", "epoch", "checkpoint", "ranks", "end"}
    assert (tmp_path / "whole/report.html").is_file() and (tmp_path / "whole/plan.json").is_file()
    for words, message in (
        (("eval", "whole"), "scripts that pass their own network and samples to cputrain.train"),
        (("export", "whole", "w.pt"), "contains a network from user code: load its model.safetensors"),
    ):
        assert main([str(tmp_path / word) if word == "whole" else word for word in words]) == 2
        assert message in capsys.readouterr().err


def test_errors_of_a_plan_name_the_settings_of_a_script(tmp_path: Path) -> None:
    rows = [(torch.zeros(2), torch.zeros(1))] * 8
    settings = {"plan.threads": 999, "output": str(tmp_path / "run"), "epochs": 5}
    with pytest.raises(InputError, match=r"^plan\.threads=999: .* set plan\.threads to \d+ or fewer"):
        train(nn.Linear(2, 1), nn.MSELoss(), rows, settings=settings)


@pytest.mark.long
def test_the_guide_s_first_script_trains_as_it_is_printed(tmp_path: Path) -> None:
    script = (ROOT / "docs/guides/own-code.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "mine.py").write_text(script)
    ran = in_fork(*OF_RANKS, "-m", "mine", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert (
        raw_events(tmp_path / "runs/mine")[-1]["status"] == "done"
        and raw_events(tmp_path / "runs/mine")[-1]["top1"] > 60
    )


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["torchrun", "launch"])
def test_a_training_that_was_interrupted_has_the_weights_of_the_unbroken_one(tmp_path: Path, launcher: str) -> None:
    """Three starts of two ranks; those of torchrun stop after an epoch, those of cputrain within one."""
    script, steps = str(EXAMPLES / "waveforms.py"), {"torchrun": 6, "launch": 30}[launcher]
    short = ("epochs=2", "batch.global=256") if launcher == "torchrun" else ()
    for words in (("output=whole",), ("output=parts", f"max_steps={steps}"), ("output=parts", "--resume")):
        if launcher == "launch":
            done = cputrain(*OF_RANKS, script, *words, cwd=tmp_path, PYTHONPATH=str(ROOT))
        else:
            torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", script)
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            argv = (*torchrun, *words, *short)
            done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    a, b = final(tmp_path / "whole"), final(tmp_path / "parts")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.nightly
@pytest.mark.long
def test_the_notebook_s_cells_run_one_after_another(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "own_network.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 5
    again = cells[2].replace("runs/surface", "runs/again")  # a second training in the same process
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*cells, again])], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("validation loss  ")]
    assert len(losses) == 2 and losses[0] < 0.2, done.stdout
    assert not (tmp_path / "runs/surface/logs").exists() and (tmp_path / "runs/again/report.html").is_file()


FAILS_FIRST = """
import sys, threading, torch
from torch import nn
from cputrain import train

class Fails(nn.Linear):
    def forward(self, rows):
        raise ValueError("not yet")

rows = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
for network in (Fails(2, 1), nn.Linear(2, 1)):
    settings = ["epochs=1", "batch.local=4", "schedule.warmup_epochs=0", "comm.backend=gloo", "output=run"]
    try:
        print(train(network, nn.MSELoss(), rows, rows, settings=settings, overwrite=True, quiet=True).step, "steps")
    except ValueError as error:
        print(error)
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("cputrain")])
print(sys.excepthook is sys.__excepthook__)
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
train(network, nn.MSELoss(), rows, rows, settings=settings)
"""


@pytest.mark.slow
def test_a_training_that_failed_leaves_nothing_to_the_next_one(tmp_path: Path) -> None:
    """Its watchdog would end the process during a later training, as its store is gone."""
    with forked("-c", FAILS_FIRST, cwd=tmp_path, PYTHONPATH=str(ROOT)) as process:
        done = ended(process)
    lines = done.out.splitlines()
    assert lines[0] == "not yet" and "2 steps" in lines and lines.count("[]") == 2, done.out + done.err
    assert lines[-1] == "True", "the next error would name the rank twice"
    assert done.err.rstrip().endswith("but makes its own: call destroy_process_group() before")


def test_settings_of_images_are_refused_and_a_base_recipe_s_are_left_out() -> None:
    for key in ("model.name=lenet", "data.crop=32", "label_smoothing=0.1", "loss=mse", "data.path=x"):
        with pytest.raises(InputError, match=f"setting {key.partition('=')[0]} has no effect with your own network"):
            _user_recipe(None, [key])
    with pytest.raises(InputError, match=r"^setting resume is no recipe key: .* argument resume=True$"):
        _user_recipe(None, {"resume": True})
    with pytest.raises(InputError, match="unknown key"):
        _user_recipe(None, {"optim.nam": "lars"})
    recipe = _user_recipe("resnet50-mlperf-8192", {"epochs": 3, "schedule.warmup_epochs": 1, "optim.momentum": 0.5})
    assert (recipe.optim.name, recipe.optim.momentum, recipe.epochs) == ("lars", 0.5, 3)
    assert recipe.data.path == "own" and recipe.data.kind == "samples" and recipe.label_smoothing == 0


@pytest.mark.parametrize(
    ("ppn", "ranks", "told"), [("auto", 1, False), (1, 1, False), (2, 2, False), (2, 1, True), (2, 4, True)]
)
def test_a_plan_s_ppn_that_a_started_script_cannot_follow_is_told(ppn: int | str, ranks: int, told: bool) -> None:
    rank = Rank(rank=0, world_size=ranks, local_rank=0, local_world_size=ranks, convention="alone")
    note = note_on_ppn(_user_recipe(None, {"plan.ppn": ppn}).plan.ppn, rank)
    assert note.startswith("plan.ppn=2 has no effect, because this script was started with ") == told
    assert note.endswith(": start it with cputrain launch --ppn 2") == told and bool(note) == told


def own_task(loss: Any, batch: Any) -> Any:
    from cputrain.data.formats.dataset import Dataset, UserSamples
    from cputrain.data.loader import own_batch
    from cputrain.training.task import UserTask

    samples = UserSamples(batch, torch.utils.data.default_collate, "train")
    own = UserTask(
        network=nn.Linear(2, 1), loss=loss, dataset=Dataset(classes=(), train=samples, val=samples), classifies=False
    )
    return own.task("float64"), own_batch(samples, [0, 2])


def test_inputs_may_be_nested_and_losses_one_value_or_many() -> None:
    rows = [({"a": torch.tensor([i, 1.0]), "n": i}, torch.tensor([float(i)])) for i in range(3)]
    task, batch = own_task(nn.MSELoss(reduction="none"), rows)
    inputs = task.inputs(batch)
    assert inputs["a"].dtype == torch.float64 and inputs["n"].tolist() == [0, 2] and batch.labels.tolist() == [[0], [2]]
    assert task.example(4)[0]["a"].shape == (4, 2)
    with pytest.raises(InputError, match=r"shape \(2, 1\): return one value per sample, or their mean"):
        task.losses(batch.labels, batch.labels + 1, 0.0)
    assert float(own_task(nn.MSELoss(), rows)[0].losses(batch.labels, batch.labels + 1, 0.0)) == 1


def test_data_that_is_no_pairs_by_number_is_refused() -> None:
    with pytest.raises(InputError, match="whose samples cannot be read by number"):
        own_task(nn.MSELoss(), iter([(1, 2)]))
    with pytest.raises(InputError, match="not a pair of inputs and targets"):
        own_task(nn.MSELoss(), torch.arange(3))
