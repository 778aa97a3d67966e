"""PyTorch and other packages over ccl, as docs/guides/oneccl.md tells: tests/support/ccl_clients.py, two ranks each."""

import importlib.util
import os
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from cputrain.mpi.supervise import free_port
from tests.support.ccl_jobs import command, lines_of, started
from tests.support.commands import needs_two_cores
from tests.support.forked import ROOT, ended

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
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
PLACEHOLDERS = str(ROOT / "compat/stand_ins")


@pytest.mark.long
@pytest.mark.parametrize("client", NEEDED)
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
import json, os
import torch, torch.distributed as dist
count = os.environ.get("CCL_WORKER_COUNT")
dist.init_process_group("ccl")
values = torch.ones(1)
dist.all_reduce(values)
said = {"rank": dist.get_rank(), "sum": values.item(), "backend": dist.get_backend(), "count": count}
os.write(1, json.dumps(said).encode() + b"\\n")
dist.destroy_process_group()
"""
needs_entry_points = pytest.mark.skipif(
    not any(point.name == "cputrain_ccl" for point in entry_points(group="torch.backends")),
    reason="needs the entry points of this version: install the package again",
)


@needs_entry_points
@needs_two_cores
def test_a_script_without_an_import_of_ours_has_the_backend_under_torchrun_and_launch(tmp_path: Path) -> None:
    """And finds CCL_WORKER_COUNT under launch, without which older accelerate and transformers take gloo."""
    script = tmp_path / "script.py"
    script.write_text(PLAIN)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script))
    ours = (sys.executable, "-m", "cputrain", "launch", "--ppn", "2")
    unset = {name: value for name, value in os.environ.items() if name != "CCL_WORKER_COUNT"}
    cases = (
        (torchrun, {"MASTER_PORT": str(free_port())}, None),
        ((*ours, "--output", str(tmp_path / "run"), str(script)), {}, "1"),
        ((*ours, "--output", str(tmp_path / "user"), str(script)), {"CCL_WORKER_COUNT": "3"}, "3"),
    )
    for argv, env, count in cases:
        done = subprocess.run(argv, cwd=ROOT, env={**unset, **env}, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        said = sorted(lines_of(done.stdout), key=lambda line: line["rank"])
        assert said == [{"rank": i, "sum": 2.0, "backend": "ccl", "count": count} for i in (0, 1)]


def test_where_entry_points_are_off_an_import_registers_the_backend() -> None:
    def ran(code: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **ALONE, "MASTER_PORT": str(free_port())}
        argv = (sys.executable, "-c", code)
        return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)

    refused = ran(PLAIN)
    assert refused.returncode == 1 and "Unknown backend type ccl" in refused.stderr, refused.stderr
    done = ran(f"import cputrain.comm.ccl\n{PLAIN}")
    assert done.returncode == 0 and lines_of(done.stdout)[0]["backend"] == "ccl", done.stderr


KNOWN = "import sys, torch; print(hasattr(torch.distributed.Backend, 'CCL'), 'cputrain.comm.ccl' in sys.modules)"


@needs_entry_points
def test_torch_knows_the_backend_without_an_import_and_loads_nothing() -> None:
    def printed(**env: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", KNOWN], env={**os.environ, **env}, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert printed() == "True False"
    assert printed(TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False False"


STAND_IN = """
import importlib.metadata, json, os, sys
import torch, {module}
torch.distributed.init_process_group("ccl")
values = torch.ones(1)
torch.distributed.all_reduce(values)
said = (values.item(), importlib.metadata.version("oneccl_bind_pt"), os.environ["CCL_WORKER_COUNT"])
print(json.dumps({{"rank": 0, "said": said}}))
torch.distributed.destroy_process_group()
"""


def test_the_names_of_intel_s_bindings_stand_in_and_never_before_an_original(tmp_path: Path) -> None:
    with ExitStack() as stack:
        processes = []
        for module in ("oneccl_bindings_for_pytorch", "torch_ccl"):
            argv, port = (sys.executable, "-c", STAND_IN.format(module=module)), str(free_port())
            processes.append(stack.enter_context(command(*argv, **ALONE, MASTER_PORT=port, PYTHONPATH=PLACEHOLDERS)))
        for process in processes:
            end = ended(process, 240)
            assert [line["said"] for line in lines_of(end.out)] == [[1.0, "2.8.0", "1"]], end.err
    # What a .pth file adds comes after what is installed.
    original = tmp_path / "oneccl_bindings_for_pytorch.py"
    original.write_text("name = 'original'")
    (tmp_path / "cputrain_stand_ins.pth").write_text(PLACEHOLDERS)
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import oneccl_bindings_for_pytorch as m; print(m.name)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.strip() == "original"
