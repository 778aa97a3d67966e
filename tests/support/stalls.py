"""A rank of a job in which one rank is held up: python -m tests.support.stalls BACKEND PHASE WAY.

The last rank, for a checkpoint the first, is held up in `held_up`, in one of the ways of WAYS; the others wait for it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FOREVER_S = 600
# Stops and continues a process, as one that waits for its pages: it runs for a fiftieth of the time.
PAGING = """
import os, signal, sys, time
while os.getppid() == int(sys.argv[1]):
    for number, seconds in ((signal.SIGSTOP, 0.49), (signal.SIGCONT, 0.01)):
        os.kill(int(sys.argv[1]), number)
        time.sleep(seconds)
"""


def read_pipe() -> None:
    path = Path(tempfile.mkdtemp()) / "fifo"
    os.mkfifo(path)
    path.read_text(encoding="utf-8")


def read_in_c(library: ctypes.CDLL) -> None:
    """Read a pipe that stays empty: a call that the kernel, unlike sleep, restarts after the signal that asks for a
    stack, so that the rank is still held up while others' stacks are read."""
    library.read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def lock_twice() -> None:
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()


def page() -> None:
    subprocess.Popen([sys.executable, "-c", PAGING, str(os.getpid())])
    while True:
        pass


def loop() -> None:
    while True:
        pass


WAYS: dict[str, Callable[[], object]] = {
    "pipe": read_pipe,
    "lock": lock_twice,
    "call": lambda: read_in_c(ctypes.CDLL(None)),
    "call-with-gil": lambda: read_in_c(ctypes.PyDLL(None)),
    "sleep": lambda: time.sleep(FOREVER_S),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "page": page,
    "loop": loop,
}


def held_up(way: str, rank: int = -1) -> None:
    """Be held up if this is that rank, -1 the last one."""
    if int(os.environ["RANK"]) == rank % int(os.environ["WORLD_SIZE"]):
        print("held up", time.time(), flush=True)
        WAYS[way]()


def steps(phase: str, way: str) -> None:
    """Train in steps; at step 20 a rank is held up, in the backward pass or before the step."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    for step in range(21):
        if step == 20 and phase == "step":
            held_up(way)
        out: Tensor = model(torch.ones(2, 8))
        if step == 20 and phase == "backward":
            out.register_hook(lambda _: held_up(way))
        out.sum().backward()


class Network(nn.Linear):
    """A network in which a rank is held up: in its first evaluation, or the first rank as it is saved."""

    def __init__(self, phase: str, way: str) -> None:
        super().__init__(8, 2)
        self.phase, self.way, self.steps = phase, way, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += self.training
        if self.phase == "evaluation" and not self.training and self.steps:
            held_up(self.way)
        return super().forward(inputs)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        if self.phase == "checkpoint" and self.steps >= 20:
            held_up(self.way, 0)
        return super().state_dict(*arguments, **options)


class Samples:
    """Samples of which one in the second half is never there."""

    def __init__(self, phase: str, way: str) -> None:
        self.phase, self.way, self.taken = phase, way, 0

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.taken += 1
        if self.phase == "data" and self.taken == 120:
            held_up(self.way)
        return torch.ones(8) * index / 480, index % 2


def train(backend: str, phase: str, way: str) -> None:
    """Train by cputrain.train; a rank is held up in its data, in an evaluation or in a checkpoint."""
    from cputrain import train

    settings = {"comm.backend": backend, "batch.local": 4, "epochs": 1, "output": "run", "schedule.warmup_epochs": 0}
    data = Samples(phase, way), Samples("", way)
    train(Network(phase, way), nn.CrossEntropyLoss(), train_data=data[0], val_data=data[1], settings=settings)


def main(backend: str, phase: str, way: str) -> None:
    if phase in ("data", "evaluation", "checkpoint"):
        train(backend, phase, way)
        return
    if phase == "start":
        held_up(way)
    dist.init_process_group(backend)
    if phase == "first":
        held_up(way)
    if phase in ("step", "backward"):
        steps(phase, way)
    dist.all_reduce(torch.ones(4))
    if phase == "handle":  # waits in C++, below a line of this file
        held_up(way)
        dist.all_reduce(torch.ones(4), async_op=True).wait()
    if phase == "barrier":
        held_up(way)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
