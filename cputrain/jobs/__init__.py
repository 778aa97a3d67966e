"""Job scripts: script.py makes those of Slurm and PBS from templates and submits them, kubernetes.py manifests."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
