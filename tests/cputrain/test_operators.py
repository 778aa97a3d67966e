"""Kernels below torch's operators: the results of any program are torch's, to rounding, whatever its tensors are."""

import copy
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cputrain
from cputrain.affinity.errors import InputError, RunError
from cputrain.kernels import operators, operators_table
from cputrain.kernels.build import KERNELS, RightKernels
from cputrain.kernels.operators import calls, enable_if_requested
from cputrain.launch.command import with_kernels
from cputrain.mpi.supervise.run import free_port
from cputrain.variables import KERNELS_VARIABLE
from tests.support.ccl_jobs import ran
from tests.support.commands import cputrain as launched
from tests.support.commands import here

pytestmark = pytest.mark.slow
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    cputrain.kernels.enable()
    yield
    cputrain.kernels.disable()


def backward(grad: Tensor, x: Tensor, w: Tensor, *options: object) -> tuple[Tensor, ...]:
    return torch.ops.aten.convolution_backward(grad, x, w, [w.shape[0]], *options, [True, True, True])


def laid_out(value: Tensor, layout: str) -> Tensor:
    """The same values in other memory: channels-last, every other column of a wider map, or with an offset."""
    if layout == "channels_last" and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        wide = value.new_zeros(*value.shape[:-1], 2 * value.shape[-1])
        wide[..., ::2] = value
        return wide[..., ::2]
    return torch.cat([value.new_zeros(3), value.flatten()])[3:].view(value.shape)


SIZES = st.tuples(*(st.sampled_from([1, 2, 3, 5, 7, 9]),) * 2)
LAYOUTS = st.sampled_from(["channels_last", "strided", "offset"])


@settings(deadline=None, max_examples=int(os.environ.get("CPUTRAIN_FUZZ", "100")))
@given(
    count=st.sampled_from([1, 2, 5]),
    channels=st.sampled_from([8, 15, 16, 33, 40]),
    sides=st.tuples(*(st.integers(1, 13),) * 2),
    kernel=SIZES,
    stride=st.tuples(*(st.sampled_from([1, 2, 3]),) * 2),
    padding=st.tuples(*(st.integers(0, 4),) * 2),
    dilation=st.tuples(*(st.sampled_from([1, 2, 3]),) * 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layouts=st.tuples(LAYOUTS, LAYOUTS, LAYOUTS),
    line=st.booleans(),
)
def test_depthwise_convolutions_are_right_in_every_shape_and_layout(
    count: int,
    channels: int,
    sides: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    dtype: torch.dtype,
    layouts: tuple[str, str, str],
    line: bool,
) -> None:
    """Outputs and gradients against float64, in the memory format that torch's own have."""
    axes = slice(1, 2) if line else slice(0, 2)
    shape = [count, channels, *sides[axes]]
    options = (stride[axes], padding[axes], dilation[axes], False, [0] * len(shape[2:]), channels)
    generator = torch.Generator().manual_seed(count + channels)
    x = torch.randn(shape, generator=generator).to(dtype)
    w = torch.randn(channels, 1, *kernel[axes], generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype)
    try:
        exact = torch.ops.aten.convolution(x.double(), w.double(), bias.double(), *options)
    except RuntimeError as error:  # a kernel larger than the image: the same error
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            torch.ops.aten.convolution(x, w, bias, *options)
        return
    grad = torch.randn(exact.shape, generator=generator).to(dtype)
    x, w, grad = (laid_out(value, layout) for value, layout in zip((x, w, grad), layouts, strict=True))
    made = [torch.ops.aten.convolution(x, w, bias, *options), *backward(grad, x, w, *options)]
    right = [exact, *backward(grad.double(), x.double(), w.double(), *options)]
    cputrain.kernels.disable()
    theirs = [torch.ops.aten.convolution(x, w, bias, *options), *backward(grad, x, w, *options)]
    cputrain.kernels.enable()
    for ours, value, torchs in zip(made, right, theirs, strict=True):
        error = float((ours.double() - value).abs().max() / value.abs().max().clamp(min=1e-30))
        assert error <= TOLERANCE[dtype]
        assert (ours.dtype, ours.shape) == (torchs.dtype, torchs.shape)
        for format_ in (torch.contiguous_format, *([torch.channels_last] if ours.dim() == 4 else [])):
            assert ours.is_contiguous(memory_format=format_) == torchs.is_contiguous(memory_format=format_)


def test_nan_and_inf_reach_what_torch_lets_them_reach() -> None:
    """As in torch's channels-last gradients; its others also multiply padding by them."""
    for place in ("x", "w", "grad"):
        for value in (float("nan"), float("inf")):
            tensors = {"x": torch.randn(2, 16, 9, 9), "w": torch.randn(16, 1, 5, 5), "grad": torch.randn(2, 16, 9, 9)}
            tensors[place].view(-1)[77] = value
            options = ([1, 1], [2, 2], [1, 1], False, [0, 0], 16)
            x, w, grad = (laid_out(tensors[name], "channels_last") for name in ("x", "w", "grad"))
            made = backward(grad, x, w, *options)
            cputrain.kernels.disable()
            right = backward(grad, x, w, *options)
            cputrain.kernels.enable()
            for ours, theirs in zip(made, right, strict=True):
                assert torch.equal(ours.isfinite(), theirs.isfinite()), (place, value)


def other_tensors() -> dict[str, tuple[Tensor, Tensor]]:
    x, w = torch.randn(2, 16, 9, 9), torch.randn(16, 1, 5, 5)
    return {
        "float64": (x.double(), w.double()),
        "float16": (x.half(), w.half()),
        "few channels": (x[:, :4], w[:4]),
        "no images": (x[:0], w),
        "a multiplier": (x, torch.randn(32, 1, 5, 5)),
        "three axes": (torch.randn(2, 16, 5, 5, 5), torch.randn(16, 1, 3, 3, 3)),
        "negated": (torch._neg_view(x), w),
    }


@pytest.mark.parametrize("kind", other_tensors())
def test_what_is_not_covered_is_torch_s_bit_for_bit(kind: str) -> None:
    x, w = other_tensors()[kind]
    axes = w.dim() - 2

    def results() -> list[Tensor]:
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        convolve = functional.conv3d if axes == 3 else functional.conv2d
        made = convolve(*leaves, padding=1, groups=w.shape[0] // (2 if kind == "a multiplier" else 1))
        return [made, *torch.autograd.grad(made, leaves, torch.ones_like(made))]

    before = calls()
    made = results()
    assert kind == "negated" or calls() == before
    cputrain.kernels.disable()
    for ours, theirs in zip(made, results(), strict=True):
        assert kind == "negated" or (torch.equal(ours, theirs) and ours.stride() == theirs.stride())


class Separable(nn.Module):
    """A stranger's block: depthwise, pointwise, squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.norm = nn.BatchNorm2d(16)
        self.pointwise = nn.Conv2d(16, 24, 1)
        self.classify = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.norm(self.depthwise(x)))
        return self.classify(functional.hardswish(self.pointwise(x)).mean((2, 3)))


def gradients(network: nn.Module, x: Tensor, *, bf16: bool = False, recompute: bool = False) -> list[Tensor]:
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        made = checkpoint(network, x, use_reentrant=False) if recompute else network(x)
    made.float().square().mean().backward()
    return [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("bf16", [False, True])
def test_a_network_trains_as_with_torch_s_operators(bf16: bool) -> None:
    """Modules stay what they are: hooks, copies and pickles work, nothing is replaced."""
    torch.manual_seed(1)
    network, x = Separable(), torch.randn(4, 16, 12, 12)
    seen = []
    network.depthwise.register_forward_hook(lambda *_: seen.append(1))
    before = calls()
    made = gradients(network, x, bf16=bf16)
    assert calls() != before and seen == [1] and type(network.depthwise) is nn.Conv2d
    for again in (copy.deepcopy(network), pickle.loads(pickle.dumps(Separable()))):
        again.load_state_dict(network.state_dict())
        assert all(map(torch.equal, gradients(again, x, bf16=bf16), made))
    assert all(map(torch.equal, gradients(copy.deepcopy(network), x, bf16=bf16, recompute=True), made))
    cputrain.kernels.disable()
    exact = gradients(copy.deepcopy(network).double(), x.double())
    theirs = gradients(copy.deepcopy(network), x, bf16=bf16)
    errors = [
        [float((value - right).norm()) for value in (ours, torchs)]
        for ours, torchs, right in zip(made, theirs, exact, strict=True)
    ]
    scale = max(float(right.norm()) for right in exact)
    assert all(ours <= 1.5 * torchs + 1e-6 * scale for ours, torchs in errors), errors


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(256, 300, 1),
        nn.Conv2d(256, 300, 1, 2),
        nn.Conv2d(64, 320, 3, padding=1),
        nn.Conv2d(64, 64, 5, groups=64, padding=2),
        nn.Conv2d(64, 64, 3, groups=16, padding=1),
        nn.Conv2d(64, 64, 3, groups=8, padding=1),
    ],
    ids=str,
)
def test_gradients_have_the_strides_of_their_weights(layer: nn.Conv2d, bf16: bool) -> None:
    """Also in dimensions of one value, of which DistributedDataParallel would warn."""
    layer = layer.to(torch.bfloat16 if bf16 else torch.float32, memory_format=torch.channels_last)
    images = torch.randn(2, layer.in_channels, 7, 7).to(layer.weight.dtype, memory_format=torch.channels_last)
    outputs = layer(images.requires_grad_())
    of_images, of_weights = torch.autograd.grad(outputs.square().sum(), (images, layer.weight))
    assert of_weights.stride() == layer.weight.stride()
    assert of_images.stride() == images.stride()


def test_second_derivatives_and_vmap_and_compiled_graphs() -> None:
    torch.manual_seed(1)
    convolution = nn.Conv2d(16, 16, 5, padding=2, groups=16).double()
    assert torch.autograd.gradgradcheck(convolution, torch.randn(1, 16, 4, 4, dtype=torch.float64, requires_grad=True))
    single, x = nn.Conv2d(16, 16, 5, padding=2, groups=16), torch.randn(3, 2, 16, 6, 6)
    weights = dict(single.named_parameters())

    def loss(values: dict[str, Tensor], images: Tensor) -> Tensor:
        return torch.func.functional_call(single, values, (images,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for number, images in enumerate(x):
        one = torch.func.grad(loss)(weights, images)
        for name, value in one.items():
            torch.testing.assert_close(per_sample[name][number], value, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(single, backend="aot_eager")
    torch.testing.assert_close(compiled(x[0]), single(x[0]))


def test_threads_do_not_change_a_bit_and_each_may_compute() -> None:
    torch.manual_seed(1)
    x, w, grad = torch.randn(6, 40, 20, 20), torch.randn(40, 1, 5, 5), torch.randn(6, 40, 20, 20)
    options = ([1, 1], [2, 2], [1, 1], False, [0, 0], 40)
    used, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(backward(grad, x, w, *options)[1])
    finally:
        torch.set_num_threads(used)
    workers = [threading.Thread(target=lambda: results.append(backward(grad, x, w, *options)[1])) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 6 and all(torch.equal(result, results[0]) for result in results)


def test_products_in_bfloat16_are_those_of_float32_rounded_once() -> None:
    torch.manual_seed(1)
    a, b, c = (torch.randn(3, 17, 17).bfloat16() for _ in range(3))
    x, w, v = (torch.randn(shape).bfloat16() for shape in ((2, 12, 9, 9), (8, 6, 3, 3), (12, 4, 3, 3)))
    made = [a[0] @ b[0], torch.addmm(c[0], a[0], b[0], alpha=2), a @ b, torch.baddbmm(c, a, b)]
    made += [
        functional.conv2d(x, w, groups=2),
        functional.conv_transpose2d(x, w.transpose(0, 1)[:, :4].repeat(2, 1, 1, 1)),
    ]
    a, b, c, x, w, v = (value.double() for value in (a, b, c, x, w, v))
    right = [a[0] @ b[0], torch.addmm(c[0], a[0], b[0], alpha=2), a @ b, torch.baddbmm(c, a, b)]
    right += [
        functional.conv2d(x, w, groups=2),
        functional.conv_transpose2d(x, w.transpose(0, 1)[:, :4].repeat(2, 1, 1, 1)),
    ]
    for ours, exact in zip(made, right, strict=True):
        assert ours.dtype == torch.bfloat16
        assert float(((ours.double() - exact).abs() / exact.abs().clamp(min=1e-2)).max()) < 2**-8


STRANGER = """
import torch
from torch import nn
torch.manual_seed(0)
layer = nn.Conv2d(16, 16, 5, padding=2, groups=16)
layer(torch.randn(2, 16, 8, 8)).sum().backward()
import sys
ours = sys.modules.get("cputrain.kernels.operators")
print(ours is not None, ours is not None and ours.calls()["depthwise"] > 0)
"""


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (None, "False False\n"),
        pytest.param("off", "False False\n", marks=pytest.mark.long),  # as of launch --kernels off, below
        ("auto", "True True\n"),
    ],
)
def test_a_program_has_them_if_the_environment_says_so(value: str | None, printed: str, tmp_path: Path) -> None:
    """Without the variable nothing of cputrain is imported."""
    env = {name: text for name, text in os.environ.items() if name != KERNELS_VARIABLE}
    env |= {} if value is None else {KERNELS_VARIABLE: value}
    done = subprocess.run([sys.executable, "-c", STRANGER], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == printed, done.stderr


TRAINING = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 5, groups=16), nn.Flatten()
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 3, 12, 12)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
import sys
ours = sys.modules.get("cputrain.kernels.operators")
print(f"loss {loss.item():.4f}, kernels called: {ours is not None and ours.calls()['depthwise'] >= 4}", flush=True)
"""


@pytest.mark.processes
def test_launch_registers_them_for_a_script_that_knows_nothing_of_them(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(TRAINING)
    done = launched("launch", "--ppn", "1", "--", "x.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loss, _, called = done.stdout.strip().rpartition(", kernels called: ")
    assert called == "True" and done.stderr.count("cputrain: kernels below torch's operators: ") == 1
    plain = ran(TRAINING, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    theirs, _, called = plain.out.strip().rpartition(", kernels called: ")
    assert called == "False", plain.err
    losses = [float(text.rpartition("loss ")[2]) for text in (loss, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    for words, variables in ((("--kernels", "off"), {}), ((), {"CPUTRAIN_KERNELS": "off"})):
        dry = here("launch", *words, "--dry-run", "--", "x.py", cwd=tmp_path, **variables)
        assert "CPUTRAIN_KERNELS=off" in dry.stdout, dry.stderr
    wrong = here("launch", "--", "x.py", cwd=tmp_path, CPUTRAIN_KERNELS="on")
    assert wrong.returncode == 2 and "CPUTRAIN_KERNELS" in wrong.stderr, wrong.stderr


@pytest.mark.processes
@pytest.mark.long
def test_the_same_under_torchrun_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(TRAINING)
    run = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    ways = [("x.py",), ("--no-python", sys.executable, "-m", "cputrain", "launch", "--", "x.py")]
    for words, variables in zip(ways, ({"CPUTRAIN_KERNELS": "auto"}, {}), strict=True):
        env = {**os.environ, **variables}
        done = subprocess.run((*run, *words), cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.stdout.count("kernels called: True") == 2, done.stderr


def test_the_trainer_decides_itself() -> None:
    env = {"PATH": "/bin"}
    assert with_kernels(("python", "x.py"), env, "auto") == {**env, "CPUTRAIN_KERNELS": "auto"}
    training = ("python", "-m", "cputrain", "train", "demo-digits")
    assert with_kernels(training, env, "auto") == env
    assert with_kernels(training, env, "off") == {**env, "CPUTRAIN_KERNELS": "off"}


def test_without_a_compiler_or_with_a_wrong_word_torch_s_operators_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cputrain.kernels.disable()
    bare = {"PATH": "/none", "CPUTRAIN_CACHE": str(tmp_path)}
    with pytest.raises(InputError, match="kernels of operators: no C"):
        cputrain.kernels.enable(bare)
    enable_if_requested({**bare, KERNELS_VARIABLE: "auto"})
    enable_if_requested({**bare, KERNELS_VARIABLE: "yes"})
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("cputrain: torch's operators stay in place: kernels of operators: no C++ compiler on PATH")
    assert second == "cputrain: torch's operators stay in place: CPUTRAIN_KERNELS=yes: give auto or off"
    with (
        monkeypatch.context() as patch,
        pytest.raises(RunError, match=r"none is right on this CPU \(depthwise: a 3 x 3"),
    ):
        patch.setattr(operators_table, "TOLERANCE", dict.fromkeys(operators_table.TOLERANCE, 1e-12))
        patch.setattr(operators, "_loaded", {})
        patch.setattr(RightKernels, "of", lambda *_: RightKernels(tmp_path / "right.txt"))
        cputrain.kernels.enable()
    before = calls()
    gradients(Separable(), torch.randn(2, 16, 9, 9))
    assert calls() == before


def test_compiled_code_depends_on_every_header_that_it_includes() -> None:
    """So that a change of any of them compiles the kernels again."""
    names = {path.name for path in operators.SOURCES}
    for path in operators.SOURCES:
        assert set(re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.M)) <= names


def test_a_kernel_that_is_wrong_on_this_cpu_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cputrain.kernels.disable()
    monkeypatch.setattr(RightKernels, "of", lambda *_: RightKernels(tmp_path / "right.txt"))
    wrong = replace(operators_table.TABLE[0], cases=(replace(operators_table.TABLE[0].cases[0], function=rounded),))
    monkeypatch.setattr(operators, "TABLE", (wrong, *operators_table.TABLE[1:]))
    monkeypatch.setattr(operators, "_loaded", {})
    line = cputrain.kernels.enable()
    assert "; left out: depthwise (a 3 x 3 depthwise convolution of stride 1 in float32 differs from float64 by" in line
    assert "batch-norm in training" in line and "depthwise convolutions" not in line
    before = calls()
    gradients(Separable(), torch.randn(2, 16, 9, 9).contiguous(memory_format=torch.channels_last))
    assert calls()["depthwise"] == before["depthwise"] and calls()["batch-norm"] > before["batch-norm"]
    cputrain.kernels.disable()
    right = (tmp_path / "right.txt").read_text().splitlines()
    assert "batch-norm" in right and "depthwise" not in right, "the next process compares only what is not known"


def rounded(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """A wrong result in float32."""
    made = functional.conv2d(x, w, bias, padding=1, groups=24)
    return made if made.dtype == torch.float64 else made.bfloat16().to(made.dtype)


@pytest.mark.long
def test_no_shape_reads_or_writes_outside_its_memory(tmp_path: Path) -> None:
    """By AddressSanitizer and UndefinedBehaviorSanitizer."""
    source = Path(__file__).parents[1] / "support/operator_shapes.cpp"
    flags = ("-std=c++20", "-O1", "-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = tmp_path / "shapes"
    subprocess.run(["c++", *flags, f"-I{KERNELS}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 1000
