"""cputrain bench operators: what is recorded, the limits, the report, a network's steps, a stranger's programs."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cputrain.cli import main
from cputrain.kernels import operators as kernels
from cputrain.kernels.recorder import Call, Recorder, Spent, TensorType, calls_of, compiled_recorder, load_recorder
from cputrain.studies.bench.figures import report_json, report_svg, report_text
from cputrain.studies.bench.operators import OUTSIDE, Measured, group_of, operators_report
from cputrain.studies.bench.profiled import FAULTS, faults_note
from cputrain.studies.bench.work import Rates, work_of
from tests.support.commands import cputrain, refused

ROOT = Path(__file__).parents[2]

RATES = Rates(flops={"float32": 1e9}, bytes_per_s=1e9, threads=1)
SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(1)
network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
optimizer = torch.optim.SGD(network.parameters(), 0.1)
for step in range(5):
    loss = network(torch.randn(4, 3, 8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss of", *sys.argv[1:], float(loss) < 10)
if sys.argv[1] == "failing":
    raise OSError("the disk is full")
"""


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = load_recorder(compiled_recorder(os.environ))
    yield recorder
    recorder.end()


def tensor(*shape: int, dtype: str = "float32") -> TensorType:
    return TensorType(shape, torch.empty(shape).stride(), dtype)


def recorded(recorder: Recorder) -> dict[str, Spent]:
    """What was recorded, by the operators' names."""
    recorder.end()
    return {call.name: spent for call, spent in calls_of(recorder.recorded()["calls"]).items()}


def test_operators_are_recorded_with_their_arguments_and_neither_views_nor_what_is_composed(recorder: Recorder) -> None:
    x, weight = torch.ones(4, 6), torch.ones(5, 6, requires_grad=True)
    recorder.begin()
    functional.linear(x, weight).t().mul(2.5).sum().backward()
    recorder.end()
    calls = calls_of(recorder.recorded()["calls"])
    names = {call.name for call in calls}
    assert {"aten::mm", "aten::mul", "aten::sum"} <= names and not names & {"aten::linear", "aten::t", "aten::empty"}
    scaled = next(
        call
        for call in calls
        if call.name == "aten::mul" and call.arguments[0] == TensorType((5, 4), (1, 5), "float32")
    )
    assert scaled.overload == "Tensor" and calls[scaled].count == 1 and calls[scaled].ns > 0
    torch.ones(3).add(1)  # after the end
    assert calls_of(recorder.recorded()["calls"]).keys() == calls.keys()


def test_a_recording_has_the_time_that_was_asked_for(recorder: Recorder) -> None:
    recorder.begin(after_s=100.0)
    torch.ones(3).add(1)
    assert not recorder.is_in_time and not recorder.is_over and not recorded(recorder)
    recorder.begin(seconds=1e-9)
    torch.ones(3).add(1)
    assert recorder.is_over and not recorded(recorder)


def test_the_calls_that_our_kernels_compute_are_marked(recorder: Recorder) -> None:
    x = torch.randn(2, 32, 9, 9).contiguous(memory_format=torch.channels_last)
    norm = nn.BatchNorm2d(32)
    marks = []
    for switch in (kernels.enable, kernels.disable):
        switch()
        recorder.begin()
        norm(x).relu()
        marks.append(recorded(recorder))
    assert marks[0]["aten::native_batch_norm"].kernels == {"batch-norm"} and not marks[0]["aten::relu"].kernels
    assert not any(spent.kernels for spent in marks[1].values())


@pytest.mark.parametrize("groups", [1, 16])
def test_the_flop_of_a_convolution_s_gradients_are_twice_its_own(recorder: Recorder, groups: int) -> None:
    x, weight = torch.randn(2, 16, 8, 8, requires_grad=True), torch.randn(16, 16 // groups, 3, 3, requires_grad=True)
    recorder.begin()
    functional.conv2d(x, weight, padding=1, groups=groups).sum().backward()
    recorder.end()
    calls = calls_of(recorder.recorded()["calls"])
    works = {call.name: work_of(call) for call in calls}
    forward, backward = works["aten::convolution"], works["aten::convolution_backward"]
    assert forward is not None and backward is not None
    assert forward.flop == 2 * x.numel() * weight[0].numel() and backward.flop == 2 * forward.flop
    assert forward.bytes == 4 * (2 * x.numel() + weight.numel())
    shown = next(str(group_of(call)) for call in calls if call.name == "aten::convolution")
    sizes = f"2x16x8x8 16x{16 // groups}x3x3" + (" 16 groups" if groups > 1 else "")
    assert shown == f"convolution {sizes} float32 contiguous"


@pytest.mark.parametrize(
    ("name", "overload", "arguments", "expected"),
    [
        ("add", "Tensor", (tensor(8, 8), tensor(8, 8), 1), 3 * 256),
        ("add_", "Tensor", (tensor(8, 8), tensor(8, 8), 1), 3 * 256),
        ("copy_", "", (tensor(8, 8), tensor(8, 8), False), 2 * 256),
        ("fill_", "Scalar", (tensor(8, 8), 1), 256),
        ("embedding", "", (tensor(1000, 4), tensor(2, dtype="int64"), -1, False, False), 2 * 32 + 16),
        ("cat", "", ((tensor(8, 8), tensor(8, 8)), 0), 4 * 256),
        ("sum", "", (TensorType((64, 64), (0, 0), "float32"), None), 2 * 4),
        ("nonzero", "", (tensor(8, 8),), None),
        ("empty", "memory_format", ((8, 8), None, None, None, None, None), 0),
    ],
)
def test_bytes_are_those_that_an_operator_reads_and_writes(
    name: str, overload: str, arguments: tuple[Any, ...], expected: int | None
) -> None:
    work = work_of(Call(f"aten::{name}", overload, arguments))
    assert (None if work is None else work.bytes) == expected


def measured(**about: Any) -> Measured:
    product = Call("aten::mm", "", (tensor(100, 100), tensor(100, 100)))
    unknown = Call("aten::nonzero", "", (tensor(4),))
    profile = {product: Spent(2, 40_000_000, {"bfloat16 on AMX"}), unknown: Spent(1, 10_000_000)}
    return Measured(title="x", profiles=(profile, profile), seconds=(0.1, 0.1), **about)


def test_an_operator_has_its_share_its_limit_and_its_kernel() -> None:
    without = {Call("aten::mm", "", (tensor(100, 100), tensor(100, 100))): Spent(2, 80_000_000)}
    report = operators_report(measured(without=(without,), seconds_without=(0.2,), images=4), RATES, 15)
    data = json.loads(report_json(report, machine="m", versions=()))
    rows = {row["operator"]: row for row in data["tables"]["operators"]}
    assert list(rows) == [OUTSIDE, "mm", "nonzero"]
    assert rows[OUTSIDE]["ms a step"] == pytest.approx(50) and rows["nonzero"]["times its limit"] is None
    product = rows["mm"]
    assert product["limit ms"] == pytest.approx(4.0) and product["limited by"] == "FLOP"  # 2 x 2 x 100^3 at 1 GFLOP/s
    assert product["times its limit"] == pytest.approx(10) and product["% of the time"] == pytest.approx(40)
    assert product["torch's ms"] == pytest.approx(80) and product["our kernel"] == "bfloat16 on AMX"
    (shape, _) = data["tables"]["operators by shape"]
    assert (shape["operator"], shape["shapes"]) == ("mm", "100x100 100x100")
    assert (shape["type"], shape["layout"], shape["GFLOP"]) == ("float32", "contiguous", pytest.approx(0.004))
    ours, torchs = data["figures"]
    assert (ours["value"], torchs["value"]) == (pytest.approx(40), pytest.approx(20))
    (unknown,) = [note for note in report.notes if "unknown" in note]
    assert unknown == "no limit, as their work is unknown: nonzero; 10 % of the time, which counts as 0 in other limits"
    text = report_text(report)
    assert "layout" not in text and "mm 100x100 100x100 float32 contiguous" in text and "1 GFLOP/s in float32" in text


def test_a_program_s_times_are_per_step_if_its_optimizers_make_some() -> None:
    for steps, head, ms in ((4, "ms a step", 10.0), (0, "ms", 40.0)):
        table = operators_report(measured(steps=steps), RATES, None).tables[1]
        assert table.head[2] == head and table.rows[0][2] == pytest.approx(ms)
        assert table.rows[0][3] == pytest.approx(40)  # percent of the time
        assert "torch's ms" not in report_text(operators_report(measured(steps=steps), RATES, None))


@pytest.mark.slow
def test_the_picture_has_bars_with_limits_and_ours_in_another_color() -> None:
    picture = report_svg(operators_report(measured(), RATES, 15))
    assert picture.startswith("<svg") and all(word in picture for word in ("mm", "limit", "our kernel", OUTSIDE))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to profile: give a NETWORK such as resnet50, or -- SCRIPT ARGS"),
        (("--",), "nothing to profile"),
        (("resnet50", "--", "x.py"), "network resnet50 and program x.py are both given"),
        (("train.py",), "network train.py is a script: give it behind --, as in -- train.py"),
        (("--batch", "4", "--", "x.py"), "--batch is for a NETWORK: remove it"),
        (("resnet50", "--seconds", "4"), "--seconds is for a SCRIPT: remove it"),
        (("--", "no-such-file.py"), "script no-such-file.py does not exist: give an existing one"),
        (("resnet51",), "resnet51 is not a classifier of torchvision (did you mean resnet"),
        (("no_such_module:Net",), "no_such_module is not installed, nor a file here"),
        (("json:loads",), "network json:loads: json makes no network loads: name a class or function without"),
        (("json:absent",), "json makes no network absent"),
        ((f"{__name__}:Broken",), f"network {__name__}:Broken: KeyError: 'width' ({__file__}, line "),
    ],
)
def test_wrong_input_is_one_line(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "operators", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


class Broken(nn.Module):
    """A user's network that cannot be built."""

    def __init__(self) -> None:
        super().__init__()
        raise KeyError("width")


class Own(nn.Module):
    """A user's network, named by its module."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, side, side) -> (N, 10)."""
        logits: Tensor = self.head(self.norm(self.convolution(images)).mean((2, 3)))
        return logits


def test_a_network_s_step_is_listed_with_our_kernels_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:Own"
    size = ("--batch", "2", "--size", "16", "--steps", "2", "--threads", "1", "--kernels", "auto")
    assert main(["bench", "operators", name, *size, "--quick", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rows = {row["operator"]: row for row in data["tables"]["operators"]}
    assert rows["native_batch_norm"]["our kernel"] == "batch-norm" and rows["native_batch_norm"]["torch's ms"] > 0
    assert rows["convolution_backward"]["calls"] == "1" and rows["convolution_backward"]["limit ms"] > 0
    assert [figure["name"] for figure in data["figures"]] == ["our kernels", "torch's operators"]
    assert sum(row["% of the time"] for row in rows.values()) >= 99


def test_memory_that_malloc_gives_back_is_said() -> None:
    words = ("--batch", "32", "--size", "96", "--steps", "1", "--threads", "1", "--kernels", "off", "--quick")
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "LD_PRELOAD": ""}
    done = cputrain("bench", "operators", f"{__name__}:Own", *words, cwd=ROOT, **malloc)
    assert done.returncode == 0, done.stderr
    assert "page faults a step, most likely as malloc gives freed memory back to the kernel" in done.stdout
    assert faults_note(FAULTS) and not faults_note(FAULTS - 1)


@pytest.mark.long
@pytest.mark.processes
def test_a_stranger_s_program_runs_unchanged_and_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = cputrain("bench", "operators", "--quick", "--format", "json", "--", "train.py", "--lr", "3", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "loss of --lr 3 True" in ran.stderr and "5 steps of its optimizers" in ran.stdout
    rows = {row["operator"]: row for row in json.loads(ran.stdout)["tables"]["operators"]}
    assert rows["convolution"]["calls"] == "1" and rows["convolution"]["ms a step"] > 0
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


@pytest.mark.long
@pytest.mark.processes
def test_a_program_that_fails_keeps_its_error_and_one_without_torch_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "other.py").write_text("print('no torch')")
    ran = cputrain("bench", "operators", "--quick", "--", "train.py", "failing", cwd=tmp_path)
    assert ran.returncode == 1 and "OSError: the disk is full" in ran.stderr
    assert "failed with exit status 1" in ran.stderr and "convolution" in ran.stdout
    other = cputrain("bench", "operators", "--quick", "--", "other.py", cwd=tmp_path)
    assert "other.py computed nothing by torch" in refused(other) and other.stdout == "no torch\n"
