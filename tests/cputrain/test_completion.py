"""Completion: what a shell is told, and what bash then puts on the command line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.cli import COMMANDS, main
from cputrain.cli.words import SHELLS
from tests.support.commands import need


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What is proposed for the last of these words, in a shell's own protocol."""

    def asked(*words: str, shell: str = "bash") -> list[str]:
        monkeypatch.setenv("_CPUTRAIN_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("cputrain", *words)))
        monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words)))
        assert main([]) == 0
        return capsys.readouterr().out.splitlines()

    return asked


def test_commands_options_recipes_machines_and_keys_are_proposed(ask) -> None:
    assert set(ask("")) == {f"plain,{name}" for name in COMMANDS}
    assert ask("train", "demo") == ["plain,demo-digits"]
    assert "plain,--machine" in ask("plan", "--mach") and "plain,--submit" in ask("job", "slurm", "--sub")
    assert "plain,knl-7250-snc4-flat" in ask("launch", "--machine", "knl-7250-snc")
    assert "plain,skx-8160-2s" in ask("plan", "--machine", "=", "skx-8160")
    assert ask("train", "demo-digits", "batch.l") == ["plain,batch.local="]
    assert "plain,batch.local=" in ask("job", "slurm", "imagefolder", "ba")
    assert "plain,optim" in ask("keys", "opt") and ask("recipes", "sh") == ["plain,show"]
    assert ask("report", "") == ["file,"]


def test_the_commands_of_a_group_are_proposed(ask) -> None:
    assert ask("job", "kub") == ["plain,kubernetes"] and "plain,slurm" in ask("job", "")
    assert ask("job", "kubernetes", "--image") == ["plain,--image"]


@pytest.mark.parametrize("words", [("optim.name", "=", "la"), ("optim.name=la",)])
def test_values_of_a_key_are_proposed_however_bash_splits_words(ask, words: tuple[str, ...]) -> None:
    expected = ["lars", "lamb"] if len(words) == 3 else ["optim.name=lars", "optim.name=lamb"]
    assert ask("train", "demo-digits", *words) == [f"plain,{each}" for each in expected]
    assert ask("train", "demo-digits", "optim.nesterov", "=") == ["plain,true", "plain,false"]


def test_zsh_and_fish_are_answered_too(ask) -> None:
    assert "demo-digits" in ask("train", "demo", shell="zsh")
    assert any("demo-digits" in line for line in ask("train", "demo", shell="fish"))


def on_path(folder: Path) -> dict[str, str]:
    """The environment of a shell that finds cputrain."""
    program = folder / "cputrain"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cputrain "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def bash_proposes(folder: Path, *words: str) -> list[str]:
    """What bash would complete the last word with."""
    quoted = " ".join(f"'{word}'" for word in ("cputrain", *words))
    script = f"""
        eval "$(cputrain completion bash)"
        complete -p cputrain >&2
        compopt() {{ :; }}
        COMP_WORDS=({quoted}) COMP_CWORD={len(words)}
        _cputrain_completion cputrain
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-ec", script], env=on_path(folder), capture_output=True, text=True, check=True)
    assert "-F _cputrain_completion cputrain" in done.stderr
    return done.stdout.splitlines()


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    assert bash_proposes(tmp_path, "train", "demo") == ["demo-digits"]
    assert bash_proposes(tmp_path, "train", "demo-digits", "optim.name", "=", "lar") == ["lars"]


def test_fish_completes_with_the_script(tmp_path: Path) -> None:
    need("fish", "fish")
    script = "cputrain completion fish | source; complete -C 'cputrain train demo-digits optim.name=la'"
    done = subprocess.run(["fish", "-c", script], env=on_path(tmp_path), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["optim.name=lamb", "optim.name=lars"]


def test_a_proposal_imports_no_torch_and_nothing_of_other_commands() -> None:
    """What a Tab imports is what it costs. One process is asked for several."""
    code = """
import os, sys
from cputrain.cli import main
for words in sys.argv[1:]:
    typed = ["cputrain", *words.split()]
    os.environ |= {"COMP_WORDS": "\\n".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    assert main([]) == 0
    imported = {"torch", "numpy", "PIL", "cputrain.cli.data"} & set(sys.modules)
    assert not imported, (words, imported)
"""
    proposed = {"pl": "plan", "train demo": "demo-digits", "train demo-digits batch.l": "batch.local="}
    argv, env = [sys.executable, "-c", code, *proposed], {**os.environ, "_CPUTRAIN_COMPLETE": "bash_complete"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"plain,{expected}" for expected in proposed.values()]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_can_read_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_CPUTRAIN_COMPLETE" in script
    if shell != "bash" and not shutil.which(shell):
        need(shell, shell)
    subprocess.run([shell, "-n"] if shell != "fish" else ["fish", "--no-execute"], input=script, text=True, check=True)
