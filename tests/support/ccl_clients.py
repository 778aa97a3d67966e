"""A rank of another package's use of a backend: python -m tests.support.ccl_clients CLIENT FOLDER ccl|gloo.

Each client is written as its documentation shows; lines that the backend needs are marked.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BACKEND = (*sys.argv, "ccl")[3]


class Line(Dataset):
    """Points of y = 2 x + 1 as transformers' Trainer expects them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([index / 64.0])
        return {"x": x, "labels": 2 * x + 1}


class Model(nn.Module):
    """A layer that returns its loss, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, backward=torch.Tensor.backward
) -> None:
    for _ in range(3):
        for batch in loader:
            loss = model(**batch)["loss"]
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def with_torchvision() -> None:
    """Help the client to import torchvision, whose CUDA wheels do not import alone beside a CPU build of torch."""
    from cputrain.models.vision import import_torchvision

    import_torchvision("models")


def ddp(_folder: Path) -> nn.Module:
    """minGPT-ddp and torchvision's reference scripts: first the group, then a loader with workers, then DDP."""
    dist.init_process_group(BACKEND)
    loader = DataLoader(Line(), batch_size=8, sampler=DistributedSampler(Line()), num_workers=2)
    model = nn.parallel.DistributedDataParallel(Model())
    train(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    return model


def accelerate(_folder: Path) -> nn.Module:
    from accelerate import Accelerator

    if BACKEND == "ccl":
        dist.init_process_group("ccl")  # the added line: Accelerate uses an existing group
    accelerator = Accelerator(cpu=True)
    model = Model()
    loader = DataLoader(Line(), batch_size=8, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    train(model, optimizer, loader, accelerator.backward)
    assert accelerator.gather(torch.ones(1)).tolist() == [1.0] * dist.get_world_size()
    return model


def trainer(folder: Path) -> nn.Module:
    with_torchvision()
    from transformers import Trainer, TrainingArguments

    if BACKEND == "ccl":
        dist.init_process_group("ccl")  # the added line: Trainer uses Accelerate
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=6, per_device_train_batch_size=8, report_to=[],
        dataloader_num_workers=2, save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    made = Trainer(model=Model(), args=arguments, train_dataset=Line())
    made.train()
    assert made.args.world_size == dist.get_world_size()
    return made.model


def lightning(folder: Path) -> nn.Module:
    with_torchvision()
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    fit = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=DDPStrategy(process_group_backend=BACKEND),
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, default_root_dir=folder,
    )  # fmt: skip
    fit.fit(module, DataLoader(Line(), batch_size=8, num_workers=2))
    return module


def deepspeed(_folder: Path) -> nn.Module:
    """ZeRO's stages 0 (none), 2 and 3: the weights equal those of one process with the batches of all ranks. DeepSpeed
    compiles an extension at its first start on a host."""
    import deepspeed

    deepspeed.init_distributed(dist_backend=BACKEND)
    world = dist.get_world_size()
    by_rank = [DataLoader(Line(), batch_size=8, sampler=DistributedSampler(Line(), world, i)) for i in range(world)]
    for stage in (0, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # the default clips to a norm of 1
        }
        model, whole = Model(), Model()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        optimizer = torch.optim.SGD(whole.parameters(), 0.1)
        for batches in zip(*by_rank, strict=True):
            engine.backward(engine(**batches[dist.get_rank()])["loss"])
            engine.step()
            torch.stack([whole(**batch)["loss"] for batch in batches]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):  # in stage 3 each rank has only a part
            whole_again = Model()
            whole_again.load_state_dict({name: value.detach().clone() for name, value in model.named_parameters()})
        torch.testing.assert_close(whole_again.state_dict(), whole.state_dict())
    return whole_again


def tensor_parallel(_folder: Path) -> nn.Module:
    """PyTorch's tensor parallelism: the result equals that of the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group(BACKEND)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    expected = whole(torch.ones(3, 8)).detach()
    parallel = parallelize_module(whole, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = parallel(torch.ones(3, 8))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    return nn.Linear(1, 1)


def fsdp2(folder: Path) -> nn.Module:
    """FSDP2, with its state saved and loaded by distributed checkpoint."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(BACKEND)
    model = Model()
    fully_shard(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(Line(), batch_size=8))
    state = {"model": model.state_dict()}
    before = [value.full_tensor().clone() for value in state["model"].values()]
    checkpoint.save(state, checkpoint_id=folder / "checkpoint")
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    checkpoint.load(state, checkpoint_id=folder / "checkpoint")
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(before, state["model"].values(), strict=True))
    return nn.Linear(1, 1)


def pipelining(_folder: Path) -> nn.Module:
    """PyTorch's pipeline parallelism over two stages: messages between ranks."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group(BACKEND)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(world)]
    inputs, target = torch.randn(8, 4), torch.zeros(8, 4)
    expected = nn.Sequential(*layers)(inputs)
    stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    output = schedule.step(*([inputs] if rank == 0 else []), **({"target": target, "losses": losses} if rank == world - 1 else {}))  # fmt: skip # noqa: E501
    if rank == world - 1:
        torch.testing.assert_close(output, expected)
        assert len(losses) == 4
    assert layers[rank].weight.grad is not None
    dist.barrier()
    return nn.Linear(1, 1)


CLIENTS = {
    client.__name__: client
    for client in (ddp, accelerate, trainer, lightning, deepspeed, tensor_parallel, fsdp2, pipelining)
}


def main(name: str, folder: str, backend: str = "ccl") -> None:
    """Run a client; check that it uses the backend, and that all ranks end with the same model."""
    torch.set_num_threads(1)
    model = CLIENTS[name](Path(folder))
    assert dist.get_backend() == backend, dist.get_backend()
    mine = torch.cat([value.detach().reshape(-1) for value in model.parameters()])
    if name in ("ddp", "accelerate", "trainer", "lightning", "deepspeed"):
        all_of = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of, mine)
        assert all(torch.equal(one, mine) for one in all_of)
    os.write(1, json.dumps({"rank": int(os.environ["RANK"]), "client": name}).encode() + b"\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
