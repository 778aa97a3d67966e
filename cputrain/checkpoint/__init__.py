"""Checkpoints for any training loop: `from cputrain.checkpoint import AsyncCheckpoint`.

async_checkpoint.py has the public class, loop_state.py what it saves; cputrain/training/saving.py uses the same parts
for the trainer. Both copy the state (state.py), hand it to the writer's thread (writer.py), and find the newest intact
checkpoint (files.py, which also has the format: safetensors and checkpoint.json, with checksums and without pickle).
"""

from cputrain import lazy_names

__getattr__ = lazy_names(__name__)
