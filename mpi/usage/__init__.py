"""What ranks and hosts use: sampler.py reads the kernel's counters, records.py writes records to usage/*.jsonl."""

from cputrain.affinity.lazy import front

__getattr__, __dir__ = front(__name__, __file__)
