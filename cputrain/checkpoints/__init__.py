"""The files of checkpoints: a folder for each, with tensors as safetensors and everything else as JSON, no pickles.

folder.py knows their places in a run's folder, manifest.py checkpoint.json, tensors.py the files of tensors. Nothing
here knows what a training is: cputrain/training/saving does.
"""
