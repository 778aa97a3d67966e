"""`cputrain bench memory`, `data`, `comm` and `optimizer`: bandwidth, decoding speed, all-reduces, optimizer steps.

Memory: every thread is bound to a core and touches its private arrays first (first touch). Bytes read by a store before
it writes (write-allocate) are not counted. All-reduces: between two ranks of this host with one core each, by size and
backend.
"""

import io
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from cputrain.affinity.binding import running_on, set_memory_policy
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.plan import Request
from cputrain.affinity.planner.records import Record, plan_this_machine
from cputrain.affinity.planner.request import ALL_REDUCE, DECODING, MEMORY
from cputrain.affinity.topology.machine import Core, Machine, NumaNode
from cputrain.affinity.wording import plural
from cputrain.comm.group import end_group, start_group, timed_rounds
from cputrain.data.loader import IMAGENET_MEAN, IMAGENET_STD, IMAGES_PER_CALL, choose_normalize
from cputrain.data.pixels import (
    Crop,
    Decode,
    Transform,
    TurboDecoder,
    center_crop,
    choose_decoder,
    decode_by_pillow,
    load_decoder,
)
from cputrain.data.prepare import reencode_image
from cputrain.launch.rank_process import RankContext, run_on_ranks
from cputrain.measurements import BUCKET_ALL_REDUCE, TITLES, rate_record, spread_of, transport_records
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.optim import build_optimizer, set_lr_and_decay
from cputrain.optim_settings import COPIES, TAKE_NORMS, OptimizerName, OptimSettings
from cputrain.predict.collectives import fit_alpha_beta
from cputrain.predict.next_best import compare_plan
from cputrain.predict.step_time import passes_over_weights
from cputrain.studies.bench.figures import Figure, Report, Table, figure_of, interleaved, number_text, seconds_of

GB = 1e9
STREAMS = {"copy": 2, "triad": 3}  # arrays that a kernel reads or writes
MIN_BYTES, CACHES = 256 << 20, 4  # the threads' arrays together: at least this, and 4 times the level-3 caches
PASSES = 4  # over the arrays, per measurement
TEST_BYTES = 8 << 20
OPTIMIZERS: tuple[OptimizerName, ...] = ("momentum", "lars", "adam")
NETWORK, TEST_NETWORK = "resnet50", "lenet"
FLOAT_BYTES = 4
WIDTH, HEIGHT = 500, 408  # together ImageNet's mean number of pixels
# These give a photo about as many bytes as ImageNet's: 110 kB, and 28 kB once prepared.
FALL, PHOTO_QUALITY, CONTRAST = 1.4, 95, 50.0
COUNT, TEST_COUNT, MAX_PHOTOS = 48, 4, 200  # generated ones, and of a folder
SIDE = 224  # pixels, of crops
RANDOM = Transform(image_size=SIDE, short_side=SIDE, crop="random_resized")
SHORT_SIDE, QUALITY = 256, 90  # of prepared images
TURBO, PILLOW, LIMIT = "libjpeg-turbo", "Pillow", "entropy decoding alone"
UNIT = "images per CPU-second"
BATCHES = 8  # per measurement of normalization
BACKENDS = ("gloo", "ccl")
SIZES = tuple(1 << k for k in range(10, 29, 2))  # 1 KiB to 256 MiB
TEST_SIZES = (1 << 10, 1 << 16, 1 << 20)
LARGE = 16 << 20  # bytes from which on latency is negligible; gradient buckets are about this large
RANKS = 2
TIMEOUT_S = 300.0  # of a collective
US = 1e6  # microseconds in a second
COMMAND = "cputrain bench comm"

Times = dict[int, dict[str, list[float]]]
"""Bytes -> "all-reduce" and "copy" -> seconds of each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Threads by PU, with the NUMA node that each one's memory is bound to; None means the kernel's default."""

    name: str
    pus: tuple[int, ...]
    nodes: tuple[int | None, ...]


def bench_memory(machine: Machine, *, repeats: int, quick: bool) -> tuple[Report, tuple[Record, ...]]:
    """Measure the bandwidth of each NUMA node by number of threads and from other nodes, and of the whole host."""
    array = TEST_BYTES if quick else max(MIN_BYTES, CACHES * level3_bytes(machine))
    figures: list[Figure] = []
    for group in places(machine):
        all_threads = group[-1]
        rates = {
            (cores, kernel): bandwidth(cores, kernel, array // len(cores.pus), repeats)
            for cores in group
            for kernel in STREAMS
        }
        for (cores, kernel), values in rates.items():
            limit = None if cores is all_threads else median(rates[all_threads, kernel]) / GB
            limited_by = "" if cores is all_threads else all_threads.name
            in_gb = [value / GB for value in values]
            figures.append(figure_of(f"{cores.name}, {kernel}", in_gb, "GB/s", limit=limit, limited_by=limited_by))
    whole = bandwidth(host_place(machine), "triad", array // len(machine.allowed_cores), repeats)
    host = figure_of("host, triad", [value / GB for value in whole], "GB/s")
    record = rate_record(machine, MEMORY, spread_of(whole), command="cputrain bench memory")
    title = f"memory of {machine.name}: arrays of {array >> 20} MiB, medians of {plural(repeats, 'repeat')}"
    return Report(title=title, figures=(*figures, host)), (record,)


def places(machine: Machine) -> list[list[Place]]:
    """For each NUMA node with memory: 1, 2, 4, ... and all of its nearest cores, after the cores of other nodes."""
    nodes = [node for node in machine.numa_nodes if node.memory_bytes and node.id in machine.allowed_nodes]
    groups = []
    for node in nodes:
        near = cores_next_to(machine, node)
        if not near:
            continue
        bound = node.id if len(nodes) > 1 else None
        name = f"node {node.id}"
        near_places = [
            _place(f"{name}, {plural(count, 'thread')}", near[:count], bound) for count in thread_counts(len(near))
        ]
        far_places = [
            _place(f"{name} from cores of node {far_node.id}", cores_next_to(machine, far_node), bound)
            for far_node in machine.numa_nodes
            if far_node.pus and far_node.id not in node.near and cores_next_to(machine, far_node)
        ]
        groups.append([*far_places, *near_places])
    return groups or [[_place("host", machine.allowed_cores, None)]]


def cores_next_to(machine: Machine, node: NumaNode) -> tuple[Core, ...]:
    """Return the allowed cores that are nearest to a node's memory."""
    return tuple(core for core in machine.allowed_cores if core.numa_node in node.near)


def host_place(machine: Machine) -> Place:
    """Return a thread on every core, each with memory of the nearest node."""
    several = sum(bool(node.memory_bytes) for node in machine.numa_nodes) > 1
    cores = machine.allowed_cores
    nodes = {node.id for node in machine.numa_nodes if node.memory_bytes and node.id in machine.allowed_nodes}
    nodes_of_cores = tuple(core.numa_node if several and core.numa_node in nodes else None for core in cores)
    return Place(name="host", pus=tuple(core.pus[0] for core in cores), nodes=nodes_of_cores)


def _place(name: str, cores: Sequence[Core], node: int | None) -> Place:
    return Place(name=name, pus=tuple(core.pus[0] for core in cores), nodes=(node,) * len(cores))


def thread_counts(maximum: int) -> list[int]:
    """Return 1, 2, 4, ... and `maximum`."""
    return sorted({1 << k for k in range(maximum.bit_length()) if 1 << k < maximum} | {maximum})


def bandwidth(cores: Place, kernel: str, array_bytes: int, repeats: int) -> list[float]:
    """Return the bytes/s of all threads together for each repeat; `array_bytes` is the size of one thread's array.

    Raises RunError if the kernel refuses to bind memory to a node.
    """
    barrier, threads = threading.Barrier(len(cores.pus)), torch.get_num_threads()
    jobs = []
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(len(cores.pus)) as pool:  # one thread per PU: all of them meet at the barrier
            for pu, node in zip(cores.pus, cores.nodes, strict=True):
                jobs.append(pool.submit(_timed_passes, pu, node, kernel, array_bytes, repeats, barrier))
                jobs[-1].add_done_callback(lambda job: barrier.abort() if job.exception() else None)
    finally:
        torch.set_num_threads(threads)
    for job in jobs:
        error = job.exception()
        if error is not None and not isinstance(error, threading.BrokenBarrierError):  # raised in the waiting threads
            raise RunError(f"bench memory: {cores.name}: {error}") from error
    moved = PASSES * STREAMS[kernel] * array_bytes * len(cores.pus)
    spans = zip(*(job.result() for job in jobs), strict=True)
    return [
        moved / (max(end for _, end in round_spans) - min(start for start, _ in round_spans)) for round_spans in spans
    ]


def _timed_passes(
    pu: int, node: int | None, kernel: str, array_bytes: int, repeats: int, barrier: threading.Barrier
) -> list[tuple[float, float]]:
    """Return start and end of each repeat; runs in one thread per PU."""
    os.sched_setaffinity(0, {pu})  # 0 is the calling thread
    if node is not None and (why := set_memory_policy("bind", (node,))):
        raise RunError(f"the kernel refuses to bind memory to node {node}: {why}")
    a, b, c = (torch.empty(array_bytes // 4).fill_(value) for value in (1.0, 2.0, 3.0))
    spans = []
    for _ in range(repeats + 1):
        barrier.wait()
        started = time.perf_counter()
        for _ in range(PASSES):
            if kernel == "copy":
                a.copy_(b)
            else:
                torch.add(b, c, alpha=3.0, out=a)
        spans.append((started, time.perf_counter()))
    return spans[1:]


def level3_bytes(machine: Machine) -> int:
    """Return the bytes of all level-3 caches of the allowed cores; 0 if the kernel does not report them."""
    first = {core.l3: core.pus[0] for core in machine.allowed_cores if core.l3 is not None}
    files = [Path(f"/sys/devices/system/cpu/cpu{pu}/cache/index3/size") for pu in first.values()]
    return sum(_size(file.read_text(encoding="utf-8")) for file in files if file.is_file())


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else 0


def bench_optimizer(machine: Machine, *, repeats: int, quick: bool) -> Report:
    """Time steps of each optimizer, on one thread and on one thread per core."""
    name = TEST_NETWORK if quick else NETWORK
    model = build_model(ModelSettings(name=name), 1000, 64).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    size = FLOAT_BYTES * sum(parameter.numel() for parameter in model.parameters())
    before, figures = torch.get_num_threads(), []
    for threads in sorted({1, len(machine.allowed_cores)}):
        torch.set_num_threads(threads)
        figures += _optimizer_figures(model, size, threads, repeats, quick=quick)
    torch.set_num_threads(before)
    title = f"optimizer steps on {name}'s {size / 1e6:.0f} MB of weights, {plural(repeats, 'repeat')}"
    return Report(title=title, figures=tuple(figures))


def _optimizer_figures(model: nn.Module, size: int, threads: int, repeats: int, *, quick: bool) -> list[Figure]:
    runs: dict[str, Callable[[], float]] = {name: _step(model, name) for name in OPTIMIZERS}
    array = TEST_BYTES if quick else MIN_BYTES
    a, b, c = (torch.full((array // FLOAT_BYTES,), value) for value in (1.0, 2.0, 3.0))
    runs["triad"] = lambda: seconds_of(lambda: torch.add(b, c, alpha=3.0, out=a))
    times = interleaved(runs, repeats)
    limit = STREAMS["triad"] * array / spread_of(times["triad"])[0] / GB
    passes = {name: passes_over_weights(COPIES[name], norms=name in TAKE_NORMS) for name in OPTIMIZERS}
    return [
        figure_of(
            f"{name}, {plural(threads, 'thread')}",
            [passes[name] * size / seconds / GB for seconds in times[name]],
            "GB/s",
            limit=limit,
            limited_by=f"triad, {plural(threads, 'thread')}",
            note=f"{number_text(1e3 * spread_of(times[name])[0])} ms",
        )
        for name in OPTIMIZERS
    ]


def _step(model: nn.Module, name: OptimizerName) -> Callable[[], float]:
    optimizer = build_optimizer(model, OptimSettings(name=name))
    set_lr_and_decay(optimizer, 1e-4, 5e-5)
    return lambda: seconds_of(optimizer.step)


def generated_photos(count: int) -> list[bytes]:
    """Generate JPEGs with the spectrum of photos, whose amplitudes fall with a power of the frequency (Field 1987), in
    similar colors."""
    rng = np.random.Generator(np.random.Philox(key=count))
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None, :])
    frequency[0, 0] = np.inf
    return [_photo(rng, frequency**-FALL) for _ in range(count)]


def _photo(rng: np.random.Generator, amplitude: np.ndarray) -> bytes:
    def layer() -> np.ndarray:
        phases = rng.uniform(0, 2 * np.pi, amplitude.shape)
        values: np.ndarray = np.fft.irfft2(amplitude * np.exp(1j * phases), (HEIGHT, WIDTH))
        return np.asarray(values / values.std())

    light = layer()
    colors = [CONTRAST * (0.95 * light + 0.3 * layer()) + 128 for _ in range(3)]
    pixels = np.clip(np.stack(colors, axis=-1), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=PHOTO_QUALITY, subsampling="4:2:0")
    return out.getvalue()


def photos_of(folder: Path, decoder: TurboDecoder | None) -> list[bytes]:
    """Return the first JPEGs in a folder, at any depth. Raises InputError if there are none."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; name a folder with JPEGs")
    paths = (Path(parent) / name for parent, _, names in sorted(os.walk(folder)) for name in sorted(names))
    photos: list[bytes] = []
    for path in paths:
        if len(photos) == MAX_PHOTOS:
            break
        data = path.read_bytes()
        small = np.empty((1, 8, 8, 3), np.uint8)
        if data.startswith(b"\xff\xd8") and (decoder is None or decoder.decode([data], center_crop(8, 8), small)[0]):
            photos.append(data)
    if not photos:
        raise InputError(f"{folder} contains no JPEG; name a folder with JPEGs, at any depth")
    return photos


def bench_decoding(
    machine: Machine, folder: Path | None, env: Mapping[str, str], *, repeats: int, quick: bool
) -> tuple[Report, tuple[Record, ...]]:
    """Decode random crops of 224 x 224 on one core. Raises InputError if the folder contains no JPEG."""
    decoder, missing = _turbo(env)
    photos = photos_of(folder, decoder) if folder else generated_photos(TEST_COUNT if quick else COUNT)
    sets = {"original": photos, "prepared": [prepared(photo) for photo in photos]}
    decoders = {**({TURBO: choose_decoder("turbo", env)[0]} if decoder else {}), PILLOW: decode_by_pillow}
    kinds = [(kind, name) for kind in sets for name in decoders]
    runs = {f"{kind}, {name}": _run(decoders[name], sets[kind]) for kind, name in kinds}
    if decoder:
        runs |= {f"{kind}, {LIMIT}": _entropy_run(decoder, files) for kind, files in sets.items()}
    with_one_core = _on_one_core(machine, lambda: interleaved(runs, repeats))
    figures = []
    for kind, name in kinds:
        limit = {"limit": median(with_one_core[f"{kind}, {LIMIT}"]), "limited_by": LIMIT} if decoder else {}
        figures.append(figure_of(f"{kind}, {name}", with_one_core[f"{kind}, {name}"], UNIT, **limit))
    figures.append(figure_of("normalizing a batch of 32", _normalizing(env, repeats), UNIT))
    shapes = [Image.open(io.BytesIO(data)).size for data in photos]
    pixels = sum(width * height for width, height in shapes) / len(photos)
    source = f"{len(photos)} JPEGs of {folder}" if folder else f"{len(photos)} generated JPEGs"
    sizes = sum(map(len, photos)) / len(photos) / 1000
    title = f"decoding on one core of {machine.name}: {source}, {pixels:,.0f} pixels and {sizes:.0f} kB each"
    command = f"cputrain bench data {folder}" if folder else "cputrain bench data"
    records = []
    for name in decoders:  # nanoseconds of one core per pixel of an original image
        spread = spread_of([1e9 / rate / pixels for rate in with_one_core[f"original, {name}"]])
        records.append(rate_record(machine, f"{DECODING} {name}", spread, command=command))
    notes = ("prepared: short side 256, quality 90, as `cputrain prepare --short-side 256` writes them", *missing)
    return Report(title=title, figures=tuple(figures), notes=notes), tuple(records)


def _turbo(env: Mapping[str, str]) -> tuple[TurboDecoder | None, tuple[str, ...]]:
    """Load the libjpeg-turbo decoder, or return the reason why it cannot be used."""
    try:
        return load_decoder(env), ()
    except (InputError, RunError) as error:
        return None, (f"{TURBO} is not measured: {error}",)


def _on_one_core(machine: Machine, work: Callable[[], dict[str, list[float]]]) -> dict[str, list[float]]:
    """Run `work` with one thread on the last core, as the first cores handle the host's interrupts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with running_on(machine.allowed_cores[-1].pus[:1]):
            return work()
    finally:
        torch.set_num_threads(threads)


def images_per_cpu_s(work: Callable[[], object], images: int) -> float:
    """Return images per CPU-second of this process."""
    return images / seconds_of(work, time.process_time)


def _run(decode: Decode, files: list[bytes]) -> Callable[[], float]:
    """Return a measurement that decodes all files in batches, as the loader's threads do."""
    pixels = np.empty((IMAGES_PER_CALL, SIDE, SIDE, 3), dtype=np.uint8)

    def once() -> None:
        for first in range(0, len(files), IMAGES_PER_CALL):
            some = files[first : first + IMAGES_PER_CALL]
            problems = decode(some, RANDOM.crops(range(first, first + len(some)), seed=1), pixels[: len(some)])
            if any(problems):
                raise InputError(f"a JPEG cannot be decoded: {next(filter(None, problems))}")

    return lambda: images_per_cpu_s(once, len(files))


def _entropy_run(decoder: TurboDecoder, files: list[bytes]) -> Callable[[], float]:
    """Return a measurement of entropy decoding: a crop of only the last pixel makes libjpeg-turbo read the whole stream
    and transform almost nothing."""
    pixel = np.empty((1, 1, 1, 3), dtype=np.uint8)
    plain = [without_markers(data) for data in files]

    def once() -> None:
        for data in plain:
            decoder.decode([data], last_pixel, pixel)

    return lambda: images_per_cpu_s(once, len(files))


def last_pixel(_place: int, width: int, height: int) -> Crop:
    """Return the crop that contains only the last pixel."""
    return Crop(width - 1, height - 1, 1, 1, 1, 1, 0, 0, 1)


def without_markers(data: bytes) -> bytes:
    """Return the JPEG without restart markers, which would let the decoder skip entropy decoding as well."""
    if b"\xff\xdd\0\4" not in data:
        return data
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).save(out, "JPEG", quality="keep", optimize=True)
    return out.getvalue()


def prepared(data: bytes) -> bytes:
    """Re-encode a JPEG as `cputrain prepare --short-side 256` does."""
    return reencode_image(data, short_side=SHORT_SIDE, quality=QUALITY).data


def _normalizing(env: Mapping[str, str], repeats: int) -> list[float]:
    """Measure images per CPU-second of normalization, from bytes to the network's input."""
    normalize = choose_normalize(IMAGENET_MEAN, IMAGENET_STD, "auto", env)
    images = torch.zeros((32, SIDE, SIDE, 3), dtype=torch.uint8)

    def once() -> None:
        for _ in range(BATCHES):
            normalize(images)

    return interleaved({"": lambda: images_per_cpu_s(once, BATCHES * len(images))}, repeats)[""]


def bench_all_reduce(
    machine: Machine, env: Mapping[str, str], *, repeats: int, quick: bool
) -> tuple[Report, tuple[Record, ...]]:
    """Time all-reduces of each backend. Raises InputError on a host with one core, RunError if the ranks fail."""
    if len(machine.allowed_cores) < RANKS:
        raise InputError(f"bench comm needs two cores, but this process may use {len(machine.allowed_cores)}")
    request = Request(ppn=RANKS, threads=1, comm_cores=0, loader_cores=0)
    plan = plan_this_machine(request, env, machine=machine, compare=compare_plan)
    times_of_backends: dict[str, Times] = {}
    notes = []
    for backend in BACKENDS:
        try:
            arguments = {"backend": backend, "rounds": repeats, "sizes": TEST_SIZES if quick else SIZES}
            what = f"the all-reduce over {backend}"
            with tempfile.TemporaryDirectory() as folder:
                first, *_ = run_on_ranks(plan, f"{__name__}:time_all_reduces", arguments, Path(folder), env, what=what)
            times_of_backends[backend] = {int(size): times for size, times in first.items()}
        except (InputError, RunError) as error:
            if backend == "gloo":
                raise
            notes.append(f"{backend} is not measured: {error}")
    transports = {} if quick or "ccl" not in times_of_backends else _transports(env, notes)
    figures = [figure for size in times_of_backends["gloo"] for figure in _all_reduce_figures(size, times_of_backends)]
    title = f"all-reduce of float32 between {RANKS} ranks of {machine.name}, a core each: {plural(repeats, 'repeat')}"
    tables = (_fits(times_of_backends), *((_bucket_times(transports),) if transports else ()))
    report = Report(title=title, figures=tuple(figures), tables=tables, notes=tuple(notes))
    records = tuple(_bandwidth_record(machine, backend, times) for backend, times in times_of_backends.items())
    return report, (*records, *transport_records(transports, command=COMMAND))


def _transports(env: Mapping[str, str], notes: list[str]) -> dict[str, list[float]]:
    """Return the seconds of a bucket's all-reduces over each oneCCL transport; append a note for each that fails."""
    from cputrain.comm.ccl.check import bucket_seconds, time_transports
    from cputrain.comm.ccl.environment import find_libraries

    try:
        measured, problems = time_transports(find_libraries(env), env)
    except RunError as error:
        measured, problems = {}, [str(error)]
    notes += problems
    return bucket_seconds(measured)


def _bucket_times(transports: Mapping[str, list[float]]) -> Table:
    spreads = {
        TITLES[name]: spread_of([1000 * duration for duration in seconds]) for name, seconds in transports.items()
    }
    rows = tuple((title, *spread) for title, spread in spreads.items())
    return Table(
        title=f"oneCCL's transports: {BUCKET_ALL_REDUCE}", head=("transport", "ms", "lowest", "highest"), rows=rows
    )


def time_all_reduces(arguments: dict[str, Any], context: RankContext) -> Times:
    """Time all-reduces and copies of float32 values of each size, as one of the ranks."""
    torch.set_num_threads(1)
    group = start_group(context.rank, context.worker, arguments["backend"], TIMEOUT_S, context.env)
    times: Times = {}
    for size in arguments["sizes"]:
        values, copied = torch.zeros(size // FLOAT_BYTES), torch.ones(size // FLOAT_BYTES)
        acts = {"all-reduce": partial(dist.all_reduce, values), "copy": partial(copied.copy_, values)}
        times[size] = {name: timed_rounds(act, arguments["rounds"] + 1)[1:] for name, act in acts.items()}
    end_group(group)
    return times


def bus_bytes_per_s(size: int, seconds: float) -> float:
    """Return the bytes/s that each rank sends, counted as in NCCL's tests: 2 (n - 1) / n of the size."""
    return 2 * (RANKS - 1) / RANKS * size / seconds


def _all_reduce_figures(size: int, times_of_backends: Mapping[str, Times]) -> list[Figure]:
    """Return each backend's bandwidth for a size, with a copy of the same size as its limit."""
    figures = []
    for backend, times in times_of_backends.items():
        seconds, copied = times[size]["all-reduce"], median(times[size]["copy"])
        rates = [bus_bytes_per_s(size, duration) / GB for duration in seconds]
        about = {"limit": size / copied / GB, "limited_by": "a copy by one core"}
        note = f"{number_text(US * median(seconds))} us"
        figures.append(figure_of(f"{backend}, {size_text(size)}", rates, "GB/s", **about, note=note))
    return figures


def size_text(size: int) -> str:
    """1024 -> "1 KiB"."""
    power = min((size.bit_length() - 1) // 10, 3)
    return f"{size >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _fits(times_of_backends: Mapping[str, Times]) -> Table:
    """Fit latency and bandwidth of each backend to its medians."""
    rows = []
    for backend, times in times_of_backends.items():
        points = [(float(size), median(times_of_size["all-reduce"])) for size, times_of_size in times.items()]
        alpha, beta = fit_alpha_beta(points)
        rows.append((backend, US * alpha, 1 / beta / GB))
    return Table(title="time = alpha + bytes / bandwidth", head=("backend", "alpha us", "GB/s"), rows=tuple(rows))


def _bandwidth_record(machine: Machine, backend: str, times: Times) -> Record:
    """Record the bandwidth of large messages: bytes/s that a core receives, adds and sends."""
    large = [size for size in times if size >= LARGE] or [max(times)]
    rates = [bus_bytes_per_s(size, seconds) for size in large for seconds in times[size]["all-reduce"]]
    return rate_record(machine, f"{ALL_REDUCE} {backend}", spread_of(rates), command=COMMAND)
