"""Training loops of other packages with `cputrain.optimize` and without it: seconds of a step, and their weights.

cputrain launch --ppn 2 [--kernels off] -- python -m benchmarks.clients [CLIENT...] [--bf16 | --split]

Each client is written as its package's documentation shows; its line of cputrain is `job.optimized`. It trains from the
same weights on the same random samples, in turns with the line and without it in one process, as an expert's script
does (channels-last). "differ" compares what both trainings changed in the weights, |a - b| / |b|; deep networks with
batch-norm multiply differences in rounding (ResNet-50, 4 steps of 8 images of 64 x 64: 0.9, as much as on another
number of threads). Networks: vit, swin and bert of transformers, timm:NAME, or one of torchvision, where the client can
train it.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import cputrain
from cputrain.models.vision import import_torchvision

CLASSES = 10
WORDS, SENTENCE = 30522, 128  # of BERT: the vocabulary, words of a sample
LR, MOMENTUM = 1e-3, 0.9
WARM_UP = 2  # first steps, which compile and allocate
TINY: dict[str, dict[str, Any]] = {
    "vit": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "swin": {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    "bert": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
}
"""Options of transformers' networks with --tiny, for tests."""

Sample = dict[str, Tensor]


class Samples(Dataset[Sample]):
    """Random images or sentences, always the same."""

    def __init__(self, shape: tuple[int, ...], count: int) -> None:
        generator = torch.Generator().manual_seed(2)
        if len(shape) == 1:
            self.inputs = {"input_ids": torch.randint(WORDS, (count, *shape), generator=generator)}
        else:
            self.inputs = {"pixel_values": torch.randn(count, *shape, generator=generator)}
        self.labels = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return {name: values[index] for name, values in self.inputs.items()} | {"labels": self.labels[index]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training: `starts` gets the time at which each of its steps starts."""

    build: Callable[[], nn.Module]
    samples: Samples
    batch: int
    line: dict[str, Any] | None
    bf16: bool
    folder: Path
    starts: list[float] = field(default_factory=list)

    def optimized(self, *model_and_optimizer: Any) -> Any:
        """Run the line of cputrain, if it is wanted."""
        if self.line is not None:
            return cputrain.optimize(*model_and_optimizer, **self.line)
        return model_and_optimizer if len(model_and_optimizer) > 1 else model_and_optimizer[0]

    def network(self, layout: torch.memory_format = torch.channels_last) -> nn.Module:
        """Return the network, from the same weights each time."""
        torch.manual_seed(1)
        return self.build().to(memory_format=layout)

    def collate(self, samples: list[Sample]) -> Sample:
        """Return a batch."""
        self.starts.append(time.perf_counter())
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"].contiguous(memory_format=torch.channels_last)
        return batch

    def loader(self, *, shards: bool = True) -> DataLoader[Sample]:
        """Return the batches of this rank, or of all for packages that shard a loader themselves."""
        sampler = DistributedSampler(self.samples, shuffle=False) if shards else None
        return DataLoader(self.samples, self.batch, sampler=sampler, collate_fn=self.collate)

    def autocast(self) -> torch.autocast:
        """Return the context of forward passes."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.samples) // (self.batch * dist.get_world_size())


def sgd(network: nn.Module) -> torch.optim.SGD:
    """Return the optimizer of all clients, so that weights show gradients."""
    return torch.optim.SGD(network.parameters(), LR, momentum=MOMENTUM)


def loss_of(outputs: Any, labels: Tensor) -> Tensor:
    """Return the loss of the outputs of torch's networks or transformers'."""
    return cross_entropy(getattr(outputs, "logits", outputs).float(), labels)


def ddp(job: Job) -> nn.Module:
    """A plain loop with DistributedDataParallel."""
    network = job.network()
    optimizer = sgd(network)
    network, optimizer = job.optimized(network, optimizer)
    parallel = DistributedDataParallel(network)
    for batch in job.loader():
        with job.autocast():
            loss = loss_of(parallel(batch["pixel_values"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network


def torchvision(job: Job) -> nn.Module:
    """torchvision's references/classification/train.py: parameter groups, warm-up, clipping, an average of weights."""
    network = job.network()
    norms = [p for layer in network.modules() if isinstance(layer, nn.BatchNorm2d) for p in layer.parameters(False)]
    others = [p for p in network.parameters() if not any(p is norm for norm in norms)]
    groups = [{"params": others, "weight_decay": 1e-4}, *([{"params": norms, "weight_decay": 0.0}] if norms else [])]
    optimizer = torch.optim.SGD(groups, LR, momentum=MOMENTUM)
    network, optimizer = job.optimized(network, optimizer)
    main = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers=[warm_up, main], milestones=[2])
    parallel = DistributedDataParallel(network)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    for batch in job.loader():
        with job.autocast():
            loss = loss_of(parallel(batch["pixel_values"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(network)
    return average.module


def timm(job: Job, *, compiles: bool = False) -> nn.Module:
    """timm's train.py: its task and optimizer, gradient checkpointing, an average of weights."""
    import_torchvision("models")  # which timm imports, beside a CPU build of torch
    from timm.optim import create_optimizer_v2
    from timm.task import ClassificationTask

    network: Any = job.network()
    if not compiles:
        network.set_grad_checkpointing(enable=True)
    task = ClassificationTask(model=network, criterion=nn.CrossEntropyLoss(), device=torch.device("cpu"))
    model = task.get_trainable_module()
    optimizer: Any = create_optimizer_v2(model, opt="momentum", lr=LR, momentum=MOMENTUM, weight_decay=2e-5)
    model, optimizer = job.optimized(model, optimizer)
    task.setup_ema(decay=0.99)
    if compiles:
        task.compile(backend="inductor")
    task.prepare_distributed(device_ids=None)
    task.train()
    for number, batch in enumerate(job.loader()):
        with job.autocast():
            loss = task(batch["pixel_values"], batch["labels"])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.update_ema(step=number)
    return network


def timm_compiled(job: Job) -> nn.Module:
    """The same with --torchcompile, without gradient checkpointing."""
    return timm(job, compiles=True)


def compiled(job: Job) -> nn.Module:
    """A plain loop with torch.compile."""
    network = job.network()
    optimizer = sgd(network)
    network, optimizer = job.optimized(network, optimizer)
    fast = torch.compile(network)
    for batch in job.loader():
        with job.autocast():
            loss = loss_of(fast(batch["pixel_values"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network


def lightning(job: Job) -> nn.Module:
    """Lightning: the line is in `configure_model`, before DistributedDataParallel."""
    import_torchvision("models")
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            network = job.network()
            self.network, self.optimizer = job.optimized(network, sgd(network))

        def training_step(self, batch: Sample) -> Tensor:
            return loss_of(self.network(batch["pixel_values"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return self.optimizer

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())), strategy="ddp",
        max_epochs=1, precision="bf16-mixed" if job.bf16 else "32-true", use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=job.folder,
    )  # fmt: skip
    trainer.fit(module, job.loader())
    return module.network


def accelerate(job: Job) -> nn.Module:
    """accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if job.bf16 else "no")
    network = job.network()
    optimizer = sgd(network)
    network, optimizer = job.optimized(network, optimizer)
    model, wrapped, loader = accelerator.prepare(network, optimizer, job.loader(shards=False))
    for batch in loader:
        loss = loss_of(model(**inputs_of(batch)), batch["labels"])
        accelerator.backward(loss)
        wrapped.step()
        wrapped.zero_grad()
    return network


def inputs_of(batch: Sample) -> Sample:
    """Return what transformers' networks take of a batch, without the labels."""
    return {name: values for name, values in batch.items() if name != "labels"}


def trainer(job: Job) -> nn.Module:
    """transformers' Trainer."""
    import_torchvision("models")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(job.folder), use_cpu=True, bf16=job.bf16, per_device_train_batch_size=job.batch,
        max_steps=job.steps, train_sampling_strategy="sequential", max_grad_norm=0.0, lr_scheduler_type="constant",
        remove_unused_columns=False, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    network = job.network()
    optimizer = sgd(network)
    network, optimizer = job.optimized(network, optimizer)
    made = Trainer(
        model=network, args=arguments, train_dataset=job.samples, data_collator=job.collate,
        optimizers=(optimizer, None),
    )  # fmt: skip
    made.train()
    return network


def deepspeed(job: Job) -> nn.Module:
    """DeepSpeed, ZeRO's stage 1, which takes contiguous weights and makes them views of a buffer: the line is after
    `initialize`, without the optimizer, which is DeepSpeed's."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": job.batch,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": MOMENTUM}},
        "torch_autocast": {"enabled": job.bf16, "dtype": "bfloat16"},
        "gradient_clipping": 0.0,
    }
    network = job.network(torch.contiguous_format)
    deepspeed.init_distributed(dist_backend=dist.get_backend())
    engine, *_ = deepspeed.initialize(model=network, model_parameters=network.parameters(), config=config)
    job.optimized(network)
    for batch in job.loader():
        engine.backward(loss_of(engine(batch["pixel_values"]), batch["labels"]))
        engine.step()
    return network


def fsdp2(job: Job) -> nn.Module:
    """FSDP2, which takes contiguous weights: the line is after `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    network = job.network(torch.contiguous_format)
    fully_shard(network)
    optimizer = sgd(network)
    network, optimizer = job.optimized(network, optimizer)
    for batch in job.loader():
        with job.autocast():
            loss = loss_of(network(batch["pixel_values"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network


CLIENTS: dict[str, Callable[[Job], nn.Module]] = {
    client.__name__: client
    for client in (ddp, torchvision, timm, timm_compiled, compiled, lightning, accelerate, trainer, deepspeed, fsdp2)
}


def network_of(name: str, size: int, *, tiny: bool) -> Callable[[], nn.Module]:
    """Return what builds a network of this name for CLASSES classes."""
    models = import_torchvision("models")
    if name in TINY:
        import transformers

        title = {"vit": "ViT", "swin": "Swin", "bert": "Bert"}[name]
        images = {"image_size": size} if name != "bert" else {"vocab_size": WORDS}
        config = getattr(transformers, f"{title}Config")(num_labels=CLASSES, **images, **(TINY[name] if tiny else {}))
        kind = "SequenceClassification" if name == "bert" else "ImageClassification"
        return lambda: getattr(transformers, f"{title}For{kind}")(config)
    if name.startswith("timm:"):
        import timm as package

        return lambda: package.create_model(name.removeprefix("timm:"), num_classes=CLASSES)
    return lambda: getattr(models, name)(num_classes=CLASSES)


def weights_of(network: nn.Module) -> Tensor:
    """Return all float32 weights in one vector."""
    values = [value for name, value in network.state_dict().items() if name in dict(network.named_parameters())]
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    return torch.cat([value.float().flatten() for value in whole])


def measured(client: Callable[[Job], nn.Module], options: argparse.Namespace, rounds: int) -> dict[str, float]:
    """Train with the line and without it, in turns; return seconds of a step and how much the weights differ."""
    build = network_of(options.network, options.size, tiny=options.tiny)
    shape = (SENTENCE,) if options.network == "bert" else (3, options.size, options.size)
    samples = Samples(shape, options.steps * options.batch * dist.get_world_size())
    bf16 = options.bf16 or options.split
    line: dict[str, Any] = {"dtype": torch.bfloat16} if bf16 else {}
    line |= {"master_weights": "split"} if options.split else {}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    updates: dict[bool, Tensor] = {}
    for _ in range(rounds):
        for has_line in (False, True):
            with TemporaryDirectory() as folder:
                job = Job(
                    build=build, samples=samples, batch=options.batch, line=line if has_line else None, bf16=bf16,
                    folder=Path(folder),
                )  # fmt: skip
                before = weights_of(job.network())
                updates[has_line] = weights_of(client(job)) - before
            seconds[has_line] += [b - a for a, b in zip(job.starts, job.starts[1:], strict=False)][WARM_UP:]
    differ = float((updates[True] - updates[False]).norm() / updates[False].norm())
    medians = {has_line: median(values or [0.0]) for has_line, values in seconds.items()}
    return {"plain": medians[False], "line": medians[True], "differ": differ}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", default=["ddp"], choices=CLIENTS, metavar="CLIENT")
    parser.add_argument("--network", default="resnet50")
    numbers = (("--batch", 8), ("--size", 224), ("--steps", 5), ("--rounds", 2))
    for option, default in numbers:
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--backend", default="gloo")
    for switch in ("--bf16", "--split", "--tiny"):
        parser.add_argument(switch, action="store_true")
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    for name in options.clients:
        found = measured(CLIENTS[name], options, options.rounds)
        if dist.get_rank() == 0:
            ratio = found["plain"] / found["line"] if found["line"] else 0.0
            row = f"{found['plain']:.3f} s | {found['line']:.3f} s | {ratio:.2f} | {found['differ']:.1e}"
            print(f"| {name} | {options.network} | {row} |", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's group may wait for a thread at the end


if __name__ == "__main__":
    main()
