"""TFRecords of `cputrain prepare` as TensorFlow itself reads them.

TensorFlow is 600 MB and pins other packages, so it lives in an environment of its own. This file is collected only
where TENSORFLOW_PYTHON names that environment's Python:
TENSORFLOW_PYTHON=tf/bin/python pytest tests/cputrain/test_tensorflow.py
"""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

from PIL import Image

from tests.support.commands import cputrain
from tests.support.images import write_images

# What TensorFlow's ResNet for TPUs does to a training image: read in file order, parse, decode a part of the JPEG.
READER = """
import json, sys
import tensorflow as tf

FEATURES = {
    "image/encoded": tf.io.FixedLenFeature((), tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    "image/class/text": tf.io.FixedLenFeature([], tf.string),
    "image/format": tf.io.FixedLenFeature([], tf.string),
    "image/colorspace": tf.io.FixedLenFeature([], tf.string),
    "image/filename": tf.io.FixedLenFeature([], tf.string),
    "image/height": tf.io.FixedLenFeature([], tf.int64),
    "image/width": tf.io.FixedLenFeature([], tf.int64),
    "image/channels": tf.io.FixedLenFeature([], tf.int64),
}
found = []
for split in ("train", "validation"):
    files = tf.data.Dataset.list_files(f"{sys.argv[1]}/{split}-*", shuffle=False)
    for record in tf.data.TFRecordDataset(files):
        example = tf.io.parse_single_example(record, FEATURES)
        pixels = tf.io.decode_jpeg(example["image/encoded"], channels=3)
        part = tf.image.decode_and_crop_jpeg(example["image/encoded"], [1, 2, 8, 8], channels=3)
        assert part.shape == (8, 8, 3)
        height, width, channels = pixels.shape
        assert (height, width) == (int(example["image/height"]), int(example["image/width"]))
        assert channels == int(example["image/channels"])
        assert (example["image/format"], example["image/colorspace"]) == (b"JPEG", b"RGB")
        name = example["image/class/text"].numpy().decode()
        found.append((split, int(example["image/class/label"]), name, example["image/filename"].numpy().decode()))
print(json.dumps(found))
"""


def test_tensorflow_reads_what_prepare_wrote(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    odd = folder / "train/class1"
    Image.new("CMYK", (20, 20)).save(odd / "cmyk.jpg")
    Image.new("L", (20, 20), 7).save(odd / "gray.jpg")
    Image.new("RGBA", (20, 20)).save(odd / "rgba.png")
    made = cputrain("prepare", "imagefolder", "images", "out", "--format", "tfrecord", "--shards", "4", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    reader = (os.environ["TENSORFLOW_PYTHON"], "-c", READER, str(tmp_path / "out"))
    read = subprocess.run(reader, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout)
    counts = Counter((split, label, name) for split, label, name, _ in found)
    assert counts == {
        **{("train", k + 1, f"class{k}"): 12 + 3 * (k == 1) for k in range(3)},
        **{("validation", k + 1, f"class{k}"): 5 for k in range(3)},
    }
    assert {"cmyk.jpg", "gray.jpg", "rgba.png", "000.jpg"} <= {name for *_, name in found}
