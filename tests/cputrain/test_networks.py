"""Networks and their variants: built as requested, or refused with a remedy."""

import json
import math
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from cputrain.affinity.errors import InputError
from cputrain.cli import main
from cputrain.kernels.norms import GhostBatchNorm2d, RunningBatchNorm2d, batchnorms
from cputrain.models.networks import build_model
from cputrain.models.vision import import_torchvision
from cputrain.models.weights import load_initial_weights
from cputrain.recipe.schema import ModelSection
from tests.support.by_hand import ranks_of_code
from tests.support.images import write_images

pytestmark = pytest.mark.slow


def made(labels: int = 10, side: int = 64, **options: object) -> nn.Module:
    torch.manual_seed(1)
    return build_model(ModelSection(**options), labels, side)


def test_each_resnet_version_has_its_strides() -> None:
    for version, strides in (("v1", [(2, 2), (1, 1)]), ("v1.5", [(1, 1), (2, 2)])):
        model = made(name="resnet50", resnet_version=version)
        for stage in (model.layer2, model.layer3, model.layer4):
            assert [stage[0].conv1.stride, stage[0].conv2.stride] == strides
            assert stage[1].conv1.stride == stage[1].conv2.stride == (1, 1)
        assert model.layer1[0].conv1.stride == model.layer1[0].conv2.stride == (1, 1)
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 10)


@pytest.mark.parametrize(("name", "last"), [("resnet18", "bn2"), ("resnet50", "bn3")])
def test_gammas_are_zero_where_requested(name: str, last: str) -> None:
    def quiet(model: nn.Module) -> list[str]:
        return [n for n, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d) and not layer.weight.any()]

    assert quiet(made(name=name)) == []
    stages = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}[name]
    every = [f"layer{s + 1}.{b}.{last}" for s, blocks in enumerate(stages) for b in range(blocks)]
    ends = [f"layer{s + 1}.{blocks - 1}.{last}" for s, blocks in enumerate(stages)]
    assert quiet(made(name=name, zero_gamma="last_of_block")) == quiet(made(name=name, zero_gamma="auto")) == every
    assert quiet(made(name=name, zero_gamma="last_of_stage")) == ends


@pytest.mark.parametrize(
    "options",
    [
        {"resnet_version": "v1"},
        {"bn_stats": "sync"},
        {"bn_ghost_batch": 4},
        {"bn_stats": "running"},
        {"freeze_to": "layer1"},
    ],
    ids=str,
)
def test_variants_keep_torchvision_s_state_dict(options: dict) -> None:
    with torch.device("meta"):  # names and sizes
        theirs = import_torchvision("models").resnet50(num_classes=10).state_dict()
        made(name="resnet50", **options).load_state_dict(theirs)


def test_alexnet_bn_has_batchnorm_after_each_convolution() -> None:
    layers = list(made(name="alexnet-bn", side=224).features)
    after = [layers[i + 1] for i, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
    assert len(after) == 5 and all(isinstance(layer, nn.BatchNorm2d) for layer in after)
    assert batchnorms(made(name="alexnet", side=224)) == []


@pytest.mark.parametrize("name", ["squeezenet1_1", "googlenet", "mobilenet_v3_small"])
def test_any_classifier_of_torchvision_trains(name: str) -> None:
    model = made(name=f"torchvision:{name}", side=96)
    assert model.training and model(torch.randn(2, 3, 96, 96)).shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "side", "message"),
    [
        ({"name": "torchvision:resnet500"}, 64, "resnet500 is not a classifier of torchvision (did you mean resnet"),
        (
            {"name": "torchvision:vit_b_16"},
            64,
            "data.crop=64: torchvision:vit_b_16 does not accept images of 64 x 64",
        ),
        ({"name": "alexnet"}, 32, "data.crop=32: alexnet does not accept images of 32 x 32 pixels"),
        ({"name": "resnet18", "classes": 9}, 64, "model.classes=9, but the data has 10 classes: set it to 10 or null"),
        (
            {"name": "resnet18", "freeze_to": "layer5"},
            64,
            "model.freeze_to=layer5 is not a layer of the network: choose conv1, bn1, relu, maxpool, layer1, layer2",
        ),
        ({"name": "resnet18", "freeze_to": "fc"}, 64, "model.freeze_to=fc freezes all layers"),
    ],
)
def test_what_cannot_be_built_is_refused(options: dict, side: int, message: str) -> None:
    with torch.device("meta"), pytest.raises(InputError) as error:
        made(side=side, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_head_may_be_larger_than_the_data() -> None:
    assert build_model(ModelSection(name="resnet18", classes=12), 10, 64).fc.out_features == 12


def test_frozen_layers_keep_their_weights_and_statistics() -> None:
    model = made(name="resnet18", freeze_to="layer2.0")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "layer2.1.conv1.weight" in trained and "fc.weight" in trained
    assert not [name for name in trained if name.startswith(("conv1", "bn1", "layer1", "layer2.0"))]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(4, 3, 64, 64)).sum().backward()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith(("layer2.1", "layer3", "layer4")) for name in changed)


def test_ghost_batches_are_normalized_each_by_itself() -> None:
    torch.manual_seed(0)
    layer, plain = GhostBatchNorm2d(5, momentum=0.3), nn.BatchNorm2d(5, momentum=0.3)
    layer.ghost_batch = 4
    images = torch.randn(10, 5, 3, 3) * 2 + 1
    pieces = images.tensor_split(3)  # 4, 3, 3
    assert torch.allclose(layer(images), torch.cat([plain(piece) for piece in pieces]))
    means = torch.stack([piece.mean((0, 2, 3)) for piece in pieces]).mean(0)
    variances = torch.stack([piece.var((0, 2, 3)) for piece in pieces]).mean(0)
    assert torch.allclose(layer.running_mean, 0.3 * means)
    assert torch.allclose(layer.running_var, 0.7 + 0.3 * variances)
    layer.eval()
    assert torch.allclose(layer(images)[3], layer(images[3:4])[0]), "evaluation has no ghost batches"


def test_running_statistics_are_used_and_not_updated() -> None:
    layer = made(name="resnet18", bn_stats="running").bn1
    assert isinstance(layer, RunningBatchNorm2d) and layer.training
    images = torch.randn(3, 64, 4, 4)
    expected = functional.batch_norm(images, torch.zeros(64), torch.ones(64), layer.weight, layer.bias)
    assert torch.allclose(layer(images), expected) and not layer.running_mean.any()


TOGETHER = """
import json, sys, torch, torch.distributed as dist, torch.distributed.nn.functional
from cputrain.kernels.norms import SyncBatchNorm2d
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
images = (torch.randn(7, 3, 4, 5, dtype=torch.float64) * 3 + 2).to(memory_format=torch.channels_last)
weighing = torch.randn(7, 3, 4, 5, dtype=torch.float64)
def run(layer, part):
    mine = images[part].clone().requires_grad_()
    out = layer(mine)
    (out * weighing[part]).sum().backward()
    return out, mine.grad, layer.weight.grad, layer.bias.grad
def made(kind):
    layer = kind(3, momentum=0.2).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 0.5]))
    return layer
part = slice(0, 5) if rank == 0 else slice(5, 7)
whole, ours = made(torch.nn.BatchNorm2d), made(SyncBatchNorm2d)
expected, got = run(whole, slice(0, 7)), run(ours, part)
for value in got[2:]:
    dist.all_reduce(value)  # as DDP does
close = [torch.allclose(expected[0][part], got[0]), torch.allclose(expected[1][part], got[1]),
         torch.allclose(expected[2], got[2]), torch.allclose(expected[3], got[3]),
         torch.allclose(whole.running_mean, ours.running_mean), torch.allclose(whole.running_var, ours.running_var)]
ours.eval(); whole.eval()
close.append(torch.allclose(whole(images), ours(images)))
sys.stdout.write(json.dumps(close) + "\\n"); sys.stdout.flush()
dist.destroy_process_group()
"""


def test_sync_batchnorm_is_batchnorm_over_all_ranks() -> None:
    """Outputs, gradients and running statistics of 5 + 2 images on two ranks against 7 on one, in float64."""
    assert ranks_of_code(TOGETHER) == [[True] * 7] * 2


def test_initial_weights_are_loaded_except_a_head_of_other_classes(tmp_path: Path) -> None:
    source = made(labels=7, name="resnet18")
    torch.save(source.state_dict(), tmp_path / "state.pt")
    torch.save({"model": source.state_dict(), "step": 3}, tmp_path / "checkpoint.pt")
    for name in ("state.pt", "checkpoint.pt"):
        torch.manual_seed(5)
        model = build_model(ModelSection(name="resnet18"), 10, 64)
        head = model.fc.weight.clone()
        assert load_initial_weights(model, tmp_path / name).endswith(", newly initialized fc.weight, fc.bias")
        assert torch.equal(model.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
        assert torch.equal(model.fc.weight, head)
    same = build_model(ModelSection(name="resnet18"), 7, 64)
    assert load_initial_weights(same, tmp_path / "state.pt") == f"weights of {tmp_path}/state.pt"
    assert torch.equal(same.fc.weight, source.fc.weight)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    torch.save(made(name="resnet34").state_dict(), tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("no weights")
    network = made(name="resnet18")
    for name, message in (
        ("other.pt", "another model (96 keys different, first layer1.2.bn1.bias, (64,) in the file and absent in"),
        ("list.pt", "contains a list instead of weights"),
        ("text.pt", "is not a file of weights, or is damaged"),
        ("absent.pt", "cannot read"),
    ):
        with pytest.raises(InputError) as error:
            load_initial_weights(network, tmp_path / name)
        assert message in str(error.value)


def small(bias: float = 0.0) -> nn.Module:
    network = nn.Sequential(
        OrderedDict(features=nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), fc=nn.Linear(4, 2))
    )
    nn.init.constant_(network.fc.bias, bias)
    return network


def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in state.items()}


def in_parts(others: str, last: str) -> dict[str, Tensor]:
    """The state of a network whose last layer has a prefix of its own."""
    state = small(1.0).state_dict()
    return {f"{last if name.startswith('fc.') else others}{name}": value for name, value in state.items()}


def averaged_model() -> dict[str, Tensor]:
    return AveragedModel(small(2.0)).state_dict()  # n_averaged and module.*, as torchvision's references have them


def data_parallel_features() -> dict[str, Tensor]:
    network = small(1.0)
    network.features = nn.DataParallel(network.features)  # as pytorch/examples wraps AlexNet's and VGG's
    return network.state_dict()


def compiled() -> dict[str, Tensor]:
    return torch.compile(nn.DataParallel(small(1.0))).state_dict()


RUN = {"epoch": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": []}]}, "arch": "small"}
ARGUMENTS = Namespace(
    generator=np.random.RandomState(0).get_state(), lr=0.1, data_path=Path("data"), milestones=[30, 60], seed=None
)
NUMBERS = [
    np.int32(1),
    np.uint8(2),
    np.float16(0.5),
    np.complex128(1j),
    np.longdouble(3),
    np.str_("top1"),
    np.bool_(True),
]
ALONE = " (to load it, save it in a separate file)"
FOREIGN = {
    "pytorch/examples": (
        lambda: {**RUN, "state_dict": prefixed("module.", small(1.0).state_dict())},
        "key state_dict, names without module.",
        1.0,
    ),
    "pytorch/examples, VGG": (
        lambda: {**RUN, "state_dict": data_parallel_features(), "best_acc1": torch.tensor(70.1)},
        "key state_dict, names without module.",
        1.0,
    ),
    "torchvision's references": (
        lambda: {**RUN, "model": small(1.0).state_dict(), "args": ARGUMENTS},
        "key model",
        1.0,
    ),
    "torchvision's references, averaged": (
        lambda: {**RUN, "model": small(1.0).state_dict(), "args": ARGUMENTS, "model_ema": averaged_model()},
        f"key model_ema (moving average), not model{ALONE}, names without module., ignored n_averaged",
        2.0,
    ),
    "timm": (
        lambda: {
            **RUN,
            "state_dict": small(1.0).state_dict(),
            "state_dict_ema": small(2.0).state_dict(),
            "args": ARGUMENTS,
            "metric": np.float64(70.1),
        },
        f"key state_dict_ema (moving average), not state_dict{ALONE}",
        2.0,
    ),
    "numbers of numpy, and numbers as names": (
        lambda: {"state_dict": {**small(1.0).state_dict(), 7: torch.ones(2)}, "numbers": NUMBERS, 3: torch.ones(1)},
        "key state_dict",
        1.0,
    ),
    "DataParallel, compiled": (compiled, "names without _orig_mod.module.", 1.0),
    "PyTorch's tutorials": (
        lambda: {**RUN, "model_state_dict": small(1.0).state_dict(), "loss": 0.1},
        "key model_state_dict",
        1.0,
    ),
    "DeepSpeed": (lambda: {**RUN, "module": small(1.0).state_dict()}, "key module", 1.0),
    "Lightning": (
        lambda: {
            "pytorch-lightning_version": "2.6.6",
            "hyper_parameters": {"lr": 0.1},
            "state_dict": {**prefixed("net._orig_mod.", small(1.0).state_dict()), "loss.weight": torch.ones(2)},
        },
        "key state_dict, names without net._orig_mod., ignored loss.weight",
        1.0,
    ),
    **{
        f"an average as {key}": (
            lambda key=key: {**RUN, "state_dict": small(1.0).state_dict(), key: small(2.0).state_dict()},
            f"key {key} (moving average), not state_dict{ALONE}",
            2.0,
        )
        for key in ("ema_state_dict", "model_ema_state_dict", "ema_model", "model_ema", "ema", "swa_model", "avg_model")
    },
    "an average with its decay": (
        lambda: {"model": small(1.0).state_dict(), "model_ema": {"decay": 0.99, "module": small(2.0).state_dict()}},
        f"key model_ema.module (moving average), not model{ALONE}",
        2.0,
    ),
    "a decay without its average": (
        lambda: {"model": small(1.0).state_dict(), "model_ema": {"decay": torch.tensor(0.99), "updates": 7}},
        "key model, not model_ema (weights of another model (9 keys different, first decay, () in the "
        "file and absent in the model))",
        1.0,
    ),
    "an average that cannot be taken": (
        lambda: {"model": small(1.0).state_dict(), "ema": {**small().state_dict(), "fc.bias": torch.ones(2).bool()}},
        "key model, not ema (fc.bias is of bool: save it as a dense tensor of real numbers)",
        1.0,
    ),
    "MMEngine, which saves the average as state_dict": (
        lambda: {
            "meta": {"mmengine_version": "0.10.7"},
            "state_dict": small(2.0).state_dict(),
            "ema_state_dict": {"steps": torch.tensor(7), **prefixed("module.", small(1.0).state_dict())},
        },
        f"key state_dict (moving average), not ema_state_dict{ALONE}",
        2.0,
    ),
    "MMEngine without an average": (
        lambda: {"meta": {"mmengine_version": "0.10.7"}, "state_dict": small(1.0).state_dict()},
        "key state_dict",
        1.0,
    ),
    "Lightning's WeightAveraging": (
        lambda: {
            "state_dict": small(2.0).state_dict(),
            "current_model_state": small(1.0).state_dict(),
            "averaging_state": {"n_averaged": torch.tensor(7)},
        },
        f"key state_dict (moving average), not current_model_state{ALONE}",
        2.0,
    ),
    "MMPretrain, whose last layer is in another module": (
        lambda: {"meta": {"epoch": 3}, "state_dict": in_parts("backbone.", "head.")},
        "key state_dict, names without backbone. and head.",
        1.0,
    ),
    "a network of a backbone, in DDP": (
        lambda: {"model": in_parts("module.model.backbone.", "module.model.")},
        "key model, names without module.model.backbone. and module.model.",
        1.0,
    ),
    "a backbone by itself, and its head": (
        lambda: in_parts("", "head."),
        "names without head.",
        1.0,
    ),
    "net": (lambda: {**RUN, "net": small(1.0).state_dict()}, "key net", 1.0),
    "a state dict in a dict": (
        lambda: {"model": {"state_dict": small(1.0).state_dict(), "arch": "small"}},
        "key model.state_dict",
        1.0,
    ),
    "moments by name": (
        lambda: {"net": small(1.0).state_dict(), "optimizer": {"exp_avg": small(3.0).state_dict()}},
        "key net",
        1.0,
    ),
    "another network first": (
        lambda: {"state_dict": nn.Linear(2, 2).state_dict(), "generator": small(1.0).state_dict()},
        "key generator",
        1.0,
    ),
}


@pytest.mark.parametrize("program", FOREIGN)
def test_weights_that_other_programs_saved_are_loaded_and_what_was_taken_is_said(program: str, tmp_path: Path) -> None:
    content, said, bias = FOREIGN[program]
    torch.save(content(), tmp_path / "w.pth")
    model = small()
    assert load_initial_weights(model, tmp_path / "w.pth") == f"weights of {tmp_path}/w.pth, {said}"
    assert model.fc.bias.tolist() == [bias, bias]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("googlenet", "aux1"),
        pytest.param("inception_v3", "AuxLogits", marks=(pytest.mark.long, pytest.mark.nightly)),
    ],
)
def test_auxiliary_classifiers_in_a_file_are_left_out_and_said(name: str, parts: str, tmp_path: Path) -> None:
    models = import_torchvision("models")
    saved = models.get_model(name, aux_logits=True, init_weights=False, num_classes=4)
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    own = models.get_model(name, aux_logits=False, init_weights=False, num_classes=4)
    line = load_initial_weights(own, tmp_path / "w.pt")
    assert f"w.pt, ignored {parts}.conv" in line and " and " in line
    assert all(torch.equal(value, saved.state_dict()[key]) for key, value in own.state_dict().items())
    torch.save(own.state_dict(), tmp_path / "without.pt")
    with pytest.raises(InputError, match=f"keys different, first {parts}.*, absent in the file"):
        load_initial_weights(saved, tmp_path / "without.pt")


def test_a_network_s_own_parts_may_have_wrappers_names(tmp_path: Path) -> None:
    network = nn.ModuleDict({"module": nn.Linear(2, 2), "model": nn.Linear(2, 2)})
    torch.save(network.state_dict(), tmp_path / "own.pt")
    torch.save(prefixed("_orig_mod.", network.state_dict()), tmp_path / "compiled.pt")
    for name, removed in (("own.pt", ""), ("compiled.pt", ", names without _orig_mod.")):
        other = nn.ModuleDict({"module": nn.Linear(2, 2), "model": nn.Linear(2, 2)})
        assert load_initial_weights(other, tmp_path / name) == f"weights of {tmp_path / name}{removed}"
        assert all(map(torch.equal, other.state_dict().values(), network.state_dict().values()))


def test_initial_weights_may_be_a_checkpoint_s_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """model.weights=DIR/checkpoints/best, as the guides have it."""
    settings = [
        f"data.path={write_images(tmp_path / 'images')}",
        "model.name=resnet18",
        "data.crop=32",
        "batch.local=4",
    ]
    (tmp_path / "best").mkdir()
    for name, status in (("best", 0), ("worst", 2)):
        assert main(["train", "imagefolder", *settings, f"model.weights={tmp_path / name}", "--dry-run"]) == status
    assert "worst does not exist: give a checkpoint" in capsys.readouterr().err


def test_files_of_weights_that_are_something_else_are_called_so(tmp_path: Path) -> None:
    network = small(1.0)
    torch.jit.trace(network.features, torch.zeros(1, 3, 8, 8)).save(tmp_path / "script.pt")
    torch.distributed.checkpoint.save({"model": network.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "hub").mkdir()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    for name in ("lfs.pth", "lfs.safetensors", "hub/model.safetensors"):
        (tmp_path / name).write_bytes(pointer)
    (tmp_path / "page.pth").write_bytes(b"\n<!DOCTYPE html><html>")
    for name, told in (
        ("lfs.pth", r"lfs\.pth is a git-LFS pointer, .*: run git lfs pull"),
        ("lfs.safetensors", r"lfs\.safetensors is a git-LFS pointer, .*: run git lfs pull"),
        ("page.pth", r"page\.pth is a web page, .*: download it again"),
        ("hub", r"is a folder but not a checkpoint of cputrain: name its file of weights, .*hub/model\.safetensors"),
        ("script.pt", r"is a TorchScript archive: torch\.save the state_dict\(\) of torch\.jit\.load\(FILE\)"),
        (
            "dcp",
            r"is a torch\.distributed checkpoint: convert it with python -m .*format_utils dcp_to_torch .*dcp FILE",
        ),
    ):
        with pytest.raises(InputError, match=told):
            load_initial_weights(small(), tmp_path / name)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_weights_in_several_files_are_loaded_by_their_index(suffix: str, tmp_path: Path) -> None:
    """As Hugging Face's save_pretrained writes them."""
    state = small(1.0).state_dict()
    names = [f"model-{part:05d}-of-00002{suffix}" for part in (1, 2)]
    weight_map = {name: names[place % 2] for place, name in enumerate(state)}
    for file in names:
        part = {name: state[name] for name in state if weight_map[name] == file}
        (save_file if suffix == ".safetensors" else torch.save)(part, tmp_path / file)
    index = tmp_path / f"model{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    loaded = small()
    assert load_initial_weights(loaded, index) == f"weights of {index}"
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    for path, told in (
        (tmp_path, rf"is a folder .*: name its file of weights, {index}$"),
        (tmp_path / names[0], "is only a part of the weights: name the index.json file beside it"),
    ):
        with pytest.raises(InputError, match=told):
            load_initial_weights(small(), path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(InputError, match=f"cannot read .*{names[1]}"):
        load_initial_weights(small(), index)
    for text in ("{", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        with pytest.raises(InputError, match="has no valid weight_map"):
            load_initial_weights(small(), index)


def test_moments_are_no_averaged_weights(tmp_path: Path) -> None:
    torch.save({"exp_avg": small(2.0).state_dict(), "network": small(1.0).state_dict()}, tmp_path / "w.pt")
    assert ", key network" in load_initial_weights(small(), tmp_path / "w.pt")


def test_weights_of_which_ranks_have_parts_are_refused(tmp_path: Path) -> None:
    """What torch.save writes of a network under FSDP2."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        part = distribute_tensor(small().fc.weight, mesh, [Shard(0)])
        torch.save({**small().state_dict(), "fc.weight": part}, tmp_path / "w.pt")
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(InputError, match=r"fc.weight is a DTensor, split over ranks \(save full_tensor\(\)\)"):
        load_initial_weights(small(), tmp_path / "w.pt")


def test_weights_that_could_be_taken_in_two_ways_or_only_in_part_are_refused(tmp_path: Path) -> None:
    state = small(1.0).state_dict()
    kernel, row = "features.0.weight", "fc.weight"
    quantized = torch.quantize_per_tensor(state[kernel], 0.1, 0, torch.qint8)
    for content, message in (
        ({"state_dict": {**prefixed("student.", state), **prefixed("teacher.", state)}},
         r"has the network several times, as student\.\*, teacher\.\*: save the one to load"),
        ({"first": state, "second": state}, "has the network several times, as first, second: save the one to load"),
        ({"net": {**state, "more": state[row]}}, r"key net: weights of another model \(1 key different, first more,"),
        ({"model": {"state_dict": nn.Linear(2, 2).state_dict()}}, r"key model\.state_dict: weights of another model"),
        ({**state, row: state[row].to_sparse()}, "fc.weight is sparse: save it as a dense tensor of real numbers"),
        ({**state, row: state[row].to_sparse_csr()}, "fc.weight is sparse_csr: save it as a dense tensor"),
        ({"model": {**state, kernel: state[kernel].to(torch.complex64)}}, "features.0.weight is complex: save it as"),
        ({**state, kernel: quantized}, "features.0.weight is quantized: save it as a dense tensor"),
        ({**state, kernel: (state[kernel] * 100).to(torch.int8)}, "features.0.weight is of int8: save it as a dense"),
        ({**state, row: state[row].to(torch.float8_e4m3fn)}, "fc.weight is of float8_e4m3fn: save it as a dense"),
        ({**state, row: state[row].bool()}, "fc.weight is of bool: save it as a dense tensor"),
        ({**state, row: state[row] * math.inf}, "fc.weight contains NaN or Inf: use the weights of an earlier"),
        ({**state, row: state[row] * math.nan}, "fc.weight contains NaN or Inf: use the weights of an earlier"),
        ({**state, row: state[row].to("meta")}, r"fc.weight is without values \(on the meta device\): save it as"),
        ({**state, row: torch.nested.as_nested_tensor([state[row]])}, "fc.weight is nested: save it as a dense tensor"),
        ({0: state[row]}, "has no weights, only 0: save a state dict"),
        ({}, "has no weights, only an empty dict: save a state dict"),
        ({"state_dict": {}, "epoch": 3}, "has no weights, only state_dict, epoch: save a state dict"),
        ({"model": small()}, r"would run code \(torch\.\S+\) when loaded: .* trust this one, .* state_dict\(\)"),
    ):  # fmt: skip
        torch.save(content, tmp_path / "w.pt")
        model = small()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(InputError, match=message):
            load_initial_weights(model, tmp_path / "w.pt")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
