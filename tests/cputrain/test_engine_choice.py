"""Which engine and backend a training takes: pairs of releases that fit, what was measured, what is refused."""

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.records import ENGINE, Records, measured_of, read_records
from cputrain.affinity.planner.request import BF16
from cputrain.affinity.rank import Rank
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.cli.recipes import precision_lines
from cputrain.comm.group import choose_backend
from cputrain.comm.store import SignedKeys
from cputrain.measurements import new_record, rate_record, save_bf16_gain
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.request import request_of
from cputrain.training import engine
from cputrain.training.engine import measured_engine
from cputrain.training.ipex import check_pair
from tests.support.commands import here, refused

ROOT = Path(__file__).parents[2]


def test_the_extension_goes_with_the_torch_of_its_own_number_only() -> None:
    check_pair("2.8.0", "2.8.0+cpu")
    for extension, torch in (("2.8.0", "2.13.0"), ("2.7.0", "2.8.0")):
        with pytest.raises(InputError) as refusal:
            check_pair(extension, torch)
        assert (
            f"at most 2.8, but intel-extension-for-pytorch {extension} and torch {torch} are installed: pip install"
            in str(refusal.value)
        )
    with pytest.raises(InputError, match=r"at most 2\.8, but intel-extension-for-pytorch is not installed: pip"):
        check_pair(None, "2.8.0")


def test_engine_ipex_is_refused_in_a_line_before_anything_starts(tmp_path: Path) -> None:
    line = refused(here("train", "imagefolder", "engine=ipex", "data.path=none", cwd=tmp_path))
    assert line.startswith("cputrain: engine=ipex needs intel-extension-for-pytorch ") and "cputrain[ipex]" in line


def test_backend_mpi_is_refused_by_a_torch_without_it() -> None:
    keys = SignedKeys(HashStore(), "token")
    with pytest.raises(InputError, match=r"comm\.backend=mpi needs a torch with MPI.*set comm\.backend=ccl"):
        choose_backend("mpi", Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="torchrun"), keys)


def test_auto_takes_the_engine_that_was_measured_for_this_network_precision_and_batch() -> None:
    recipe = load_recipe("resnet50-small", ("batch.local=16", "data.path=synthetic"))
    machine = find_machine("skx-8160-2s")
    name = "resnet50 at 224 x 224, float32, libjpeg-turbo, batch of 16 a worker"
    values = {"engine": "eager", "why": "measured: eager is 1.10 (1.05-1.15) times as fast as native"}
    record = new_record(machine, ENGINE, name, values, command="cputrain tune resnet50-small")
    found = measured_engine(request_of(recipe), Records(usable=(record,)))
    assert found is not None and found[0] == "eager"
    assert found[1] == f"{values['why']} (cputrain tune resnet50-small, {record.date})"
    for other in ("batch.local=8", "precision=bf16", "data.crop=96"):
        changed = load_recipe("resnet50-small", ("batch.local=16", "data.path=synthetic", other))
        assert measured_engine(request_of(changed), Records(usable=(record,))) is None
    damaged = replace(record, values={"engine": "none such", "why": "x"})
    assert measured_engine(request_of(recipe), Records(usable=(damaged,))) is None


def test_plan_names_bf16_where_the_processor_has_it_and_by_how_much_once_that_is_measured() -> None:
    recipe = load_recipe("imagefolder", ("data.path=synthetic",))

    def lines(machine: str, precision: str = "float32", gain: float | None = None) -> list[str]:
        plan = plan_machine(find_machine(machine), request_of(recipe))
        if gain is not None:
            kept = rate_record(plan.machine, BF16, (gain, gain, gain), command="cputrain train")
            plan = replace(plan, measured=measured_of((kept,)))
        return precision_lines(precision, plan)

    assert lines("skx-8160-2s") == []
    assert lines("spr-8480plus-2s", "bf16") == []
    (unmeasured,) = lines("spr-8480plus-2s")
    assert unmeasured.startswith("precision=bf16 may be faster") and "amx_bf16" in unmeasured
    (measured,) = lines("spr-8480plus-2s", gain=2.13)
    assert "a convolution is 2.1 times as fast on this CPU" in measured and "(measured on 20" in measured
    assert lines("spr-8480plus-2s", gain=1.1) == []


def test_what_a_training_measures_at_its_start_is_what_plan_says_from_then_on(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    save_bf16_gain([3.1, 2.9, 3.0], {"CPUTRAIN_CACHE": str(cache)})
    recipe = ("imagefolder", "data.path=synthetic")
    kept = here("plan", *recipe, cwd=tmp_path, CPUTRAIN_CACHE=str(cache))
    has_bf16 = any("bf16" in flag for flag in this_machine().isa)
    assert kept.returncode == 0, kept.stderr
    assert ("a convolution is 3.0 times as fast on this CPU" in kept.stdout) == has_bf16
    (record,) = read_records(this_machine(), {"CPUTRAIN_CACHE": str(cache)}).usable
    assert (record.name, record.command) == (BF16, "cputrain train") and record.values["low"] == 2.9


def test_a_cache_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    save_bf16_gain([3.1, 2.9, 3.0], {"CPUTRAIN_CACHE": str(tmp_path / "cache")})
    assert (tmp_path / "cache").read_text() == "a file"


def test_only_one_file_each_of_python_and_cpp_knows_that_releases_of_torch_differ() -> None:
    asked = re.compile(r"torch\.__version__ *[<>=]|TORCH_VERSION|[Vv]ersion\(torch|version\.parse|signature\(Dist")
    files = [path for part in ("affinity", "mpi", "cputrain") for path in (ROOT / part).rglob("*")]
    files = [path for path in files if path.suffix in (".py", ".cpp", ".hpp")]
    assert len(files) > 100
    assert {path.name for path in files if asked.search(path.read_text())} == {"state.py", "pointwise_operators.hpp"}


def test_the_tested_sets_are_what_the_extras_and_the_makefile_install() -> None:
    project, sets = (ROOT / "pyproject.toml").read_text(), ROOT / "constraints"
    (ipex,) = re.findall(r"^ipex = \[(.*?)\]", project, re.MULTILINE)
    lines = [line for line in (sets / "torch-2.8-ipex.txt").read_text().splitlines() if not line.startswith("#")]
    assert sorted(re.findall(r'"([^"]+)"', ipex)) == sorted(lines)
    newest = (sets / "torch-2.13.txt").read_text()
    assert f"torch=={version('torch').partition('+')[0]}\n" in newest or find_spec("intel_extension_for_pytorch")


def test_a_busy_host_does_not_change_how_fast_bf16_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in float32 and bf16 in turn, of 20 and 10 ms; the first two of every eight were interrupted."""

    def clock() -> Iterator[float]:
        now = 0.0
        for call in count():
            yield now
            now += (0.01 if call % 2 else 0.02) + (0.5 if call % 8 < 2 else 0)
            yield now

    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=clock().__next__))
    monkeypatch.setattr(engine, "functional", SimpleNamespace(conv2d=lambda *_, **__: None))
    assert engine.bf16_speedups() == pytest.approx([2.0] * engine.ROUNDS)
