"""`intel_extension_for_pytorch` of cputrain-compat: scripts for Intel's extension run unchanged, or say what to do."""

import copy
import importlib
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, RMSprop

import cputrain
from cputrain.affinity.errors import InputError
from cputrain.kernels import operators
from cputrain.kernels.split_weights import SplitParameter
from cputrain.variables import KERNELS_VARIABLE
from tests.support.forked import ROOT

pytestmark = pytest.mark.slow

STAND_INS = ROOT / "compat/stand_ins"
SCRIPTS = ROOT / "tests/support/ipex_scripts"
NAME = "intel_extension_for_pytorch"
# The arguments of IPEX 2.8, in its order; tests/ipex compares them with the original's.
ARGUMENTS = (
    *("model", "dtype", "optimizer", "level", "inplace", "conv_bn_folding", "linear_bn_folding", "weights_prepack"),
    *("replace_dropout_with_identity", "optimize_lstm", "split_master_weight_for_bf16", "fuse_update_step"),
    *("auto_kernel_selection", "sample_input", "graph_mode", "concat_linear"),
)


@pytest.fixture(scope="module")
def ipex() -> Iterator[Any]:
    sys.path.append(str(STAND_INS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KERNELS_VARIABLE, "off")  # for other tests of this process
        yield importlib.import_module(NAME)
    sys.path.remove(str(STAND_INS))
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def built() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 5))


def images(number: int = 1) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number))


def train(network: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32) -> list[float]:
    losses = []
    for number in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = network(images(number)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_its_functions_have_the_original_s_arguments(ipex: Any) -> None:
    assert tuple(inspect.signature(ipex.optimize).parameters) == ARGUMENTS
    assert ipex.__version__.split(".")[:2] == torch.__version__.split(".")[:2]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_model_and_its_optimizer_train_as_with_cputrain_optimize(
    ipex: Any, dtype: torch.dtype | None, inplace: bool
) -> None:
    model = built()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    before = copy.deepcopy(model.state_dict())
    made, of_made = ipex.optimize(model, optimizer=optimizer, dtype=dtype, inplace=inplace)
    assert (made is model, of_made is optimizer) == (inplace, inplace)
    assert isinstance(made[0].weight, SplitParameter) == (dtype == torch.bfloat16)
    other = built()
    of_other = SGD(other.parameters(), lr=0.01, momentum=0.9)
    narrow = {"dtype": torch.bfloat16, "master_weights": "split"} if dtype == torch.bfloat16 else {}
    cputrain.optimize(other, of_other, **narrow)
    used = dtype or torch.float32
    assert train(made, of_made, used) == train(other, of_other, used)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in made.state_dict().items())
    if not inplace:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_copied_optimizer_keeps_its_state_groups_and_others_parameters(ipex: Any) -> None:
    model, head = built(), nn.Linear(5, 2)
    optimizer = SGD([{"params": model.parameters(), "lr": 0.3}, {"params": head.parameters()}], lr=0.1, momentum=0.9)
    train(model, optimizer)
    made, of_made = ipex.optimize(model, optimizer=optimizer)
    assert [group["lr"] for group in of_made.param_groups] == [0.3, 0.1]
    assert of_made.param_groups[0]["params"][0] is next(made.parameters())
    assert of_made.param_groups[1]["params"][0] is head.weight
    states = [each.state[each.param_groups[0]["params"][0]]["momentum_buffer"] for each in (optimizer, of_made)]
    assert torch.equal(*states) and states[0] is not states[1]


@pytest.mark.parametrize(
    "options",
    [
        {"split_master_weight_for_bf16": False},
        {"fuse_update_step": False},
        {"weights_prepack": False, "auto_kernel_selection": True, "optimize_lstm": True, "concat_linear": True},
    ],
)
def test_options_of_training_are_done_or_harmless(ipex: Any, options: dict[str, bool]) -> None:
    model = built()
    optimizer = AdamW(model.parameters(), lr=0.01)
    made, of_made = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16, **options)
    assert isinstance(made[0].weight, SplitParameter) == ("weights_prepack" in options)
    assert train(made, of_made, torch.bfloat16)[-1] < 1


def test_an_optimizer_without_kernel_keeps_float32_weights_and_says_so(
    ipex: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = built()
    made, _ = ipex.optimize(model, optimizer=RMSprop(model.parameters()), dtype=torch.bfloat16)
    assert {weight.dtype for weight in made.parameters()} == {torch.float32}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("ipex.optimize: weights stay float32, cast by autocast: ") and "RMSprop" in line


def test_a_model_in_evaluation_mode_is_folded_for_inference(ipex: Any) -> None:
    model = built()
    train(model, SGD(model.parameters(), lr=0.01))
    model.eval()
    with torch.no_grad():
        expected = model(images())
        made = ipex.optimize(model, sample_input=(images(),))
        assert [type(layer).__name__ for layer in made.children()].count("FoldedConv2d") == 1
        assert torch.allclose(made(images()), expected, atol=1e-5)
        kept = ipex.optimize(model, conv_bn_folding=False)
        assert isinstance(kept[1], nn.BatchNorm2d) and torch.allclose(kept(images()), expected, atol=1e-5)
        assert type(model[1]) is nn.BatchNorm2d
        narrow = ipex.optimize(model, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.allclose(narrow(images()).float(), expected, rtol=0.1, atol=0.05)


def test_level_o0_and_scripts_are_left_as_they_are(ipex: Any) -> None:
    model = built()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert ipex.optimize(model, optimizer=optimizer, level="O0") == (model, optimizer)
    scripted = torch.jit.script(nn.Linear(2, 2).eval())
    assert ipex.optimize(scripted) is scripted


def with_optimizer(model: nn.Module, **options: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), **options}


def resnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3))


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "training without optimizer": (lambda: {"model": built()}, "the model is in training mode: pass optimizer="),
    "evaluation with one": (
        lambda: with_optimizer(built().eval()),
        "the model is in evaluation mode: call model.train",
    ),
    "level": (lambda: with_optimizer(built(), level="O2"), "level='O2': give 'O0', which changes nothing, or 'O1'"),
    "half": (lambda: with_optimizer(built(), dtype=torch.float16), "dtype=torch.float16: CPUs train in bfloat16"),
    "double": (lambda: with_optimizer(built(), dtype=torch.float64), "dtype=torch.float64: kernels exist for"),
    "graph": (
        lambda: with_optimizer(built(), graph_mode=True),
        "graph_mode=True: leave it out, and call torch.compile",
    ),
    "input": (
        lambda: with_optimizer(resnet(), sample_input=torch.zeros(2, 5, 9, 9)),
        "a copy of the network fails with",
    ),
    "no module": (lambda: {"model": [1]}, "model is a list, not a torch.nn.Module"),
    "meta": (lambda: with_optimizer(nn.Linear(2, 2, device="meta")), "weight is on meta: move the model to the CPU"),
    "lazy": (
        lambda: {"model": nn.LazyLinear(2), "optimizer": SGD(nn.Linear(2, 2).parameters(), 0.1), "inplace": True},
        "weight is not initialized: call model(example) once",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_one_line(ipex: Any, what: str) -> None:
    make, said = BAD[what]
    with pytest.raises(InputError) as error:
        ipex.optimize(**make())
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


@pytest.mark.usefixtures("group")
def test_a_model_in_ddp_is_told_the_order(ipex: Any) -> None:
    ddp = DistributedDataParallel(built())
    with pytest.raises(InputError, match=r"model is in DistributedDataParallel already: call .* before it"):
        ipex.optimize(ddp, optimizer=SGD(ddp.parameters(), 0.1), inplace=True)


class Doubled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_own_layers_hooks_and_quantized_layers_are_left_and_named(
    ipex: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = built()
    model[1] = Doubled(16)
    called: list[int] = []
    model[4].register_forward_hook(lambda *_: called.append(1))
    model.append(torch.ao.nn.quantized.Linear(5, 3))
    made, optimizer = ipex.optimize(model, optimizer=SGD(model.parameters(), 0.1), dtype=torch.bfloat16, inplace=True)
    cputrain.explain(made)
    printed = capsys.readouterr().out
    assert "torch's: batch-norm, 1 layer (not torch's BatchNorm2d):\n    1" in printed
    assert "torch's: bfloat16 weights, 1 layer (hooks):\n    4" in printed
    assert isinstance(made[5], torch.ao.nn.quantized.Linear) and isinstance(made[0].weight, SplitParameter)
    del made[5]
    train(made, optimizer, torch.bfloat16)
    assert len(called) == 4


@pytest.mark.parametrize(("value", "enabled"), [(None, True), ("off", False)])
def test_kernels_are_below_torch_s_operators_unless_the_user_has_decided(
    ipex: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], value: str | None, enabled: bool
) -> None:
    if value is None:
        monkeypatch.delenv(KERNELS_VARIABLE)
    try:
        for _ in range(2):
            model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 5, groups=16))
            made, optimizer = ipex.optimize(model, optimizer=SGD(model.parameters(), 0.1))
        before = operators.calls()["depthwise"]
        train(made, optimizer)
        assert (operators.calls()["depthwise"] > before) == enabled
    finally:
        operators.disable()
    assert capfd.readouterr().err.count("cputrain: kernels below torch's operators: ") == enabled


def test_two_calls_are_as_one(ipex: Any) -> None:
    model = built()
    made = ipex.optimize(model, optimizer=Adam(model.parameters(), lr=0.01), dtype=torch.bfloat16)
    again = ipex.optimize(made[0], optimizer=made[1], dtype=torch.bfloat16)
    assert isinstance(again[0][0].weight, SplitParameter)
    assert train(*again, torch.bfloat16) == train(*made, torch.bfloat16)


def test_float32_precision_is_torch_s_own_switch(ipex: Any, caplog: pytest.LogCaptureFixture) -> None:
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        ipex.set_fp32_math_mode(ipex.FP32MathMode.BF32)
        assert (ipex.get_fp32_math_mode(), matmul.fp32_precision) == (ipex.FP32MathMode.BF32, "bf16")
        ipex.set_fp32_math_mode(ipex.FP32MathMode.TF32)
        assert "CPUs have FP32MathMode.FP32 and BF32" in caplog.text and matmul.fp32_precision == "bf16"
        ipex.set_fp32_math_mode()
        assert (ipex.get_fp32_math_mode(), matmul.fp32_precision) == (ipex.FP32MathMode.FP32, "ieee")
    finally:
        for name in ("matmul", "conv", "rnn"):
            getattr(torch.backends.mkldnn, name).fp32_precision = before
    with pytest.raises(InputError, match="device='xpu': the stand-in"):
        ipex.set_fp32_math_mode(device="xpu")


def test_its_optimizers_are_lars_and_lamb_by_the_original_s_formulas(ipex: Any) -> None:
    w, g = torch.linspace(-1, 2, 30).view(5, 6), torch.linspace(1, -0.5, 30).view(5, 6)
    layer = nn.Linear(6, 5)
    layer.weight.data, layer.weight.grad = w.clone(), g.clone()
    layer.bias.data, layer.bias.grad = torch.ones(5), torch.ones(5)
    lars = ipex.optim._lars.create_optimizer_lars(layer, 0.5, 0.9, 0.1, True, 0.0)
    lars.step()
    ratio = 1e-3 * w.norm() / (g.norm() + 0.1 * w.norm())
    assert torch.allclose(layer.weight.detach(), w - 0.5 * ratio * (g + 0.1 * w), atol=1e-6)
    assert torch.allclose(layer.bias.detach(), torch.full((5,), 0.5)), "neither decay nor trust ratio"
    layer.weight.data = w.clone()
    ipex.optim._lamb.Lamb([layer.weight], lr=0.1, weight_decay=0.01, fused=True).step()
    step = g / (g.abs() + 1e-8) + 0.01 * w
    assert torch.allclose(layer.weight.detach(), w - 0.1 * w.norm() / step.norm() * step, atol=1e-5)
    model = built()
    made, of_made = ipex.optimize(
        model, optimizer=ipex.optim._lars.Lars(model.parameters(), lr=0.1), dtype=torch.bfloat16
    )
    assert isinstance(made[0].weight, SplitParameter) and train(made, of_made, torch.bfloat16)


def test_what_it_has_not_is_one_line_with_what_has_it(ipex: Any) -> None:
    for name, use in (
        ("llm", "vLLM"),
        ("quantization", "torchao"),
        ("fast_bert", "optimize"),
        ("compile", "torch.compile"),
    ):
        with pytest.raises(ImportError, match=rf"{name} is not in the stand-in of cputrain-compat: use .*{use}"):
            getattr(ipex, name)
    with pytest.raises(ImportError, match="prepare is not in the stand-in"):
        exec(f"from {NAME}.quantization import prepare")
    with pytest.raises(ImportError, match=r"llm\.optimize is not in the stand-in"):
        exec(f"import {NAME}.llm; {NAME}.llm.optimize")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        ipex.nonsense  # noqa: B018
    assert not ipex.xpu.is_available() and ipex.xpu.device_count() == 0
    with pytest.raises(ImportError, match=r"use torch\.xpu"):
        ipex.xpu.synchronize()


def test_pools_name_cores_and_pinning_at_run_time_is_refused(ipex: Any) -> None:
    runtime = ipex.cpu.runtime
    cores = runtime.CPUPool().core_ids
    assert cores and runtime.CPUPool([cores[0], 10**6]).core_ids == cores[:1]
    assert set(runtime.CPUPool(node_id=0).core_ids) <= set(range(10**6)) and not runtime.is_runtime_ext_enabled()
    with pytest.raises(InputError, match="node_id=99: this machine has no such NUMA node"):
        runtime.CPUPool(node_id=99)
    for refused in (runtime.pin, runtime.Task, runtime.MultiStreamModule):
        with pytest.raises(
            InputError, match=f"{refused.__name__} is not in the stand-in: cores are bound at the start"
        ):
            refused(runtime.CPUPool())


def test_onednn_s_calls_are_printed_on_demand(ipex: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with ipex.verbose(ipex.VERBOSE_ON):
        torch.nn.functional.conv2d(images(), torch.randn(4, 3, 3, 3))
    assert "onednn_verbose" in capfd.readouterr().out


def test_its_launcher_is_cputrain_s(ipex: Any) -> None:
    launch = importlib.import_module(f"{NAME}.cpu.launch")
    line, notes = launch.command(
        ["cpu", "--nnodes", "1", "--nproc-per-node", "2", "--master-port", "29500", "x.py", "--epochs", "3"]
    )
    assert line == "cputrain launch --ppn 2 x.py --epochs 3"
    assert notes == ["--master-port 29500: launch chooses a free port: export MASTER_PORT to fix it"]
    with pytest.raises(InputError, match="ipexrun xpu: cputrain starts processes on CPUs"):
        launch.command(["xpu", "x.py"])
    assert importlib.import_module(f"{NAME}.launcher").main is launch.main


def script(*words: str) -> list[str]:
    """Run a script beside the stand-in; return its lines."""
    env = {**os.environ, "PYTHONPATH": str(STAND_INS), "OMP_NUM_THREADS": "2"}
    result = subprocess.run((sys.executable, *words), capture_output=True, text=True, timeout=500, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet50", ("--bf16",)),
        ("bert", ()),
        pytest.param("resnet50", (), marks=pytest.mark.nightly),
        pytest.param("bert", ("--bf16",), marks=pytest.mark.nightly),
    ],
)
def test_scripts_that_people_copy_run_unchanged(name: str, options: tuple[str, ...]) -> None:
    lines = script(str(SCRIPTS / f"{name}.py"), *options)
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert losses == sorted(losses, reverse=True) and len(losses) == (3 if name == "resnet50" else 10), lines
    assert name == "resnet50" or lines[-1] == "correct 8"


@pytest.mark.long
def test_the_launcher_starts_ranks_that_train_over_oneccl() -> None:
    module = ("-m", f"{NAME}.cpu.launch", "--nnodes", "1", "--nproc-per-node", "2")
    lines = script(*module, str(SCRIPTS / "resnet50.py"), "--ddp", "--bf16", "--steps", "2")
    assert [line.partition("loss")[0].split("step ")[-1] for line in lines if "step" in line] == ["0 ", "1 "], lines
