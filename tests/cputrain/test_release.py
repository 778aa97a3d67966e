"""What a release checks before it exists."""

import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import tools.release
from cputrain import __version__
from tools.release import ReleaseError, check_contents, check_tag, check_version, requirements

ROOT = Path(__file__).parents[2]
TRACKED = ["cputrain/py.typed", "affinity/__init__.py", "configs/recipes/a.yaml", "tests/test_a.py", "Makefile"]
IN_WHEEL = [
    *("cputrain/py.typed", "cputrain/affinity/__init__.py", "cputrain/recipes/a.yaml", "cputrain-0.dist-info/METADATA"),
    f"cputrain-{__version__}.data/data/share/man/man1/cputrain-plan.1",
]


def packed(folder: Path, in_wheel: list[str], in_sdist: list[str]) -> tuple[Path, Path]:
    wheel, sdist = folder / "x.whl", folder / "x.tar.gz"
    text = "Requires-Dist: click>=8.2\nRequires-Dist: build; extra == 'release'\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in in_wheel:
            archive.writestr(name, text if name.endswith("METADATA") else "")
    with tarfile.open(sdist, "w:gz") as archive:
        for name in in_sdist:
            archive.addfile(tarfile.TarInfo(f"cputrain-{__version__}/{name}"))
    return wheel, sdist


def test_every_file_has_the_same_version(tmp_path: Path) -> None:
    check_version(ROOT)
    for name in ("CITATION.cff", "compat/pyproject.toml", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text().replace(__version__, "9.9.9"))
    with pytest.raises(ReleaseError, match=r"CITATION.cff has version 9\.9\.9, cputrain/__init__.py"):
        check_version(tmp_path)


def test_the_tag_is_the_version_and_everything_is_committed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {__version__} (unreleased)\n")
    with pytest.raises(ReleaseError, match="is not committed"):
        check_tag(tmp_path)
    git("add", ".")
    git("commit", "-qm", "a")
    git("tag", "v0.0.1")
    with pytest.raises(ReleaseError, match=rf"has the tags \['v0.0.1'\]: git tag v{__version__}"):
        check_tag(tmp_path)
    git("tag", f"v{__version__}")
    with pytest.raises(ReleaseError, match="write the date"):
        check_tag(tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {__version__} (2027-01-31)\n")
    git("commit", "-qam", "b")
    git("tag", "-f", f"v{__version__}")
    check_tag(tmp_path)


def test_a_file_that_is_missing_or_foreign_is_named(tmp_path: Path) -> None:
    wheel, sdist = packed(tmp_path, IN_WHEEL, TRACKED)
    check_contents(wheel, sdist, TRACKED)
    assert requirements(wheel) == ["click>=8.2"]
    for in_wheel, in_sdist, message in (
        (IN_WHEEL[1:], TRACKED, "lacks cputrain/py.typed"),
        ([*IN_WHEEL, "tests/test_a.py"], TRACKED, "also contains tests/test_a.py"),
        (IN_WHEEL[:-1], TRACKED, "no manual pages"),
        (IN_WHEEL, TRACKED[1:], "lacks cputrain/py.typed"),
    ):
        with pytest.raises(ReleaseError, match=message):
            check_contents(*packed(tmp_path, in_wheel, in_sdist), TRACKED)


def test_a_release_that_cannot_be_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tools.release, "release", lambda: pytest.fail("nothing is built"))
    monkeypatch.setattr(tools.release, "__version__", "7.0")
    assert tools.release.main([]) == 1
    assert capsys.readouterr().err.startswith("release: CITATION.cff has version")
