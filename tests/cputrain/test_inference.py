"""cputrain predict and export: a small trained network, as eval has it."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cputrain import inference as exporting
from cputrain.affinity.errors import InputError, RunError
from cputrain.checkpoint.files import MANIFEST, write_content
from cputrain.checksums import crc32c_of_json
from cputrain.cli import main
from cputrain.data.formats.folder import image_files
from cputrain.inference import choose_format, export, load_classifier, predict
from cputrain.kernels.folding import FoldedWinogradConv2d
from cputrain.manifest import read_manifest
from cputrain.models.vision import import_torchvision
from cputrain.training.engine import has_onednn
from tests.cputrain.test_json_output import fields
from tests.support.commands import here, refused
from tests.support.forked import in_fork
from tests.support.images import write_images

ENV: dict[str, str] = {}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and a run on them, with a moving average of the weights."""
    place = tmp_path_factory.mktemp("inference")
    write_images(place / "images", train=8, val=7)
    settings = ("data.path=images", "model.name=resnet18", "data.crop=32", "batch.local=6", "epochs=1", "ema_decay=0.7")
    more = ("schedule.warmup_epochs=0", "plan.ppn=1", "plan.threads=1", "output=run", "schedule.peak_rate=0.02")
    done = in_fork("train", "imagefolder", *settings, *more, "--quiet", cwd=place)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def best(place: Path) -> Path:
    return (place / "run/checkpoints/best").resolve()


def copied(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint with the same files, without its manifest."""
    return shutil.copytree(
        checkpoint, folder, copy_function=os.link, ignore=shutil.ignore_patterns(MANIFEST), symlinks=True
    )


@pytest.mark.long
def test_predictions_over_the_validation_images_are_eval_s(place: Path, best: Path) -> None:
    shown = in_fork("eval", "run", "--format", "json", "--report", "page.html", "plan.ppn=1", cwd=place)
    assert shown.returncode == 0, shown.stderr
    done = in_fork("predict", "run", "images/val", "--format", "json", "--top", "2", "--batch", "4", cwd=place)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(done.stdout.splitlines()) == 2 + 21, "a line for each image"
    right = [Path(one["image"]).parent.name == one["top"][0]["class"] for one in found["predictions"]]
    assert set(json.loads(shown.stdout)) == fields("eval")
    (result,) = json.loads(shown.stdout)["results"]
    assert 100 * sum(right) / 21 == pytest.approx(result["top1"]) and found["step"] == result["step"]
    rows = list(csv.DictReader((place / "page.csv").read_text().splitlines()))
    for one, row in zip(found["predictions"], rows, strict=True):
        assert row["image"].endswith(one["image"]) and row["predicted"] == one["top"][0]["class"]
        assert len(one["top"]) == 2 and one["top"][0]["probability"] >= one["top"][1]["probability"]


def test_files_that_are_no_images_are_named_and_the_others_classified(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    (place / "notes.txt").write_text("no image")
    (place / "cut.jpg").write_bytes((place / "images/val/class0/000.jpg").read_bytes()[:200])
    done = in_fork("predict", "run", "notes.txt", "images/val/class1/000.jpg", "cut.jpg", "--top", "9", cwd=place)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith("images/val/class1/000.jpg  class") and line.count(" %") == 3
    assert "cputrain: notes.txt: cannot identify image file\n" in done.stderr and "cputrain: cut.jpg: " in done.stderr
    assert "2 of 3 images cannot be read" in done.stderr
    for words, message in (
        (("run", "absent.jpg"), "image absent.jpg does not exist"),
        (("images", "cut.jpg"), "images is not a checkpoint"),
        (("run", "run/logs"), "run/logs contains no image"),
    ):
        assert main(["predict", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_checkpoint_of_an_engine_that_is_not_here_is_loaded(best: Path, tmp_path: Path) -> None:
    copy = copied(best, tmp_path / "copy")
    manifest = read_manifest(best)
    content = manifest.model_dump(mode="json")
    write_content(copy, {**content, "recipe": {**manifest.recipe, "engine": "ipex"}})
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    loaded, own = load_classifier(copy, ENV), load_classifier(best, ENV)
    assert loaded.recipe.engine == "ipex" and torch.equal(loaded.logits(images), own.logits(images))


def test_layers_by_winograd_are_the_training_s(best: Path, tmp_path: Path) -> None:
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    logits = []
    for layers in ((), ("layer1.0.conv1", "layer2.1.conv2")):
        copy = copied(best, tmp_path / str(len(layers)))
        manifest = read_manifest(best)
        training = manifest.training.model_copy(update={"winograd": layers})
        write_content(copy, manifest.model_copy(update={"training": training}).model_dump(mode="json"))
        classifier = load_classifier(copy, dict(os.environ))
        folded = [layer for layer in classifier.network.modules() if isinstance(layer, FoldedWinogradConv2d)]
        assert len(folded) == len(layers) * has_onednn()
        logits.append(classifier.logits(images))
    assert torch.allclose(*logits, rtol=1e-3, atol=1e-4)


def test_few_images_are_in_memory_however_many_there_are(
    place: Path, best: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = load_classifier(best, ENV)
    paths = image_files([place / "images/train"]) * 3
    reads: list[int] = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: reads.append(1) or read(self))
    predictions = predict(classifier, paths, top=1, batch=2)
    first = next(predictions)
    assert first.image == paths[0] and len(reads) <= 2 * 10 < len(paths)
    assert len([first, *predictions]) == len(paths) == 72


def test_what_is_no_file_is_no_image(tmp_path: Path) -> None:
    """Opening a pipe without a writer would wait for ever."""
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "gone.jpg").symlink_to("nowhere")
    (tmp_path / "folder.jpg/image.png").touch()
    assert image_files([tmp_path]) == [str(tmp_path / "folder.jpg/image.png"), str(tmp_path / "gone.jpg")]


@pytest.mark.parametrize(
    "name",
    ["safetensors", "torchscript", *(pytest.param(name, marks=pytest.mark.long) for name in ("state-dict", "onnx"))],
)
def test_each_export_has_eval_s_logits_for_any_batch_and_says_what_it_takes(
    place: Path, best: Path, tmp_path: Path, name: str
) -> None:
    if name == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    form = exporting.FORMATS[name]
    file = tmp_path / f"net{form.suffixes[0]}"
    done = export(best, file, choose_format(file, None), ENV)
    assert done.images == 8 and done.difference < 1e-4 and list(tmp_path.iterdir()) == [file]
    classifier = load_classifier(best, ENV)
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8))
    inputs = classifier.normalize(pixels)
    fresh = exporting.load_network(best, trained=False)[0]
    run = form.open(file, fresh)
    with torch.inference_mode():
        for count in (1, 5):
            found = run(inputs[:count])
            assert found.shape == (count, 3)
            assert torch.allclose(found, classifier.logits(pixels[:count]), atol=1e-3)
    assert about_of(name, file)["mean"] == [0.485, 0.456, 0.406]
    if name in ("safetensors", "state-dict"):
        theirs = import_torchvision("models").resnet18(num_classes=3).eval()
        theirs.load_state_dict(load_file(file) if name == "safetensors" else torch.load(file), strict=True)
        with torch.inference_mode():
            assert torch.allclose(theirs(inputs), classifier.logits(pixels), atol=1e-3)


def about_of(name: str, file: Path) -> dict:
    """The classes and the normalization in a file's metadata."""
    if name == "safetensors":
        with safe_open(file, "pt") as opened:
            texts = opened.metadata()
    elif name == "torchscript":
        extra = {"cputrain.json": ""}
        torch.jit.load(file, _extra_files=extra)
        texts = json.loads(extra["cputrain.json"])
    elif name == "onnx":
        import onnx

        texts = {each.key: each.value for each in onnx.load(file).metadata_props}
    else:
        return {"mean": [0.485, 0.456, 0.406]}  # a state dict has tensors only
    assert json.loads(texts["classes"]) == ["class0", "class1", "class2"] and "minus mean" in texts["input"]
    return {"mean": json.loads(texts["mean"])}


def test_the_moving_average_is_exported(best: Path, tmp_path: Path) -> None:
    export(best, tmp_path / "net.pt", "state-dict", ENV)
    exported = torch.load(tmp_path / "net.pt", weights_only=True)
    with safe_open(best / "ema.safetensors", "pt") as ema, safe_open(best / "model.safetensors", "pt") as model:
        assert torch.equal(exported["fc.weight"], ema.get_tensor("fc.weight"))
        assert not torch.equal(exported["fc.weight"], model.get_tensor("fc.weight"))


def test_a_file_whose_logits_differ_is_not_written(
    best: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, network: torch.nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return 1.01 * self.network(images)

    torchscript = exporting.FORMATS["torchscript"]
    wrong = exporting.FORMATS | {
        "torchscript": type(torchscript)(
            suffixes=torchscript.suffixes,
            write=lambda network, *rest: torchscript.write(Doubled(network), *rest),
            open=torchscript.open,
        )
    }
    monkeypatch.setattr(exporting, "FORMATS", wrong)
    with pytest.raises(RunError, match=r"net\.ts is not written, as its logits differ from an evaluation's by 0\.0"):
        export(best, tmp_path / "net.ts", "torchscript", ENV)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        InputError, match="comparing logits needs two images, but only 1 image can be read: give others with --images"
    ):
        export(best, tmp_path / "n.pt", "state-dict", ENV, image_files([place / "images/val/class0/000.jpg"]))


@pytest.mark.parametrize("name", ["safetensors", "state-dict", "torchscript"])
def test_a_full_disk_is_told_with_the_name_of_the_file(best: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / ".net.x.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/net.x'$"):
        export(best, tmp_path / "net.x", name, ENV)
    assert list(tmp_path.iterdir()) == []


def test_export_needs_a_name_or_a_format(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, images = str(place / "run"), str(place / "images/val")
    assert main(["export", run]) == 2
    assert "give FILE, or --to safetensors, state-dict, torchscript, onnx" in capsys.readouterr().err
    assert main(["export", run, "net.bin"]) == 2
    assert "the suffix decides the format; give one of .safetensors (safetensors), " in capsys.readouterr().err
    assert main(["export", run, "--to", "torchscript", "--images", images]) == 0
    assert "run.torchscript: " in (out := capsys.readouterr().out) and "logits of 8 images differ" in out


@pytest.mark.parametrize(
    ("place_in_it", "value", "expected"),
    [
        ("network.model.weights", 5, "the network's weights is wrong"),
        ("network.crop", 3_000_000, "network.crop: Input should be less than or equal to 4096"),
        ("network.resize", 10**11, "network.resize: Input should be less than or equal to 4096"),
        ("network.std", [0, 0, 0], "network.std.0: Input should be greater than 0"),
        ("network.mean", [1e999, 0, 0], "network.mean.0: Input should be a finite number"),
        ("network.model.freeze_to", "\x1b[31mred", "freeze_to is wrong: it has '\\x1b', which is a control character"),
    ],
)
def test_somebody_else_s_checkpoint_is_refused_in_a_line(
    best: Path, tmp_path: Path, place_in_it: str, value: object, expected: str
) -> None:
    """With a right checksum, which anybody can compute."""
    changed(best, tmp_path, place_in_it, value)
    line = refused(here("export", "copy", "net.pt", cwd=tmp_path))
    assert expected in line and line.isprintable() and not (tmp_path / "net.pt").exists()


def test_a_prediction_by_somebody_else_s_checkpoint_is_refused_in_a_line(best: Path, tmp_path: Path) -> None:
    image = changed(best, tmp_path, "network.model.freeze_to", "\x1b[31mred")
    line = refused(in_fork("predict", "copy", image, cwd=tmp_path))
    assert "freeze_to is wrong: it has '\\x1b', which is a control character" in line and line.isprintable()


def test_names_of_classes_give_no_commands_to_the_terminal(best: Path, tmp_path: Path) -> None:
    names = ["\x1b]0;x\x07\x1b[2Ja", "b\nfake  99 %", "c"]
    image = changed(best, tmp_path, "network.classes", names)
    result = in_fork("predict", "copy", image, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.count("\n") == 1
    assert not {"\x1b", "\x07"} & {*result.stdout}


def changed(best: Path, folder: Path, place_in_it: str, value: object) -> str:
    """Copy the checkpoint to copy/ with another value; return an image to classify."""
    copied(best, folder / "copy")
    content = json.loads((best / MANIFEST).read_text())["checkpoint"]
    part, *way = content, *place_in_it.split(".")
    for word in way[:-1]:
        part = part[word]
    part[way[-1]] = value
    (folder / "copy" / MANIFEST).write_text(json.dumps({"crc32c": crc32c_of_json(content), "checkpoint": content}))
    return str(next((best.parents[2] / "images/val").rglob("*.jpg")))
