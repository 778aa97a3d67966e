"""The shell blocks of README.md and docs/ run, and every block says what it is."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import children_of, stacks_of
from tests.support.images import write_images
from tests.support.markdown import PAGES, blocks, name_of

TAGS = {
    "sh": "runs in a scratch folder, the blocks of a page in their order",
    "sh cluster": "needs hosts, data or files that are not here: parsed by test_commands",
    "sh install": "installs: parsed likewise",
    "console": "a transcript: its commands run, and print what it shows (test_transcripts)",
    "console here": "a transcript from another machine: commands behind $ are parsed by test_commands",
    "text": "output alone",
    "python": "compiles",
    "json": "",
    "yaml": "",
}
WITH_TORCH = {  # whose train.py forms a process group; elsewhere, ranks show their variables
    "README.md": (),
    "docs/start.md": (pytest.mark.long,),
    "docs/guides/runs.md": (pytest.mark.long,),
    **dict.fromkeys(
        ("docs/guides/training.md", "docs/guides/reports.md", "docs/guides/simulate.md"),
        (pytest.mark.long, pytest.mark.nightly),
    ),
}
LONG = ("recipes", "command-line", "planning", "launching", "images", "cluster-run")  # take 5 to 10 s each
MARKS = {**{f"docs/guides/{name}.md": (pytest.mark.long,) for name in LONG}, **WITH_TORCH}
HANGS_S = 1800.0  # for all blocks of a page; the first training also compiles the oneCCL backend
THEIRS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print("ranks", int(one))
dist.destroy_process_group()
"""
WITHOUT_TORCH = """
import os

print("ranks", int(os.environ["WORLD_SIZE"]), os.environ["RANK"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages call data/photos."""
    folder = tmp_path_factory.mktemp("pages")
    write_images(folder / "data/photos", classes=2, train=20, val=4, size=40)
    return folder


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=MARKS.get(name_of(page), ()))
        for page in PAGES
        if any(block.tag == "sh" for block in blocks(page))
    ],
    ids=name_of,
)
def test_the_shell_blocks_of_a_page_run(page: Path, place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(place, folder)
    (folder / "train.py").write_text(THEIRS if name_of(page) in WITH_TORCH else WITHOUT_TORCH)
    script = "\n".join(block.text for block in blocks(page) if block.tag == "sh")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    argv, env, pipe = ["bash", "-euo", "pipefail", "-c", script], {**os.environ, "PATH": path}, subprocess.PIPE
    with subprocess.Popen(argv, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True) as shell:
        try:
            out, err = shell.communicate(timeout=HANGS_S)
        except subprocess.TimeoutExpired:
            where = "\n".join(stacks_of(pid) for pid in [shell.pid, *children_of(shell.pid)])
            shell.terminate()
            pytest.fail(f"hangs: {name_of(page)}\n{where}")
    assert shell.returncode == 0, f"{err}\n{out}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_a_page_says_what_it_is(page: Path) -> None:
    found = [block for block in blocks(page) if not block.tag.startswith("{")]
    assert {block.tag for block in found} <= set(TAGS)
    for block in found:
        if block.tag == "python":
            ast.parse(block.text)
        if block.tag.startswith("console"):
            assert block.text.startswith("$ ")
