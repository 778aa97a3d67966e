"""What differs between the releases of torch that are supported (2.8 to 2.13), by what they have; nothing else asks."""

from inspect import signature

from torch.nn.parallel import DistributedDataParallel

# DDP's switch for sending rank 0's buffers before every forward pass has another name since torch 2.13.
SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)
