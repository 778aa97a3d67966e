"""PyTorch and other packages over ccl, as docs/guides/oneccl.md tells: tests/support/ccl_clients.py, two ranks each."""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from cputrain.mpi.supervise.run import free_port
from tests.support.ccl_jobs import command, lines_of, needs_ccl, started
from tests.support.commands import PPN
from tests.support.forked import ROOT, ended, forked, in_fork

NEEDED = {
    "ddp": (),
    "tensor_parallel": (),
    "fsdp2": (),
    "pipelining": (),
    "accelerate": ("accelerate",),
    "trainer": ("accelerate", "transformers"),
    "lightning": ("pytorch_lightning",),
    "deepspeed": ("deepspeed",),
}
COSTLY = ("fsdp2", "trainer", "deepspeed")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
PLACEHOLDERS = str(ROOT / "compat/stand_ins")


@pytest.mark.long
@pytest.mark.parametrize(
    "client", [pytest.param(name, marks=pytest.mark.nightly) if name in COSTLY else name for name in NEEDED]
)
def test_a_client_trains(client: str, tmp_path: Path) -> None:
    for package in NEEDED[client]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(reason=f"needs the package {package}")
    with started("tests.support.ccl_clients", client, str(tmp_path), PYTHONWARNINGS="ignore") as ranks:
        for rank in ranks:
            end = ended(rank, 480)  # DeepSpeed compiles
            assert end.status == 0, end.err
            assert [line["client"] for line in lines_of(end.out)] == [client]


PLAIN = """
import json, os, sys
import torch, torch.distributed as dist
count = os.environ.get("CCL_WORKER_COUNT")
known = [hasattr(dist.Backend, "CCL"), "cputrain.comm.ccl" in sys.modules]
dist.init_process_group("ccl")
values = torch.ones(1)
dist.all_reduce(values)
said = {"rank": dist.get_rank(), "sum": values.item(), "backend": dist.get_backend(), "count": count, "known": known}
os.write(1, json.dumps(said).encode() + b"\\n")
dist.destroy_process_group()
"""
needs_entry_points = pytest.mark.skipif(
    not any(point.name == "cputrain_ccl" for point in entry_points(group="torch.backends")),
    reason="needs the entry points of this version: install the package again",
)


@needs_ccl
@needs_entry_points
def test_a_script_without_an_import_of_ours_has_the_backend_under_torchrun_and_launch(tmp_path: Path) -> None:
    """Nothing of it is loaded before it is used. And a script finds CCL_WORKER_COUNT under launch, without which older
    accelerate and transformers take gloo."""
    (tmp_path / "script.py").write_text(PLAIN)
    script = str(tmp_path / "script.py")
    unset = {name: value for name, value in os.environ.items() if name != "CCL_WORKER_COUNT"}
    launch = ("-m", "cputrain", "launch", "--output", str(tmp_path / "run"), "--ppn", "1", script)
    done = subprocess.run((sys.executable, *launch), cwd=ROOT, env=unset, capture_output=True, text=True, timeout=240)
    assert said_by(done, 1, "1") == [[True, False]]
    run = ("torch.distributed.run", "--nproc-per-node=1", "--master-port", str(free_port()), "--no-python")
    with forked("-m", *run, "env", "-u", "CCL_WORKER_COUNT", sys.executable, script) as torchrun:  # its rank is not
        end = ended(torchrun, 240)
    done = subprocess.CompletedProcess(run, end.status, end.out, end.err)
    assert said_by(done, 1, None) == [[True, False]]
    forking = ("--output", str(tmp_path / "user"), "--ppn", str(PPN), sys.executable, "-m", "script")
    said_by(in_fork("launch", *forking, cwd=tmp_path, CCL_WORKER_COUNT="3"), PPN, "3")


def said_by(done: subprocess.CompletedProcess[str], ranks: int, count: str | None) -> list[list[bool]]:
    """What each rank of PLAIN knew of the backend at first: whether it was registered, and loaded."""
    assert done.returncode == 0, done.stderr
    said = sorted(lines_of(done.stdout), key=lambda line: line["rank"])
    known = [line.pop("known") for line in said]
    expected = {"sum": float(ranks), "backend": "ccl", "count": count}
    assert said == [{"rank": i, **expected} for i in range(ranks)]
    return known


UNKNOWN = f"""
import sys, torch
print(hasattr(torch.distributed.Backend, "CCL"), "cputrain.comm.ccl" in sys.modules, flush=True)
plain = {PLAIN!r}
try:
    exec(plain)
except Exception as error:
    print(error, flush=True)
import cputrain.comm.ccl
import os
os.environ["MASTER_PORT"] = sys.argv[1]
exec(plain)
"""


@needs_ccl
def test_where_entry_points_are_off_an_import_registers_the_backend() -> None:
    argv = (sys.executable, "-c", UNKNOWN, str(free_port()))
    env = {**os.environ, **ALONE, "MASTER_PORT": str(free_port())}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False False\n") and "Unknown backend type ccl" in done.stdout, done.stdout
    (said,) = lines_of(done.stdout)
    assert said["backend"] == "ccl" and said["known"] == [True, True]


STAND_IN = """
import importlib.metadata, json, os, sys
import torch, {module}
loaded = "cputrain.comm.ccl" in sys.modules
torch.distributed.init_process_group("ccl")
values = torch.ones(1)
torch.distributed.all_reduce(values)
said = (loaded, values.item(), importlib.metadata.version("oneccl_bind_pt"), os.environ["CCL_WORKER_COUNT"])
print(json.dumps({{"rank": 0, "said": said}}))
torch.distributed.destroy_process_group()
"""


@needs_ccl
def test_the_names_of_intel_s_bindings_stand_in_and_never_before_an_original(tmp_path: Path) -> None:
    """The newer name registers the backend where entry points are off; the older one imports the newer one."""
    codes = [STAND_IN.format(module=module) for module in ("oneccl_bindings_for_pytorch", "torch_ccl")]
    envs = [{**ALONE, "MASTER_PORT": str(free_port()), "PYTHONPATH": PLACEHOLDERS} for _ in codes]
    with command(sys.executable, "-c", codes[0], **envs[0]) as new, forked("-c", codes[1], **envs[1]) as old:
        for process in (new, old):
            end = ended(process, 240)
            assert [line["said"] for line in lines_of(end.out)] == [[True, 1.0, "2.8.0", "1"]], end.err
    # What a .pth file adds comes after what is installed.
    original = tmp_path / "oneccl_bindings_for_pytorch.py"
    original.write_text("name = 'original'")
    (tmp_path / "cputrain_stand_ins.pth").write_text(PLACEHOLDERS)
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import oneccl_bindings_for_pytorch as m; print(m.name)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.strip() == "original"
