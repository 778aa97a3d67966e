"""Record the operators of an unchanged program, from its `import torch` on: in the main thread of each of its
processes, unless they are forked, into a file for each."""

import atexit
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from cputrain.affinity.filesystem import write_bytes
from cputrain.kernels.recorder import Recorder, load_recorder
from cputrain.variables import RECORDING_VARIABLE

WRITE_S = 2.0  # between writings of the file, for programs that are killed


def recording_setting(library: Path, folder: Path, after_s: float, seconds: float) -> str:
    """Return the value of RECORDING_VARIABLE with which the processes of a program record into a folder."""
    return json.dumps([str(library), str(folder), after_s, seconds])


def record_if_requested(env: Mapping[str, str]) -> None:
    """Do what RECORDING_VARIABLE says, at `import torch` in the main thread."""
    setting = env.get(RECORDING_VARIABLE)
    if setting is None or threading.current_thread() is not threading.main_thread():
        return
    library, folder, after_s, seconds = json.loads(setting)
    recording = _Recording(load_recorder(Path(library)), Path(folder) / f"{os.getpid()}.json", env)
    register_optimizer_step_post_hook(recording.count_step)
    atexit.register(recording.finish)
    recording.recorder.begin(after_s, seconds)
    threading.Thread(target=recording.keep_writing, daemon=True).start()


class _Recording:
    """What this process computes, kept in a file."""

    def __init__(self, recorder: Recorder, path: Path, env: Mapping[str, str]) -> None:
        self.recorder, self.path, self.env, self.pid = recorder, path, env, os.getpid()
        self.steps = 0

    def count_step(self, *_: Any) -> None:
        """Count a step of an optimizer."""
        self.steps += self.recorder.is_in_time

    def finish(self) -> None:
        """Record no more, and write."""
        self.recorder.end()
        self.write()

    def write(self) -> None:
        """Write what was recorded so far, in the recorded thread; a forked process has its parent's recording."""
        if os.getpid() == self.pid:
            process = {"command": sys.argv, "rank": self.env.get("RANK", ""), "threads": torch.get_num_threads()}
            values = {**process, "steps": self.steps, "is_over": self.recorder.is_over, **self.recorder.recorded()}
            write_bytes(self.path, json.dumps(values).encode())

    def keep_writing(self) -> None:
        """Let the main thread write between two of its bytecodes, every WRITE_S; end the recording after its time."""
        written = threading.Event()

        def write(_: object) -> int:
            try:
                (self.finish if self.recorder.is_over else self.write)()
            finally:
                written.set()
            return 0

        pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(write)
        while not self.recorder.is_over:
            time.sleep(WRITE_S)
            written.clear()
            ctypes.pythonapi.Py_AddPendingCall(pending, None)
            written.wait()
