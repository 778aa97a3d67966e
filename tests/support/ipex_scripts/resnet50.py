"""Train ResNet-50 as scripts for Intel's extension do: float32 or bfloat16, in one process or by DDP over oneCCL."""

import argparse
import os

import intel_extension_for_pytorch as ipex
import torch
import torch.distributed as dist
from network import resnet50
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--ddp", action="store_true")
parser.add_argument("--no-prepack", action="store_true", help="the original's blocked weights need AVX-512 in bfloat16")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()
rank, ranks = 0, 1
if args.ddp:
    import oneccl_bindings_for_pytorch  # noqa: F401  it registers the backend

    dist.init_process_group("ccl", init_method="env://")
    rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = resnet50(10).to(memory_format=torch.channels_last)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)
model.train()
dtype = torch.bfloat16 if args.bf16 else torch.float32
prepack = {"weights_prepack": False} if args.no_prepack else {}
model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=dtype, **prepack)
if args.ddp:
    model = DistributedDataParallel(model)
torch.manual_seed(2)
data, target = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
data, target = data.chunk(ranks)[rank].to(memory_format=torch.channels_last), target.chunk(ranks)[rank]
for step in range(args.steps):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        loss = criterion(model(data).float(), target)
    loss.backward()
    optimizer.step()
    if args.ddp:
        dist.all_reduce(loss.detach_().div_(ranks))
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)
if args.ddp:
    dist.barrier()
    os._exit(0)  # gloo's and oneCCL's groups may wait for a thread at the end
