"""Run folders as a training writes them, generated from formulas, for tests of pages, tables and the live view."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.plan_file import plan_to_json
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.catalog import named_machine
from cputrain.mpi.usage import FOLDER, HostUse, UsageFile, WorkerUse, host_file, worker_file

MACHINE = "skx-8160-2s"
BEGUN = 1_795_371_953.0
LAYERS = ("conv1.weight", "layer1.0.conv1.weight", "layer2.0.conv1.weight", "layer4.2.conv3.weight", "fc.weight")
RECIPE = "name: demo\nmodel: {name: resnet50}\ndata: {path: images}\nbatch: {local: 32}\nlog_norms_every_steps: 10\n"


def write_run(folder: Path, *, ranks: int = 4, epochs: int = 6, steps: int = 40, seed: int = 1, **more: Any) -> Path:
    """Write a run with a number of steps per epoch. `more` events are appended, `recipe` replaces RECIPE, `end=False`
    leaves it unfinished, `usage=False` omits samples of resource use."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_machine(named_machine(MACHINE), Request(ppn=ranks)) if ranks <= 8 else None
    if plan is not None:
        (folder / "plan.json").write_text(plan_to_json(plan))
    (folder / "recipe.yaml").write_text(more.get("recipe", RECIPE))
    environment = {
        "cputrain": "0.1.0",
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "backend": "ccl",
        "backend_why": "oneCCL 2021.13 over MPI",
        "engine": "native",
        "decoder": "libjpeg-turbo",
        "allocator": "tcmalloc",
        "cpu_capability": "AVX512",
        "kernel": "6.12.0",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    pus = [list(worker.pus) for worker in plan.workers] if plan else [[rank] for rank in range(ranks)]
    lines = list(events(ranks, epochs, steps, seed, pus))
    if not more.get("end", True):
        lines = [line for line in lines if line["event"] != "end"]
    lines += more.get("events", [])
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if more.get("usage", True):
        write_usage(folder, ranks, lines[-1]["time"] - BEGUN, seed)
    return folder


def events(ranks: int, epochs: int, steps: int, seed: int, pus: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Return the events of a run without faults."""
    noise = random.Random(seed)
    now, total = BEGUN, epochs * steps
    bindings = [
        {"rank": r, "host": f"n{r // 4:02}", "planned_pus": own, "pus": own, "memory_policy": "bind", "thread_pus": []}
        for r, own in enumerate(pus)
    ]
    sizes = {"workers": ranks, "global_batch": 32 * ranks, "train_images": 32 * ranks * steps, "classes": 10}
    total_steps = {"last_step": total, "steps_per_epoch": steps}
    yield (
        {"event": "start", "time": now, "data": "images", "backend": "ccl", "bindings": bindings} | sizes | total_steps
    )
    peak = noise.uniform(1.0, 5.0)
    for step in range(1, total + 1):
        epoch = step / steps
        part = step / total
        seconds = noise.gauss(0.8, 0.03) + (0.6 if noise.random() < 0.02 else 0.0)
        comm, data = abs(noise.gauss(0.12, 0.02)), abs(noise.gauss(0.01, 0.01))
        now += seconds
        loss = 2.3 * math.exp(-2.5 * part) + 0.25 + noise.gauss(0, 0.08) * (1.1 - part)
        rate = peak * min(epoch, 1.0) * (1 - part) ** 2
        speed = 32 * ranks / seconds
        times = {"images_per_s": speed, "data_wait_s": data, "comm_wait_s": comm}
        yield {"event": "step", "time": now, "step": step, "epoch": epoch, "loss": loss, "rate": rate} | times
        if step % max(steps // 4, 1) == 0:
            slow = [1.25 if r == ranks - 2 and part > 0.5 else 1.0 for r in range(ranks)]
            computing = [0.65 * factor + abs(noise.gauss(0, 0.01)) for factor in slow]
            data_waits = [abs(noise.gauss(0.01, 0.01)) for _ in range(ranks)]
            whole = max(computing) + 0.1
            waits = [whole - own - wait for own, wait in zip(computing, data_waits, strict=True)]
            of_ranks = {"seconds": [whole] * ranks, "data_wait_s": data_waits, "comm_wait_s": waits}
            yield {"event": "ranks", "time": now, "step": step, "steps": max(steps // 4, 1)} | of_ranks
            yield {"event": "ratios", "time": now, "step": step, "rate": rate, "layers": layers(part, noise)}
        if step % steps == 0:
            yield evaluated(now, step, int(epoch), steps, loss, part, speed, noise)
            yield {"event": "checkpoint", "time": now, "step": step, "path": f"checkpoints/step-{step}", "best": True}
    top = {"top1": 76.0 + noise.gauss(0, 1), "top5": 93.1, "val_loss": 0.98, "test_top1": None, "test_top5": None}
    spent = {"time_to_train_s": now - BEGUN, "wall_time_s": now - BEGUN, "trained_until": now, "starts": 1}
    images = {"images": total * 32 * ranks, "steps": total, "step": total, "status": "done"}
    yield {"event": "end", "time": now, "data": "images"} | top | spent | images


def evaluated(
    now: float, step: int, epoch: int, steps: int, loss: float, part: float, speed: float, noise: random.Random
) -> dict[str, Any]:
    """Return an epoch's event."""
    top1 = 76 * (1 - math.exp(-4 * part)) + noise.gauss(0, 1)
    values = {
        "train_loss": loss,
        "train_top1": top1 - 3,
        "val_loss": loss + 0.1,
        "val_top1": top1,
        "val_top5": top1 + 16,
    }
    return {
        "event": "epoch",
        "time": now,
        "step": step,
        "epoch": epoch,
        "seconds": 0.8 * steps,
        "images_per_s": speed,
    } | values


def layers(part: float, noise: random.Random) -> list[dict[str, Any]]:
    """Return the norms of a step."""
    return [
        {
            "layer": name,
            "weights": 10.0 + i,
            "gradients": math.exp(-i - 2 * part),
            "ratio": (10.0 + i) / math.exp(-i - 2 * part),
            "trust": 0.001 * (10.0 + i) / math.exp(-i - 2 * part) * noise.uniform(0.9, 1.1),
        }
        for i, name in enumerate(LAYERS)
    ]


def write_usage(folder: Path, ranks: int, seconds: float, seed: int) -> None:
    """Write samples of CPU, memory and network."""
    noise = random.Random(seed)
    every = max(seconds / 60, 0.1)
    times = [BEGUN + every * (i + 1) for i in range(60)]
    for rank in range(ranks):
        file = UsageFile(worker_file(folder / FOLDER, rank), WorkerUse)
        for i, at in enumerate(times):
            memory = round((3.0 + min(i, 10) * 0.2 + rank * 0.1) * 2**30)
            cpu = every * noise.uniform(9.5, 11.8)
            host = f"n{rank // 4:02}"
            file.add(WorkerUse(time=at, seconds=every, host=host, cpu_s=cpu, rss_bytes=memory, processes=1))
        file.close()
    for host in sorted({f"n{rank // 4:02}" for rank in range(ranks)}):
        whole = UsageFile(host_file(folder / FOLDER, host), HostUse)
        for at in times:
            sent = round(every * noise.uniform(80e6, 120e6))
            network = {"eth0": (sent, sent), "lo": (1000, 1000)}
            use = {"cpu_s": every * 46.0, "memory_available_bytes": 150 << 30, "network": network}
            whole.add(HostUse(time=at, seconds=every, **use))
        whole.close()
