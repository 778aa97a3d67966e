"""Checkpoints for any training loop: `from cputrain.checkpoint import AsyncCheckpoint`.

async_checkpoint.py is the public class; cputrain/training/saving.py is the trainer's use of the same parts. Both copy
the state (state.py; tree.py for any object's state dict), hand it to the writer's thread (writer.py), and find the
newest intact one (folder.py). files.py has the format: safetensors and checkpoint.json, with checksums, without pickle.
"""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
