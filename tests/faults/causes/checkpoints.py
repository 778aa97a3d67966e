"""Checkpoints that are damaged, cut short, foreign or of another training, when a run is resumed."""

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.fault import Fault, Seen
from tests.faults.place import SAVED_EVERY, Place, alive

KIND = "checkpoint"
NEWEST, OLDER = "step-0000020", "step-0000010"
MODEL, OPTIMIZER, RANK, MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "rank-00000.safetensors",
    "checkpoint.json",
)
Damage = Callable[[Path], None]


def resumed(damage: Damage, *settings: str, ppn: int = 1, steps: int = 30) -> Callable[[Place], Seen]:
    """Damage the checkpoints of a copy of the template, and resume it for ten more steps."""

    def cause(place: Place) -> Seen:
        damage(place.copy_of_template() / "checkpoints")
        before = place.step
        with place.training("--resume", f"max_steps={steps}", *settings, ppn=ppn) as run:
            status = run.end()
            steps_done = [line["step"] for line in place.logged if line["event"] == "step"]
            again = sum(1 for step in steps_done if step <= before) - before if status == 0 else None
            return Seen(status=status, text=run.text, seconds=run.seconds, lost=again)

    return cause


def flipped(name: str, place: float = 0.5, checkpoint: str = NEWEST) -> Damage:
    """Flip a bit of a file."""

    def damage(checkpoints: Path) -> None:
        path = checkpoints / checkpoint / name
        data = bytearray(path.read_bytes())
        data[int(len(data) * place)] ^= 16
        path.write_bytes(data)

    return damage


def zeroed_page(checkpoints: Path) -> None:
    path = checkpoints / NEWEST / MODEL
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(bytes(4096))


def torn(checkpoints: Path) -> None:
    path = checkpoints / NEWEST / MODEL
    os.truncate(path, path.stat().st_size // 3)


def without(name: str) -> Damage:
    return lambda checkpoints: (checkpoints / NEWEST / name).unlink()


def all_flipped(checkpoints: Path) -> None:
    for checkpoint in (NEWEST, OLDER):
        flipped(MODEL, checkpoint=checkpoint)(checkpoints)


def unfinished(checkpoints: Path) -> None:
    """What a crash leaves: a newer checkpoint that was being written."""
    shutil.copytree(checkpoints / NEWEST, checkpoints / ".step-0000025.partial")
    (checkpoints / ".step-0000025.partial" / MANIFEST).unlink()


def foreign(checkpoints: Path) -> None:
    """Files of somebody else, among them one that is named like a checkpoint."""
    (checkpoints / "step-0000099").write_text("notes")
    (checkpoints / "step-of-mine").mkdir()
    (checkpoints / "thesis.txt").write_text("years of work")


def edited_by_hand(checkpoints: Path) -> None:
    path = checkpoints / NEWEST / MANIFEST
    text = json.loads(path.read_text())
    text["checkpoint"]["step"] = 19
    path.write_text(json.dumps(text))


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch was-executed",)


def hostile_weights(place: Place) -> Seen:
    """A file that runs a command when it is loaded carelessly."""
    (place.folder / "weights.pt").write_bytes(pickle.dumps(Hostile()))
    with place.training("model.weights=weights.pt", "max_steps=2", ppn=1) as run:
        status = run.end()
        assert not (place.folder / "was-executed").exists()
        return Seen(status=status, text=run.text, seconds=run.seconds)


def killed_while_saving_then_resumed(place: Place) -> Seen:
    """kill -9 of all while a checkpoint is written, then --resume: it goes on from the one before."""
    with place.training() as run:
        run.wait_for(lambda: place.saved and any((place.run / "checkpoints").glob(".step-*.partial")))
        pids = run.ranks().values()
        run.process.kill()
        run.process.wait()
        while any(map(alive, pids)):
            time.sleep(0.05)
    lost, before = place.lost, place.step
    with place.training("--resume", f"max_steps={before + 20}") as again:
        status = again.end()
        assert not list((place.run / "checkpoints").glob(".*")), "what was unfinished is removed"
        return Seen(status=status, text=again.text, seconds=again.seconds, lost=lost)


def nothing(checkpoints: Path) -> None:
    """No damage: what is wrong is in the settings."""


def damaged(name: str, damage: Damage, says: str, loses: int = SAVED_EVERY, nightly: bool = False) -> Fault:
    used = (f"renamed to {NEWEST}.damaged, using {OLDER}",) if loses else ()
    return Fault(
        kind=KIND, name=name, cause=resumed(damage), status=0, says=(says, *used), loses=loses, nightly=nightly
    )


def refused(name: str, cause: Callable[[Place], Seen], *says: str, nightly: bool = False) -> Fault:
    return Fault(kind=KIND, name=name, cause=cause, status=2, says=says, nightly=nightly)


FAULTS = (
    damaged("a flipped bit in the weights", flipped(MODEL), f"{MODEL} is damaged: the checksum of"),
    damaged(
        "a flipped bit in the optimizer's state",
        flipped(OPTIMIZER),
        f"{OPTIMIZER} is damaged: the checksum of",
        nightly=True,
    ),
    damaged("a flipped bit in a rank's own state", flipped(RANK, 0.9), f"{RANK} is damaged", nightly=True),
    damaged("a flipped bit in the header of the weights", flipped(MODEL, 0.001), f"{MODEL} is damaged", nightly=True),
    damaged("a flipped bit in checkpoint.json", flipped(MANIFEST), f"{MANIFEST} is damaged", nightly=True),
    damaged(
        "checkpoint.json edited by hand", edited_by_hand, f"{MANIFEST} is damaged: its checksum is wrong", nightly=True
    ),
    damaged("a page of zeros in the weights", zeroed_page, f"{MODEL} is damaged: the checksum of", nightly=True),
    damaged("a torn file of weights", torn, f"{MODEL} is damaged"),
    damaged(
        "a missing file of a rank's state", without(RANK), f"cannot read run/checkpoints/{NEWEST}/{RANK}", nightly=True
    ),
    damaged("a missing checkpoint.json", without(MANIFEST), f"has no {MANIFEST}"),
    damaged("a checkpoint that was not finished", unfinished, "continues after step 20", loses=0, nightly=True),
    damaged("foreign files among the checkpoints", foreign, "continues after step 20", loses=0, nightly=True),
    Fault(
        kind=KIND,
        name="kill -9 of all while one is written, then --resume",
        cause=killed_while_saving_then_resumed,
        status=0,
        says=("continues after step",),
        loses=2 * SAVED_EVERY,
    ),
    refused(
        "a flipped bit in every checkpoint",
        resumed(all_flipped),
        "none of the 2 checkpoints in run/checkpoints can be used",
        "or start again with --overwrite",
    ),
    refused(
        "--resume with another optimizer",
        resumed(nothing, "optim.name=adam"),
        "optim.name: momentum -> adam would change what the run in run computes",
    ),
    refused(
        "--resume with another network",
        resumed(nothing, "model.name=resnet18", "data.crop=32"),
        "would change what the run in run computes",
        nightly=True,
    ),
    refused(
        "--resume with twice the workers and so another global batch",
        resumed(nothing, ppn=2),
        "the global batch is 8 with 2 workers, but 4 in the run in run (1 worker): set batch.global=4",
        nightly=True,
    ),
    Fault(
        kind=KIND,
        name="--resume with twice the workers and the same global batch",
        cause=resumed(nothing, "batch.local=2", ppn=2),
        status=0,
        says=("2 workers instead of 1",),
        loses=0,
    ),
    refused("weights that run a command when they are loaded", hostile_weights, "weights.pt"),
)
