"""What an import of a part loads: torch, and little else."""

import json
import subprocess
import sys

import pytest

# Each import is that of a new process which has only imported torch.
FORKING = """
import json, os, sys
import torch
for code in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        exec(code, {})
        print(json.dumps(sorted(sys.modules)), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, code
"""
MADE_FROM_SETTINGS = """
import torch
from cputrain.comm.settings import CommSettings
from cputrain.data.from_settings import open_data, training_transform
from cputrain.data.settings import DataSettings
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.optim import build_optimizer, set_lr_and_decay
from cputrain.optim_settings import OptimSettings

data = DataSettings(path="synthetic", crop=28, train_images=4)
images = open_data(data, classes=2, seed=7).train
assert len(images) == 4 and training_transform(data, 28, data.train_crop).image_size == 28
network = build_model(ModelSettings(name="lenet"), 2, 28)
optimizer = build_optimizer(network, OptimSettings(name="lars", momentum=0.5))
set_lr_and_decay(optimizer, 0.1, 5e-5)
before = network.fc.weight.clone()
network(torch.rand(4, 3, 28, 28)).square().sum().backward()
optimizer.step()
assert not torch.equal(before, network.fc.weight)
"""
IMPORTS = {
    "kernels": "import cputrain; cputrain.optimize",
    "checkpoints": "import cputrain.checkpoint.async_checkpoint",
    "optimizers": "from cputrain.optim import Lars",
    "settings": MADE_FROM_SETTINGS,
}


@pytest.mark.slow
def test_a_part_loads_torch_and_little_else() -> None:
    argv = [sys.executable, "-c", FORKING, json.dumps([*IMPORTS.values()])]
    ran = subprocess.run(argv, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    modules = {name: set(json.loads(line)) for name, line in zip(IMPORTS, ran.stdout.splitlines(), strict=True)}
    ours = {part: {name for name in names if name.partition(".")[0] == "cputrain"} for part, names in modules.items()}
    for part, names in modules.items():
        assert not any(name.startswith("cputrain.recipe") for name in names), part
        assert part == "settings" or not names & {"pydantic", "click", "yaml", "msgspec"}, part
    assert not modules["kernels"] & {"torch._dynamo", "torchvision"}
    outside = [name for name in ours["kernels"] if not name.startswith("cputrain.kernels") and "." in name]
    assert len(outside) <= 9, outside
    assert "cputrain.checkpoint.writer" in ours["checkpoints"] and len(ours["checkpoints"]) <= 15, ours["checkpoints"]
    assert "cputrain.optim" in ours["optimizers"]
