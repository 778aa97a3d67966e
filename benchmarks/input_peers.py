"""Peers of benchmarks/input.py that are installed: other ways from encoded images to the pixels of a training.

Each uses its own random crop, 224 x 224 and mirrored or not; OpenCV, simplejpeg, tf.data and FFCV scale it without
antialiasing.
"""

import importlib
import io
import os
import random
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cputrain.data.pixels import Transform
from cputrain.models.vision import import_torchvision

SIDE, BATCH = 224, 32
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Run = Callable[[], object]
"""Function that processes every image once."""
Contender = Callable[[list[bytes]], Run]


RANDOM = Transform(
    image_size=SIDE, short_side=SIDE, crop="random_resized", min_area=AREA[0], max_aspect=ASPECT[1], flip=True
)


def each(files: list[bytes], one: Callable[[bytes, int], object]) -> Run:
    def run() -> None:
        for i, data in enumerate(files):
            one(data, i)

    return run


def installed_peers() -> dict[str, Contender]:
    """Return the peers by name; missing ones are printed."""
    known = {
        "torchvision + Pillow, uint8": (torchvision_bytes, ()),
        "torchvision + Pillow, float": (torchvision_floats, ()),
        "webdataset + torchvision + Pillow, float": (by_webdataset, ("webdataset",)),
        "OpenCV, linear": (by_opencv, ("cv2",)),
        "simplejpeg, fast DCT + OpenCV, linear": (by_simplejpeg, ("cv2", "simplejpeg")),
        "tf.data, decode_and_crop_jpeg, fast DCT": (by_tensorflow, ("tensorflow",)),
        "DALI, CPU": (by_dali, ("nvidia.dali",)),
        "FFCV, jpg": (by_ffcv, ("ffcv",)),
    }
    found: dict[str, Contender] = {}
    for name, (contender, modules) in known.items():
        missing = [module for module in modules if not installed(module)]
        if missing:
            print(f"{', '.join(missing)}: not installed, skipped", file=sys.stderr)
        else:
            found[name] = contender
    return found


def installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def torchvision_bytes(files: list[bytes]) -> Run:
    crop = v2_crop()
    return each(files, lambda data, _: crop(Image.open(io.BytesIO(data)).convert("RGB")))


def torchvision_floats(files: list[bytes]) -> Run:
    made = v2_floats()
    return each(files, lambda data, _: made(Image.open(io.BytesIO(data)).convert("RGB")))


def v2_crop() -> Any:
    v2 = import_torchvision("transforms.v2")
    return v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, scale=AREA, ratio=ASPECT, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
        ]
    )


def v2_floats() -> Any:
    v2 = import_torchvision("transforms.v2")
    return v2.Compose([v2_crop(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def by_webdataset(files: list[bytes]) -> Run:
    webdataset: Any = importlib.import_module("webdataset")
    path = Path(tempfile.mkdtemp()) / "some.tar"
    with tarfile.open(path, "w") as archive:
        for i, data in enumerate(files):
            for suffix, content in ((".jpg", data), (".cls", b"0")):
                member = tarfile.TarInfo(f"{i:08d}{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    made = v2_floats()

    def run() -> None:
        samples = webdataset.WebDataset(str(path), shardshuffle=False).decode("pil").to_tuple("jpg", "cls")
        for image, _ in samples:
            made(image.convert("RGB"))

    return run


def by_opencv(files: list[bytes]) -> Run:
    cv2: Any = importlib.import_module("cv2")
    cv2.setNumThreads(1)
    how = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    return each(files, lambda data, i: cv2_crop(cv2, cv2.imdecode(np.frombuffer(data, np.uint8), how), i))


def by_simplejpeg(files: list[bytes]) -> Run:
    cv2: Any = importlib.import_module("cv2")
    simplejpeg: Any = importlib.import_module("simplejpeg")
    cv2.setNumThreads(1)
    return each(files, lambda data, i: cv2_crop(cv2, simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True), i))


def cv2_crop(cv2: Any, image: np.ndarray, i: int) -> None:
    left, top, width, height, *_ = RANDOM.crops([i], seed=1)(0, image.shape[1], image.shape[0])
    square = cv2.resize(image[top : top + height, left : left + width], (SIDE, SIDE))
    if random.random() < 0.5:
        cv2.flip(square, 1)


def by_tensorflow(files: list[bytes]) -> Run:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    tf: Any = importlib.import_module("tensorflow")

    def one(data: Any) -> Any:
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(data),
            bounding_boxes=tf.zeros((1, 0, 4)),
            aspect_ratio_range=ASPECT,
            area_range=AREA,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.concat([begin[:2], size[:2]], 0)
        image = tf.image.decode_and_crop_jpeg(data, window, channels=3, dct_method="INTEGER_FAST")
        return tf.image.random_flip_left_right(tf.cast(tf.image.resize(image, (SIDE, SIDE)), tf.uint8))

    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    data = tf.data.Dataset.from_tensor_slices(files).with_options(options).map(one).batch(BATCH)
    return lambda: sum(1 for _ in data)


def by_dali(files: list[bytes]) -> Run:
    dali: Any = importlib.import_module("nvidia.dali")
    fn: Any = importlib.import_module("nvidia.dali.fn")
    encoded = [np.frombuffer(data, np.uint8) for data in files]

    def batches() -> Iterator[list[np.ndarray]]:
        while True:
            for first in range(0, len(encoded), BATCH):
                yield encoded[first : first + BATCH]

    @dali.pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, exec_pipelined=False, exec_async=False)
    def pipeline() -> Any:
        data = fn.external_source(source=batches(), dtype=dali.types.UINT8)
        part = fn.decoders.image_random_crop(
            data, device="cpu", output_type=dali.types.RGB, random_area=AREA, random_aspect_ratio=ASPECT
        )
        return fn.flip(fn.resize(part, size=(SIDE, SIDE)), horizontal=fn.random.coin_flip())

    made = pipeline()
    made.build()

    def run() -> None:
        for _ in range(0, len(encoded), BATCH):
            made.run()

    return run


def by_ffcv(files: list[bytes]) -> Run:
    """Read from an FFCV file of JPEGs with quality 90; FFCV decodes whole images."""
    fields: Any = importlib.import_module("ffcv.fields")
    rgb: Any = importlib.import_module("ffcv.fields.rgb_image")
    loader: Any = importlib.import_module("ffcv.loader")
    transforms: Any = importlib.import_module("ffcv.transforms")
    writer: Any = importlib.import_module("ffcv.writer")
    path = str(Path(tempfile.mkdtemp()) / "some.beton")
    images = [(Image.open(io.BytesIO(data)).convert("RGB"), 0) for data in files]
    form = {"image": fields.RGBImageField(write_mode="jpg", jpeg_quality=90), "label": fields.IntField()}
    writer.DatasetWriter(path, form, num_workers=1).from_indexed_dataset(images)
    part = rgb.RandomResizedCropRGBImageDecoder((SIDE, SIDE), scale=AREA, ratio=ASPECT)
    made = loader.Loader(
        path,
        batch_size=BATCH,
        num_workers=1,
        order=loader.OrderOption.SEQUENTIAL,
        pipelines={"image": [part, transforms.RandomHorizontalFlip(), transforms.ToTensor()], "label": None},
    )
    return lambda: sum(1 for _ in made)
