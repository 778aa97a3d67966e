"""Other packages over the ccl backend, as docs/guides/oneccl.md tells: tests/support/ccl_clients.py, two ranks each."""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from mpi.supervise.local import free_port
from tests.support.ccl_jobs import ROOT, ended, lines_of, started

NEEDED = {
    "ddp": (),
    "tensor_parallel": (),
    "fsdp2": (),
    "pipelining": (),
    "accelerate": ("accelerate",),
    "trainer": ("accelerate", "transformers"),
    "lightning": ("pytorch_lightning",),
}
STAND_INS = str(ROOT / "compat/stand_ins")


@pytest.mark.parametrize("client", NEEDED)
def test_a_client_trains(client: str, tmp_path: Path) -> None:
    for package in NEEDED[client]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(reason=f"needs the package {package}")
    with started("tests.support.ccl_clients", client, str(tmp_path), PYTHONWARNINGS="ignore") as ranks:
        for rank in ranks:
            end = ended(rank, 240)
            assert end.status == 0, end.err[-3000:]
            assert [line["client"] for line in lines_of(end.out)] == [client]


KNOWN = "import sys, torch; print(hasattr(torch.distributed.Backend, 'CCL'), 'cputrain.comm.ccl' in sys.modules)"


def test_torch_knows_the_backend_without_an_import_and_loads_nothing() -> None:
    if not any(point.name == "cputrain_ccl" for point in entry_points(group="torch.backends")):
        pytest.skip(reason="needs the entry points of this version: install the package again")

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
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    processes = []
    with ExitStack() as stack:
        for module in ("oneccl_bindings_for_pytorch", "torch_ccl"):
            env = {**os.environ, **alone, "MASTER_PORT": str(free_port()), "PYTHONPATH": STAND_INS}
            argv = [sys.executable, "-c", STAND_IN.format(module=module)]
            processes.append(
                stack.enter_context(subprocess.Popen(argv, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            )
        for process in processes:
            out = process.communicate(timeout=240)[0]
            assert [json.loads(line)["said"] for line in out.splitlines() if "said" in line] == [[1.0, "2.8.0", "1"]]
    # What a .pth file adds comes after what is installed.
    original = tmp_path / "oneccl_bindings_for_pytorch.py"
    original.write_text("name = 'original'")
    (tmp_path / "cputrain_stand_ins.pth").write_text(STAND_INS)
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import oneccl_bindings_for_pytorch as m; print(m.name)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.strip() == "original"
