"""Image files as people have them: companions of other systems, all suffixes, 16 bits, MPO, numbers for classes."""

import io
import struct
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from threading import Barrier, Thread, get_ident
from typing import Any
from warnings import warn

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cputrain.affinity.errors import InputError
from cputrain.data.formats.folder import image_files, read_folder
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.source import IMAGE_SUFFIXES, is_hidden, is_image
from cputrain.data.pixels import Crop, Decode, center_crop, choose_decoder, decode_by_pillow
from cputrain.data.prepare import ImageError, Options, encode_image, pack_dataset
from cputrain.data.sources import read_caltech256
from tests.cputrain.test_sources import archive
from tests.support.commands import here
from tests.support.images import encoded, jpeg, survey, write_files, write_images

# AppleDouble (RFC 1740, appendix B): magic, version, filler, no entries.
APPLE_DOUBLE = struct.pack(">II16sH", 0x00051607, 0x00020000, b"Mac OS X        ", 0)
# Formats that Pillow only identifies, writes, or hands to another program or library.
UNREADABLE = {"BUFR", "EPS", "FITS", "GRIB", "HDF5", "IPTC", "MPEG", "PALM", "PDF", "WMF"}


def counts(folder: Path) -> tuple[int, int]:
    """Training and validation images, which counting and opening find alike."""
    summary, dataset = survey(str(folder)), open_dataset(str(folder))
    assert (summary.train, summary.val) == (len(dataset.train), len(dataset.val))
    assert (summary.classes, summary.notes) == (dataset.classes, dataset.notes)
    return summary.train, summary.val


def test_what_other_systems_leave_in_folders_is_no_image(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", train=4, val=2)
    for image in list(folder.rglob("*.jpg")):
        (image.parent / f"._{image.name}").write_bytes(APPLE_DOUBLE)
    for name in (".DS_Store", "train/class0/Thumbs.db", "train/class1/.hidden.jpg", "train/class1/desktop.ini"):
        (folder / name).write_bytes(APPLE_DOUBLE)
    for image in list((folder / "train").rglob("0*.jpg")):
        (image.parent / f"{image.name}:Zone.Identifier").write_text("[ZoneTransfer]\nZoneId=3\n")  # copied to WSL
    kept_by_systems = (
        *("__MACOSX", "train/__MACOSX", "train/class0/@eaDir", "train/.ipynb_checkpoints", "train/lost+found"),
        *("train/#recycle", "val/@Recycle", "train/#snapshot", "train/@tmp"),
    )
    for name in kept_by_systems:
        (folder / name).mkdir()
        (folder / name / "._001.jpg").write_bytes(APPLE_DOUBLE)
        (folder / name / "001.jpg").write_bytes(APPLE_DOUBLE)
    assert counts(folder) == (12, 6) and not survey(str(folder)).notes
    assert len(image_files([folder])) == 18
    classes = (folder / "train").rename(tmp_path / "classes")
    assert survey(str(classes)).classes == ("class0", "class1", "class2")


def test_hidden_members_of_archives_are_no_images(tmp_path: Path) -> None:
    files = {f"256_ObjectCategories/00{k}.x/00{k}_{i}.jpg": jpeg(i) for k in (1, 2) for i in range(5)}
    hidden = {f"{Path(name).parent}/._{Path(name).name}": APPLE_DOUBLE for name in files}
    mac = {f"__MACOSX/{name}": APPLE_DOUBLE for name in files}
    archive(tmp_path / "256_ObjectCategories.tar", files | hidden | mac)
    for source in (tmp_path, tmp_path / "256_ObjectCategories.tar"):
        assert read_caltech256(source).splits["train"].images == 10


def test_every_format_that_pillow_reads_by_itself_is_read_by_its_suffix() -> None:
    known = Image.registered_extensions()  # which loads all formats
    readable = {suffix for suffix, name in known.items() if name not in UNREADABLE}
    assert readable | {".avif", ".avifs"} == IMAGE_SUFFIXES, "AVIF came with Pillow 11.3"
    assert not any(map(is_hidden, ("a.jpg", "photo.Thumbs.db.png"))) and not any(map(is_image, ("jpg", ".jpg", "a.db")))


@pytest.mark.parametrize(
    ("suffix", "form"),
    [
        *((".jfif", "JPEG"), (".JPE", "JPEG"), (".gif", "GIF"), (".ppm", "PPM"), (".pgm", "PPM"), (".avif", "AVIF")),
        *((".tga", "TGA"), (".jp2", "JPEG2000"), (".qoi", "QOI"), (".ico", "ICO"), (".mpo", "MPO"), (".WebP", "WEBP")),
    ],
)
def test_an_image_of_any_format_is_listed_decoded_and_packed(tmp_path: Path, suffix: str, form: str) -> None:
    image = Image.new("RGB", (40, 40), (200, 60, 90))
    data = encoded(image.convert("L") if suffix == ".pgm" else image, form)
    write_files(
        tmp_path, {f"in/{split}/{name}/a{suffix}": data for split in ("train", "val") for name in ("cat", "dog")}
    )
    assert counts(tmp_path / "in") == (2, 2)
    dataset = open_dataset(str(tmp_path / "in"))
    out = np.empty((1, 16, 16, 3), np.uint8)
    assert choose_decoder("auto", {})[0]([dataset.train.read(0)], center_crop(16, 16), out) == [None]
    gray = round(0.299 * 200 + 0.587 * 60 + 0.114 * 90)  # ITU-R 601-2, as Pillow has it
    assert np.abs(out.astype(int) - ((gray,) * 3 if suffix == ".pgm" else (200, 60, 90))).max() <= 6
    made = pack_dataset(dataset, tmp_path / "out", Options(kind="imagefolder", source="in"))
    assert made["train"]["images"] == 2 and not made["train"]["damaged"]


def test_files_of_formats_that_are_not_read_are_named_and_counted(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", classes=2, train=3, val=2)
    for name in ("a.heic", "b.HEIC", "c.eps", "notes", "d.mp4"):
        (folder / "train/class1" / name).write_bytes(b"x")
    (folder / "train/stray.jpg").write_bytes(jpeg(1))
    assert counts(folder) == (6, 4)
    others, outside = survey(str(folder)).notes
    assert f"{folder}/train: ignored 5 files of other formats (2 .heic, " in others
    assert "1 without a suffix" in others and "1 .eps" in others
    assert outside == f"{folder}/train: ignored 1 image outside the class folders"
    result = here("data", "info", "images", cwd=tmp_path)
    assert result.returncode == 0 and "ignored 5 files of other formats (2 .heic" in result.stdout
    for image in (folder / "train/class1").glob("*.jpg"):
        image.unlink()
    with pytest.raises(InputError, match=r"class class1 has no image in .*, only 2 \.heic, "):
        survey(str(folder))


def test_images_in_folders_of_a_class_are_its_images_and_a_link_back_ends(tmp_path: Path) -> None:
    """As torchvision's ImageFolder and Tiny ImageNet have them: train/CLASS/images/*."""
    folder = write_images(tmp_path / "images", classes=2, train=3, val=2)
    for name in ("class0", "class1"):
        (folder / "train" / name / "images").mkdir()
        for image in list((folder / "train" / name).glob("*.jpg")):
            image.rename(image.parent / "images" / image.name)
        (folder / "train" / name / "again").symlink_to("..", target_is_directory=True)
    (folder / "train/class0/gone.jpg").symlink_to("nowhere")
    assert counts(folder) == (7, 4), "a link to an image that is gone is an image, and damaged"
    found = read_folder(folder)
    assert Counter(found.splits["train"].labels or ()) == {0: 4, 1: 3} and not found.notes


RAMP = (np.arange(64 * 64, dtype=np.uint32).reshape(64, 64) * 16).astype(np.uint16)  # 0 to 65,520


def tiff(values: NDArray[np.generic], *, bits: int, photometric: int = 1, sample_format: int = 1) -> bytes:
    """An uncompressed little-endian TIFF of one strip, by TIFF 6.0: 12-bit values are packed two in three bytes."""
    data = values.tobytes()
    if bits == 12:
        pairs = values.reshape(-1, 2).astype(np.uint32)
        packed = [pairs[:, 0] >> 4, (pairs[:, 0] & 15) << 4 | pairs[:, 1] >> 8, pairs[:, 1] & 255]
        data = np.stack(packed, axis=1).astype(np.uint8).tobytes()
    height, width = values.shape
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height, 279: len(data)}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted((tags | {339: sample_format}).items())]
    ifd = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + ifd


DEEP: dict[str, tuple[bytes, NDArray[np.uint8]]] = {
    "png": (encoded(Image.fromarray(RAMP), "PNG"), (RAMP >> 8).astype(np.uint8)),
    "tiff": (encoded(Image.fromarray(RAMP), "TIFF"), (RAMP >> 8).astype(np.uint8)),
    "tiff, big-endian": (encoded(Image.fromarray(RAMP.astype(">u2")), "TIFF"), (RAMP >> 8).astype(np.uint8)),
    "tiff, lzw": (encoded(Image.fromarray(RAMP), "TIFF", compression="tiff_lzw"), (RAMP >> 8).astype(np.uint8)),
    "tiff, white is zero": (tiff(RAMP, bits=16, photometric=0), (255 - (RAMP >> 8)).astype(np.uint8)),
    "tiff, 12 bits": (tiff(RAMP >> 4, bits=12), (RAMP >> 8).astype(np.uint8)),
    "pgm": (b"P5 64 64 65535\n" + RAMP.byteswap().tobytes(), (RAMP >> 8).astype(np.uint8)),
    "jpeg 2000": (encoded(Image.fromarray(RAMP), "JPEG2000", irreversible=False), (RAMP >> 8).astype(np.uint8)),
}


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("decode", [decode_by_pillow, choose_decoder("auto", {})[0]], ids=["pillow", "auto"])
def test_deeper_gray_is_scaled_to_8_bits(name: str, decode: Decode, tmp_path: Path) -> None:
    data, expected = DEEP[name]
    out = np.empty((1, 64, 64, 3), np.uint8)
    assert decode([data], center_crop(64, 64), out) == [None]
    assert np.array_equal(out[0], np.repeat(expected[..., None], 3, axis=2))
    packed = encode_image(data, short_side=None, quality=95, jpeg_only=False)
    again = np.asarray(Image.open(io.BytesIO(packed.data))).astype(int)
    assert again.shape == (64, 64) and np.abs(again - expected).max() <= 8, "a white image would differ by 255"
    assert {"gray", "16 bits", "no jpeg"} <= set(packed.unusual)
    kept = encode_image(data, short_side=None, quality=None, jpeg_only=False)
    assert kept.data == data and kept.suffix == {"jpeg 2000": ".jp2", "pgm": ".ppm", "png": ".png"}.get(name, ".tif")


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF"),
        encoded(Image.fromarray(RAMP.astype(np.int32)), "TIFF"),
        tiff(RAMP.astype(np.int16), bits=16, sample_format=2),
        b"Pf 64 64 -1.0\n" + RAMP.astype("<f4").tobytes(),
    ],
    ids=["float", "32 bits", "signed", "pfm"],
)
def test_gray_without_a_known_white_is_refused_by_name(data: bytes) -> None:
    (problem,) = decode_by_pillow([data], center_crop(32, 32), np.empty((1, 32, 32, 3), np.uint8))
    assert problem and problem.startswith("32-bit, signed or floating-point gray has no known white")
    for quality in (None, 90):
        with pytest.raises(ImageError, match="has no known white: convert it to 8 bits"):
            encode_image(data, short_side=None, quality=quality, jpeg_only=False)


@pytest.mark.parametrize("decode", [decode_by_pillow, choose_decoder("auto", {})[0]], ids=["pillow", "auto"])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
@pytest.mark.filterwarnings("error")
def test_too_large_an_image_is_damaged_with_every_decoder_and_in_prepare(
    form: str, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = encoded(np.zeros((40, 51, 3), np.uint8), form)
    allowed = encoded(np.zeros((40, 50, 3), np.uint8), form)
    out = np.empty((2, 16, 16, 3), np.uint8)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    problem = "the image has more than 2,000 pixels, which is not supported; scale it down"
    assert decode([large, allowed], center_crop(16, 16), out) == [problem, None]
    for quality in (None, 90):
        with pytest.raises(ImageError, match=problem):
            encode_image(large, short_side=None, quality=quality, jpeg_only=False)
        encode_image(allowed, short_side=None, quality=quality, jpeg_only=False)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode([large, allowed], center_crop(16, 16), out) == [None, None], "a script may lift the limit"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    crop = Crop(0, 0, 50, 39, 20, 16, 2, 0, 16)
    assert decode([allowed], lambda *_: crop, out[:1]) == [None], "Pillow warns of large crops, too"


@pytest.mark.filterwarnings("always")
def test_warnings_of_pillow_in_two_threads_leave_those_of_the_program(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The first thread ends while the second decodes."""
    image = encoded(np.zeros((40, 50, 3), np.uint8), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    real, turns = Image.open, Barrier(2, timeout=60)

    def paused(file: Any) -> Image.Image:
        turns.wait()
        if second.ident == get_ident():
            first.join()
        return real(file)

    def decode() -> None:
        assert decode_by_pillow([image], center_crop(16, 16), np.empty((1, 16, 16, 3), np.uint8)) == [None]

    monkeypatch.setattr(Image, "open", paused)
    first, second = Thread(target=decode), Thread(target=decode)
    first.start()
    second.start()
    first.join()
    warn("while one decodes", stacklevel=1)
    second.join()
    warn("afterwards", stacklevel=1)
    assert [str(each.message) for each in recwarn] == ["while one decodes", "afterwards"]


@pytest.mark.parametrize("form", ["AVIF", "DDS", "WEBP", "JPEG2000", "TIFF", "GIF", "PNG"])
def test_damage_in_any_place_of_any_format_is_damage_and_no_failure(form: str) -> None:
    """Of AVIF Pillow raises RuntimeError, which has ended a training."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    whole = bytearray(encoded(noise, form))
    found, out = [], np.empty((1, 16, 16, 3), np.uint8)
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        data = bytes(whole[:place] + bytes([whole[place] ^ 255]) * 8 + whole[place + 8 :])
        found += decode_by_pillow([data], center_crop(16, 16), out)
        with suppress(ImageError):
            encode_image(data, short_side=8, quality=90, jpeg_only=False)
    assert any(found)


def test_16_bit_colors_keep_their_upper_bits() -> None:
    """What Pillow does of itself, by which gray goes, too: PNG's color type 2 with 16 bits, from its specification."""
    rows = b"".join(b"\0" + np.repeat(RAMP[y, :, None], 3, axis=1).astype(">u2").tobytes() for y in range(64))
    parts = {b"IHDR": struct.pack(">IIBBBBB", 64, 64, 16, 2, 0, 0, 0), b"IDAT": zlib.compress(rows), b"IEND": b""}
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in parts.items():
        png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    out = np.empty((1, 64, 64, 3), np.uint8)
    assert decode_by_pillow([png], center_crop(64, 64), out) == [None]
    assert np.array_equal(out[0], np.repeat((RAMP >> 8).astype(np.uint8)[..., None], 3, axis=2))


def test_a_jpeg_is_one_by_its_bytes_whatever_stands_behind_it(tmp_path: Path) -> None:
    """Photos of phones are MPO to Pillow: JPEGs with a second picture or a gain map."""
    first, second = (Image.open(io.BytesIO(jpeg(i))) for i in (1, 2))
    data = encoded(first, "MPO", save_all=True, append_images=[second])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    kept = encode_image(data, short_side=None, quality=None, jpeg_only=True)
    assert kept.suffix == ".jpg" and "no jpeg" not in kept.unusual and kept.data == data, "byte for byte, TFRecords too"
    fast, slow = (np.empty((1, 32, 32, 3), np.uint8) for _ in range(2))
    assert choose_decoder("auto", {})[0]([data], center_crop(32, 32), fast) == [None]
    assert decode_by_pillow([data], center_crop(32, 32), slow) == [None] and np.array_equal(fast, slow)


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        ([str(i) for i in range(12)], 'label 2 is class "10"'),
        (["1", "2", "10"], 'label 1 is class "10"'),
        (["07", "8", "10"], 'label 1 is class "10"'),
        (["00", "01", "10"], None),
        (["1", "2", "10x"], None),
        (["0", "1", "2"], None),
    ],
)
def test_classes_of_numbers_in_text_order_are_said(tmp_path: Path, classes: list[str], told: str | None) -> None:
    write_files(tmp_path, {f"in/{split}/{name}/a.jpg": jpeg(1) for split in ("train", "val") for name in classes})
    assert counts(tmp_path / "in") == (len(classes), len(classes))
    found = survey(str(tmp_path / "in"))
    assert found.classes == tuple(sorted(classes)) and len(found.notes) == (told is not None)
    if told:
        assert told in found.notes[0]
        result = here("prepare", "imagefolder", "in", "out", cwd=tmp_path)
        assert result.returncode == 0 and told in result.stdout
