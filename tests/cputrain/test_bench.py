"""cputrain bench: every part on tiny sizes, its figures beside their limits, what is kept; the trace of two ranks."""

import gc
import io
import json
import os
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.input import main as bench_decoders
from cputrain.affinity.topology.machine import NumaNode
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.views import processor_text
from cputrain.cli import main
from cputrain.kernels.convolution import ConvolutionShape
from cputrain.kernels.measure import shape_key
from cputrain.kernels.plan import MIN_SPEEDUP
from cputrain.studies.bench.figures import Figure, Report, Table, report_json, report_svg, report_text
from cputrain.studies.bench.limits import HEIGHT, WIDTH, generated_photos, host_place, places, thread_counts
from cputrain.studies.bench.model import layer_seconds, trace_json
from cputrain.studies.bench.recorder import LayerRecorder
from cputrain.studies.simulate.setup import LayerSeconds
from tests.cputrain.test_decode import NEEDS_TURBO
from tests.support.ccl_jobs import unmeasured_cache
from tests.support.commands import PPN, cputrain, here, needs_two_cores, refused
from tests.support.forked import in_fork
from tests.support.machines import build_machine
from tests.support.trainings import LENET

SMALL = (*LENET, "batch.local=4", "comm.backend=gloo")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for measurements, with what is compiled already."""
    monkeypatch.setenv("CPUTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(cache: Path) -> dict[str, dict[str, Any]]:
    """The values of each record, by kind and name."""
    records = [json.loads(path.read_text()) for path in cache.glob("measured/*/*.json")]
    return {f"{record['kind']} {record['name']}": record["values"] for record in records}


def test_figures_are_shown_with_their_spread_and_share_of_the_limit() -> None:
    figure = Figure(name="x", value=2.0, low=1.5, high=2.5, unit="GB/s", limit=8.0, limited_by="a copy", note="3 us")
    table = Table(title="parts", head=("part", "ms"), rows=(("a", 1.234), ("b", None), ("c", 5.0)), shown=2)
    report = Report(title="bench", figures=(figure,), tables=(table,), notes=("a remark",))
    text = " ".join(report_text(report).split())
    assert "x 2 1.5-2.5 GB/s 3 us 8 25 % a copy" in text and "(1 more: --format json)" in text and "a remark" in text
    assert "the repeats of 1 of 1 figure differ by more than 30 %; measure on an idle machine" in text
    data = json.loads(report_json(report, machine="m", versions=("torch 1",)))
    assert data["figures"][0]["limit"] == 8.0 and data["tables"]["parts"][2] == {"part": "c", "ms": 5.0}


def test_memory_is_measured_for_each_node_by_thread_count_and_from_other_nodes() -> None:
    names = [[place.name for place in group] for group in places(build_machine(2, 1, 3, 2))]
    own = ["node {0}, 1 thread", "node {0}, 2 threads", "node {0}, 3 threads"]
    assert names == [
        ["node 0 from cores of node 1", *(name.format(0) for name in own)],
        ["node 1 from cores of node 0", *(name.format(1) for name in own)],
    ]
    machine = build_machine(1, 1, 2, 1)
    ((*_, most),) = places(machine)
    assert most.nodes == (None, None) and host_place(machine).pus == most.pus  # one node: nothing to bind to
    assert thread_counts(1) == [1] and thread_counts(12) == [1, 2, 4, 8, 12]


def test_memory_without_cores_is_measured_from_the_nearest() -> None:
    machine = build_machine(1, 1, 2, 1)
    hbm = NumaNode(id=1, pus=(), memory_bytes=1 << 34, kind="hbm", near=(0,))
    machine = replace(machine, numa_nodes=(*machine.numa_nodes, hbm), allowed_nodes=(0, 1))
    group = places(machine)[1]
    assert [(place.name, place.nodes) for place in group] == [("node 1, 1 thread", (1,)), ("node 1, 2 threads", (1, 1))]


def test_bench_memory_prints_the_host_s_bandwidth(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "--quick", "--repeats", "1", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    host = data["figures"][-1]
    assert host["name"] == "host, triad" and host["low"] <= host["value"] <= host["high"]
    assert all(figure["value"] > 0 and figure["unit"] == "GB/s" for figure in data["figures"])
    assert data["machine"].startswith(this_machine().model) and any("torch " in each for each in data["versions"])
    assert not kept(cache)  # of tiny sizes nothing is


def test_generated_photos_are_as_large_as_imagenet_s() -> None:
    sizes = [len(data) for data in generated_photos(2)]
    assert WIDTH * HEIGHT == 204_000 and all(90_000 < size < 125_000 for size in sizes)


def test_bench_data_compares_the_decoders_with_entropy_decoding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "data", "--quick", "--repeats", "1", "--format", "json"]) == 0
    figures = {each["name"]: each for each in json.loads(capsys.readouterr().out)["figures"]}
    assert {"original, Pillow", "prepared, Pillow"} <= figures.keys()
    if "original, libjpeg-turbo" in figures:
        assert figures["original, libjpeg-turbo"]["value"] > figures["original, Pillow"]["value"]
        assert figures["original, Pillow"]["limit"] > figures["original, Pillow"]["value"]
    assert os.sched_getaffinity(0) == set(this_machine().allowed_pus)  # it was bound to a core meanwhile
    assert main(["bench", "data", str(tmp_path)]) == 2
    assert "contains no JPEG; name a folder with JPEGs" in capsys.readouterr().err


def test_bench_optimizer_counts_the_bytes_that_a_step_moves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "optimizer", "--quick", "--repeats", "1", "--format", "json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [each["name"] for each in figures[:3]] == ["momentum, 1 thread", "lars, 1 thread", "adam, 1 thread"]
    assert all(each["limited_by"].startswith("triad, ") and each["limit"] > 0 for each in figures)
    assert main(["bench", "optimizer", "--step", "3"]) == 2
    assert "--step selects the norms of a RUN" in capsys.readouterr().err


def test_layers_are_timed_forward_and_backward_with_their_operations() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 5))
    recorder = LayerRecorder()
    with recorder.attached(network):
        network(torch.rand(4, 3, 6, 6)).sum().backward()
    times = {layer["name"]: layer for layer in recorder.times(end=recorder.gradients[-1][1] + 1.0)}
    assert [layer["kind"] for layer in times.values()] == ["Conv2d", "ReLU", "Flatten", "Linear"]
    forward = 2.0 * 3 * 8 * 9 * 36 * 4
    assert times["0"]["forward_flop"] == times["0"]["backward_flop"] == forward  # the images need no gradient
    assert times["3"]["backward_flop"] == 2 * times["3"]["forward_flop"] == 4.0 * 8 * 36 * 5 * 4
    assert times["0"]["backward_s"] == pytest.approx(1.0, abs=0.01)  # until the given end
    assert all(layer["forward_s"] > 0 and layer["backward_s"] > 0 for layer in times.values())
    with recorder.attached(network):
        pass
    recorder.clear()
    network(torch.rand(1, 3, 6, 6)).sum().backward()
    assert not recorder.forwards and not recorder.gradients  # its hooks are gone


def test_layers_without_weights_count_with_the_one_before_them() -> None:
    spans = [("conv", 0.0, 1.0), ("relu", 1.0, 1.5), ("pool", 1.5, 2.0), ("fc", 2.0, 4.0), ("relu", 4.0, 5.0)]
    back = [("relu", 5.0, 6.0), ("fc", 6.0, 8.0), ("pool", 8.0, 9.0), ("relu", 9.0, 10.0), ("conv", 10.0, 14.0)]
    weights = {"conv": 10, "relu": 0, "pool": 0, "fc": 7}
    step = {
        "seconds": 14.0,
        "layers": [{"name": name, "weights": count} for name, count in weights.items()],
        "layer_spans": [
            [name, way, *span] for way, group in (("forward", spans), ("backward", back)) for name, *span in group
        ],
    }
    slower = {**step, "seconds": 15.0, "layer_spans": []}
    assert layer_seconds([slower, step]) == (
        LayerSeconds(weights=10, forward=2.0, backward=6.0),
        LayerSeconds(weights=7, forward=3.0, backward=3.0),
    )
    assert layer_seconds([]) == () == layer_seconds([{**step, "layers": []}])


ROUNDING_US = 0.01


def check_trace(events: list[dict[str, Any]], ranks: int) -> None:
    """Fail unless each rank is a named process with named tracks, and its events are complete, in order and nested, as
    ui.perfetto.dev requires it."""
    assert {event["ph"] for event in events} <= {"M", "X", "b", "e"}
    assert all(type(event["pid"]) is int and event["pid"] in range(ranks) for event in events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names) == list(range(ranks)) and all(name.startswith(f"rank {rank} ") for rank, name in names.items())
    tracks = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    timed = [event for event in events if event["ph"] != "M"]
    assert timed and all((event["pid"], event["tid"]) in tracks and event["ts"] >= 0 for event in timed)
    slices = sorted((each for each in timed if each["ph"] == "X"), key=lambda each: (each["pid"], each["tid"]))
    for _, track in groupby(slices, key=lambda each: (each["pid"], each["tid"])):
        _check_nesting(sorted(track, key=lambda each: (each["ts"], -each["dur"])))
    begun = {(each["cat"], each["id"], each["pid"]): each["ts"] for each in timed if each["ph"] == "b"}
    ended = {(each["cat"], each["id"], each["pid"]): each["ts"] for each in timed if each["ph"] == "e"}
    assert begun.keys() == ended.keys() and all(ended[key] >= start for key, start in begun.items())


def _check_nesting(track: list[dict[str, Any]]) -> None:
    """Fail if slices of a track overlap without nesting, which viewers cannot draw."""
    open_until: list[float] = []
    for each in track:
        assert each["dur"] >= 0
        end = each["ts"] + each["dur"]
        while open_until and open_until[-1] <= each["ts"] + ROUNDING_US:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + ROUNDING_US, f"{each} crosses the end of the slice around it"
        open_until.append(end)


def test_a_trace_has_a_process_for_each_rank_and_slices_that_nest() -> None:
    steps = [
        {
            "start": 10.0 * number,
            "end": 10.0 * number + 9.0,
            "spans": [
                ("forward", 10.0 * number, 10.0 * number + 3.0),
                ("backward", 10.0 * number + 3.0, 10.0 * number + 8.0),
            ],
            "layer_spans": [["conv", "forward", 10.0 * number, 10.0 * number + 1.0]],
            "buckets": [(4, 10.0 * number + 4.0, 10.0 * number + 7.0), (4, 10.0 * number + 5.0, 10.0 * number + 8.0)],
        }
        for number in range(2)
    ]
    ranks = [{"rank": rank, "pus": [rank], "profiled": steps} for rank in range(2)]
    data = json.loads(trace_json(ranks))
    check_trace(data["traceEvents"], ranks=2)
    assert data["displayTimeUnit"] == "ms"
    (first, *_) = [each for each in data["traceEvents"] if each["name"] == "backward"]
    assert (first["ts"], first["dur"]) == (3e6, 5e6)  # microseconds


@pytest.mark.long
def test_bench_model_splits_a_step_and_keeps_the_rate(tmp_path: Path) -> None:
    cache, trace = tmp_path / "cache", tmp_path / "trace.json"
    small = (*SMALL, f"plan.ppn={PPN}", "engine=eager", "data.decoder=pillow")  # nothing to compile
    options = ("--steps", "2", "--trace", str(trace), "--format", "json")
    ran = cputrain("bench", "model", "imagefolder", *small, *options, CPUTRAIN_CACHE=str(cache))
    assert ran.returncode == 0, ran.stderr
    data = json.loads(ran.stdout)
    parts = {row["part"]: row["ms"] for row in data["tables"]["a step of rank 0"]}
    assert list(parts)[:3] == ["data wait", "forward", "backward"] and parts["backward"] > 0 and parts["optimizer"] > 0
    assert 0 < sum(ms for part, ms in parts.items() if part != "step") <= 1.5 * parts["step"]
    layers = {row["layer"]: row for row in data["tables"]["layers"]}
    assert layers["conv1"]["kind"] == "Conv2d" and layers["conv1"]["GFLOP/s"] > 0
    rate = next(each for each in data["figures"] if each["unit"] == "images/s")
    assert rate["limit"] > rate["value"] and rate["limited_by"] == "3 x 3 convolutions alone"
    records = kept(cache)
    measured = records["training lenet at 28, float32"]
    assert measured["low"] <= measured["images_per_s"] <= measured["high"] and measured["workers"] == PPN
    assert records["rate training lenet at 28 x 28, float32"]["value"] > 0
    timed = measured["layers"]
    assert len(timed) == 4 and all(each["weights"] and each["forward"] > 0 < each["backward"] for each in timed)
    events = json.loads(trace.read_text())["traceEvents"]
    check_trace(events, ranks=PPN)
    names = {each["name"] for each in events if each["ph"] == "X"}
    assert {"forward", "backward", "optimizer", "conv1"} <= names
    assert [each["ph"] for each in events if each.get("cat") == "all-reduce"][:2] == ["b", "e"]


@pytest.mark.long
@pytest.mark.nightly
def test_bench_model_says_what_layers_by_winograd_would_take_otherwise(tmp_path: Path) -> None:
    small = ("model.name=resnet18", "data.crop=64", "batch.local=4", "plan.ppn=1", "plan.threads=1", "engine=native")
    options = ("--steps", "1", "--format", "json")
    ran = cputrain("bench", "model", "imagefolder", *small, *options, **unmeasured_cache(tmp_path))
    assert ran.returncode == 0, ran.stderr
    (record,) = tmp_path.glob("measured/*/winograd-float32-1-thread.json")
    gains = json.loads(record.read_text())["values"]
    layers = {row["layer"]: row for row in json.loads(ran.stdout)["tables"]["layers"]}
    for i, (channels, side) in enumerate(((64, 16), (128, 8), (256, 4), (512, 2)), start=1):
        shape = ConvolutionShape(inputs=channels, outputs=channels, height=side, width=side, padding=1)
        row, gain = layers[f"layer{i}.1.conv2"], gains[shape_key(shape, 4)]
        assert row["kind"] == ("WinogradConv2d" if gain >= MIN_SPEEDUP else "Conv2d")
        direct = gain * (row["forward ms"] + row["backward ms"])
        assert row["ms by oneDNN"] == (pytest.approx(direct, rel=0.01) if gain >= MIN_SPEEDUP else None)


@pytest.mark.parametrize("wrong", ["optim.name=nothing", "precision=fp16"])
def test_bench_model_takes_settings_without_a_recipe(wrong: str) -> None:
    assert f"setting '{wrong}'" in refused(here("bench", "model", wrong))


@needs_two_cores
def test_bench_comm_measures_each_backend_beside_a_copy(tmp_path: Path) -> None:
    ran = in_fork("bench", "comm", "--quick", "--repeats", "2", "--format", "json")
    assert ran.returncode == 0, ran.stderr
    data = json.loads(ran.stdout)
    sizes = [each["name"] for each in data["figures"] if each["name"].startswith("gloo")]
    assert sizes == ["gloo, 1 KiB", "gloo, 64 KiB", "gloo, 1 MiB"]
    assert all(each["limited_by"] == "a copy by one core" and each["note"].endswith(" us") for each in data["figures"])
    (fit,) = [row for row in data["tables"]["time = alpha + bytes / bandwidth"] if row["backend"] == "gloo"]
    assert fit["alpha us"] > 0 and fit["GB/s"] > 0


@pytest.mark.slow
def test_a_report_is_drawn_with_a_panel_for_each_unit() -> None:
    figures = tuple(
        Figure(name=f"figure {unit}", value=1.0, low=0.5, high=2.0, unit=unit, limit=3.0)
        for unit in ("GB/s", "images/s")
    )
    picture = report_svg(Report(title="bench", figures=figures))
    assert picture.startswith("<svg") and all(word in picture for word in ("figure GB/s", "images/s", "limit"))


def test_the_pixels_of_a_generated_photo_are_not_flat() -> None:
    pixels = np.asarray(Image.open(io.BytesIO(generated_photos(1)[0])))
    assert pixels.shape == (HEIGHT, WIDTH, 3) and pixels.std() > 30


@NEEDS_TURBO
def test_the_benchmark_of_decoders_runs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, photo in enumerate(generated_photos(2)):
        (tmp_path / f"{number}.jpg").write_bytes(photo)
    monkeypatch.setattr(sys, "argv", ["benchmarks.input", str(tmp_path), "--rounds", "1"])
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        bench_decoders()
    finally:  # it binds its process, sets its threads and freezes its objects
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        gc.unfreeze()
    out = capsys.readouterr().out
    assert out.startswith(f"{processor_text(this_machine())}\n")
    assert "| images per CPU-second, 2 files |" in out and "an epoch permuted in" in out
