"""Ranks of another version, recipe or data are refused before they communicate."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from cputrain.affinity.errors import InputError
from cputrain.affinity.rank import Rank
from cputrain.comm.group import check_consistency, describe_rank_difference
from cputrain.comm.store import SignedKeys
from cputrain.data.from_settings import open_data
from cputrain.mpi.supervise.run import free_port
from cputrain.recipe.loading import load_recipe
from cputrain.training.session import job_settings
from tests.support.commands import here, needs_two_cores
from tests.support.forked import ended, forked
from tests.support.images import write_images
from tests.support.trainings import LENET

RANKS = [Rank(rank=i, world_size=3, local_rank=i, local_world_size=3, convention="env") for i in range(3)]


def refusals(*facts: dict[str, str]) -> list[str]:
    """What each of three ranks with these facts is refused with, "" where it is not."""
    keys = SignedKeys(dist.HashStore(), "token")

    def refusal(rank: Rank) -> str:
        try:
            check_consistency(facts[rank.rank], rank, keys)
        except InputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(refusal, RANKS))


def test_ranks_that_agree_go_on() -> None:
    assert refusals(*({"torch": "2.13.0", "seed": "1"},) * 3) == [""] * 3


def test_all_ranks_are_told_who_differs_and_in_what() -> None:
    same = {"torch": "2.13.0", "optim.momentum": "0.9"}
    told = refusals(same, same, {**same, "torch": "2.12.0"})
    assert len(set(told)) == 1
    assert (
        "rank 2 on " in told[0]
        and "differs from rank 0 on " in told[0]
        and "in torch: 2.12.0 instead of 2.13.0" in told[0]
    )


def test_many_differences_are_some_names() -> None:
    own, first = ({"host": host, "facts": {f"k{i}": host for i in range(9)}} for host in ("n2", "n1"))
    line = describe_rank_difference(3, own, first)
    assert line.startswith("rank 3 on n2 differs from rank 0 on n1 in k0: n2 instead of n1, k1: ")
    assert "k4: n2 instead of n1 and 4 more: start all ranks with the same program, recipe and data" in line
    assert "x: 1 instead of nothing" in describe_rank_difference(
        1, {"host": "b", "facts": {"x": "1"}}, {"host": "a", "facts": {}}
    )


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images", train=4, val=2)


def facts(path: Path, *settings: str) -> dict[str, str]:
    recipe = load_recipe("imagefolder", (f"data.path={path}", *settings))
    return job_settings(recipe, open_data(recipe.data))


def differing(a: dict[str, str], b: dict[str, str]) -> set[str]:
    return {name for name in {**a, **b} if a.get(name) != b.get(name)}


def test_the_place_of_the_data_may_differ_and_its_content_may_not(images: Path, tmp_path: Path) -> None:
    here = facts(images, "output=a")
    copy = shutil.copytree(images, tmp_path / "copy")
    assert differing(here, facts(copy, "output=b", "data.stage_dir=/tmp")) == set()
    (copy / "train/class0/000.jpg").rename(copy / "train/class0/zzz.jpg")
    assert differing(here, facts(copy)) == {"train images"}
    assert here["train images"].startswith("12 (checksum ")
    (copy / "train/class0").rename(copy / "train/class00")
    (copy / "val/class0").rename(copy / "val/class00")
    assert "classes" in differing(here, facts(copy))
    assert differing(here, facts(images, "optim.momentum=0.8")) == {"optim.momentum"}


def test_shards_are_told_apart_by_the_checksums_of_their_images(images: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        assert here("prepare", "imagefolder", "images", out, cwd=tmp_path).returncode == 0
    assert differing(facts(tmp_path / "a"), facts(tmp_path / "b")) == set()
    pixels = images / "train/class1/002.jpg"
    pixels.write_bytes((images / "train/class1/003.jpg").read_bytes())
    assert here("prepare", "imagefolder", "images", "c", cwd=tmp_path).returncode == 0
    assert differing(facts(tmp_path / "a"), facts(tmp_path / "c")) == {"train images"}


@needs_two_cores
def test_a_training_of_two_recipes_is_refused_by_both_ranks(images: Path, tmp_path: Path) -> None:
    network = (*LENET, "comm.backend=gloo", "batch.local=2")
    command = ("-m", "cputrain", "train", "imagefolder", "data.path=images", *network, "output=run")
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        of_rank = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        started = [
            stack.enter_context(forked(*command, f"seed={seed}", cwd=tmp_path, **env))
            for seed, env in zip((7, 8), of_rank, strict=True)
        ]
        ranks = [ended(rank) for rank in started]
    assert [rank.status for rank in ranks] == [2, 2], ranks
    assert all("rank 1 on " in one.err and "in seed: 8 instead of 7: start all ranks with" in one.err for one in ranks)
    assert not (tmp_path / "run").exists()
