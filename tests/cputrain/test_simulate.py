"""Predictions: steps in time, published runs, and the command."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.simulate_published import (
    PublishedEfficiency,
    command_of,
    efficiencies,
    families,
    first_of,
    predicted_rate,
    predicted_row,
    published_efficiencies,
    table,
)
from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.catalog import named_machine
from cputrain.cli import main
from cputrain.cli.studies import numbers_of_hosts
from cputrain.predict.assumptions import ASSUMPTIONS, CONSTANTS, PublishedRun, link_of, published_runs
from cputrain.predict.step_time import Setup, Speed, Step, messages_of, predict_step, work_of
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.request import request_of
from cputrain.studies.simulate.predict import (
    Scenario,
    checkpoints_saved,
    core_flops_of,
    images_per_s_of,
    published_reference,
    speed_at,
)

COVERED = (pytest.mark.long, pytest.mark.nightly)
KNOWN = ("simulate", "resnet50-skx-256node", "--machine", "skx-8160-2s")

SURFSARA = "SURFsara, TensorFlow, Xeon 8160, Omni-Path"


def runs_of(family: str) -> list[PublishedRun]:
    return sorted((run for run in published_runs() if run.family == family), key=lambda run: run.hosts)


@cache
def speed_of_256_hosts() -> Speed:
    reference = published_reference(runs_of(SURFSARA)[0])
    return speed_at(core_flops_of(reference, CONSTANTS), machine=reference)


def predicted(setup: Setup) -> Step:
    """The step on hosts as fast as those of the 256-node run."""
    return predict_step(setup, speed_of_256_hosts(), CONSTANTS)


@pytest.fixture(scope="module")
def of_256_hosts() -> Setup:
    return published_reference(runs_of(SURFSARA)[-1]).setup


@pytest.fixture(scope="module")
def predictions() -> list[tuple[str, ...]]:
    return table()


@pytest.mark.slow
def test_published_runs_follow_from_the_smallest_of_their_family(predictions: list[tuple[str, ...]]) -> None:
    head, *rows = predictions
    runs = [run for runs in families().values() for run in runs]
    errors = [abs(float(row[head.index("error")].partition(" ")[0])) for row in rows]
    for run, found in zip(runs, errors, strict=True):
        assert found < (16 if run.contradicts else 5 if run.hosts == 256 else 10), run.name
        assert found < 0.1 or run is not first_of(runs_of(run.family)), run.name


def test_the_contradicted_run_is_faster_than_in_proportion_to_its_images() -> None:
    """Even a step without any fixed cost would be too slow by 6 % or more."""
    runs = {run.name: run for run in published_runs()}
    (run,) = (run for run in runs.values() if run.contradicts)
    other = runs[run.contradicts or ""]
    own_s, other_s = (each.hosts * each.workers * each.local_batch / each.images_per_s for each in (run, other))
    assert own_s < 0.94 * other_s * run.local_batch / other.local_batch


@pytest.mark.parametrize("known", published_efficiencies(), ids=lambda known: known.network)
def test_published_efficiencies_lie_in_the_range(known: PublishedEfficiency) -> None:
    row = predicted_row(known)
    single = row.images_per_s / row.efficiency
    assert row.low / single < known.efficiency < row.high / single


def test_the_guide_shows_the_tables_of_the_benchmark(predictions: list[tuple[str, ...]]) -> None:
    """What is predicted there may be rounded, or of a version before, but not by more than 2 %."""
    lines = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text().splitlines()
    for head, *rows in (predictions, efficiencies()):
        first = lines.index(f"| {' | '.join(head)} |") + 2
        for line, row in zip(lines[first : first + len(rows)], rows, strict=True):
            for name, shown, found in zip(head, line[2:-2].split(" | "), row, strict=True):
                assert _numbers(shown) == pytest.approx(_numbers(found), rel=0.02, abs=2.0)
                assert shown == found or name in ("predicted", "error", "left out", "range"), line


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", text)]


def test_a_step_is_computing_exposed_communication_and_optimizer(of_256_hosts: Setup) -> None:
    step = predicted(of_256_hosts)
    assert step.step_s == pytest.approx(step.backward_end_s + step.exposed_s + step.optimizer_s)
    assert 0 < step.straggler_s < step.step_s
    assert sum(bucket.size for bucket in step.buckets) == of_256_hosts.gradient_bytes
    ends = [0.0, *(bucket.end_s for bucket in step.buckets)]
    for bucket, free in zip(step.buckets, ends, strict=False):
        assert bucket.start_s == max(bucket.ready_s, free) and bucket.end_s > bucket.start_s


def test_an_instant_network_exposes_nothing_and_a_slow_one_everything(of_256_hosts: Setup) -> None:
    instant = replace(of_256_hosts, link=link_of("opa", gbit=1e9, latency_us=1e-6), move_bytes_per_s=1e18)
    assert predicted(instant).exposed_s < 1e-3
    slow = replace(of_256_hosts, link=link_of("ethernet", gbit=0.1), algorithm="ring")
    wire = 2 * of_256_hosts.gradient_bytes / (0.94 * 0.1e9 / 8)
    assert predicted(slow).step_s == pytest.approx(wire, rel=0.1)


def test_without_comm_cores_communication_stops_computing(of_256_hosts: Setup) -> None:
    """The same threads compute, and what a core moves is taken from them."""
    sharing = predicted(replace(of_256_hosts, comm_cores=0))
    moved = 2 * of_256_hosts.gradient_bytes / CONSTANTS.core_move_bytes_per_s
    assert sharing.step_s - predicted(of_256_hosts).step_s == pytest.approx(moved, rel=0.1)


def test_bf16_gradients_halve_the_time_on_the_wire(of_256_hosts: Setup) -> None:
    slow = replace(of_256_hosts, link=link_of("ethernet", gbit=1), algorithm="ring")
    full, half = (predicted(replace(slow, compression=name)) for name in ("none", "bf16"))
    assert half.exposed_s / full.exposed_s < 0.55


def test_gloo_moves_bf16_no_faster_than_twice_as_many_bytes(of_256_hosts: Setup) -> None:
    alone = replace(of_256_hosts, hosts=1, link=None, comm_cores=1, backend="gloo")

    def all_reduce_s(compression: str) -> float:
        return sum(message.cost.seconds for message in messages_of(replace(alone, compression=compression), CONSTANTS))

    assert all_reduce_s("bf16") == pytest.approx(all_reduce_s("none"), rel=0.01)


def test_copies_into_buckets_belong_to_the_backward_pass(of_256_hosts: Setup) -> None:
    work, step = work_of(of_256_hosts, speed_of_256_hosts(), CONSTANTS), predicted(of_256_hosts)
    computed = step.backward_end_s - step.forward_end_s
    slowness = step.forward_end_s / sum(work.forward_s)
    copied = 2 * of_256_hosts.gradient_bytes / work.memory_bytes_per_s
    assert computed == pytest.approx(slowness * sum(work.backward_s) + copied)


def test_a_core_reorders_weights_at_its_own_speed_where_memory_is_faster() -> None:
    plain = published_reference(runs_of(SURFSARA)[0]).setup
    alone = replace(plain, workers=1, threads=1, local_batch=1)

    def forward_s(memory: float) -> float:
        return sum(work_of(alone, Speed(core_flops=1e15, host_bytes_per_s=memory), CONSTANTS).forward_s)

    weights = sum(layer.weight_bytes for layer in alone.layers if layer.reordered)
    fixed = len(alone.layers) * CONSTANTS.layer_overhead_s
    assert forward_s(1e15) - fixed == pytest.approx(2 * weights / CONSTANTS.core_reorder_bytes_per_s, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "fabric", "settings"),
    [
        ("skx-8160-2s", "opa", ()),
        pytest.param("skx-8160-2s", "ethernet", ("comm.compression=bf16",), marks=COVERED),
        pytest.param("knl-7250-quad-cache", "ethernet", (), marks=COVERED),
        ("knl-7250-quad-cache", "slingshot", ("comm.compression=bf16",)),
        ("spr-8480plus-2s", "opa", ("precision=bf16", "plan.ppn=8", "batch.local=4")),
        pytest.param("spr-8480plus-2s", "slingshot", ("precision=bf16",), marks=COVERED),
        ("cpx-8376h-8s", "ethernet", ("precision=bf16", "comm.backend=gloo")),
    ],
)
def test_hosts_gain_at_most_their_number(
    machine: str, fabric: str, settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--machine", machine, "--fabric", fabric, "--nodes", "1,2,3,16,1024", *settings)
    for row in json_of(capsys, *words)["rows"]:
        assert 0 < row["efficiency"] <= 1.0001
        assert 0 < row["low"] <= row["images_per_s"] <= row["high"]


@pytest.mark.parametrize("fabric", ["opa", "ethernet"])
def test_more_bandwidth_is_never_slower_with_the_same_plan_and_buckets(fabric: str, of_256_hosts: Setup) -> None:
    links = [link_of(fabric, gbit=gbit) for gbit in (0.1, 1, 10, 25, 100, 400)]
    seconds = [predicted(replace(of_256_hosts, link=link, bucket_mib=25.0)).step_s for link in links]
    assert seconds == sorted(seconds, reverse=True)


def test_json_has_points_for_curves_too(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json_of(capsys, "--nodes", "1,64")
    same = ("nodes", "workers", "images_per_s", "efficiency", "step_s", "time_to_train_s")
    for row, point in zip(answer["rows"], answer["points"], strict=True):
        assert point == {name: row[name] for name in same} | {"exposed_comm_s": row["exposed_s"]}


def test_loaders_that_are_too_slow_set_the_pace(of_256_hosts: Setup) -> None:
    starved = predicted(replace(of_256_hosts, loader_cores=1, decoded_per_core_s=10.0))
    assert starved.step_s == pytest.approx(48 / 10)


def test_accumulation_adds_passes_without_communication(of_256_hosts: Setup) -> None:
    once, thrice = predicted(of_256_hosts), predicted(replace(of_256_hosts, accumulation=3))
    assert 2.8 < thrice.step_s / once.step_s < 3.0
    assert len(thrice.buckets) == len(once.buckets)


def test_every_assumption_has_a_range_and_a_source() -> None:
    assert all(a.low <= a.value <= a.high and len(a.source) > 20 for a in ASSUMPTIONS)


def test_smaller_batches_cost_more_for_each_image(of_256_hosts: Setup) -> None:
    def image_s(batch: int) -> float:
        work = work_of(replace(of_256_hosts, local_batch=batch), speed_of_256_hosts(), CONSTANTS)
        return (sum(work.forward_s) + sum(work.backward_s)) / batch

    assert image_s(1) > image_s(8) > image_s(48)


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[dict[str, float]]]:
    assert main([*KNOWN, *arguments, "--format", "json"]) == 0
    found: dict[str, list[dict[str, float]]] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_predicts_the_published_run(capsys: pytest.CaptureFixture[str]) -> None:
    """16,400 images/s and 81 % on 256 hosts, in the documented format, without torch and without data."""
    loaded = set(sys.modules)
    answer = json_of(capsys, "--nodes", "1,256", "--fabric", "opa", "batch.local=48", "plan.ppn=2")
    row = answer["rows"][1]
    assert row["images_per_s"] == pytest.approx(16_400, rel=0.05) and row["efficiency"] == pytest.approx(0.81, rel=0.05)
    assert (row["nodes"], row["workers"]) == (256, 512) and row["low"] < row["images_per_s"] < row["high"]
    assert row["step_s"] == pytest.approx(24_576 / row["images_per_s"])
    assert row["time_to_train_s"] == pytest.approx(4680 * row["step_s"], rel=0.01)
    assert {"exposed_s", "node_hours"} <= set(row)
    assert all({"name", "value", "source"} <= set(item) for item in answer["assumptions"])
    assert not {name for name in set(sys.modules) - loaded if name.startswith("matplotlib")}


@pytest.mark.parametrize("runs", families().values(), ids=lambda runs: runs[-1].name)
def test_the_command_makes_the_predictions_of_the_table(
    runs: list[PublishedRun], capsys: pytest.CaptureFixture[str]
) -> None:
    first, run = first_of(runs), runs[-1]
    assert main([*command_of(run, first), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["images_per_s"] == pytest.approx(predicted_rate(run, [first]), rel=1e-6)


def test_a_rate_of_several_hosts_is_as_good_as_the_run_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    named, given = (
        json_of(capsys, "--nodes", "8,256", "--from", start)["rows"] for start in ("tf-8160-256", "16400@256x2x48")
    )
    assert named == given


def test_text_names_other_runs_to_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*KNOWN, "--nodes", "1"]) == 0
    assert "\nother runs to start --from: tf-8160-1, caffe-8160-64, " in capsys.readouterr().out
    assert main([*KNOWN, "--nodes", "1", "--rate", "80"]) == 0
    assert "--from" not in capsys.readouterr().out


def test_what_if_options_are_settings_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--nodes", "16", "--local-batch", "32", "--compression", "bf16", "--workers", "4", "--comm-cores", "1")
    settings = ("--nodes", "16", "batch.local=32", "comm.compression=bf16", "plan.ppn=4", "plan.comm_cores=1")
    assert json_of(capsys, *options)["rows"] == json_of(capsys, *settings)["rows"]


@pytest.mark.slow
def test_the_network_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (
        json_of(capsys, "--nodes", "64", "--fabric", "ethernet", "--bandwidth", gbit)["rows"][0]["images_per_s"]
        for gbit in ("1", "10")
    )
    assert slow < 0.8 * fast
    one_way, other_way = (
        json_of(capsys, "--nodes", "64", "--latency-us", "500", "--algorithm", name)["rows"][0]["exposed_s"]
        for name in ("two-level", "ring")
    )
    assert one_way < other_way


def test_text_names_the_rate_and_energy_follows_from_watts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*KNOWN, "--nodes", "1,2,...,4", "--watts", "400", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "79.1 images/s on 1 host (SURFsara-Intel best known methods, 2018" in text and "kWh" in text
    assert "host_variation 0.2 (0.03 to 0.26): " in text and "memory_share 1 (0.8 to 1.15): " in text
    row = json_of(capsys, "--nodes", "4", "--watts", "400")["rows"][0]
    assert row["energy_kwh"] == pytest.approx(0.4 * row["node_hours"])


@pytest.mark.slow
def test_pictures_are_svg(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, words in (
        ("svg", ("ideal", "published: SURFsara, Intel Caffe")),
        ("timeline", ("all-reduce: ", "network")),
    ):
        assert main([*KNOWN, "--nodes", "1,8", "--format", kind]) == 0
        picture = capsys.readouterr().out
        assert picture.startswith("<svg") and all(word in picture for word in words)


@pytest.mark.slow
def test_the_best_plan_beats_the_published_one_within_its_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """The published 2 x 22 + 2, without loader cores, costs little against the best plan of as large a batch."""
    best = ("--nodes", "256", "--best", "plan.profile=bkm-2018")
    assert main([*KNOWN, *best, "--format", "json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    own, found = plans[0], plans[-1]
    assert (own["workers"], own["threads"], own["comm_cores"]) == (2, 22, 2) and found["name"] == "best"
    assert found["global_batch"] <= own["global_batch"] == 24_576
    assert 1 <= own["time_to_train_s"] / found["time_to_train_s"] < 1.1
    assert all(found["time_to_train_s"] <= plan["time_to_train_s"] for plan in plans)
    assert main([*KNOWN, *best, "--batch-limit", "16384"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("the recipe") and "2 x 22" in lines[2]
    assert lines[-1].split("  ")[0] == "best" and "24,576" not in lines[-1]
    assert main([*KNOWN, *best, "--algorithm", "two-level", "--format", "json"]) == 0
    assert {plan["algorithm"] for plan in json.loads(capsys.readouterr().out)["plans"]} == {"two-level"}


def test_4096_hosts_take_less_than_10_s_and_1_gb() -> None:
    """16,384 ranks, in a process of its own; its CPU seconds, for other processes may hold it up."""
    words = ("simulate", "resnet50-skx-256node", "--machine", "skx-8160-2s", "--nodes", "1,2,4,...,4096", "plan.ppn=4")
    code = (
        "import sys, time; from pathlib import Path; from cputrain.cli import main; assert main(sys.argv[1:]) == 0; "
        "peak = Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]; "
        "print(time.process_time(), peak)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    cpu_s, peak_kib = map(float, done.stdout.splitlines()[-1].split())
    assert cpu_s < 10 and peak_kib < 1_000_000


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("4", (4,)),
        ("1,2,4,...,32", (1, 2, 4, 8, 16, 32)),
        ("1,2,3,...,6", (1, 2, 3, 4, 5, 6)),
        ("16,8,1", (1, 8, 16)),
        ("1,4,...,100", (1, 4, 16, 64, 100)),
    ],
)
def test_numbers_of_hosts_are_lists_with_a_continuation(text: str, numbers: tuple[int, ...]) -> None:
    assert numbers_of_hosts(text) == numbers


@pytest.mark.parametrize(
    "text",
    ["", "1,...,4", "4,2,...,8", "a", "1;2", "0", "1,2,...,2", "999999", "-1", "2,3,...,200000", "1,2,...,999999"],
)
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--nodes"):
        numbers_of_hosts(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--machine", "genoa-9654-2s-nps1"),
            "no training rate of genoa-9654-2s-nps1 .*cputrain bench model.*known rates: .*skx-8160-2s",
        ),
        (("precision=bf16",), "is known in bf16; .*known rates: cpx-8376h-8s, spr-8480plus-2s"),
        (("--nodes", "5", "batch.global=24576"), "the nearest numbers of hosts are 4 or 6"),
        (("--local-batch", "8", "batch.local=8"), "--local-batch and batch.local=VALUE set the same key"),
        (("--batch-limit", "64"), "--batch-limit needs --best"),
        (("--best", "--format", "svg"), "as text or JSON: remove --format svg"),
        (("--best", "--watts", "400"), "remove --watts"),
        (("--rate", "1e12"), "out of reach"),
        (("--rate", "80", "--from", "tf-8160-1"), "--rate and --from both set"),
        (("--from", "you-7250-16"), "choose one of tf-8160-1, .* on skx-8160-2s in float32.*or pass a rate with hosts"),
        (("--from", "80@0x2x32"), "must be above 0"),
        (("--from", "80@1x2"), "as in 6303@64x2x32"),
        (("model.name=torchvision:vgg99",), "does not know the layers of model.name=torchvision:vgg99"),
        (("--bandwidth", "nan"), "'--bandwidth': nan is not a finite number"),
        (("--bandwidth", "inf"), "'--bandwidth': inf is not a finite number"),
        (("--latency-us", "nan"), "'--latency-us': nan is not a finite number"),
        (("--rate", "inf"), "'--rate': inf is not a finite number"),
        (("--watts", "nan"), "'--watts': nan is not a finite number"),
    ],
)
def test_wrong_input_is_named(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*KNOWN, "--nodes", "1,2", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_rate_of_ones_own_replaces_published_ones(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json_of(capsys, "--machine", "pack:2 core:16 pu:1", "--nodes", "1,2", "--rate", "50")
    assert answer["rows"][0]["images_per_s"] == pytest.approx(50, rel=1e-3)
    assert answer["assumptions"][0]["value"] == 50


def test_times_to_train_need_the_number_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: {name: resnet18}\nschedule: {peak_rate: 0.1}\n")
    assert main(["simulate", str(recipe), "--machine", "skx-8160-2s", "--nodes", "1", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["time_to_train_s"] is None


def test_a_number_of_hosts_that_is_only_compared_need_not_fit(of_256_hosts: Setup) -> None:
    run = next(run for run in published_runs() if run.name == "tf-8160-256")
    machine, recipe = named_machine(run.machine), load_recipe("resnet50-skx-256node")
    fits = replace(request_of(recipe), ppn=1, threads=46, comm_cores=2, loader_cores=0)
    scenario = Scenario(
        recipe=recipe, machine=machine, link=link_of("opa"), reference=published_reference(run), request=fits
    )
    assert images_per_s_of(scenario, 1) is not None
    assert images_per_s_of(replace(scenario, request=replace(fits, threads=47)), 1) is None


@pytest.mark.slow
def test_plans_of_several_hosts_say_what_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    planned = ["plan", "resnet50-skx-256node", "--machine", "skx-8160-2s", "--nodes", "256"]
    assert main(planned) == 0
    fast = capsys.readouterr().out
    known = r"\npredicted: 1[67],\d{3} images/s \(1[56],.* to 19,.*\), 8\d % of 256 single hosts; 90 epochs"
    assert re.search(known, fast) and "one more host" not in fast
    for options, line in (
        (("--fabric", "ethernet", "--link-gbit", "1"), "warning: one more host would add "),
        (("batch.global=8190",), "no prediction: batch.global=8190 does not divide among 256 hosts of "),
        (("model.name=torchvision:vgg99",), "no prediction: `cputrain simulate` does not know the layers of "),
        (("--machine", "genoa-9654-2s-nps1"), "genoa-9654-2s-nps1 is known in float32; run `cputrain bench"),
    ):
        assert main([*planned, *options]) == 0
        assert line in capsys.readouterr().out


def test_checkpoints_are_counted_as_the_trainer_saves_them() -> None:
    def saved(*settings: str, steps: int = 400, step_s: float = 1.0) -> int:
        recipe = load_recipe("imagefolder", ("data.path=x", *settings))
        return checkpoints_saved(recipe.checkpoint, recipe.evaluate.every_epochs, steps, 100, step_s)

    assert saved() == 4, "the last epoch's is the last one"
    assert saved(steps=350) == 4
    assert saved("checkpoint.every_epochs=null") == 4, "before each evaluation"
    assert saved("checkpoint.every_epochs=null", "evaluate.every_epochs=null", "checkpoint.every_minutes=null") == 1
    assert saved("checkpoint.every_epochs=2", "evaluate.every_epochs=4", "checkpoint.every_minutes=null") == 2
    assert saved(step_s=7.0) == 4 + 4 * 2, "700 s an epoch: after 300 and 600 s"
    assert saved("checkpoint.every_epochs=null", "evaluate.every_epochs=null", step_s=1.6) == 1 + 2
    assert saved("checkpoint.every_steps=50", step_s=7.0) == 8
