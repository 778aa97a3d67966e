"""A rank that samples what it uses itself: nobody else does where mpirun, srun or torchrun has started it."""

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from affinity.ranks.rank import Rank
from mpi.usage.file import FOLDER as USAGE
from mpi.usage.sampler import Sampler

LOOK_S = 0.5


@contextmanager
def sampled(folder: Path, rank: Rank, pus: Collection[int]) -> Iterator[None]:
    """Sample this rank, and its host where it is the first there, into a run's folder, by a thread on these PUs."""
    sampler = Sampler(folder / USAGE, {rank.rank: os.getpid()}, whole_host=rank.local_rank == 0)
    done = threading.Event()

    def watch() -> None:
        os.sched_setaffinity(0, pus)
        while not done.wait(LOOK_S):
            sampler.tick()

    thread = threading.Thread(target=watch, name="cputrain-usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sampler.close()
