"""Every reader of files, settings and variables: whatever it gets, it returns, or refuses it in a line, within 2 s."""

import gzip
import json
import os
import random
import struct
import tarfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.plan_file import plan_from_dict, plan_of_host, plan_to_json, read_json, read_plan
from cputrain.affinity.planner.records import measured_of, parse_record
from cputrain.affinity.planner.request import Request
from cputrain.affinity.rank import rank_from_env
from cputrain.affinity.topology.catalog import find_machine, tree_root
from cputrain.affinity.topology.hwloc import read_lstopo
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.topology.sysfs import read_machine
from cputrain.affinity.topology.tarball import unpacked_tarball
from cputrain.affinity.views import plan_differences, plan_to_svg, plan_to_text
from cputrain.checkpoint.async_checkpoint import AsyncCheckpoint
from cputrain.checkpoint.files import MANIFEST, checkpoint_name, read_content, read_tensors, write_tensors
from cputrain.checkpoint.loop_state import check_objects_fit, load_state
from cputrain.checksums import crc32c_of_json
from cputrain.cli.output import parse_clock
from cputrain.data.formats import source as shards
from cputrain.data.sources import read_idx
from cputrain.files import RECIPES
from cputrain.jobs.script import parse_array
from cputrain.manifest import read_manifest
from cputrain.mpi.hostfile import expand_hosts, parse_hosts
from cputrain.mpi.schedulers import scheduler_allocation
from cputrain.other_launchers.parsing import command_and_rest, split_words
from cputrain.other_launchers.parsing import parse_command as read_line
from cputrain.other_launchers.translation import translate
from cputrain.recipe.loading import load_recipe, parse_setting
from cputrain.report.run import read_usage
from cputrain.runs.events import FILE as EVENTS
from cputrain.runs.events import read_events, read_log, time_spent
from cputrain.runs.folder import finished
from tests.fuzz.inputs import COUNT, damaged, edited, fuzzed, read, write
from tests.support.machines import build_machine, write_sysfs

Loop = tuple[Path, nn.Module, torch.optim.Optimizer, str]
MACHINES = Path(__file__).parents[1] / "machines"

RECIPE_TEXTS = tuple(path.read_text() for path in sorted(RECIPES.glob("*.yaml")))


@fuzzed
@given(text=edited(RECIPE_TEXTS))
def test_recipes(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", text)
    read(lambda: load_recipe(str(path)))


KEYS = (
    "epochs",
    "seed",
    "batch.local",
    "data.path",
    "data.mean",
    "phases",
    "sweep.grid",
    "output",
    "optim.clip_norm",
    "",
)
SETTINGS = tuple(f"{key}={value}" for key in KEYS for value in ("3", "a", "[1, 2, 3]", "{x: 1}", "null"))


@fuzzed
@given(text=edited(SETTINGS))
def test_settings(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "name: x\n")
    read(lambda: load_recipe(str(path), [text]))
    read(lambda: parse_setting(text))
    read(lambda: parse_array(text))


PLAN = plan_to_json(plan_machine(find_machine("skx-8160-2s"), Request(ppn=2), Runtime()))
SMALL_PLAN = plan_to_json(plan_machine(find_machine("pack:1 core:2 pu:1"), Request(ppn=2), Runtime()))
GROUPS = f'{{"host_groups": [{{"hosts": ["n1"], "plan": {SMALL_PLAN}}}]}}'


@fuzzed
@given(text=edited((SMALL_PLAN, SMALL_PLAN, GROUPS, PLAN)))
def test_plans(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "plan.json", text)
    read(lambda: shown(read_plan(path)))
    read(lambda: plan_from_dict(plan_of_host(read_json(path), "n1")))


def shown(plan: Plan) -> str:
    """A plan that is accepted can be used."""
    return plan_to_text(plan, explained=True) + plan_to_svg(plan) + "".join(plan_differences(plan, plan))


@st.composite
def json_edits(draw: st.DrawFn, text: str) -> str:
    """JSON with values replaced by others anywhere."""
    whole = json.loads(text)
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    for _ in range(rng.randint(1, 3)):
        place = whole
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = rng.choice(keys)
            if not (isinstance(place[key], dict | list) and place[key] and rng.randrange(2)):
                break
            place = place[key]
        place[key] = rng.choice([None, True, -1, 0, 0.5, 1e300, 10**30, "", "x", [], ["a"], {}, {"a": 1}, [[]]])
    return json.dumps(whole)


@fuzzed
@given(text=json_edits(GROUPS) | json_edits(SMALL_PLAN))
def test_plans_edited_by_hand(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "plan.json", text)
    read(lambda: shown(read_plan(path)))
    read(lambda: plan_from_dict(plan_of_host(read_json(path), "n1")))


MIXING = {"classes_in_32": 1.0, "at_random": 1.5}
SPLIT = {
    "images": 3,
    "shards": 1,
    "bytes": [9],
    "mixing": MIXING,
    "unusual": {"gray": 1},
    "damaged": ["x"],
}
SHARDS = json.dumps({"version": 3, "classes": ["a"], "options": {"kind": "x", "seed": 1}, "splits": {"train": SPLIT}})


@fuzzed
@given(text=edited((SHARDS,)) | json_edits(SHARDS))
def test_manifests_of_shards(text: str, tmp_path: Path) -> None:
    write(tmp_path / shards.MANIFEST, text)
    read(lambda: shards.read_data_manifest(tmp_path))


NETWORK = {"model": {"name": "lenet"}, "classes": ["a", "b"], "features": None, "crop": 28, "resize": 28}
TRAINING = {"epoch_done": True, "own_statistics": False, "best_score": None, "bucket_mib": 25.0, "first_loss": 1.0}
OPTIMIZER = {"name": "momentum", "groups": [{"lr": 0.1, "params": ["fc.weight"]}], "values": {"fc.weight": {"step": 1}}}
CHECKPOINT = json.dumps(
    {
        **{"format": "cputrain checkpoint", "version": 1, "cputrain": "0.1", "step": 3, "recipe": {"name": "x"}},
        "network": {**NETWORK, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]},
        "scale": {"workers": 1, "global_batch": 4, "train_images": 9, "classes": 2},
        "training": {**TRAINING, "diverged": False, "rollbacks": {}, "optimizer": OPTIMIZER},
        "files": {"model.safetensors": {"bytes": 1, "crc32c": 2}},
    }
)


def signed(content: str) -> str:
    """A checkpoint's file as somebody writes it who knows its checksum."""
    try:
        data = json.loads(content)
        return json.dumps({"crc32c": crc32c_of_json(data), "checkpoint": data})
    except (ValueError, RecursionError):
        return content


def test_the_checkpoint_that_is_edited_is_one(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(signed(CHECKPOINT))
    assert read_manifest(tmp_path).network.crop == 28


@fuzzed
@given(text=edited((CHECKPOINT,)) | json_edits(CHECKPOINT))
def test_manifests_of_checkpoints(text: str, tmp_path: Path) -> None:
    write(tmp_path / MANIFEST, signed(text))
    read(lambda: read_manifest(tmp_path))
    write(tmp_path / MANIFEST, text)
    read(lambda: read_manifest(tmp_path))


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """A checkpoint of a loop."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    folder = tmp_path_factory.mktemp("loop")
    with AsyncCheckpoint(folder) as checkpoint:
        checkpoint.save(1, model, optimizer, generator=torch.Generator(), value=(1, np.float32(2)))
    return folder, model, optimizer, json.dumps(read_content(folder / checkpoint_name(1)))


@fuzzed
@given(data=st.data())
def test_checkpoints_of_loops(data: st.DataObject, loop: Loop) -> None:
    """What a script's own object then makes of its state is its own affair."""
    folder, model, optimizer, text = loop
    write(folder / checkpoint_name(1) / MANIFEST, signed(data.draw(edited((text,)) | json_edits(text))))

    def load() -> None:
        found = load_state(folder / checkpoint_name(1), 0, 1, wants_optimizer=True)
        check_objects_fit(found, model, optimizer, {"generator": torch.Generator()})

    read(load)


RATE = {"value": 1.0, "low": 0.5, "high": 2.0}
PLANNED = {"ppn": 2, "comm_cores": 0, "loader_cores": 1, "allocator": "glibc", "why": "measured: faster"}
MEASURED = {"name": "x", "machine": "m", "versions": ["a 1"], "date": "2026-01-02", "command": "c", "format": 1}
RECORDS = tuple(json.dumps({**MEASURED, "kind": k, "values": v}) for k, v in (("rate", RATE), ("tuned", PLANNED)))


@fuzzed
@given(text=edited(RECORDS) | json_edits(RECORDS[0]) | json_edits(RECORDS[1]))
def test_measurements(text: str) -> None:
    with suppress(ValueError, RecursionError):  # read_records tells of these in a line
        record = parse_record(text)
        plan_machine(build_machine(2, 1, 16, 2), Request(nodes=2), measured=measured_of([record]))


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    import torch

    path = tmp_path_factory.mktemp("tensors") / "t.safetensors"
    write_tensors(path, {"a": torch.zeros(3, 4), "b": torch.ones(5, dtype=torch.int64)}, {"text": "x"})
    return path.read_bytes()


@fuzzed
@given(data=st.data())
def test_files_of_tensors(data: st.DataObject, tensors: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.safetensors").write_bytes(data.draw(damaged(tensors)))
    read(lambda: read_tensors(tmp_path / "t.safetensors"))


EVENT_LINES = "\n".join(
    json.dumps({"time": 1.5, **fields})
    for fields in (
        {"event": "start", "bindings": [], "workers": 2, "global_batch": 4, "train_images": 8, "classes": 2},
        {"event": "step", "step": 1, "epoch": 0.5, "loss": None, "rate": 0.1, "images_per_s": 2.5},
        {"event": "warning", "what": "x", "images": ["a"]},
        {"event": "end", "steps": 1, "status": "done", "images": 4, "top1": 1.5, "top5": None, "time_to_train_s": 1.0},
    )
)


@fuzzed
@given(text=edited((EVENT_LINES + "\n",)))
def test_events(text: str, tmp_path: Path) -> None:
    write(tmp_path / EVENTS, text)
    read(lambda: (read_events(tmp_path), time_spent(tmp_path), read_log(tmp_path), finished(tmp_path, 1)))


USE = {"time": 1.0, "seconds": 1.0, "host": "n1", "cpu_s": 1.0, "rss_bytes": 1, "processes": 1}


@fuzzed
@given(text=edited((json.dumps(USE) + "\n",)) | json_edits(json.dumps(USE)))
def test_records_of_use(text: str, tmp_path: Path) -> None:
    (tmp_path / "usage").mkdir(exist_ok=True)
    write(tmp_path / "usage/rank-0.jsonl", text + "\n")
    read(lambda: read_usage(tmp_path))


LISTS = ("n[001-128,130],gpu-x3", "n1,n2", "n[1-99999999999]", "a[1-2]b[3-4]", "n[1-2,]")
FILES = ("n1 slots=4\nn2 slots=2\n", "n1:4\nn2:4\n", "# x\nn1\nn1\n", "n1 max_slots=3\n", "[::1]\n")


@fuzzed
@given(hosts=edited(LISTS), lines=edited(FILES))
def test_hosts(hosts: str, lines: str) -> None:
    read(lambda: expand_hosts(hosts))
    read(lambda: parse_hosts(lines, "hosts"))


NUMBERS = ("0", "1", "2", "2(x3),1", "-1", "99999999999", "4096(x4096)", "n[1-4]")
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    *("SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_JOB_NODELIST", "SLURM_NTASKS"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PBS_NODEFILE"),
    *("SLURM_HET_SIZE", "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_1", "PE_HOSTFILE"),
    *("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID", "PALS_APINFO", "PMIX_RANK"),
    *("LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "LSB_HOSTS", "LSB_JOBID"),
)


@fuzzed
@given(env=st.dictionaries(st.sampled_from(VARIABLES), edited(NUMBERS), max_size=12))
def test_variables_of_launchers_and_schedulers(env: dict[str, str]) -> None:
    # As an environment holds them: bytes without zeros.
    env = {name: os.fsdecode(value.replace("\0", "").encode(errors="replace")) for name, value in env.items()}
    read(lambda: rank_from_env(env))
    read(lambda: scheduler_allocation(env))


@fuzzed
@given(text=edited(("01:30:00", "2-00:00:00", "99-99:59:59", "\u0660\u0661:\u0660\u0660:\u0660\u0660")))
def test_time_limits(text: str) -> None:
    read(lambda: parse_clock(text))


IDX = struct.pack(">HBBIII", 0, 8, 3, 2, 3, 4) + bytes(range(24))


@fuzzed
@given(data=damaged(IDX) | damaged(gzip.compress(IDX)) | damaged(IDX).map(gzip.compress))
def test_mnist_s_files(data: bytes, tmp_path: Path) -> None:
    for name in ("images", "images.gz"):
        (tmp_path / name).write_bytes(data)
        read(lambda name=name: read_idx(tmp_path / name, 3))


LAUNCHES = (
    "ipexrun --nnodes 2 --nprocs-per-node 2 --ccl-worker-count 4 --hostfile hosts train.py --epochs 3",
    "torchrun --nproc-per-node=4 --rdzv-endpoint n1:29500 -m train",
    "mpirun -np 4 -ppn 2 -genv OMP_NUM_THREADS=4 -hosts n1,n2 python train.py",
    "mpirun -n 4 --map-by ppr:2:socket:pe=4 --bind-to core -x A -x B=1 python train.py",
    "horovodrun -np 8 -H n1:4,n2:4 python train.py",
    "srun -lN2-4 -t10:00 -w ./hosts --export=ALL,A=b,OMP_NUM_THREADS=4 --hint=nomultithread python train.py",
    "accelerate launch --cpu --num_machines 2 --num_processes 4 train.py",
    "deepspeed --num_nodes 2 --num_accelerators 2 -i n1@n2:0,1 train.py --deepspeed ds.json",
)


@fuzzed
@given(text=edited(LAUNCHES))
def test_command_lines_of_other_launchers(text: str) -> None:
    read(lambda: translate(read_line(split_words(command_and_rest(text)[0]), None), cores=4, hosts_in=lambda _: None))


SYNTHETIC = (
    "pack:2 core:24 pu:2",
    "pack:2 [numa] l3:1 core:24 pu:2(indexes=2*48:48*1)",
    "core:100000000",
    "numa:4 core:2",
)


@fuzzed
@given(text=edited(SYNTHETIC))
def test_synthetic_machines(text: str) -> None:
    read(lambda: find_machine(text))


XML = (MACHINES / "coreless.xml").read_bytes()


@fuzzed
@given(data=damaged(XML))
def test_lstopo_s_xml(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.xml").write_bytes(data)
    read(lambda: read_lstopo(tmp_path / "m.xml"))


@pytest.fixture(scope="module")
def tarball(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small machine's files: each that is unpacked takes as long as a hundred lines."""
    place = tmp_path_factory.mktemp("tarball")
    write_sysfs(build_machine(1, 1, 2, 2), place / "small")
    with tarfile.open(place / "small.tar.xz", "w:xz") as archive:
        archive.add(place / "small", "small")
    return (place / "small.tar.xz").read_bytes()


def machine_in(tarball: Path) -> Machine:
    with unpacked_tarball(tarball) as folder:
        return read_machine(tree_root(folder))


def test_the_tarball_that_is_damaged_has_a_machine(tarball: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.tar.xz").write_bytes(tarball)
    assert len(machine_in(tmp_path / "m.tar.xz").cores) == 2


@settings(fuzzed, max_examples=max(COUNT // 10, 1))
@given(data=st.data())
def test_tarballs(data: st.DataObject, tarball: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.tar.xz"
    path.write_bytes(data.draw(damaged(tarball)))
    read(lambda: machine_in(path))
