"""Job scripts: script.py renders and submits scripts for Slurm and PBS, kubernetes.py makes manifests."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
