"""Communication between ranks: the process group over oneCCL or gloo, and gradient all-reduce hooks for DDP.

A watchdog in every rank ends the job when a peer is lost (watchdog.py). `ccl` is the oneCCL backend for c10d; any
script can use it: `import cputrain.comm.ccl`, then `torch.distributed.init_process_group("ccl")`.
"""

from cputrain import lazy_names

__getattr__ = lazy_names(__name__)
