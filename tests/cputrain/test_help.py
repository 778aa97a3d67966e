"""--help of commands with many options, and the manual pages."""

import pydoc
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest
from site_pages.python_api import SECTIONS

import cputrain
from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import ExitStatus
from cputrain.cli import group
from cputrain.cli.options import OTHER, SectionedCommand
from tools.man_pages import main as write_man_pages
from tools.man_pages import man_pages, roff

SECTIONED = ("plan", "launch", "job slurm", "job pbs", "job kubernetes")


def command(name: str) -> tuple[SectionedCommand, click.Context]:
    found: click.Command | None = group
    for word in name.split():
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), word)
    assert isinstance(found, SectionedCommand)
    return found, click.Context(found, info_name=name, max_content_width=100)


@pytest.mark.parametrize("name", ["bench", "data", "doctor", "job", "machines", "recipes", "reproduce"])
def test_a_group_s_help_has_the_whole_summary_of_each_command(name: str) -> None:
    found = group.get_command(click.Context(group), name)
    assert isinstance(found, click.Group)
    text = " ".join(found.get_help(click.Context(found, info_name=name, terminal_width=80)).split())
    assert found.commands and "..." not in text.partition(" Commands: ")[2]
    for each in found.commands.values():
        assert " ".join((each.help or "").partition("\n\n")[0].split()).split(". ")[0].removesuffix(".") in text


def test_the_help_of_all_commands_fits_a_terminal() -> None:
    lines = group.get_help(click.Context(group, info_name="cputrain")).splitlines()
    assert len(lines) < 40 and max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if line.startswith("  ")} == set(
        group.list_commands(click.Context(group))
    )


@pytest.mark.parametrize("name", SECTIONED)
def test_every_option_stands_in_one_section(name: str) -> None:
    """A new option belongs into a section of cputrain/cli/options.py or of its command."""
    found, context = command(name)
    sections = dict(found.options_by_section(context))
    assert [option.opts[-1] for option in sections.pop(OTHER)] == ["--help"]
    shown = [option.name for options in sections.values() for option in options]
    own = [param.name for param in found.params if isinstance(param, click.Option)]
    assert sorted(shown) == sorted(own) and len(sections) >= 4


@pytest.mark.parametrize("name", SECTIONED)
def test_help_has_sections_and_examples_that_the_command_takes(name: str) -> None:
    found, context = command(name)
    text = found.get_help(context)
    assert "Workers and cores:\n" in text and "Network and launcher:\n" in text and "Examples:\n" in text
    assert "\nOptions:" not in text
    for example in found.examples:
        assert f"  {example}\n" in f"{text}\n"
        words = example.split()
        own = 1 + len(name.split())
        assert words[:own] == ["cputrain", *name.split()]
        if "--hostfile" not in words:  # which has to exist
            with found.make_context(name, words[own:]):
                pass


@pytest.mark.parametrize(
    ("name", "words", "refused"),
    [
        (
            "job slurm",
            ("--nodes", "2", "--time", "1:00:00"),
            (("--hosts", "n1"), ("--share",), ("--oversubscribe",), ("--bind", "launcher"), ("--queue", "q")),
        ),
        (
            "job pbs",
            ("--nodes", "2", "--time", "1:00:00"),
            (("--hosts", "n1"), ("--partition", "p"), ("--qos", "q"), ("--constraint", "c")),
        ),
        (
            "job kubernetes",
            ("--nodes", "2", "--cpus", "4", "--memory", "8Gi", "--image", "a"),
            (
                *(("--hosts", "n1"), ("--machine", "skx-8160-2s"), ("--share",), ("--oversubscribe",)),
                *(("--cores", "0"), ("--bind", "launcher")),
            ),
        ),
    ],
)
def test_help_leaves_out_what_a_command_always_refuses(
    name: str, words: tuple[str, ...], refused: tuple[tuple[str, ...], ...]
) -> None:
    found, context = command(name)
    text = found.get_help(context)
    assert "--ppn auto|N" in text and "--hostfile" not in text
    page = man_pages()[f"cputrain-{name.replace(' ', '-')}.1"]
    for option in refused:
        assert option[0] not in text and roff(option[0]) not in page
        with pytest.raises(InputError, match=r"remove|give"):
            group.main([*name.split(), *words, *option, "--", "x.py"], standalone_mode=False)


def test_manual_pages_have_the_exit_statuses_of_the_reference() -> None:
    page = man_pages()["cputrain-plan.1"]
    assert all(f".B {status.value}\n{roff(status.meaning)}\n" in page for status in ExitStatus)


def test_every_command_has_a_manual_page() -> None:
    pages = man_pages()
    assert {"cputrain.1", "cputrain-plan.1", "cputrain-machine-save.1", "cputrain-doctor-ccl.1"} <= set(pages)
    plan = pages["cputrain-plan.1"]
    for part in (
        ".TH CPUTRAIN-PLAN 1",
        ".SH SYNOPSIS",
        ".SS Workers and cores",
        "\\-\\-ppn",
        ".SH EXAMPLES",
        ".SH EXIT",
    ):
        assert part in plan
    assert ".BR cputrain\\-plan (1)" in pages["cputrain.1"]
    assert roff(".x -- a\\b 'c'") == "\\&.x \\-\\- a\\eb \\(aqc\\(aq"


def test_groff_has_nothing_to_warn_of(tmp_path: Path) -> None:
    if not shutil.which("groff"):
        pytest.skip(reason="needs the system package groff (groff)")
    write_man_pages(tmp_path)
    pages = sorted(tmp_path.glob("*.1"))
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", *pages],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.stderr == "" and "CPUTRAIN-JOB(1)" in done.stdout and len(pages) > 30


def test_no_value_is_called_by_its_type_alone() -> None:
    """N, PIXELS or RATE in a help, not click's INTEGER RANGE."""
    pages = {name for name, text in man_pages().items() if "INTEGER" in text or "FLOAT" in text}
    assert pages == set()


def test_a_page_names_the_others_as_their_files_are_named() -> None:
    pages = man_pages()
    named = re.findall(r"^\.BR (\S.*) \(1\)", "".join(pages.values()), re.MULTILINE)
    assert {f"{name.replace(chr(92), '')}.1" for name in named} == set(pages)


def test_train_s_help_has_examples_and_names_where_recipes_and_keys_are_listed() -> None:
    found, context = command("train")
    text = found.get_help(context)
    assert "`cputrain recipes` lists the shipped recipes, `cputrain keys` the keys" in " ".join(text.split())
    assert "Examples:\n  cputrain train imagefolder data.path=DIR" in text
    for line in found.examples:
        found.make_context("train", line.split()[2:])


@pytest.mark.slow
def test_a_script_sees_what_it_may_use() -> None:
    """In dir() and help(): one list, whose names exist, and which the page of the Python API has."""
    packages = ["affinity", "predict", "kernels", "data", "optim", "schedule", "comm", "checkpoint", "training"]
    assert set(dir(cputrain)) == {*cputrain.__all__, *packages} and len(cputrain.__all__) <= 33
    assert all(getattr(cputrain, name).__name__ == name for name in cputrain.__all__ if name != "__version__")
    described = {name for names in SECTIONS.values() for name in names if "." not in name}
    assert described == set(cputrain.__all__) - {"__version__"}
    listed = re.findall(r"\b(?!import)\w+", (cputrain.__doc__ or "").partition("\n\n")[2].partition("\n\n")[0])
    assert described <= set(listed)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = cputrain.trian
    text = pydoc.plain(pydoc.render_doc(cputrain))
    assert "A script may use" in text and "train(" in text and "__getattr__" not in text
