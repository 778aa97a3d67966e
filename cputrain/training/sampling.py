"""Sampling of a rank's use of CPU and memory by the rank itself, where mpirun, srun or torchrun has started it."""

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from affinity.kernel.binding import bind_thread
from affinity.ranks.rank import Rank
from mpi.usage.file import FOLDER as USAGE
from mpi.usage.sampler import Sampler

POLL_S = 0.5


@contextmanager
def sample_usage(folder: Path, rank: Rank, pus: Collection[int]) -> Iterator[None]:
    """Sample this rank, and its host if it is the first rank there, into a run's folder, in a thread on these PUs."""
    sampler = Sampler(folder / USAGE, {rank.rank: os.getpid()}, whole_host=rank.local_rank == 0)
    done = threading.Event()

    def sample() -> None:
        bind_thread(tuple(pus))
        while not done.wait(POLL_S):
            sampler.tick()

    thread = threading.Thread(target=sample, name="cputrain-usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sampler.close()
