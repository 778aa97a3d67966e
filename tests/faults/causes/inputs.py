"""Files, settings and variables that are too large, hostile, damaged or edited by hand."""

import gzip
import json
import sys
import tarfile
import time
from collections.abc import Callable, Mapping

from tests.faults.fault import Fault, Seen
from tests.faults.place import Place, cputrain
from tests.support.commands import here
from tests.support.forked import in_fork
from tests.support.trainings import LENET

KIND = "input"
TRAIN = ("train", "imagefolder", "data.path=images")
Prepare = Callable[[Place], None]
SRUN = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def nothing(_place: Place) -> None:
    """The words themselves are wrong."""


def written(name: str, text: str) -> Prepare:
    return lambda place: (place.folder / name).write_text(text) and None


def command(*argv: str, prepare: Prepare = nothing, env: Mapping[str, str] | None = None) -> Callable[[Place], Seen]:
    """A command in the folder that `prepare` has filled; one of cputrain's is forked."""

    def cause(place: Place) -> Seen:
        prepare(place)
        with place.running(*argv, forked=argv[:3] == (*cputrain(),), **(env or {})) as run:
            status = run.end()
            assert not (place.folder / "was-executed").exists()
            return Seen(status=status, text=run.text, seconds=run.seconds)

    return cause


ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def tarball_of_zeros(place: Place) -> None:
    """A tarball of some MB whose files have 3 GB, each no more than is read of one."""
    zeros = gzip.compress(bytes(16 << 20))
    with (place.folder / "machine.tar.gz").open("wb") as file:
        for number in range(190):
            member = tarfile.TarInfo(f"x{number}/cpu.max")
            member.size = 16 << 20
            file.write(gzip.compress(member.tobuf()) + zeros)
        file.write(gzip.compress(bytes(tarfile.RECORDSIZE)))


def edited_plan(place: Place) -> None:
    made = here("plan", "--machine", "pack:1 core:2 pu:1", "--format", "json", cwd=place.folder)
    plan = json.loads(made.stdout)
    plan["workers"][0]["compute_pus"] = "all of them"
    (place.folder / "plan.json").write_text(json.dumps(plan))


def edited_manifest(place: Place) -> None:
    in_fork("prepare", "imagefolder", "images", "shards", cwd=place.folder)
    path = place.folder / "shards/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"]["shards"] = -1
    path.write_text(json.dumps(manifest))


def damaged_shard(place: Place) -> None:
    """A bit of an image in a shard."""
    in_fork("prepare", "imagefolder", "images", "shards", cwd=place.folder)
    path = next((place.folder / "shards").glob("train-*.tar"))
    data = bytearray(path.read_bytes())
    data[700] ^= 4
    path.write_bytes(data)


def broken_log(place: Place) -> None:
    with (place.copy_of_template() / "events.jsonl").open("ab") as file:
        file.write(b'null\n{"event": "step", "step": \n\xff\xfe\n')


def foreign_folder(place: Place) -> None:
    (place.folder / "run/checkpoints").mkdir(parents=True)
    (place.folder / "run/recipe.yaml").write_text("name: mine\n")
    (place.folder / "run/checkpoints/thesis.txt").write_text("years of work")


def link_to_nowhere(place: Place) -> None:
    run = place.copy_of_template()
    (run / "logs").rename(run / "old-logs")
    (run / "logs").symlink_to("/gone/logs")


def overwritten(prepare: Prepare, kept: str) -> Callable[[Place], Seen]:
    """`--overwrite` where it has to be refused, with everything still there."""

    def cause(place: Place) -> Seen:
        begun = time.monotonic()
        prepare(place)
        status, text = place.command(*TRAIN, "output=run", "--overwrite")
        assert (place.folder / kept).exists()
        return Seen(status=status, text=text, seconds=time.monotonic() - begun)

    return cause


SMALL = (
    *("comm.backend=gloo", *LENET, "schedule.warmup_epochs=0"),
    "epochs=1",
)
SHARDS = cputrain("train", "imagefolder", "data.path=shards", *SMALL, "batch.local=4", "plan.ppn=1", "output=run")
BIND = (sys.executable, "-m", "cputrain.affinity.bind", "--plan", "plan.json", "--local-rank", "0", "--", "true")


def refused(name: str, cause: Callable[[Place], Seen], *says: str, status: int = 2, nightly: bool = False) -> Fault:
    return Fault(kind=KIND, name=name, cause=cause, status=status, says=says, nightly=nightly)


def recipe(name: str, text: str, *says: str, nightly: bool = False) -> Fault:
    cause = command(*cputrain("plan", "recipe.yaml"), prepare=written("recipe.yaml", text))
    return refused(name, cause, *says, nightly=nightly)


def second_training(place: Place) -> Seen:
    """A second training is started in the folder of one that runs, which goes on."""
    with place.training() as run:
        run.wait_for(lambda: place.step >= 20)
        with place.training("--resume") as second:
            status, before = second.end(), place.step
            seconds, text = second.seconds, second.text
        run.wait_for(lambda: place.step > before + 20)
        return Seen(status=status, text=text, seconds=seconds)


FAULTS = (
    recipe("a recipe of aliases that stand for gigabytes", ALIASES, "*a is an alias; write out its value"),
    recipe("a recipe of 50 MB", f"name: {'x' * 50_000_000}", "has more than 100,000 bytes", nightly=True),
    recipe("a recipe of 3,000 levels", "{a: " * 3000, "more than 16 levels of nesting", nightly=True),
    recipe(
        "a recipe that runs a command",
        'name: !!python/object/apply:os.system ["touch was-executed"]',
        "is a tag; remove it",
    ),
    recipe("a recipe that contains itself", "&a [*a]", "*a is an alias", nightly=True),
    refused(
        "output=2026-02-30, which YAML 1.1 takes for a date",
        command(*cputrain(*TRAIN, "output=2026-02-30", "--dry-run")),
        "steps per epoch",
        status=0,
    ),
    refused(
        "a seed of 23 digits",
        command(*cputrain("plan", "imagefolder", "seed=12345678901234567890123")),
        "seed must be a whole number",
        nightly=True,
    ),
    refused(
        "--nodes 99999999999", command(*cputrain("plan", "--nodes", "99999999999")), "more than 200,000", nightly=True
    ),
    refused(
        "--hosts n[1-99999999999]",
        command(*cputrain("plan", "--hosts", "n[1-99999999999]")),
        "has more than 9 digits",
        nightly=True,
    ),
    refused(
        "a host name of 5,000 letters",
        command(*cputrain("plan", "--hosts", "n" * 5000)),
        "more than 255 characters",
        nightly=True,
    ),
    refused(
        "a machine of 100,000,000 cores",
        command(*cputrain("plan", "--machine", "pack:1 core:100000000 pu:1")),
        "core:100000000",
    ),
    refused(
        "a time limit in Arabic digits",
        command(*cputrain("job", "slurm", "imagefolder", "--time", "\u0660\u0661:\u0660\u0660:\u0660\u0660")),
        "is not a time limit: give HH:MM:SS",
        nightly=True,
    ),
    refused(
        "damaged variables of Slurm",
        command(*cputrain(*TRAIN), env=SRUN),
        "SLURM_STEP_TASKS_PER_NODE='2(x': '2(x' is not N or N(xM)",
    ),
    refused(
        "a tarball that unpacks to 3 GB",
        command(*cputrain("plan", "--machine", "machine.tar.gz"), prepare=tarball_of_zeros),
        "machine.tar.gz has more than 64 MiB of topology files",
    ),
    refused(
        "plan.json edited by hand", command(*BIND, prepare=edited_plan), "the plan is damaged: workers[0].compute_pus"
    ),
    refused(
        "manifest.json of shards edited by hand", command(*SHARDS, prepare=edited_manifest), "manifest.json is damaged"
    ),
    refused(
        "a flipped bit in an image of a shard",
        command(*SHARDS, prepare=damaged_shard),
        "1 damaged image skipped",
        "checksum differs from the index",
        status=0,
    ),
    refused(
        "broken lines in events.jsonl",
        command(*cputrain("report", "run"), prepare=broken_log),
        "run/report.html",
        status=0,
    ),
    refused(
        "--overwrite of a folder that is no run",
        overwritten(foreign_folder, "run/checkpoints/thesis.txt"),
        "run contains other files but no run",
    ),
    refused(
        "--overwrite where logs/ is a link to nowhere",
        overwritten(link_to_nowhere, "run/checkpoints/step-0000020"),
        "run/logs is a link to /gone/logs, which does not exist",
    ),
    refused("a second training in the folder of one that runs", second_training, "is in use: process"),
)
