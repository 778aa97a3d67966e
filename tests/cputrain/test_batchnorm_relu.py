"""Native batch-norm with residual and ReLU: one layer against float64, whole networks, other statistics, threads."""

import copy
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from cputrain.affinity.errors import InputError, RunError
from cputrain.kernels import batchnorm_comparison
from cputrain.kernels.activations import KINDS, RELU, Activation
from cputrain.kernels.batchnorm import EXTENSION, FUSED, LIBRARY, FusedBatchNorm2d, load
from cputrain.kernels.batchnorm_comparison import verify_kernels
from cputrain.kernels.build import KERNELS
from cputrain.kernels.evidence import measuring
from cputrain.kernels.norms import GhostBatchNorm2d, RunningBatchNorm2d
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.training.engine import agree_on_engine, choose_engine
from tests.support.by_hand import ranks_of_code
from tests.support.ccl_jobs import ran
from tests.support.kernels import fuse_batchnorms

pytestmark = pytest.mark.slow


def fused(layer: nn.BatchNorm2d, activation: Activation | None = RELU) -> FusedBatchNorm2d:
    """The layer's native form, by itself."""
    layer.__class__ = FUSED[type(layer)]
    layer.kernels, layer.activation = load(os.environ), activation
    return layer


def images_of(shape: tuple[int, ...], seed: int, mean: float = 0.0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread + mean).to(memory_format=torch.channels_last)


def furthest(got: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the expected values' root mean square where that is above 1."""
    return float((got.double() - expected).abs().max() / expected.square().mean().sqrt().clamp(min=1.0))


Result = dict[str, Tensor]


def expected_of(
    x: Tensor, residual: Tensor | None, layer: nn.BatchNorm2d, gradient: Tensor, activation: Activation | None
) -> Result:
    """Outputs, gradients and running statistics of torch's operators in float64."""
    plain = copy.deepcopy(layer).double()
    images = x.double().requires_grad_()
    added = None if residual is None else residual.double().requires_grad_()
    before = plain(images) if added is None else plain(images) + added
    y = activation(before) if activation else before
    # where an activation's input is at a bend but for rounding (half a unit of bfloat16 below 8), either side is right
    near = 1e-3 if x.dtype == torch.float32 else 2.0**-6 + 1e-3
    kept = torch.stack([(before.detach() - bend).abs() > near for bend in (-3, 0, 3, 6)]).all(0)
    y.backward(gradient.double() * kept)
    return {
        "y": y.detach(),
        "kept": kept,
        "x": images.grad,
        "weight": plain.weight.grad,
        "bias": plain.bias.grad,
        "mean": plain.running_mean,
        "var": plain.running_var,
        **({} if added is None else {"residual": added.grad}),
    }


def got_from(layer: FusedBatchNorm2d, x: Tensor, residual: Tensor | None, gradient: Tensor) -> Result:
    images = x.clone().requires_grad_()
    added = None if residual is None else residual.clone().requires_grad_()
    y = layer(images, added)
    y.backward(gradient)
    return {
        "y": y.detach(),
        "x": images.grad,
        "weight": layer.weight.grad,
        "bias": layer.bias.grad,
        "mean": layer.running_mean,
        "var": layer.running_var,
        **({} if added is None else {"residual": added.grad}),
    }


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 12), st.integers(1, 12)).filter(
        lambda shape: shape[0] * shape[2] * shape[3] > 15  # fewer may lie so close together that rounding is large
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    with_residual=st.booleans(),
    activation=st.none() | st.builds(Activation, st.sampled_from(sorted(KINDS)), st.just(0.2)),
    training=st.booleans(),
    mean=st.sampled_from([0.0, 3.0, -100.0]),
    count=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_one_layer_is_torch_s_in_float64_within_rounding(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    with_residual: bool,
    activation: Activation | None,
    training: bool,
    mean: float,
    count: int,
    seed: int,
) -> None:
    torch.set_num_threads(count)
    torch.manual_seed(seed)
    layer = nn.BatchNorm2d(shape[1], momentum=0.3).train(training)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    nn.init.constant_(layer.running_mean, mean)
    x = images_of(shape, seed, mean).to(dtype)
    residual = images_of(shape, seed + 1).to(dtype) if with_residual else None
    gradient = images_of(shape, seed + 2).to(dtype)
    expected = expected_of(x, residual, layer, gradient, activation)
    kept = expected.pop("kept")
    got = got_from(fused(layer, activation), x, residual, gradient * kept)
    rounding = 1e-5 if dtype == torch.float32 else 2.0**-7
    assert layer.num_batches_tracked == training
    from_rounded = with_residual and activation is not None and not activation.keeps_output
    for name, value in expected.items():
        of_images = name in ("y", "x", "residual")
        assert got[name].dtype == (dtype if of_images else torch.float32)
        off = rounding if of_images or from_rounded else 1e-5
        assert furthest(got[name], value) < off * (4 + float(value.abs().max())), name


def test_statistics_of_many_images_are_exact_to_float32() -> None:
    x = images_of((16, 64, 56, 56), 0, mean=1000.0)
    layer = fused(nn.BatchNorm2d(64), None)
    wide = x.double()
    mean, variance = wide.mean((0, 2, 3), keepdim=True), wide.var((0, 2, 3), correction=0, keepdim=True)
    exact = (wide - mean) / (variance + layer.eps).sqrt()
    got = layer(x).detach()
    torchs = functional.batch_norm(x, None, None, training=True)
    assert furthest(got, exact) < 2e-6 < furthest(torchs, exact)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_any_number_of_threads_computes_the_same_bits(dtype: torch.dtype, with_residual: bool, name: str) -> None:
    shape = (5, 33, 31, 29)
    x, residual, gradient = (images_of(shape, seed).to(dtype) for seed in range(3))
    results = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        results.append(
            got_from(fused(nn.BatchNorm2d(33), Activation(name, 0.2)), x, residual if with_residual else None, gradient)
        )
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize("name", KINDS)
def test_nan_and_infinity_reach_the_outputs_as_in_torch(name: str) -> None:
    x, activation = images_of((2, 3, 4, 4), 0), Activation(name, 0.2)
    x[0, 1, 0, 0] = torch.nan
    for value in (torch.nan, torch.inf):
        x[0, 2, 0, 0] = value
        got = fused(nn.BatchNorm2d(3), activation)(x)
        expected = activation(functional.batch_norm(x, None, None, training=True))
        assert torch.equal(got.isnan(), expected.isnan()) and got.isnan().any() and not got.isnan().all()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_an_activation_of_any_value_is_torch_s(name: str, dtype: torch.dtype, with_residual: bool) -> None:
    """By identity statistics: numbers from the smallest to the largest, zeros, the bends, and outputs of infinities and
    NaN; errors are a rounding more than torch's own at most."""
    powers = torch.logspace(-44, 37, 300, 10, dtype=torch.float64).float()
    near = torch.linspace(-110, 110, 4001)
    special = torch.tensor([0.0, -0.0, 3, -3, 6, -6, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([powers, -powers, near, special]).to(dtype).view(-1, 1, 1, 1)
    values = values.expand(-1, 19, -1, -1).contiguous(memory_format=torch.channels_last)
    activation, layer = Activation(name, 0.2), fused(nn.BatchNorm2d(19, eps=1e-45).eval(), Activation(name, 0.2))
    residual = torch.zeros_like(values) if with_residual else None
    results = []
    for kind, function in ((dtype, activation), (torch.float64, activation), (dtype, lambda x: layer(x, residual))):
        x = values.to(kind, memory_format=torch.preserve_format).requires_grad_()
        y = function(x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        results.append((y.detach().double(), gradient.double()))
    (torchs, _), _, (ours, _) = results
    assert torch.equal(ours.isnan(), torchs.isnan()) and torch.equal(ours.isinf(), torchs.isinf())
    for (torchs, exact, ours), least in zip(zip(*results, strict=True), (0.0, 0.5), strict=True):
        allowed = (torchs - exact).abs() + torch.finfo(dtype).eps * exact.abs().clamp(min=least) + 1e-35
        assert ((ours - exact).abs() <= allowed)[values.isfinite()].all()


def test_bfloat16_is_rounded_to_the_nearest_even() -> None:
    """By identity statistics: every finite float32 pattern in steps, and numbers halfway between two."""
    bits = torch.arange(0, 0x7F000000, 0x7FFF * 13, dtype=torch.int64)
    values = torch.cat([bits, bits & ~0xFFFF | 0x8000]).to(torch.int32).view(torch.float32)
    layer = fused(nn.BatchNorm2d(1, eps=0.0).eval(), None)
    zeros = torch.zeros(len(values), 1, 1, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        for value in values[:: len(values) // 500]:
            layer.bias.fill_(float(value))
            assert torch.equal(layer(zeros[:2]).view(-1)[0], value.to(torch.bfloat16))


def made(name: str = "resnet18", side: int = 32, **options: object) -> nn.Module:
    torch.manual_seed(1)
    return build_model(ModelSettings(name=name, **options), 10, side).to(memory_format=torch.channels_last)


def pair(name: str, side: int = 32, **options: object) -> tuple[nn.Module, nn.Module]:
    """A network in torch's operators and with native layers."""
    plain = made(name, side, **options)
    native = copy.deepcopy(plain)
    fuse_batchnorms(native, load(os.environ))
    return plain, native


@pytest.mark.parametrize(
    ("name", "side", "relus"),
    [
        ("resnet18", 32, 0),
        pytest.param("resnet50", 32, 0, marks=pytest.mark.long),
        ("alexnet-bn", 64, 2),
        pytest.param("torchvision:densenet121", 32, 0, marks=pytest.mark.long),
        ("torchvision:mobilenet_v3_small", 32, 9),
    ],
)
def test_a_fused_network_has_the_same_weights_outputs_and_gradients(name: str, side: int, relus: int) -> None:
    plain, native = pair(name, side)
    assert list(native.state_dict()) == list(plain.state_dict())
    called: list[nn.Module] = []
    for module in native.modules():
        if type(module) is nn.ReLU:
            module.register_forward_hook(measuring(lambda relu, *_: called.append(relu)))
    assert all(isinstance(m, FusedBatchNorm2d) for m in native.modules() if isinstance(m, nn.BatchNorm2d))
    images = images_of((4, 3, side, side), 3)
    gradient = torch.randn(4, 10, generator=torch.Generator().manual_seed(4))
    outputs = []
    for network in (plain, native):
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.BatchNorm2d):  # far from where rounding decides whether ReLU cuts a value
                nn.init.constant_(module.bias, 2.0)
        outputs.append(network(images))
        outputs[-1].backward(gradient)
    assert torch.allclose(*outputs, rtol=1e-3, atol=1e-3)
    pairs = [(p.grad, q.grad) for p, q in zip(plain.parameters(), native.parameters(), strict=True)]
    largest = max(float(expected.norm()) for expected, _ in pairs)  # others are 0 but for rounding
    for expected, got in pairs:
        assert float((expected - got).norm()) < 0.01 * float(expected.norm()) + 1e-4 * largest
    assert len(called) == relus
    buffers = zip(plain.buffers(), native.buffers(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in buffers)


TOGETHER = """
import copy, json, os, sys, torch, torch.distributed as dist, torch.distributed.nn.functional
from cputrain.kernels.norms import SyncBatchNorm2d
from tests.cputrain.test_batchnorm_relu import fused, images_of
dist.init_process_group("gloo")
rank = dist.get_rank()
images, residual, weighing = (images_of((7, 3, 4, 5), seed) * 3 + 2 for seed in range(3))
def run(layer, part):
    mine, added = (each[part].clone().requires_grad_() for each in (images, residual))
    out = layer(mine, added)
    (out * weighing[part]).sum().backward()
    return out, mine.grad, added.grad, layer.weight.grad, layer.bias.grad
def made(kind):
    layer = kind(3, momentum=0.2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 0.5]))
    return fused(layer)
part = slice(0, 5) if rank == 0 else slice(5, 7)
whole, ours = made(torch.nn.BatchNorm2d), made(SyncBatchNorm2d)
expected, got = run(whole, slice(0, 7)), run(ours, part)
for value in got[3:]:
    dist.all_reduce(value)  # as DDP does
near = lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-5)
close = [near(e[part], g) for e, g in zip(expected[:3], got)] + [near(e, g) for e, g in zip(expected[3:], got[3:])]
close += [near(whole.running_mean, ours.running_mean), near(whole.running_var, ours.running_var)]
ours.eval(); whole.eval()
close.append(near(whole(images), ours(images)))
# A single value per channel on rank 1, which torch's operators normalize there.
parts, factors = ([each[:5], each[5:6, :, :1, :1]] for each in (images, weighing))
columns, weights = (torch.cat([part.transpose(0, 1).flatten(1) for part in each], 1) for each in (parts, factors))
row = columns[None, :, None].double().requires_grad_()
plain = torch.nn.BatchNorm2d(3).double()
(plain(row).relu() * weights[None, :, None]).sum().backward()
mine, layer = parts[rank].clone().requires_grad_(), fused(SyncBatchNorm2d(3))
(layer(mine) * factors[rank]).sum().backward()
own = mine.grad.transpose(0, 1).flatten(1)
close.append(near(row.grad[0, :, 0, : own.shape[1]] if rank == 0 else row.grad[0, :, 0, -1:], own.double()))
dist.all_reduce(layer.weight.grad)
close.append(near(plain.weight.grad, layer.weight.grad.double()))
sys.stdout.write(json.dumps(close) + "\\n"); sys.stdout.flush()
dist.destroy_process_group()
"""


def test_sync_statistics_are_those_of_all_ranks() -> None:
    """5 + 2 images on two ranks against 7 on one: outputs, gradients, running statistics, evaluation."""
    assert ranks_of_code(TOGETHER) == [[True] * 10] * 2


@pytest.mark.parametrize(
    ("kind", "ghost_batch"), [(GhostBatchNorm2d, 4), (GhostBatchNorm2d, 20), (RunningBatchNorm2d, 0)]
)
def test_ghost_and_running_statistics_are_the_unfused_ones(kind: type[nn.BatchNorm2d], ghost_batch: int) -> None:
    torch.manual_seed(0)
    plain = kind(5, momentum=0.3)
    plain.ghost_batch = ghost_batch
    nn.init.normal_(plain.running_mean)
    native = fused(copy.deepcopy(plain))
    x, gradient = (images_of((10, 5, 3, 3), seed) for seed in range(2))
    for training in (True, False):
        results = []
        for layer in (plain, native):
            layer.train(training).zero_grad()
            images = x.clone().requires_grad_()
            y = layer(images) if layer is native else layer(images).relu()
            y.backward(gradient)
            results.append([y.detach(), images.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()])
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*results, strict=True))


def test_frozen_layers_and_a_first_layer_need_no_gradients() -> None:
    layer = fused(RunningBatchNorm2d(4))
    for p in layer.parameters():
        p.requires_grad_(False)
    x = images_of((2, 4, 3, 3), 0).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None
    first = fused(nn.BatchNorm2d(4))
    first(x.detach()).sum().backward()
    assert first.weight.grad is not None


def test_what_kernels_do_not_support_goes_through_torch() -> None:
    layer = fused(nn.BatchNorm2d(4).double())
    x = images_of((2, 4, 3, 3), 0).double()
    assert torch.equal(layer(x, x), (functional.batch_norm(x, None, None, training=True) + x).relu())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fused(nn.BatchNorm2d(4))(torch.zeros(1, 4, 1, 1))
    nchw = torch.randn(2, 4, 3, 3)
    assert torch.allclose(
        fused(nn.BatchNorm2d(4))(nchw), functional.batch_norm(nchw, None, None, training=True).relu(), atol=1e-5
    )


def test_copies_of_a_network_share_the_kernels() -> None:
    native = pair("resnet18")[1]
    assert copy.deepcopy(native).bn1.kernels is native.bn1.kernels


ELSEWHERE = """
import faulthandler, os, sys, threading, torch
faulthandler.dump_traceback_later(100, exit=True)
from torch import nn
from tests.cputrain.test_batchnorm_relu import fused, images_of, got_from
x, gradient = images_of((4, 64, 24, 24), 0), images_of((4, 64, 24, 24), 1)
def run():
    return got_from(fused(nn.BatchNorm2d(64)), x, None, gradient)
torch.set_num_threads(1)
expected = run()
def check(result):
    assert all(torch.equal(expected[name], result[name]) for name in expected)
for count in (2, 1, 3, 2):
    torch.set_num_threads(count)
    torch.ones(1 << 20).add_(1)  # a parallel region of torch's own
    check(run())
results = []
def work(count):
    torch.set_num_threads(count)
    results.extend(run() for _ in range(5))
callers = [threading.Thread(target=work, args=(count,)) for count in (1, 2, 3)]
[caller.start() for caller in callers]
[caller.join() for caller in callers]
assert len(results) == 15
[check(result) for result in results]
torch.set_num_threads(2)
check(run())
child = os.fork()
if not child:
    with torch.no_grad():
        got = fused(nn.BatchNorm2d(64))(x)
    # not by torch: a parallel region of its own would wait for the parent's threads
    os._exit(0 if (got.numpy() == expected["y"].numpy()).all() else 1)
assert os.waitpid(child, 0)[1] == 0
check(run())
"""


def test_other_threads_other_teams_and_forked_children_neither_hang_nor_differ() -> None:
    done = ran(ELSEWHERE, limit_s=120)
    assert done.status == 0, done.err


def test_auto_falls_back_to_torch_with_the_reason(tmp_path) -> None:
    bare = {"PATH": "/none", "CPUTRAIN_CACHE": str(tmp_path)}
    chosen = choose_engine("auto", "float32", bare)
    assert (chosen.name, chosen.kernels) == ("eager", None) and chosen.why.startswith("no C++ compiler on PATH")
    with pytest.raises(InputError, match="engine=native: no C\\+\\+ compiler"):
        choose_engine("native", "float32", bare)
    native = choose_engine("auto", "float32", os.environ)
    assert native.name == "native" and choose_engine("auto", "float64", os.environ).name == "eager"
    assert choose_engine("eager", "float32", os.environ).why == "engine=eager"
    assert agree_on_engine([("native", "here"), ("native", "there")], native) is native
    fallen = agree_on_engine([("native", "here"), ("eager", "no compiler")], native)
    assert (fallen.name, fallen.why, fallen.kernels) == ("eager", "rank 1: no compiler", None)


def compiler_that(place: Path, does: str) -> dict[str, str]:
    """An environment whose C++ compiler does something to a copy of the sources first and optimizes little, which takes
    a quarter of the time, and whose cache is empty."""
    cxx = place / "cxx"
    cxx.write_text(
        f"#!/bin/bash -e\nwork=$(mktemp -d)\ncp {shlex.quote(str(KERNELS))}/* $work\ncd $work\n{does}\n"
        'exec c++ "${@/*batchnorm_relu.cpp/batchnorm_relu.cpp}" -O1\n'
    )
    cxx.chmod(0o755)
    return {**os.environ, "CXX": str(cxx), "CPUTRAIN_CACHE": str(place / "cache"), "TMPDIR": str(place)}


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("echo 'x.cpp: error: out of registers' >&2; exit 1", r"cannot compile .* \(x\.cpp: error: out of registers\)"),
        ("sed -i 's/return GOMP_parallel .*/return 0;/' batchnorm_relu.cpp", "OpenMP runtime is not visible"),
        (
            "sed -i 's/ + shift\\[c\\]//' forward.hpp",
            r"\(output with relu in float32 is .* off\): remove /.*, or (use torch's layers|set engine=eager)",
        ),
        pytest.param(
            "sed -i 's/scale \\* own\\[c\\]/scale/' batchnorm_relu.cpp",
            r"\(gradient with relu in float32 is .* off\)",
            marks=pytest.mark.long,
        ),
    ],
)
def test_kernels_that_do_not_compile_or_compute_wrongly_are_not_used(tmp_path: Path, does: str, why: str) -> None:
    env = compiler_that(tmp_path, does)
    chosen = choose_engine("auto", "float32", env)
    assert (chosen.name, chosen.kernels) == ("eager", None) and re.search(why, chosen.why), chosen.why
    with pytest.raises(RunError, match=f"engine=native: .*{why}"):
        choose_engine("native", "float32", env)


def test_kernels_are_compared_once_and_wrong_ones_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, kernels, results = {**os.environ, "CPUTRAIN_CACHE": str(tmp_path)}, load(os.environ), ["output is 1 off", ""]
    monkeypatch.setattr(batchnorm_comparison, "_difference", lambda _: results.pop(0))
    with pytest.raises(RunError, match=r"wrong results \(output is 1 off\)"):
        verify_kernels(kernels, env)
    for _ in range(2):  # the second time, no result is left
        assert verify_kernels(kernels, env) is kernels
    (file,) = tmp_path.glob("batchnorm-right-*/*")
    results.append("output is 2 off")
    file.write_text("batch")  # as an interrupted process may leave it
    with pytest.raises(RunError, match="output is 2 off"):
        verify_kernels(kernels, env)


def test_the_library_links_no_openmp_runtime_of_its_own() -> None:
    load(os.environ)
    needed = subprocess.run(
        ["readelf", "-d", LIBRARY.path(os.environ)], capture_output=True, text=True, check=True
    ).stdout
    assert "libstdc++" in needed and "omp" not in needed.replace("compression", "")
    assert "-fopenmp" not in EXTENSION.argv("g++", LIBRARY.path(os.environ))
