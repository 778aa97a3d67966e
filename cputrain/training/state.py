"""State of a training: network and loss in DDP, optimizer, moving average; buffers that ranks share, batch-norm's
statistics; and the parameters that the loss does not reach."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.wording import MIB, first_named, plural
from cputrain.checkpoint.state import plain_name
from cputrain.comm.group import all_gather, measure_alpha_beta
from cputrain.comm.hooks import HOOKS, AllReduceHook
from cputrain.comm.settings import CommSettings
from cputrain.predict.collectives import bucket_bytes
from cputrain.training.engine import autocast

LOSS_PREFIX = "loss/"  # of the names of a loss's own parameters and buffers; no name in a network has a slash
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# DDP's option to broadcast rank 0's buffers before every forward pass was renamed in torch 2.13; 2.8 to 2.13 are
# supported.
SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)

Losses = Callable[[Any, Any, float], Tensor]
Buffers = dict[tuple[str, str], Tensor]  # by module and name
T = TypeVar("T", bound=Tensor)


class Hidden:
    """A network's outputs, in which DDP is not to search for tensors: only what the loss reaches gets a gradient."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Learner(nn.Module):
    """A network and its loss as one module, so that DDP, the optimizer and checkpoints include the loss's parameters.

    `losses(outputs, targets, smoothing)` returns the samples' losses; `loss_module` is the module behind it, if that
    has parameters or buffers of its own.
    """

    def __init__(
        self, network: nn.Module, losses: Losses, precision: str = "float32", loss_module: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.network, self.loss_module = network, loss_module
        self.losses, self.precision = losses, precision

    def forward(self, inputs: Any, targets: Any, smoothing: float) -> tuple[Hidden, Tensor]:
        """Return the network's outputs and the losses."""
        with autocast(self.precision):
            outputs = self.network(inputs)
        return Hidden(outputs), self.losses(outputs, targets, smoothing)

    @property
    def parts(self) -> tuple[tuple[str, nn.Module], ...]:
        """The network and the loss's module, each with the prefix of its names."""
        loss = () if self.loss_module is None else ((LOSS_PREFIX, self.loss_module),)
        return (("", self.network), *loss)

    def weights(self) -> dict[str, nn.Parameter]:
        """Return each parameter once, by its name in checkpoints."""
        return _once((prefix, part.named_parameters()) for prefix, part in self.parts)

    def all_buffers(self) -> dict[str, Tensor]:
        """Return each buffer once, by its name in checkpoints."""
        return _once((prefix, part.named_buffers()) for prefix, part in self.parts)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that require gradients, by name."""
        return {name: weight for name, weight in self.weights().items() if weight.requires_grad}


def _once(parts: Iterable[tuple[str, Iterable[tuple[str, T]]]]) -> dict[str, T]:
    by_name: dict[str, T] = {}
    ids = set()
    for prefix, named in parts:
        for name, value in named:
            if id(value) not in ids:
                ids.add(id(value))
                by_name[f"{prefix}{plain_name(name)}"] = value
    return by_name


def loss_module_of(loss: Any, network: nn.Module) -> nn.Module | None:
    """Return the module behind a loss function (itself, a method's object, or what functools.partial calls) if it has
    parameters or buffers that are not the network's."""
    while isinstance(loss, partial):
        loss = loss.func
    owner = getattr(loss, "__self__", loss)
    if not isinstance(owner, nn.Module):
        return None
    of_network = {id(value) for value in chain(network.parameters(), network.buffers())}
    tensors = chain(owner.parameters(), owner.buffers())
    return owner if any(id(value) not in of_network for value in tensors) else None


def make_dense(module: nn.Module) -> list[str]:
    """Let embeddings compute dense gradients, which all backends sum and all optimizers take; return the names of those
    whose gradients would be sparse."""
    layers = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }
    for layer in layers.values():
        layer.sparse = False
    return [plain_name(name).removeprefix("network.") for name in layers]


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Network and loss, their DDP wrapper, optimizer, and the exponential moving average (EMA) of the network's
    parameters by name, or None; `ema_decay` is its decay factor.

    `all_reduce` is DDP's communication hook, `bucket_mib` the size of its gradient buckets. `winograd` has the layers
    that use Winograd's algorithm with their speedups, as returned by plan_network. `operators`: kernels are registered
    below torch's operators. `checked`: the first forward pass has shown which parameters the loss reaches; `unused`
    names those without a gradient on some rank, `suspects` are other tensors that require gradients, and
    `shares_buffers` is whether there are buffers of which all ranks take rank 0's.
    """

    learner: Learner
    ddp: nn.Module
    optimizer: Optimizer
    all_reduce: AllReduceHook
    bucket_mib: float
    averages: dict[str, Tensor] | None
    ema_decay: float | None = None
    winograd: dict[str, float | None] | None = None
    operators: bool = False
    checked: bool = False
    suspects: tuple[Tensor, ...] = ()
    unused: tuple[str, ...] = ()
    shares_buffers: bool = False

    @property
    def network(self) -> nn.Module:
        """The network."""
        return self.learner.network

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Yield the network to evaluate, which has the averaged parameters within the block, if there are any.

        They are swapped: a copy of the network would miss buffers that appear in forward passes, and not every network
        can be copied.
        """
        self._swap()
        try:
            yield self.network
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        weights = self.learner.weights()
        for name, average in (self.averages or {}).items():
            kept = weights[name].clone()
            weights[name].copy_(average)
            average.copy_(kept)

    def average_batchnorm(self) -> None:
        """Set every rank's running statistics to the mean over all ranks, so that all evaluate the same network."""
        for statistic, mean in mean_statistics(self.learner):
            statistic.copy_(mean)

    @torch.no_grad()
    def update_ema(self) -> None:
        """Update the averages, if there are any: w_ema = ema_decay w_ema + (1 - ema_decay) w."""
        if self.averages is not None and self.ema_decay is not None:
            weights, share = self.learner.weights(), 1 - self.ema_decay
            torch._foreach_lerp_(list(self.averages.values()), [weights[name] for name in self.averages], share)

    def forward(
        self, inputs: Any, targets: Any, smoothing: float, stack: ExitStack, *, reduces: bool
    ) -> tuple[Any, Tensor]:
        """Return outputs and losses. The backward pass within `stack` sums the gradients over the ranks if `reduces`.

        The first call checks which parameters the loss reaches, on all ranks. If some get no gradient, DDP searches for
        them in every pass from then on. Raises InputError if the loss needs parameters that nobody trains.
        """
        before = None if self.checked else Volatile(self.learner)
        outputs, losses = self._pass(inputs, targets, smoothing, stack, reduces=reduces)
        if before is None:
            self._check_suspects(losses)
            return outputs, losses
        trained = self.learner.trained()
        reached = leaves(losses)
        missing = [name for name, weight in trained.items() if id(weight) not in reached]
        known = {id(weight) for weight in trained.values()}
        others = [leaf for place, leaf in reached.items() if place not in known]
        foreign = describe_foreign([leaf for leaf in others if isinstance(leaf, nn.Parameter)])
        problem = foreign or describe_sparse(losses)
        self.suspects = tuple(others)  # the forward pass may have made them
        of_ranks = all_gather((problem, missing, bool(own_buffers(self.learner))))
        if problems := [text for text, _, _ in of_ranks if text]:
            raise InputError(problems[0])
        self.checked, self.shares_buffers = True, any(has_buffers for _, _, has_buffers in of_ranks)
        if not any(names for _, names, _ in of_ranks) or self._finds_unused:
            return outputs, losses
        stack.close()
        self._search_unused(inputs, targets, smoothing, before)
        return self._pass(inputs, targets, smoothing, stack, reduces=reduces)

    def _pass(
        self, inputs: Any, targets: Any, smoothing: float, stack: ExitStack, *, reduces: bool
    ) -> tuple[Any, Tensor]:
        if not reduces:
            stack.enter_context(self.ddp.no_sync())  # type: ignore[operator]
        self.all_reduce.finished = False
        outputs, losses = self.ddp(inputs, targets, smoothing)
        return outputs.value, losses

    def _check_suspects(self, losses: Tensor) -> None:
        """Raise RunError if a tensor that nobody trains has taken part in two passes, so that it outlives a pass."""
        if self.suspects:
            reached = leaves(losses)
            problem = describe_foreign([each for each in self.suspects if id(each) in reached])
            self.suspects = ()
            if problem:
                raise RunError(problem)

    @property
    def _finds_unused(self) -> bool:
        return bool(getattr(self.ddp, "find_unused_parameters", False))

    def _search_unused(self, inputs: Any, targets: Any, smoothing: float, before: "Volatile") -> None:
        """Find the parameters without gradients by a backward pass on this rank alone, as reentrant checkpointing hides
        parameters from the graph; if there are any, let DDP search for them in every pass."""
        self.ddp._remove_autograd_hooks()  # type: ignore[operator]
        before.restore()
        _, losses = self.learner(inputs, targets, smoothing)
        reached = leaves(losses)
        if losses.requires_grad:
            losses.sum().backward()
        before.restore()
        trained = self.learner.trained()
        unused = [name for name, weight in trained.items() if weight.grad is None]
        hides = any(weight.grad is not None and id(weight) not in reached for weight in trained.values())
        for weight in trained.values():
            weight.grad = None
        of_ranks = all_gather((unused, hides))
        self.unused = tuple(dict.fromkeys(name for names, _ in of_ranks for name in names))
        if any(len(names) == len(trained) for names, _ in of_ranks):
            raise InputError("the loss does not depend on any parameter that is trained: return it with its graph")
        if self.unused and any(hides_some for _, hides_some in of_ranks):
            raise InputError(
                f"{first_named(list(self.unused))} get no gradient, and reentrant checkpointing hides other parameters "
                "from DDP: call torch.utils.checkpoint with use_reentrant=False"
            )
        self.ddp = wrapped(self.learner, self.bucket_mib, self.all_reduce, find_unused=bool(self.unused))

    def check_reduced(self, losses: Tensor) -> None:
        """Raise RunError if this rank's backward pass gave no gradient to parameters that had one in the first pass, so
        that DDP has not summed all gradients."""
        if isinstance(self.ddp, DistributedDataParallel) and not self.all_reduce.finished:
            reached = leaves(losses)
            names = [name for name, weight in self.learner.trained().items() if id(weight) not in reached]
            raise RunError(
                f"rank {dist.get_rank()}: the loss of this batch does not depend on {first_named(names)}, that of the "
                "first batch did: set comm.find_unused_parameters=true to let DDP search for such parameters in every "
                "pass"
            )


class Volatile:
    """What a forward pass changes: buffers and torch's random state, to repeat the pass."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.random = module, torch.get_rng_state()
        self.buffers = copies_of_buffers(module)

    def restore(self) -> None:
        """Restore the state."""
        torch.set_rng_state(self.random)
        restore_buffers(self.module, self.buffers)


def copies_of_buffers(module: nn.Module) -> Buffers:
    """Return copies of all buffers that are initialized."""
    return {
        (place, name): value.clone()
        for place, part in module.named_modules()
        for name, value in part.named_buffers(recurse=False)
        if not is_lazy(value)
    }


@torch.no_grad()
def restore_buffers(module: nn.Module, saved: Buffers) -> None:
    """Restore buffers from copies, and remove those that have appeared since."""
    for place, part in module.named_modules():
        for name, value in list(part.named_buffers(recurse=False)):
            kept = saved.get((place, name))
            if kept is None:
                delattr(part, name)
            elif kept.shape == value.shape and kept.dtype == value.dtype:
                value.copy_(kept)
            else:
                part._buffers[name] = kept.clone()


def graph_of(losses: Tensor) -> Iterator[Any]:
    """Yield the nodes of the autograd graph of `losses`."""
    seen, queue = set(), [losses.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            queue += [following for following, _ in node.next_functions]


def leaves(losses: Tensor) -> dict[int, Tensor]:
    """Return the leaves of the autograd graph of `losses`, by id."""
    variables = (getattr(node, "variable", None) for node in graph_of(losses))
    return {id(leaf): leaf for leaf in variables if isinstance(leaf, Tensor)}


def describe_sparse(losses: Tensor) -> str:
    """Return the error about operators with sparse gradients, which no hook of DDP sums, "" if there are none."""
    options = ("_saved_sparse", "_saved_sparse_grad")  # of embeddings, and of gather
    names = [node.name() for node in graph_of(losses) if any(getattr(node, option, False) for option in options)]
    if not names:
        return ""
    return f"{first_named(names)} of the network has sparse gradients: pass sparse=False (sparse_grad=False) there"


def describe_foreign(foreign: Sequence[Tensor]) -> str:
    """Return the error about tensors that take part in the loss but in no module that is trained, "" if there are
    none."""
    if not foreign:
        return ""
    shapes = first_named([f"shape {tuple(each.shape)}" for each in foreign])
    return (
        f"the loss depends on {plural(len(foreign), 'tensor')} with requires_grad ({shapes}) that no module has: make "
        "them parameters of the network, or of a loss that is a torch.nn.Module, or set requires_grad to False"
    )


def wrapped(
    learner: Learner, bucket_mib: float, all_reduce: AllReduceHook, *, find_unused: bool, sync: bool = False
) -> DistributedDataParallel:
    """Wrap network and loss in DDP; with `sync`, all ranks take rank 0's parameters."""
    keep_buffers: dict[str, Any] = {SYNC_BUFFERS: False}
    ddp = DistributedDataParallel(
        learner,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mib,
        find_unused_parameters=find_unused,
        init_sync=sync,
        **keep_buffers,
    )
    ddp.register_comm_hook(None, all_reduce.hook)
    return ddp


def make_train_state(
    learner: Learner,
    optimizer: Optimizer,
    comm: CommSettings,
    *,
    ema_decay: float | None = None,
    bucket_mib: float | None = None,
    all_reduce: AllReduceHook | None = None,
) -> TrainState:
    """Wrap a network and its loss in DDP. All ranks take rank 0's parameters and buffers. `bucket_mib` and `all_reduce`
    replace the bucket size and the communication hook of `comm`.

    Each rank keeps its own batch-norm statistics until `average_batchnorm`.
    """
    bucket_mib = bucket_mib or _bucket_mib(comm, learner)
    all_reduce = all_reduce or HOOKS[comm.compression]()
    ddp = wrapped(learner, bucket_mib, all_reduce, find_unused=comm.find_unused_parameters, sync=True)
    _take_from_first(list(learner.buffers()))
    averages = None
    if ema_decay is not None:
        weights = _once([("", learner.network.named_parameters())])
        averages = {name: weight.detach().clone() for name, weight in weights.items() if weight.is_floating_point()}
    return TrainState(
        learner=learner,
        ddp=ddp,
        optimizer=optimizer,
        all_reduce=all_reduce,
        bucket_mib=bucket_mib,
        averages=averages,
        ema_decay=ema_decay,
    )


def _bucket_mib(comm: CommSettings, learner: nn.Module) -> float:
    """Return the size of a gradient bucket in MiB: the given one, or the best one for measured all-reduce times."""
    if comm.bucket_mib != "auto":
        return comm.bucket_mib
    gradients = sum(p.numel() * p.element_size() for p in learner.parameters() if p.requires_grad)
    return bucket_bytes(gradients, *measure_alpha_beta()) / MIB


def own_buffers(module: nn.Module, *, persistent: bool = False) -> dict[str, Tensor]:
    """Return the buffers of which all ranks have rank 0's, by name: all but batch-norm's statistics; with `persistent`,
    only those in the state dict."""
    return {
        plain_name(f"{place}.{name}".removeprefix(".")): value
        for place, part in module.named_modules()
        for name, value in part.named_buffers(recurse=False)
        if not (isinstance(part, _BatchNorm) and name in STATISTICS)
        and not (persistent and name in part._non_persistent_buffers_set)
    }


def share_buffers(module: nn.Module) -> None:
    """Give all ranks rank 0's own buffers, after each step. DDP does so before the next forward pass.

    Buffers that some ranks do not have, or in another shape, must not be persistent, such as caches; they are left as
    they are. Raises RunError on every rank for others.
    """
    own = own_buffers(module)
    described = {name: f"{value.dtype} {tuple(value.shape)}" for name, value in own.items()}
    checksum = zlib.crc32(repr(described).encode())
    extremes = torch.tensor([checksum, -checksum])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if int(extremes[0]) != -int(extremes[1]):
        of_ranks = all_gather((described, list(own_buffers(module, persistent=True))))
        differing = {
            name for found, _ in of_ranks for name in found if len({others.get(name) for others, _ in of_ranks}) > 1
        }
        if state := sorted(differing & {name for _, names in of_ranks for name in names}):
            shapes = ", ".join(f"{found.get(state[0], 'none')} on rank {i}" for i, (found, _) in enumerate(of_ranks))
            raise RunError(
                f"buffer {state[0].partition('.')[2]} differs between the ranks ({shapes}): give it the same "
                "shape on all ranks, or register it with persistent=False if it is a cache"
            )
        own = {name: value for name, value in own.items() if name not in differing}
    _take_from_first(list(own.values()))


@torch.no_grad()
def _take_from_first(tensors: Sequence[Tensor]) -> None:
    """Copy rank 0's values into these tensors, in one broadcast of their bytes."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors or dist.get_world_size() == 1:
        return
    flat = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    dist.broadcast(flat, src=0)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.nbytes for tensor in tensors]), strict=True):
        first = part.clone().view(tensor.dtype).view(tensor.shape)
        if not torch.equal(first, tensor):  # a constant may be an expanded view, which cannot be written
            tensor.copy_(first)


def mean_statistics(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return batch-norm's running statistics on this rank, each with its mean over all ranks."""
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    statistics = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var)]
    present = [buffer for buffer in statistics if buffer is not None]
    if not present:
        return []
    flat = torch.cat(present)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return list(zip(present, torch.split(flat, [b.numel() for b in present]), strict=True))
