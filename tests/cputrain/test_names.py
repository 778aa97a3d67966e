"""Names of files are bytes and text is UTF-8: in any locale, with names that are not UTF-8, in both Unicode forms."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.cli import main
from cputrain.data.formats.open import open_dataset
from tests.support.commands import here, need, refused
from tests.support.forked import ended, forked, in_fork
from tests.support.images import survey, write_images
from tests.support.run_folders import write_run
from tests.support.trainings import LENET

LATIN_1, UTF_8 = b"caf\xe9", "thé".encode()
NFC, NFD = "caf\u00e9", "cafe\u0301"
COMPOSED, APART = NFC.encode(), NFD.encode()
POSIX = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
SMALL = (
    *(*LENET, "engine=eager", "batch.local=4", "plan.ppn=1", "plan.threads=1"),
    *("epochs=2", "schedule.warmup_epochs=0", "max_steps=1", "comm.backend=gloo"),
)


def named(root: Path, **names: bytes) -> Path:
    """Give the folders class0, class1, ... of all splits these names, by split and number: train0=b"dog"."""
    for place, name in names.items():
        split, number = place[:-1], place[-1]
        (root / split / f"class{number}").rename(root / split / os.fsdecode(name))
    return root


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", classes=2, train=4, val=2)
    return named(tmp_path / "images", train0=LATIN_1, val0=LATIN_1, train1=UTF_8, val1=UTF_8)


@pytest.fixture(scope="session")
def latin_1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a locale whose encoding is ISO-8859-1."""
    need("locales", "localedef")
    folder = tmp_path_factory.mktemp("locales")
    command = ("localedef", "-i", "en_US", "-f", "ISO-8859-1", folder / "en_US.ISO-8859-1")
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(reason="needs the system package locales (/usr/share/i18n)")
    return {"LOCPATH": str(folder), "LC_ALL": "en_US.ISO-8859-1"}


@pytest.fixture(params=["UTF-8", "POSIX", "ISO-8859-1"])
def locale(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == "ISO-8859-1":
        found: dict[str, str] = request.getfixturevalue("latin_1")
        return found
    return POSIX if request.param == "POSIX" else {"LC_ALL": "C.UTF-8"}


def printed(*words: str, cwd: Path, **env: str) -> bytes:
    """What a command prints to stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "cputrain", *words], cwd=cwd, env={**os.environ, **env}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.long
def test_a_training_in_any_locale_keeps_names_of_any_bytes(
    images: Path, locale: dict[str, str], tmp_path: Path
) -> None:
    """With curves on its stdout, which takes ASCII alone if the locale has no other letters."""
    place = tmp_path / os.fsdecode(LATIN_1)
    place.mkdir()
    images.rename(place / "images")
    strict = {"PYTHONIOENCODING": "ascii:strict"} if locale is POSIX else {}
    words = ("train", "imagefolder", f"data.path={place}/images", *SMALL, f"output={place}/sortié")
    out = printed(*words, cwd=tmp_path, **locale, **strict)
    assert out.isascii() or not strict
    assert any(name in out for name in ("sortié/".encode(), b"sorti\\xe9/", b"sorti\xe9/"))
    run = place / "sortié"  # UTF-8 on disk
    record = json.loads((run / "checkpoints/best/checkpoint.json").read_text(encoding="utf-8"))
    classes = record["checkpoint"]["network"]["classes"]
    assert [os.fsencode(name) for name in classes] == [LATIN_1, UTF_8]
    assert "sortié" in (run / "report.html").read_text(encoding="utf-8")
    out = printed("eval", "sortié", "--report", "page é.html", cwd=place, **locale)
    assert any(name in out for name in ("page é.html".encode(), b"page \\xe9.html", b"page \xe9.html"))
    assert "thé" in (page := (place / "page é.html").read_text(encoding="utf-8")) and "caf\\xe9" in page
    assert "images/val/thé/000.jpg,thé," in (place / "page é.csv").read_text(encoding="utf-8")
    said = printed("predict", "sortié", "images/val", cwd=place, **locale)
    # Under POSIX the ranks' Python is in its UTF-8 mode (PEP 540), as PYTHONUTF8 does not count in isolated mode.
    encoding = "latin-1" if "8859" in locale["LC_ALL"] else "utf-8"
    assert b"caf\\xe9 " in said and "thé ".encode(encoding) in said


def test_folders_whose_names_are_not_utf_8_can_be_trained_in(images: Path, tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(LATIN_1)
    place.mkdir()
    images.rename(place / "images")
    words = ("train", "imagefolder", f"data.path={place}/images", *SMALL, f"output={place}/run")
    done = in_fork(*words, cwd=tmp_path)
    assert done.returncode == 0 and "caf\\xe9/run/report.html" in done.stdout, done.stderr
    done = in_fork("train", "run", "--resume", "max_steps=2", cwd=place)
    assert done.returncode == 0, done.stderr
    for name in ("w.pt", "w.safetensors", "w.torchscript"):
        assert here("export", "run", name, cwd=place).returncode == 0 and (place / name).is_file()
    data = f"data.path={place}/images"
    for command in (
        ("plan", "imagefolder", data, "batch.local=2", "--format", "command"),
        ("launch", "--dry-run", "--", "/bin/cat", data),
    ):
        assert os.fsencode(data) in printed(*command, cwd=tmp_path)  # a path that a shell finds


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_prepared_shards_have_the_bytes_of_names(images: Path, kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["prepare", "imagefolder", str(images), str(out), "--format", kind]) == 0
    assert [os.fsencode(name) for name in open_dataset(str(out)).classes] == [LATIN_1, UTF_8]
    if kind == "tfrecord":
        data = b"".join(path.read_bytes() for path in out.glob("train-*-of-*"))
        assert (
            data.count(b"\x04" + LATIN_1) == 4 and data.count(b"\x04" + UTF_8) == 4
        )  # a field of four bytes, each image
        shutil.copytree(out, bare := tmp_path / "bare", ignore=shutil.ignore_patterns("manifest.json", "*.npy"))
        assert [os.fsencode(name) for name in open_dataset(str(bare)).classes] == [LATIN_1, UTF_8]


def test_a_class_in_two_unicode_forms_is_one_and_that_is_said(tmp_path: Path) -> None:
    """Unicode Standard Annex 15: canonically equivalent strings are the same text; HFS+ keeps names decomposed."""
    for number, (train, val) in enumerate(((COMPOSED, APART), (APART, COMPOSED))):
        root = write_images(tmp_path / str(number), classes=2, train=4, val=3)
        named(root, train0=train, val0=val, train1=b"dog", val1=b"dog")
        summary, opened = survey(str(root)), open_dataset(str(root))
        assert summary.classes == opened.classes == (train.decode(), "dog") and (summary.val, len(opened.val)) == (6, 6)
        (note,) = summary.notes
        assert summary.notes == opened.notes and "another Unicode form" in note
        assert f"{val.decode()!a} for {train.decode()!a}; the class is the same" in note
        assert os.fsencode(opened.val.name(0)).split(b"/")[-2] == val


def test_several_classes_in_two_unicode_forms_are_counted(tmp_path: Path) -> None:
    """Hangul as syllables and as the parts that HFS+ writes; Angstrom's sign, which is a letter of Swedish."""
    names = (NFC, NFD), ("\ud55c", "\u1112\u1161\u11ab"), ("\u212b", "\u00c5")
    splits = (("train", 0), ("val", 1))
    given = {f"{split}{number}": pair[side].encode() for number, pair in enumerate(names) for split, side in splits}
    root = named(write_images(tmp_path / "images", classes=3, train=4, val=3), **given)
    opened = open_dataset(str(root))
    assert len(opened.classes) == 3 and len(opened.val) == 9
    (note,) = opened.notes
    assert "(and 2 more names) in another Unicode form" in note and note.endswith("; the class is the same"), note


def test_a_message_quotes_a_name_by_its_bytes() -> None:
    name = os.fsdecode(b"caf\xe9")
    for command in (("recipes", name), ("machines", name), (name,), ("prepare", name, "in", "out")):
        line = refused(here(*command))
        assert r"'caf\xe9'" in line, line


def test_two_folders_that_look_the_same_are_refused(tmp_path: Path) -> None:
    root = named(write_images(tmp_path / "images", classes=2), train0=COMPOSED, train1=APART)
    line = refused(here("train", "imagefolder", f"data.path={root}", "--dry-run"))
    assert "twice, in two Unicode forms, as 'cafe\\u0301' and 'caf\\xe9': move the images" in line


def test_names_of_other_encodings_are_the_same_text_in_every_locale(latin_1: dict[str, str]) -> None:
    code = "import sys; from cputrain.affinity.terminal import text_of; print(*map(ascii, map(text_of, sys.argv[1:])))"
    for env in (latin_1, POSIX, {"LC_ALL": "C.UTF-8"}):
        command = [os.fsencode(sys.executable), b"-c", code.encode(), UTF_8, LATIN_1, APART]
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, cwd=Path(__file__).parents[2])
        assert done.stdout.split() == [rb"'th\xe9'", rb"'caf\udce9'", rb"'cafe\u0301'"], done.stderr


ASCII_ONLY = (POSIX, {"PYTHONIOENCODING": "ascii"}, {**POSIX, "PYTHONIOENCODING": "ascii:strict"})
COMMANDS = ("plan --explain", "recipes", "keys", "--help", "train --help", "machines", "env")
ABOUT_NAMES = ("report sortié", "data info images")


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(ASCII_ONLY[0], marks=(pytest.mark.long, pytest.mark.nightly)),
        ASCII_ONLY[1],
        pytest.param(ASCII_ONLY[2], marks=pytest.mark.long),
    ],
)
def test_streams_of_ascii_alone_take_every_command_s_output_with_curves_and_names(
    env: dict[str, str], images: Path, tmp_path: Path
) -> None:
    """As each by itself does it, but in one process, which Python takes half a second to start."""
    write_run(tmp_path / "sortié", ranks=1, epochs=2, steps=4)
    code = (
        "import sys\nfrom cputrain.affinity.terminal import use_utf8\nfrom cputrain.cli import main\nuse_utf8()\n"
        "print([main(words.split()) for words in sys.argv[1:]])"
    )
    slow = ("doctor",) if env is ASCII_ONLY[-1] else ()  # and 1 on a host that lacks something
    argv = [sys.executable, "-c", code, *COMMANDS, *ABOUT_NAMES, *slow]
    done = subprocess.run(argv, cwd=tmp_path, env={**os.environ, **env}, capture_output=True)
    assert sum(json.loads(done.stdout.splitlines()[-1])) <= len(slow), done.stderr
    assert done.stdout.isascii() and done.stderr.isascii() and b"Traceback" not in done.stderr


def test_what_a_launched_program_prints_in_its_locale_is_shown(latin_1: dict[str, str], tmp_path: Path) -> None:
    """A rank's é in ISO-8859-1 is the same byte on a terminal of that encoding, and in its log."""
    out = printed("launch", "--ppn", "1", "--", "printf", r"caf\351\n", cwd=tmp_path, **latin_1)
    assert b"caf\xe9\n" in out
    out = printed("launch", "--ppn", "1", "--", "printf", r"caf\351\n", cwd=tmp_path, LC_ALL="C.UTF-8")
    assert rb"caf\xe9" in out


@pytest.mark.parametrize("setting", ["data.resize=4097", "data.std=[0,1,1]"])
def test_what_a_checkpoint_cannot_hold_is_refused_before_the_first_step(setting: str, tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=2, train=4, val=2)
    done = in_fork("train", "imagefolder", "data.path=images", *SMALL, "output=run", setting, cwd=tmp_path)
    assert done.returncode == 2 and "checkpoints cannot store " in done.stderr, done.stderr
    assert '"step"' not in (tmp_path / "run/events.jsonl").read_text(encoding="utf-8")


OWN_CODE = """
import sys
sys.stdout.reconfigure(encoding="ascii", errors="strict")
import torch
from cputrain import train

data = [(torch.rand(2), number % 2) for number in range(8)]
settings = {"output": "sorti\u00e9", "epochs": 1, "schedule.warmup_epochs": 0, "batch.local": 4, "comm.backend": "gloo"}
loss = torch.nn.CrossEntropyLoss()
train(torch.nn.Linear(2, 2), loss, data, data, settings=settings, classes=["th\u00e9", 1])
print(sys.stdout.errors)
"""


def test_a_script_s_own_ascii_stream_takes_names_and_is_as_before_afterwards(tmp_path: Path) -> None:
    with forked("-c", OWN_CODE, cwd=tmp_path) as process:
        done = ended(process)
    assert done.status == 0 and done.out.isascii(), done.err
    lines = done.out.splitlines()
    assert lines[-2].endswith(r"sorti\xe9/report.html") and lines[-1] == "strict"
    record = json.loads((tmp_path / "sortié/checkpoints/best/checkpoint.json").read_text(encoding="utf-8"))
    assert record["checkpoint"]["network"]["classes"] == ["thé", "1"]
