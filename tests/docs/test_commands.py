"""Every command, option and recipe key in README.md and docs/ exists: the command line parses all of them."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest
from site_pages.recipe_keys import keys

from cputrain.cli import group
from cputrain.mpi.launchers import LAUNCHERS
from tests.support.markdown import PAGES, ROOT, commands, inline, name_of, prose, scripts

# Options of other programs that the pages mention.
FOREIGN = {
    "--nnodes",
    "--nproc-per-node",
    "--batch",
    "--batch-size",
    "--bf16",
    "--account",
    "--avx2",
    "--bind-to",
    "--check",
    "--constraint",
    "--dtype",
    "--crop",
    "--cpu-bind",
    "--cpuset-cpus",
    "--durations",
    "--env",
    "--exclusive",
    "--extra-index-url",
    "--filter",
    "--gres",
    "--group-add",
    "--het-group",
    "--ipc",
    "--job-name",
    "--logdir",
    "--max-restarts",
    "--mail-type",
    "--mail-user",
    "--mem",
    "--mpi",
    "--shm-size",
    "--network",
    "--ninstances",
    "--no-python",
    "--ntasks",
    "--of",
    "--pid",
    "--pty",
    "--rounds",
    "--side",
    "--torch-backend",
    "--untagged",
    "--update-golden",
    "--user",
    "--userns",
    "--way",
}
KEY = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+(?==|$)")
FILES = (".csv", ".json", ".md", ".safetensors", ".svg", ".txt")
PLACEHOLDERS = {"KIND": "imagefolder", "FOLDER": "."}  # where the command line takes only certain words


def in_blocks() -> set[tuple[str, tuple[str, ...]]]:
    return {(name_of(page), tuple(words)) for page in PAGES for text in scripts(page) for words in commands(text)}


def in_prose() -> set[tuple[str, tuple[str, ...]]]:
    codes = ((page, code) for page in PAGES for code in inline(page) if re.match(r"(cputrain|mpirun) [^-]", code))
    calls = {(name_of(page), tuple(words)) for page, code in codes for words in commands(code.replace("|", "\\|"))}
    return {(page, words) for page, words in calls if not any("|" in word for word in words)}


def parse(words: list[str]) -> None:
    """Parse the words behind `cputrain` as the command line does, which raises its errors."""
    command: click.Command = group
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        _, found, words = command.resolve_command(click.Context(command), words)
        assert found is not None, words
        command = found
    if words or not isinstance(command, click.Group):
        with command.make_context(command.name, [PLACEHOLDERS.get(word, word) for word in words]):
            pass


def words_of(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else " ".join(value)


@pytest.mark.parametrize(("page", "words"), sorted(in_blocks()), ids=words_of)
def test_the_command_line_takes_a_command_of_a_block(page: str, words: tuple[str, ...]) -> None:
    parse(list(words))


@pytest.mark.parametrize(("page", "words"), sorted(in_prose()), ids=words_of)
def test_the_command_line_knows_a_command_of_the_text(page: str, words: tuple[str, ...]) -> None:
    with suppress(click.MissingParameter, click.BadOptionUsage):  # text may leave values out
        parse(list(words))


def options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), name)
            assert inner is not None
            yield from options(inner)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_options_that_a_page_names_exist(page: Path) -> None:
    known = {*options(group), *FOREIGN, "--help"}
    assert {found for code in inline(page) for found in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", code)} <= known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_recipe_keys_that_a_page_names_exist(page: Path) -> None:
    known = keys()
    sections = {key.partition(".")[0] for key in known if "." in key}
    words = [word for code in inline(page) for word in code.split() if not word.endswith(FILES)]
    named = {found[0] for word in words if (found := KEY.match(word))}
    assert {key for key in named if key.partition(".")[0] in sections} <= known


def test_the_guide_to_launching_lists_the_launchers_that_reach_other_hosts() -> None:
    listed = re.search(r"`--launcher ([a-z|]+)`", prose(ROOT / "docs/guides/launching.md"))
    assert listed is not None
    assert listed[1].split("|") == [name for name, launcher in LAUNCHERS.items() if launcher.reaches_hosts]
