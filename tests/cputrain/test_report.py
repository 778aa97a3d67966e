"""The page of a run: what it says, that it shows runs in any state, that no name of a run becomes markup, and what is
drawn of very many steps."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cputrain.cli import main
from cputrain.report.charts import (
    MAX_ROWS,
    MIN_ROWS,
    Chart,
    Line,
    charts_data,
    packed,
    rank_times,
    rows_per_run,
    thin_table,
    time_heat,
    trust_heat,
)
from cputrain.report.page import write_report
from cputrain.report.run import (
    DONE,
    INTERRUPTED,
    NOT_STARTED,
    RUNNING,
    STOPPED,
    Run,
    duration_text,
    faults_of,
    read_run,
    run_figures,
    run_notes,
    run_particulars,
    warnings_of,
)
from tests.support.run_folders import BEGUN, write_run

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\'"&{{7*7}}'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo")


def data_of(html: str) -> Any:
    """The data that the page's program draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_names_what_ran_where_and_how_well(run: Path) -> None:
    html = write_report(run).read_text()
    read = read_run(run)
    shown = dict(run_figures(read)) | dict(run_particulars(read))
    assert shown["workers"] == "4 on 1 host" and shown["global batch"] == "128" and shown["started"].endswith("UTC")
    assert "Platinum 8160" in shown["CPU"] and shown["torch"] == "2.13.0+cpu" and shown["backend"].startswith("ccl")
    assert all(f"<dd>{value}</dd>" in html for value in (shown["time to train"], shown["images/s"], "4 on 1 host"))
    data = data_of(html)
    assert [chart["id"] for chart in data["charts"]] == [
        *("loss", "accuracy", "rate", "throughput", "parts", "cpu", "memory", "network")
    ]
    assert [heat["id"] for heat in data["heats"]] == ["ranks", "trust"]
    assert "reports 4 ranks bound as planned." in html


def test_the_page_loads_nothing_and_runs_its_own_program_only(run: Path) -> None:
    html = write_report(run).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy and "default-src 'none'" in policy[1] and "'sha256-" in policy[1]
    without_program = re.sub(r"<script.*?</script>|<style>.*?</style>|<svg.*?</svg>", "", html, flags=re.DOTALL)
    assert not re.search(r"\b(?:src|href)=|https?:|\son\w+=", without_program)


def test_every_curve_is_also_described_in_words(run: Path) -> None:
    html = write_report(run).read_text()
    labels = dict(re.findall(r'aria-label="([^:"]+): ([^"]*)"', html))
    assert re.search(
        r"rank 0, each step: 240 values, first [\d.]+, last [\d.]+, lowest [\d.]+ at step \d+", labels["Loss"]
    )
    assert "rank 2 computes longest" in labels["Seconds of a step, by rank"]
    assert labels["rank 0"].startswith("compute ")


def test_what_differs_from_the_defaults_comes_before_the_folded_recipe(run: Path) -> None:
    html = write_report(run).read_text()
    settings = html[html.index("<h2>Settings</h2>") :]
    assert "<td>log_norms_every_steps</td>" in settings and "<td>schedule.peak_rate</td>" not in settings
    assert settings.index("log_norms_every_steps") < settings.index("<summary>Complete recipe</summary>")


def test_the_times_of_all_ranks_show_which_one_the_others_wait_for(run: Path) -> None:
    read = read_run(run)
    times = rank_times(read)
    assert [each.rank for each in times] == [0, 1, 2, 3]
    assert max(times, key=lambda each: each.compute_s).rank == 2 == min(times, key=lambda each: each.comm_s).rank
    assert all(sum(each.percents) == pytest.approx(100) for each in times)
    heat = time_heat(read)
    assert heat is not None and heat.measures["compute"].shape == (4, 24) and heat.at[-1] == 240
    trust = trust_heat(read)
    assert trust is not None and trust.rows[-1] == "fc.weight" and "fc.weight" in trust.words


def test_a_run_without_times_of_its_ranks_shows_rank_0(tmp_path: Path) -> None:
    path = write_run(tmp_path / "old", usage=False) / "events.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"event": "ranks"' not in line]
    path.write_text("\n".join(lines) + "\n")
    read = read_run(tmp_path / "old")
    (only,) = rank_times(read)
    assert only.seconds == pytest.approx(0.8, abs=0.1) and only.percents[1] == pytest.approx(15, abs=4)
    assert time_heat(read) is None and "rank 0" in write_report(tmp_path / "old").read_text()


def test_the_status_of_a_run_in_every_state(tmp_path: Path) -> None:
    going_on = read_run(write_run(tmp_path / "a", end=False))
    last = going_on.log.written[-1]["time"]
    assert going_on.status(now=last + 60) == RUNNING and going_on.status(now=last + 600) == INTERRUPTED
    assert read_run(write_run(tmp_path / "b")).status() == DONE
    start = {"event": "start", "time": BEGUN + 9000, "bindings": []}
    assert read_run(write_run(tmp_path / "c", events=[start])).status(now=BEGUN + 9001) == RUNNING
    (tmp_path / "d").mkdir()
    (tmp_path / "d/recipe.yaml").write_text("name: x\n")
    assert read_run(tmp_path / "d").status() == NOT_STARTED
    assert "not started" in write_report(tmp_path / "d").read_text()
    end = {**read_run(tmp_path / "b").end, "status": "stopped"}  # type: ignore[dict-item]
    assert read_run(write_run(tmp_path / "e", events=[end])).status() == STOPPED
    html = write_report(tmp_path / "e").read_text()
    assert "continue with cputrain train " in html and "of 240" in html and "best top-1" in html
    (tmp_path / "e/recipe.yaml").write_text("name: x\ndata: {path: own}\n")
    assert "continue with resume=True in the script" in write_report(tmp_path / "e").read_text(), "of cputrain.train"


def test_faults_that_a_run_survived_are_told(tmp_path: Path) -> None:
    begin = {"event": "start", "time": BEGUN + 1000.0, "bindings": []}
    step = {"event": "step", "time": BEGUN + 1001.0, "step": 230, "epoch": 5.75, "loss": 1.0, "rate": 0.1}
    again = [
        begin,
        {**step, "images_per_s": 10.0},
        *({"event": "warning", "time": BEGUN + 1002, "what": "w", "step": s} for s in (5, 9)),
    ]
    read = read_run(write_run(tmp_path / "run", end=False, events=again))
    (line,) = faults_of(read)
    assert line.startswith("interrupted after step 240, started again 13 min") and line.endswith("11 steps repeated")
    (warned,) = warnings_of(read)
    assert (warned.what, warned.times, warned.first, warned.last) == ("w", 2, 5, 9)
    html = write_report(tmp_path / "run").read_text()
    assert "w (2 times, steps 5 to 9)" in html and "over 2 starts" in html


def test_no_name_of_a_run_becomes_markup(tmp_path: Path) -> None:
    begin = {
        **{"event": "start", "time": BEGUN, "data": EVIL, "backend": EVIL, "workers": 1, "global_batch": 8},
        "bindings": [{"rank": 0, "host": EVIL, "planned_pus": [0], "pus": [1], "memory_policy": EVIL}],
    }
    layer = {"layer": EVIL, "weights": 1.0, "gradients": 1.0, "ratio": 1.0, "trust": 0.5}
    ratios = {"event": "ratios", "time": BEGUN + 1, "step": 1, "rate": 1.0, "layers": [layer]}
    warning = {"event": "warning", "time": BEGUN + 2, "what": EVIL, "images": [EVIL]}
    run = write_run(tmp_path / "run<b>", events=[begin, ratios, warning], recipe=f"name: {json.dumps(EVIL)}\n")
    (run / "environment.json").write_text(json.dumps({"torch": EVIL, "decoder": [EVIL], "kernel": {"a": EVIL}}))
    html = write_report(run).read_text()
    assert "<script>alert" not in html and "<img" not in html and html.count("{{7*7}}") > 5
    assert html.count("</script>") == 2 and "<b>" not in html.split("<main>")[1].split("</h1>")[0]
    assert data_of(html)["heats"][1]["rows"] == [EVIL]


def test_what_is_damaged_or_of_another_version_is_left_out_and_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", recipe="name: x\nretired_key: 3\n")
    for name in ("plan.json", "environment.json"):
        (run / name).write_text("{")
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "ti\n{"event": "of a later version", "time": 1.0}\n')
    html = write_report(run).read_text()
    assert "1 damaged line of events.jsonl omitted" in html and "retired_key" in html
    assert "plan.json is damaged or of another version" in html and "environment.json is damaged" in html
    assert '"chart-loss"' in html and "of another version and shown unchanged" in html


def busy(run: Path, cpus: float, *, whole: float) -> Run:
    """The run with workers that were busy on so many of their 12 CPUs, on a host with `whole` busy CPUs."""
    found = read_run(run)
    assert found.usage is not None
    workers = {
        rank: [structs.replace(each, cpu_s=cpus * each.seconds) for each in records]
        for rank, records in found.usage.workers.items()
    }
    hosts = {
        host: [structs.replace(each, cpu_s=whole * each.seconds) for each in records]
        for host, records in found.usage.hosts.items()
    }
    return replace(found, usage=replace(found.usage, workers=workers, hosts=hosts))


def test_workers_that_had_little_of_their_cpus_are_named_at_the_top(run: Path) -> None:
    """Four workers of 11 or 12 compute CPUs each."""
    cpus = len(read_run(run).plans[0][1].workers[0].compute_pus)
    assert run_notes(busy(run, 0.9 * cpus, whole=4 * cpus)) == ()
    (alone,) = run_notes(busy(run, 0.65 * cpus, whole=0.65 * 4 * cpus))
    used = "the workers used 65 % of the time of the CPUs on which they compute"
    assert alone == f"{used}: see the waits below"
    (crowded,) = run_notes(busy(run, 0.65 * cpus, whole=0.65 * 4 * cpus + 10))
    assert crowded == f"{used}: other programs used 10.0 CPUs on n00"
    short = busy(run, 0.5 * cpus, whole=30.0)
    assert short.usage is not None
    seconds = {
        rank: [structs.replace(each, seconds=0.1, cpu_s=0.1) for each in records]
        for rank, records in short.usage.workers.items()
    }
    assert run_notes(replace(short, usage=replace(short.usage, workers=seconds))) == ()
    assert run_notes(replace(short, usage=None)) == ()


def test_the_plans_warnings_are_at_the_top(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", usage=False)
    plan = json.loads((run / "plan.json").read_text())
    plan["warnings"] = ["a quota <b>", "cores are in use: {share=true} avoids them", "a quota <b>"]
    (run / "plan.json").write_text(json.dumps(plan))
    html = write_report(run).read_text()
    top, _, _ = html.partition("<dl class=")
    assert top.count("a quota &lt;b&gt;") == 1 and "in use: plan.share=true avoids them" in top
    groups = [{"hosts": [name], "plan": plan} for name in ("n1", "n2")]
    (run / "plan.json").write_text(json.dumps({"host_groups": groups}))
    assert [note.partition(":")[0] for note in run_notes(read_run(run))] == ["n1", "n1", "n2", "n2"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "contains no run" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--output", "x.pdf"]) == 2
    assert "does not end in .html" in capsys.readouterr().err


def test_durations_read_as_people_say_them() -> None:
    seconds = (0.41, 52.0, 200.0, 18_420.0, 183_600.0)
    assert [duration_text(each) for each in seconds] == ["0.4 s", "52 s", "3 min 20 s", "5 h 07 min", "2 d 03 h"]


def test_a_rank_that_the_kernel_put_elsewhere_is_named(run: Path) -> None:
    read = read_run(run)
    start = {**read.start, "bindings": [{**each, "pus": [0]} for each in read.start["bindings"]]}
    moved = replace(read, log=replace(read.log, written=(start, *read.log.written[1:])))
    from cputrain.report.page import report_html

    assert "Not bound as planned: rank 0, 1, 2, 3" in report_html(moved)


def steps(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The columns of so many steps."""
    random = np.random.default_rng(seed)
    at = np.arange(1, count + 1, dtype=float)
    values = {name: random.normal(size=count) for name in ("loss", "rate", "images_per_s")}
    return {"step": at, "epoch": at / 100, "time": at * 0.5, **values}


@given(st.integers(1, 3000), st.integers(20, 500), st.integers(0, 9))
def test_thinning_keeps_the_ends_and_the_lowest_and_highest_of_every_column(count: int, most: int, seed: int) -> None:
    table = steps(count, seed)
    kept = thin_table(table, most)
    assert len(kept["step"]) <= max(most, 2 * 3 + 2) + 6
    assert (kept["step"][0], kept["step"][-1]) == (1, count) and (np.diff(kept["step"]) > 0).all()
    for name in ("loss", "rate", "images_per_s"):
        assert kept[name].min() == table[name].min() and kept[name].max() == table[name].max()
    rows = kept["step"].astype(int) - 1
    assert all((kept[name] == table[name][rows]).all() for name in table)


def test_a_spike_of_one_step_in_a_million_stays_at_its_step() -> None:
    table = steps(1_000_000)
    table["loss"][654_321] = 1e3
    table["loss"][100:200] = np.nan
    kept = thin_table(table, rows_per_run(1))
    assert len(kept["step"]) <= MAX_ROWS
    assert kept["step"][np.nanargmax(kept["loss"])] == 654_322


@pytest.mark.parametrize(("runs", "events"), [(1, 1_000_000), (100, 10_000)])
def test_a_million_steps_stay_below_15_mb(runs: int, events: int) -> None:
    tables = {f"{run}.steps": steps(events, run) for run in range(runs)}
    tables |= {f"{run}.epochs": steps(events // 100, run) for run in range(runs)}
    chart = Chart(id="loss", title="Loss", unit="", lines=tuple(Line(label=t, table=t, y="loss") for t in tables))
    data = charts_data((chart,), tables, (), rows_per_run(runs))
    size = sum(len(text) for table in data["tables"].values() for text in table.values())  # type: ignore[attr-defined]
    assert size < 10e6, "the rest of the page, with its program, is below a megabyte"
    assert rows_per_run(runs) >= MIN_ROWS


def test_packed_numbers_are_float32_with_nan_for_what_is_missing() -> None:
    values = np.frombuffer(base64.b64decode(packed(np.array([1.5, np.nan, -3.0]))), "<f4")
    assert values[0] == 1.5 and np.isnan(values[1]) and values[2] == -3.0
