"""Other packages' training loops with the line of `cputrain.optimize`, as benchmarks/clients.py and the guide have it:
two ranks each change their weights as without it. And exports of a restored network."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import cputrain
from benchmarks.clients import CLIENTS
from cputrain.models.vision import import_torchvision
from tests.support.ccl_jobs import started
from tests.support.forked import ended

# Clients that train one after the other in the same processes, as these start for seconds -> packages that they need,
# their arguments, and whether they have split weights, too.
IMAGES = ("--network", "timm:test_efficientnet", "--size", "64", "--batch", "8")
SMALL = ("--tiny", "--size", "32", "--batch", "4")
LOOPS: dict[str, tuple[tuple[str, ...], tuple[str, ...], bool]] = {
    "ddp torchvision timm lightning": (("timm", "pytorch_lightning"), IMAGES, True),
    "timm_compiled": (("timm",), IMAGES, False),
    "compiled": (("timm",), IMAGES, True),
    "accelerate": (("accelerate", "transformers"), ("--network", "vit", *SMALL), True),
    "trainer": (("accelerate", "transformers"), ("--network", "bert", *SMALL), True),
    "trainer on swin": (("accelerate", "transformers"), ("--network", "swin", *SMALL), True),
    "deepspeed": (("timm", "deepspeed"), IMAGES, False),
    "fsdp2": (("timm",), IMAGES, False),
}
COSTLY = ("timm_compiled", "compiled", "deepspeed", "trainer on swin")
# The other loops train in one way each; the second is nightly.
SECOND = {"ddp torchvision timm lightning": "float32", "accelerate": "float32", "trainer": "split", "fsdp2": "float32"}
WAYS = {"float32": ((), 1e-3), "bf16": (("--bf16",), 5e-2), "split": (("--split",), 5e-2)}
"""Options of a way to train, and how much the changes of weights may differ from those without the line."""


def clients_of(name: str) -> list[str]:
    return name.partition(" on ")[0].split()


def cases() -> list[object]:
    cases: list[object] = []
    for name, (_, _, splits) in LOOPS.items():
        for way in ("float32", "split" if splits else "bf16"):
            marks = [pytest.mark.nightly] if name in COSTLY or SECOND.get(name) == way else []
            cases.append(pytest.param(name, way, marks=marks, id=f"{name}-{way}"))
    return cases


def test_every_client_is_tested() -> None:
    assert {client for name in LOOPS for client in clients_of(name)} == set(CLIENTS)


@pytest.mark.long
@pytest.mark.parametrize(("name", "way"), cases())
def test_a_loop_with_the_line_changes_weights_as_without_it(name: str, way: str) -> None:
    packages, arguments, _ = LOOPS[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(reason=f"needs the package {package}: make clients")
    options, tolerance = WAYS[way]
    words = (*clients_of(name), *arguments, *options, "--steps", "3", "--rounds", "1")
    with started("benchmarks.clients", *words, GLOO_SOCKET_IFNAME="lo", PYTHONWARNINGS="ignore") as ranks:
        ends = [ended(rank, 480) for rank in ranks]  # DeepSpeed and torch.compile compile
    assert all(end.status == 0 for end in ends), ends[0].out + ends[0].err
    differ = dict(re.findall(r"^\| (\w+) \|.*\| (\S+) \|$", ends[0].out, re.MULTILINE))
    assert list(differ) == clients_of(name)
    assert all(float(value) < tolerance for value in differ.values()), differ


def restored() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a network that was optimized, trained a step and restored, images, and its outputs."""
    torch.manual_seed(1)
    network = import_torchvision("models").resnet18(num_classes=5)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    cputrain.optimize(network, optimizer, dtype=torch.bfloat16, master_weights="split")
    images = torch.randn(2, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        network(images).sum().backward()
    optimizer.step()
    cputrain.restore(network)
    network.eval()
    with torch.no_grad():
        return network, images, network(images)


def scripted(network: nn.Module, _images: torch.Tensor, path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.jit.script(network).save(path)
    loaded: Callable[[torch.Tensor], torch.Tensor] = torch.jit.load(path)
    return loaded


def exported(network: nn.Module, images: torch.Tensor, path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.export.save(torch.export.export(network, (images,)), path)
    loaded: Callable[[torch.Tensor], torch.Tensor] = torch.export.load(path).module()
    return loaded


def onnx(network: nn.Module, images: torch.Tensor, path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'cputrain[onnx]'")
    torch.onnx.export(network, (images,), path, dynamo=True, input_names=["images"], verbose=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda values: torch.from_numpy(session.run(None, {"images": values.numpy()})[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's, of its own exporters
@pytest.mark.parametrize(
    "export", [scripted, exported, pytest.param(onnx, marks=[pytest.mark.long, pytest.mark.nightly])]
)
def test_a_restored_network_is_exported(
    export: Callable[[nn.Module, torch.Tensor, Path], Callable[[torch.Tensor], torch.Tensor]], tmp_path: Path
) -> None:
    network, images, expected = restored()
    found = export(network, images, tmp_path / "network.pt2")(images)
    assert torch.allclose(found, expected, atol=1e-4)
