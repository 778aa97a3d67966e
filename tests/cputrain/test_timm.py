"""model.name=timm:NAME: built, fused and folded like torchvision's, trained, evaluated, used and exported."""

import copy
import importlib
import os
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cputrain.affinity.errors import InputError
from cputrain.data.formats.folder import image_files
from cputrain.inference import export, load_classifier, predict
from cputrain.kernels.apply import restore
from cputrain.kernels.batchnorm import load
from cputrain.kernels.folding import FoldedConv2d, fold_batchnorms
from cputrain.kernels.norms import batchnorms
from cputrain.models.networks import build_model, inputs_note
from cputrain.models.vision import import_torchvision
from cputrain.optim import build_optimizer
from cputrain.recipe.schema import DataSection, ModelSection, OptimSection
from cputrain.runs.events import read_events
from cputrain.training.engine import has_onednn
from tests.support.forked import in_fork
from tests.support.images import write_images
from tests.support.kernels import fuse_batchnorms, left_to_torch

pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: pip install 'cputrain[timm]'")


def built(name: str, side: int = 32, **options: object) -> nn.Module:
    torch.manual_seed(1)
    return build_model(ModelSection.model_validate({"name": f"timm:{name}", **options}), 10, side)


def by_timm(name: str, classes: int) -> nn.Module:
    """The network that timm itself makes."""
    import_torchvision("models")  # which timm imports, beside a CPU build of torch
    import timm

    return timm.create_model(name, num_classes=classes)


@pytest.mark.parametrize(
    ("name", "side", "message"),
    [
        ("resnet5o", 32, "model.name=timm:resnet5o is not a classifier of timm (did you mean resnet50"),
        ("resnet50.a1_in1", 32, "timm:resnet50.a1_in1 is not a classifier of timm (did you mean resnet50.a1_in1k"),
        ("test_vit", 100, "data.crop=100: timm:test_vit does not accept images of 100 x 100 pixels ("),
    ],
)
def test_what_timm_does_not_have_is_refused(name: str, side: int, message: str) -> None:
    with pytest.raises(InputError) as error:
        built(name, side)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_absent_timm_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"needs timm, but timm is not installed: run pip install 'cputrain\[timm\]'$"):
        built("test_resnet")


def test_transformers_are_built_for_the_crop() -> None:
    assert built("test_vit", 64)(torch.zeros(2, 3, 64, 64)).shape == (2, 10)
    assert built("test_vit.r160_in1k", 160).pos_embed.shape[1] > built("test_vit", 64).pos_embed.shape[1]


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("test_vit", "data.crop=160 data.mean=[0.5,0.5,0.5] data.std=[0.5,0.5,0.5]"),
        ("resnet10t", "data.crop=176"),
        ("resnet18", None),
    ],
)
def test_the_images_that_timm_trained_with_are_offered(name: str, trained: str | None) -> None:
    side, data = 32 if name != "test_vit" else 224, DataSection()
    found = inputs_note(built(name, side), f"timm:{name}", data.crop, data.mean, data.std)
    assert found == (trained and f"timm:{name} was trained by timm with {trained}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "folded"),
    [
        ("resnet10t", {}, 14),  # plain layers, in residual blocks
        ("test_efficientnet", {"bn_ghost_batch": 2}, 13),  # batch-norm and its activation in one layer
        ("resnetv2_18", {"bn_stats": "running"}, 8),  # batch-norm before the convolutions
    ],
)
def test_native_layers_compute_what_timm_s_do(name: str, options: dict[str, object], folded: int) -> None:
    plain = built(name, **options)
    for layer in batchnorms(plain):
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.uniform_(layer.bias, -0.5, 0.5)
    native = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    fuse_batchnorms(native, load(os.environ))
    assert list(native.state_dict()) == list(plain.state_dict())
    images = torch.randn(4, 3, 32, 32)
    gradients = []
    for network in (plain, native):
        network(images).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-4 * float(gradients[0].abs().max()))
    fast = fold_batchnorms(native.eval(), torch.float32)
    with torch.inference_mode():
        expected = plain.eval()(images)
        assert torch.allclose(native(images), expected, atol=1e-4)
        assert not has_onednn() or torch.allclose(fast(images), expected, atol=1e-4)
    assert sum(isinstance(layer, FoldedConv2d) for layer in fast.modules()) == folded


def test_batchnorms_of_timm_keep_their_activation() -> None:
    """timm's own network, with the same weights, has the same outputs."""
    theirs = by_timm("test_efficientnet", 10).eval()
    ours = built("test_efficientnet").eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(ours(images), theirs(images), atol=1e-6)


def test_position_embeddings_and_class_tokens_do_not_decay() -> None:
    network = built("test_vit", 64)
    optimizer = build_optimizer(network, OptimSection(name="lars", weight_decay=0.1, decay_bn_and_bias=False))
    names = {p: name for name, p in network.named_parameters()}
    apart = {names[p] for p in optimizer.param_groups[1]["params"]}
    assert {"cls_token", "pos_embed", "norm.bias"} <= apart and "head.weight" not in apart
    assert optimizer.param_groups[1]["weight_decay"] == 0 < optimizer.param_groups[0]["weight_decay"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"act_layer": nn.SiLU}, {"apply_act": False}, {"drop_layer": lambda: nn.Dropout(0.0)}),
        *({"momentum": None}, {"affine": False}),
    ],
)
def test_a_user_s_batch_norm_with_activation_is_native_if_its_options_are(options: dict[str, object]) -> None:
    import_torchvision("models")
    layers = importlib.import_module("timm.layers")
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(3, 16, 3), layers.BatchNormAct2d(16, **options), nn.Conv2d(16, 4, 1))
    native = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    fuse_batchnorms(native, load(os.environ))
    left = "not native, but torch's: 1 BatchNormAct2d" if options.keys() & {"momentum", "affine"} else ""
    assert left_to_torch(native).partition(" (")[0] == left
    images = torch.randn(4, 3, 8, 8)

    def same_steps() -> None:
        found = []
        for network in (plain, native, copy.deepcopy(native), pickle.loads(pickle.dumps(native))):
            found.append((network(images), network.eval()(images), network.train()[1].num_batches_tracked))
        for got in found[1:]:
            assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(got, found[0], strict=True))

    same_steps()
    for network in (plain, native):
        network[1].act = nn.Tanh()
    same_steps()
    seen: list[Tensor] = []
    native[1].act.register_forward_hook(lambda _layer, inputs, _outputs: seen.append(inputs[0]))
    native(images)
    assert len(seen) == 1
    restore(native)
    assert type(native[1]) is layers.BatchNormAct2d


@pytest.mark.long
def test_a_network_of_timm_from_training_to_export(tmp_path: Path) -> None:
    write_images(tmp_path / "images", train=6, val=4)
    network = ("model.name=timm:test_efficientnet", "model.zero_gamma=none", "data.crop=32")
    settings = ("data.path=images", *network, "batch.local=6", "max_steps=3", "plan.ppn=1", "plan.threads=1")
    done = in_fork("train", "imagefolder", *settings, "output=run", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "timm:test_efficientnet was trained by timm with data.crop=160" in done.stdout + done.stderr
    (end,) = (event for event in read_events(tmp_path / "run") if event["event"] == "end")
    assert end["steps"] == 3 and end["status"] == "done"
    best = (tmp_path / "run/checkpoints/best").resolve()
    paths = image_files([tmp_path / "images/val"])
    found = [one.top[0][0] for one in predict(load_classifier(best, os.environ), paths, top=1, batch=4)]
    assert len(found) == 12 and set(found) <= {"class0", "class1", "class2"}
    exported = tmp_path / "net.pt"
    assert export(best, exported, "state-dict", os.environ, paths).difference < 1e-4
    by_timm("test_efficientnet", 3).load_state_dict(torch.load(exported, weights_only=True))
