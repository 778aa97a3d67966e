"""Images -> shards: killed and started again, odd files counted, damage found."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cputrain.affinity.errors import InputError
from cputrain.cli import main
from cputrain.data import prepare as preparing
from cputrain.data.formats.dataset import check_labels
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.shards import RECORD, Shards
from cputrain.data.formats.source import apportioned
from cputrain.data.order import epoch_order, expected_classes_in_window, mean_classes_in_window
from cputrain.data.prepare import Options, inspect, pack_dataset
from cputrain.data.sources import open_source
from tests.support.commands import PYTHON, here
from tests.support.images import jpeg, survey, write_files, write_images, write_mnist


def options(source: Path, kind: str = "imagefolder", **how: object) -> Options:
    return Options(kind=kind, source=str(source), **how)


def test_a_share_of_each_class_is_split_off_by_the_seed(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images") / "train"
    splits = [open_source("imagefolder", folder, val_fraction=0.25, seed=seed) for seed in (1, 1, 2)]
    assert all(split.test is None for split in splits)
    names = [[split.val.name(i) for i in range(len(split.val))] for split in splits]
    assert names[0] == names[1] != names[2]
    for split in splits:
        assert Counter(split.val.labels.tolist()) == {0: 3, 1: 3, 2: 3}
        all_names = [part.name(i) for part in (split.train, split.val) for i in range(len(part))]
        assert len(set(all_names)) == 36
    with pytest.raises(InputError, match=r"class class0 has 12 .*, too few to split off 0\.99"):
        open_source("imagefolder", folder, val_fraction=0.99, seed=1)


@given(
    sizes=st.lists(st.integers(4, 400), min_size=1, max_size=30),
    fraction=st.floats(0.26, 0.74),
)
def test_shares_of_classes_add_up_to_the_share_of_all(sizes: list[int], fraction: float) -> None:
    counts = apportioned(fraction, sizes)
    assert sum(counts) == round(fraction * sum(sizes))
    assert all(abs(count - fraction * size) < 1 and count >= 1 for count, size in zip(counts, sizes, strict=True))


def test_a_source_s_own_validation_images_become_the_test_split(tmp_path: Path) -> None:
    """MNIST's 60,000 and 10,000 as the lab has them: 50,000, 10,000 and 10,000; here a thousandth, without rounding."""
    write_mnist(tmp_path / "mnist", train=60, val=10, zipped=False)
    dataset = open_source("mnist", tmp_path / "mnist", val_fraction=1 / 6, seed=1)
    assert [len(images) for images in dataset.splits.values()] == [50, 10, 10]
    assert Counter(dataset.val.labels.tolist()) == dict.fromkeys(range(10), 1), "one of each class"
    whole = open_source("mnist", tmp_path / "mnist", val_fraction=None, seed=1)
    assert whole.test is None and dataset.test is not None
    assert [dataset.test.read(i) for i in range(10)] == [whole.val.read(i) for i in range(10)]
    made = here("prepare", "mnist", "mnist", "out", "--val-fraction", "1/6", cwd=tmp_path)
    assert made.returncode == 0 and "out: test 10 images" in made.stdout, made.stderr
    info = here("data", "info", "out", cwd=tmp_path)
    assert "test: 10 images" in info.stdout and survey(str(tmp_path / "out")).test == 10
    assert here("data", "show", "out", "--split", "test", cwd=tmp_path).returncode == 0
    assert "0 of 70 samples damaged" in here("data", "verify", "out", cwd=tmp_path).stdout


def test_validation_and_test_images_are_drawn_from_a_source_without_them(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", train=20) / "train"
    dataset = open_source("imagefolder", folder, val_fraction=0.2, test_fraction=0.1, seed=1)
    assert [Counter(images.labels.tolist()) for images in dataset.splits.values()] == [
        dict.fromkeys(range(3), count) for count in (14, 4, 2)
    ]
    names = [images.name(i) for images in dataset.splits.values() for i in range(len(images))]
    assert len(set(names)) == 60
    alone = open_source("imagefolder", folder, val_fraction=0.2, seed=1)
    assert [alone.val.name(i) for i in range(12)] == [dataset.val.name(i) for i in range(12)]


def test_a_folder_s_test_images_are_a_split_or_stand_in_for_validation(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    shutil.copytree(folder / "val", folder / "test")
    (folder / "test/class2/000.jpg").unlink()
    for found in (open_dataset(str(folder)), open_source("imagefolder", folder, val_fraction=None, seed=1)):
        assert [len(images) for images in found.splits.values()] == [36, 15, 14]
    with pytest.raises(InputError, match="has its own validation and test images: remove --val-fraction"):
        open_source("imagefolder", folder, val_fraction=0.25, seed=1)
    shutil.rmtree(folder / "val")
    assert (survey(str(folder)).val, survey(str(folder)).test) == (14, 0), (
        "train/ and test/ alone, as many sets have it"
    )
    drawn = open_source("imagefolder", folder, val_fraction=0.25, seed=1)
    assert [len(images) for images in drawn.splits.values()] == [27, 9, 14]
    with pytest.raises(InputError, match="has its own images to test on: give only --val-fraction"):
        open_source("imagefolder", folder, val_fraction=0.25, test_fraction=0.25, seed=1)
    shutil.move(folder / "test", folder / "val")
    (folder / "test").mkdir()
    (folder / "test/0001.jpg").write_bytes(b"one without a class")
    assert open_dataset(str(folder)).test is None, "images without classes are no split"


@pytest.mark.parametrize("text", ["0", "1", "5/4", "-0.5", "1/0", "a sixth"])
def test_shares_are_between_0_and_1(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["prepare", "imagefolder", "images", "out", f"--val-fraction={text}"]) == 2
    assert f"{text!r} is not a fraction between 0 and 1, such as 0.2 or 1/6" in capsys.readouterr().err


def test_images_are_scaled_down_and_encoded_anew(tmp_path: Path) -> None:
    sides = {f"in/{split}/a/{i}.jpg": (300, 100)[i % 2] for split in ("train", "val") for i in range(4)}
    write_files(tmp_path, {place: jpeg(i, side) for i, (place, side) in enumerate(sides.items())})
    pack_dataset(open_dataset(str(tmp_path / "in")), tmp_path / "out", options(tmp_path, short_side=128, quality=80))
    packed = Shards(tmp_path / "out", "train")
    sizes = [Image.open(io.BytesIO(packed.read(i))).size for i in range(4)]
    assert sorted(sizes) == [(108, 100), (108, 100), (131, 128), (131, 128)]  # smaller ones stay as large as they are
    assert sizes == [(int(row["width"]), int(row["height"])) for row in packed.index]
    assert all(inspect(packed.read(i)).suffix == ".jpg" for i in range(4))


@pytest.mark.parametrize("anew", [False, True])
def test_odd_images_are_counted_and_damaged_ones_left_out(tmp_path: Path, anew: bool) -> None:
    for split in ("train", "val"):
        folder = tmp_path / f"in/{split}/odd"
        folder.mkdir(parents=True)
        Image.new("L", (20, 20), 7).save(folder / "gray.jpg")
        Image.new("CMYK", (20, 20)).save(folder / "cmyk.jpeg")
        Image.new("RGBA", (20, 20)).save(folder / "png.png")
        (folder / "png.png").rename(folder / "really_png.jpg")
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.new("RGB", (20, 30)).save(folder / "turned.jpg", exif=exif)
        (folder / "tail.jpg").write_bytes(jpeg(1) + b"trailing")
        (folder / "cut.jpg").write_bytes(jpeg(1)[:700])
        (folder / "page.jpg").write_bytes(b"<html>404</html>")
        (folder / "empty.jpg").write_bytes(b"")
    how = {"short_side": 16, "quality": 90} if anew else {}
    made = pack_dataset(open_dataset(str(tmp_path / "in")), tmp_path / "out", options(tmp_path, **how))["train"]
    assert made["unusual"] == {"gray": 1, "cmyk": 1, "no jpeg": 1, "exif rotation": 1, "no end marker": 1}
    assert made["images"] == 5 and len(made["damaged"]) == 3
    assert sorted(line.split(":")[0].rsplit("/", 1)[1] for line in made["damaged"]) == [
        "cut.jpg",
        "empty.jpg",
        "page.jpg",
    ]
    assert not any(" at 0x" in line for line in made["damaged"]), "an address differs from run to run"
    shards = Shards(tmp_path / "out", "train")
    assert [shards.name(i).rsplit(":", 1)[1] for i in range(5)] == [f"{i:08d}" for i in range(5)]
    result = here("data", "verify", str(tmp_path / "out"), cwd=tmp_path)
    assert result.returncode == 0 and "0 of 10 samples damaged" in result.stdout, result.stdout


@pytest.mark.parametrize("form", ["tar", "tfrecord"])
def test_killed_and_started_again_it_goes_on(tmp_path: Path, form: str) -> None:
    folder = write_images(tmp_path / "images", train=60)
    command = ("prepare", "imagefolder", "images", "out", "--shards", "24", "--quality", "90", "--jobs", "1")
    command = (*command, "--format", form)
    beside = tmp_path / ".out.partial"
    argv = (sys.executable, "-m", "cputrain", *command)
    for _ in range(5):  # it may be done before this process gets to kill it
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        process = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.DEVNULL)
        while len(list(beside.glob("train-*.json"))) < 3 and process.poll() is None:
            time.sleep(0.005)
        process.kill()
        process.wait()
        if beside.exists():
            break
    done = {path.name: path.stat().st_mtime_ns for path in shards_done(beside)}
    assert done and not (tmp_path / "out").exists()
    assert here(*command, cwd=tmp_path).returncode == 0
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in done} == done, "whole shards are kept"
    assert not beside.exists() and not [path for path in (tmp_path / "out").iterdir() if path.suffix == ".json"][1:]
    whole = pack_dataset(
        open_dataset(str(folder)), tmp_path / "again", options(folder, shards=24, quality=90, format=form)
    )
    assert json.loads((tmp_path / "out/manifest.json").read_text())["splits"] == whole
    again = here(*command, cwd=tmp_path)
    assert again.returncode == 0 and "out: train" in again.stdout, "what is there already is left as it is"
    assert "out is already complete, with these options; nothing to do" in again.stdout
    other = here(*command, "--seed", "2", cwd=tmp_path)
    assert other.returncode == 2 and "out was prepared with other options (seed: 1 -> 2): " in other.stderr


def test_a_source_written_in_another_way_is_the_same(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    (tmp_path / "link").symlink_to(folder)
    for source in ("images", "../" + tmp_path.name + "/images", str(folder), "link"):
        made = here("prepare", "imagefolder", source, "out", cwd=tmp_path)
        assert made.returncode == 0 and ("already complete" in made.stdout) == (source != "images"), made.stderr


def test_a_folder_of_other_files_is_not_taken_and_an_empty_one_is(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    out, dataset = tmp_path / "out", open_dataset(str(folder))
    out.write_text("mine")
    with pytest.raises(InputError, match=r"out is a file: prepare into a new folder$"):
        pack_dataset(dataset, out, options(folder))
    out.unlink()
    write_files(out, {"thesis.tex": b"years of work", "manifest.json": b"{}"})
    with pytest.raises(InputError, match=r"out has other files, manifest.json, thesis.tex: prepare into a new folder$"):
        pack_dataset(dataset, out, options(folder))
    assert (out / "thesis.tex").read_bytes() == b"years of work"
    shutil.rmtree(out)
    out.mkdir()
    assert pack_dataset(dataset, out, options(folder))["train"]["images"] == len(dataset.train)


def shards_done(beside: Path) -> list[Path]:
    """The shards in an unfinished folder whose reports say that they are whole."""
    done = {path.stem for path in beside.glob("train-*.json")}
    return [path for path in beside.glob("train-*") if path.suffix != ".json" and path.name[:11] in done]


def test_a_disk_that_is_too_small_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_images(tmp_path / "images")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preparing.shutil, "disk_usage", lambda _folder: usage._replace(free=1000))
    with pytest.raises(InputError, match=r"has 0.0 GB free, but the shards need about"):
        pack_dataset(open_dataset(str(folder)), tmp_path / "out", options(folder))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip(reason="needs root, to mount a small file system")
    folder, small = write_images(tmp_path / "images", train=60), tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0
    assert mounted, "needs mount namespaces"
    code = (
        "import shutil, sys\nfrom pathlib import Path\nfrom cputrain.data import prepare as p\n"
        "from cputrain.data.formats.open import open_dataset\np._check_space = lambda *_: None\n"
        f"p.pack_dataset(open_dataset({str(folder)!r}), Path({str(small)!r}) / 'out', "
        "p.Options(kind='imagefolder', source='x', shards=2))\n"
    )
    script = f'mount -t tmpfs -o size=100k none {small} && {PYTHON} -c "$CODE"; echo rc=$?; find {small} | sort'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], env={**os.environ, "CODE": code}, capture_output=True, text=True
    )
    assert "rc=1" in done.stdout and "No space left" in done.stderr, done.stderr[-500:]
    whole = ("small/out", "train-00000.tar", "index.npy")
    assert not [line for line in done.stdout.splitlines() if line.endswith(whole)]


def test_names_that_a_terminal_would_obey_are_shown_as_codes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        folder = tmp_path / f"images/{split}/a\x1b]0;title\x07"
        folder.mkdir(parents=True)
        Image.new("L", (20, 20), 7).save(folder / "gray.jpg")
        (folder / "page\x1b[2J.jpg").write_bytes(b"<html>404</html>")
    outputs = [
        here(*words, cwd=tmp_path)
        for words in (("data", "info", "images"), ("prepare", "imagefolder", "images", "out"), ("data", "info", "out"))
    ]
    for result in outputs:
        assert result.returncode == 0, result.stderr
        assert "\x1b" not in result.stdout and "\\x1b]0;title\\x07" in result.stdout, result.stdout


def test_a_failing_disk_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    (folder / "train/class2/004.jpg").unlink()
    (folder / "train/class2/004.jpg").symlink_to("/proc/self/mem")  # opens, and cannot be read
    result = here("prepare", "imagefolder", "images", "out", cwd=tmp_path)
    assert result.returncode == 0 and "1 unreadable image skipped" in result.stdout, result.stderr
    (tmp_path / ".second.partial").write_text("a file in the way")
    result = here("prepare", "imagefolder", "images", "second", cwd=tmp_path)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "prepare: cannot write second: " in result.stderr and ".partial" not in result.stderr
    assert "finished shards are kept: fix this and repeat the command" in result.stderr
    (tmp_path / ".second.partial").unlink()
    assert here("prepare", "imagefolder", "images", "second", cwd=tmp_path).returncode == 0


def test_images_that_are_repaired_after_a_refusal_are_read_again(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", classes=2, train=3, val=2)
    whole = {path: path.read_bytes() for path in folder.rglob("val/*/*.jpg")}
    for path in whole:
        path.write_bytes(b"no image")
    command = ("prepare", "imagefolder", "images", "out")
    refused = here(*command, cwd=tmp_path)
    assert refused.returncode == 2 and "no image of the val split can be read" in refused.stderr
    for path, data in whole.items():
        path.write_bytes(data)
    again = here(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert survey(str(tmp_path / "out")).val == 4


def test_empty_classes_and_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    pack_dataset(open_dataset(str(folder)), tmp_path / "out", options(folder))
    index = tmp_path / "out/train.index.npy"
    records = np.load(index)
    records[20]["label"] = 3
    with index.open("wb") as file:
        np.save(file, records)
    told = r"train-00000.tar:00000020 of the train split has label 3, but there are 3 classes"
    with pytest.raises(InputError, match=told):
        check_labels(open_dataset(str(tmp_path / "out")))
    (folder / "train/class9").mkdir()
    for reader in (open_dataset, survey):
        with pytest.raises(InputError, match="class class9 has no image in"):
            reader(str(folder))


def test_mixing_is_measured_against_chance(tmp_path: Path) -> None:
    ordered = np.repeat(np.arange(100), 32)
    assert mean_classes_in_window(ordered) == 1.0
    shuffled = ordered[epoch_order(len(ordered), 1, 0)]
    assert abs(mean_classes_in_window(shuffled) - expected_classes_in_window(ordered)) < 0.5
    assert 27 < expected_classes_in_window(ordered) < 28
    places = [f"in/{split}/c{k:02d}/{i}.jpg" for split in ("train", "val") for k in range(40) for i in range(8)]
    write_files(tmp_path, dict.fromkeys(places, jpeg(1, 8)))
    made = pack_dataset(open_dataset(str(tmp_path / "in")), tmp_path / "out", options(tmp_path))
    mix = made["train"]["mixing"]
    assert abs(mix["classes_in_32"] - mix["at_random"]) < 2


def test_verify_names_every_damaged_sample(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    pack_dataset(open_dataset(str(folder)), tmp_path / "out", options(folder))
    shard, index = tmp_path / "out/train-00000.tar", tmp_path / "out/train.index.npy"
    records = np.load(index)
    assert records.dtype == RECORD
    data = bytearray(shard.read_bytes())
    data[int(records[4]["offset"]) + 30] ^= 4
    data[int(records[9]["offset"]) - 512 + 20] ^= 1
    shard.write_bytes(data)
    records[20]["label"] = 7
    with index.open("wb") as file:
        np.save(file, records)
    result = here("data", "verify", "out", cwd=tmp_path)
    assert result.returncode == 1
    assert f"00000004, byte {int(records[4]['offset']):,}: the image's checksum differs from the index" in result.stdout
    assert "00000009" in result.stdout and "the archive is damaged before the image" in result.stdout
    assert "00000020" in result.stdout and "label 7, but there are 3 classes" in result.stdout
    assert "3 of 51 samples damaged" in result.stdout
    plain = here("data", "verify", "images", cwd=tmp_path)
    assert plain.returncode == 2 and "only the output of cputrain prepare" in plain.stderr


def test_a_picture_that_is_there_is_replaced_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    Path("sheet.png").write_text("mine", encoding="utf-8")
    assert main(["data", "show", "images"]) == 2
    assert capsys.readouterr().err == (
        "cputrain: --output sheet.png already exists: name another file, or add --overwrite\n"
    )
    assert Path("sheet.png").read_text(encoding="utf-8") == "mine"
    assert main(["data", "show", "images", "--count", "2", "--overwrite"]) == 0
    assert capsys.readouterr().out == "sheet.png: 2 of 36 train images\n"
    with Image.open("sheet.png") as sheet:
        assert sheet.format == "PNG"


def test_data_is_described_and_shown(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    (folder / "train/class1/000.jpg").write_bytes(b"junk")
    for place in ("images", "out"):
        if place == "out":
            assert here("prepare", "imagefolder", "images", "out", cwd=tmp_path).returncode == 0
        info = here("data", "info", place, cwd=tmp_path)
        assert info.returncode == 0 and "3 classes: class0, class1, class2" in info.stdout
        shown = here("data", "show", place, "--count", "10", "--overwrite", cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith("sheet.png: 10 of ")
        with Image.open(tmp_path / "sheet.png") as sheet:
            assert sheet.width == 8 * 134 + 6 and sheet.height == 2 * 148 + 6
    seen = [folder / f"seen-{i}.webp" for i in range(2)]
    for i, path in enumerate(seen):  # in this process: a start takes a second
        as_trained = ("--as-trained", "imagefolder", "--epoch", str(i + 1), "--count", "9", "--output", str(path))
        assert main(["data", "show", str(folder), *as_trained, "data.crop=40"]) == 0
    with Image.open(seen[0]) as first, Image.open(seen[1]) as second:
        assert first.format == "WEBP" and first.size == (8 * 46 + 6, 2 * 60 + 6)
        assert np.asarray(first.convert("L")).tolist() != np.asarray(second.convert("L")).tolist(), "crops are random"
    assert main(["data", "show", str(folder), "--output", "sheet.pdf"]) == 2
    assert main(["data", "show", str(folder), "data.crop=40"]) == 2
    assert "1 damaged image not packed" in info.stdout and "prepared with kind=imagefolder" in info.stdout
    wrong = here("prepare", "imagefolders", "images", "x", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "is not one of imagefolder, digits, imagenet, mnist, tfrecord, caltech256" in wrong.stderr


def test_more_shards_than_files_are_usually_allowed(tmp_path: Path) -> None:
    images = [f"in/train/a/{i}.jpg" for i in range(100)]
    write_files(tmp_path, dict.fromkeys([*images, "in/val/a/0.jpg"], jpeg(1, 8)))
    pack_dataset(open_dataset(str(tmp_path / "in")), tmp_path / "out", options(tmp_path, shards=100))
    out = str(tmp_path / "out")
    code = f"from cputrain.data.formats.open import open_dataset; print(len(open_dataset({out!r}).train))"
    limited = f'ulimit -S -n 64; exec {PYTHON} -c "{code}"'
    printed = subprocess.run(["sh", "-c", limited], capture_output=True, text=True)
    assert printed.stdout == "100\n", printed.stderr[-500:]


def test_a_large_index_opens_at_once(tmp_path: Path) -> None:
    """1.28 million samples: mapped, not parsed; what is resident grows by what is used."""
    count = 1_281_167
    (tmp_path / "train-00000.tar").write_bytes(b"")
    np.save(tmp_path / "train.index.npy", np.zeros(count, dtype=RECORD))
    mixing = {"classes_in_32": 1.0, "at_random": 1.0}
    made = {"images": count, "shards": 1, "bytes": [0], "mixing": mixing, "unusual": {}, "damaged": []}
    manifest = {"version": 3, "classes": ["a"], "options": {}, "splits": {"train": made}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom cputrain.data.formats.shards import Shards\n"
        "rss = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        f"before = rss(); shards = Shards(Path({str(tmp_path)!r}), 'train'); print(len(shards), rss() - before)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(printed[0]) == count and int(printed[1]) < 20 << 20
