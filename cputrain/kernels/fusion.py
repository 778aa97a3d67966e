"""Batch-norm, ReLU and residual as one native layer, in modules whose forward pass is known from a trace."""

import linecache
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, wraps
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from cputrain.kernels.batchnorm import FUSED, FusedBatchNorm2d, Kernels, second_use
from cputrain.kernels.convolution import CONVOLUTIONS
from cputrain.kernels.evidence import (
    Native,
    calls_are_plain,
    departure,
    is_silent,
    methods_are_plain,
    replaced_functions,
    runs_eagerly,
)
from cputrain.kernels.norms import activate
from cputrain.kernels.tracing import NotTraceable, Read, Traced, is_sequential, plain_of, trace

SOLE_USER = "_is_sole_user"
"""Keyword by which a module whose forward pass is fused is told that nothing else has its input."""


def fuse_batchnorms(network: nn.Module, kernels: Kernels) -> None:
    """Replace batch-norm layers by native ones, and compute them together with the addition and the ReLU after them
    where the forward pass of the module that calls them is known from a trace, and where timm has both in one layer.

    Only layers as built are replaced: of exactly these classes, with options that the kernels have, without hooks, and
    without attributes in the place of methods. Hooks and layers that are set later count from the next call on.

    All modules, parameters and buffers and their names stay; only classes change. `restore` undoes it.
    """
    for layer in list(network.modules()):
        if isinstance(layer, nn.BatchNorm2d) and not isinstance(layer, FusedBatchNorm2d) and not _unfit(layer):
            _use_kernels(layer, kernels)
    for module in reversed(list(network.modules())):  # children first
        if not isinstance(module, Native) and _has_norms(module) and not departure(module):
            fusions, _ = _fusions_of(module)
            if fusions:
                module.__class__ = _fused_class(FusedModule, cast(Any, type(module)))
                cast(FusedModule, module).fusions = fusions


def left_to_torch(network: nn.Module) -> str:
    """Return a line with the layers that `fuse_batchnorms` has left to torch, by class and reason; "" if none."""
    if replaced := replaced_functions():
        return f"not native, but torch's: all layers, because torch.nn.functional.{replaced[0]} is replaced"
    left = Counter[str]()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and not isinstance(module, FusedBatchNorm2d):
            left[f"{type(module).__name__} ({_unfit(module)})"] += 1
        elif type(module) is nn.ReLU and not is_silent(module):
            left["ReLU (hooks)"] += 1
        elif isinstance(module, FusedModule):
            left.update(f"{type(module).__name__} ({why})" for each in module.fusions if (why := each.obstacle(module)))
        elif not isinstance(module, Native) and _has_norms(module):
            why = departure(module) or _fusions_of(module)[1]
            left.update([f"{type(module).__name__} ({why})"] if why else [])
    layers = ", ".join(f"{count} {what}" for what, count in sorted(left.items()))
    return f"not native, but torch's: {layers}" if left else ""


def _unfit(layer: nn.BatchNorm2d) -> str:
    """Return why a batch-norm layer stays torch's, "" if it can be native."""
    if type(layer) not in FUSED and not _has_activation(layer):
        return "not torch's BatchNorm2d"
    options = {
        "affine=False": layer.weight is None,
        "bias=False": layer.weight is not None and layer.bias is None,
        "track_running_stats=False": not layer.track_running_stats or layer.running_mean is None,
        "momentum=None": layer.momentum is None,
    }
    missing = [option for option, chosen in options.items() if chosen]
    if missing:
        return missing[0]
    return "" if activated(layer) else departure(layer)


def _use_kernels(layer: nn.BatchNorm2d, kernels: Kernels) -> None:
    plain: Any = type(layer)
    kind: Any = _fused_class(FusedBatchNormAct2d, plain) if _has_activation(layer) else FUSED[plain]
    layer.__class__ = kind
    norm = cast(FusedBatchNorm2d, layer)
    norm.kernels = kernels
    if activated(norm) and _is(nn.ReLU, norm.act) and _is(nn.Identity, norm.drop):
        norm._forward_hooks.clear()
        norm.relu = True


def activated(layer: nn.Module) -> bool:
    """Return whether the only hook of a batch-norm layer is its activation, as in timm's BatchNormAct2d."""
    return list(layer._forward_hooks.values()) == [activate]


def _has_activation(layer: nn.Module) -> bool:
    return f"{type(layer).__module__}.{type(layer).__name__}" == "timm.layers.norm_act.BatchNormAct2d"


def _has_norms(module: nn.Module) -> bool:
    """Return whether a module calls native batch-norm layers, or several modules whose forward passes are fused."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    parts = list(_called_by(module))
    return (
        any(type(part) in FUSED.values() for part in parts) or sum(isinstance(part, FusedModule) for part in parts) > 1
    )


def _called_by(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children, and in the place of containers theirs."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or is_sequential(child):
            yield from _called_by(child)
        yield child


def _is(kind: type[nn.Module], layer: Any) -> bool:
    """Return whether a layer is of exactly this class and may be computed without calling it."""
    return type(layer) is kind and is_silent(layer)


def _is_fused(norm: Any) -> bool:
    return type(norm) in FUSED.values() and is_silent(norm) and not norm.relu


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module that a fused forward pass does not call as its own one does: path, classes that it may have, and whether
    it is a batch-norm layer."""

    path: tuple[str, ...]
    kinds: tuple[type[nn.Module], ...]
    norm: bool = False

    def obstacle(self, root: nn.Module) -> str:
        """Return why the module must be called, "" if not."""
        module: Any = root
        for name in self.path:
            module = module._modules.get(name)
            if module is None:
                return f"another {self.path[0]}"
        kind: Any = type(module)
        if isinstance(module, FusedModule):
            kind = FusedModule if FusedModule in self.kinds else module.plain
        if kind not in self.kinds:
            return "batch-norm that stays torch's" if self.norm else f"another {'.'.join(self.path)}"
        if not is_silent(module):
            return f"hooks of {'.'.join(self.path)}"
        return f"ReLU in {'.'.join(self.path)}" if self.norm and module.relu else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """A module's forward pass with fused layers as Python code, and what must hold so that it computes the same.

    `inputs` is the number of arguments, of which the first is a tensor if `tensors`. `reuses` is whether the code takes
    an alias of its only input for the second use, `reusable` whether such an alias of its outputs may be asked for.
    """

    source: str
    functions: tuple[tuple[str, Callable[..., Any]], ...]
    inputs: int
    tensors: bool
    reuses: bool
    reusable: bool
    parts: tuple[Part, ...]
    reads: tuple[Read, ...]
    containers: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    methods: tuple[str, ...]

    def obstacle(self, module: nn.Module) -> str:
        """Return why the code cannot be used now, "" if it can."""
        if not (
            calls_are_plain(nn.ReLU, nn.Identity, nn.Sequential)
            and methods_are_plain(cast(Native, module), *self.methods)
        ):
            return "hooks of all modules, or replaced methods"
        for path, names in self.containers:
            found: Any = module
            for name in path:
                found = found._modules[name]
            if tuple(found._modules) != names:
                return "other layers"
        changed = next((read.name for read in self.reads if not read.still_holds(module)), "")
        return (
            f"another {changed}" if changed else next(filter(None, (part.obstacle(module) for part in self.parts)), "")
        )

    def run(self, module: nn.Module, inputs: tuple[Any, ...], *, sole_user: bool) -> Any:
        """Compute the forward pass; `sole_user` is whether nothing else has the only input."""
        if self.reuses:
            inputs = (*inputs, second_use(inputs[0]) if sole_user else inputs[0])
        return _compiled(self.source, self.functions)(module, *inputs)


@cache
def _compiled(source: str, functions: tuple[tuple[str, Callable[..., Any]], ...]) -> Callable[..., Any]:
    """Return the function that a Fusion's source defines."""
    name = f"<cputrain fused forward {hash((source, functions)):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
    space: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "inf": math.inf,
        "nan": math.nan,
        **dict(functions),
    }
    exec(compile(source, name, "exec"), space)
    return cast(Callable[..., Any], space["forward"])


def _fusions_of(module: nn.Module) -> tuple[tuple[Fusion, ...], str]:
    """Return the fused forward passes of a module, none if there is nothing to fuse, and why there are none if its
    forward pass is not known."""
    try:
        traced = [trace(module)]
        if traced[0].asked:
            traced.append(trace(module, tensors=False))
    except NotTraceable as error:
        return (), str(error)
    found = [_fused(module, each, tensors=number == 0) for number, each in enumerate(traced)]
    return tuple(each for each in found if each is not None), ""


def _fused(module: nn.Module, traced: Traced, *, tensors: bool) -> Fusion | None:
    """Return the forward pass with batch-norm, additions and ReLU in one call, None if there are none."""
    graph = traced.graph
    layers: dict[Any, nn.Module] = {node: module.get_submodule(str(node.target)) for node in _calls(graph)}
    parts: dict[str, Part] = {}
    ends: set[fx.Node] = set()
    for node in list(layers):
        if _is_fused(layers[node]) and (chain := _following(node, layers)) is not None:
            parts[str(node.target)] = Part(path=_path(node), kinds=tuple(FUSED.values()), norm=True)
            parts |= {str(each.target): Part(path=_path(each), kinds=(type(layers[each]),)) for each in chain.passed}
            fused = _join(graph, node, chain)
            layers[fused] = layers[node]
            if chain.residual is not None and chain.relu:
                ends.add(fused)
    reused = _share_gradients(graph, layers)
    parts |= {str(node.target): Part(path=_path(node), kinds=(FusedModule,)) for pair in reused for node in pair}
    if not parts:
        return None
    reuses = tensors and _takes_second(graph, layers, parts)
    code = graph.python_code("self")
    (output,) = next(node for node in graph.nodes if node.op == "output").args
    containers = (*traced.containers, *((path, ()) for path in traced.inlined if path not in dict(traced.containers)))
    silent = [
        Part(path=tuple(path.split(".")), kinds=(plain_of(module.get_submodule(path)),)) for path in traced.inlined
    ]
    return Fusion(
        source=code.src,
        functions=tuple((name, each) for name, each in code.globals.items() if _is_kept(name, each)),
        inputs=sum(node.op == "placeholder" for node in graph.nodes) - reuses,
        tensors=tensors,
        reuses=reuses,
        reusable=output in ends,
        parts=(*parts.values(), *silent),
        reads=traced.reads,
        containers=tuple((tuple(path.split(".")) if path else (), names) for path, names in containers),
        methods=traced.methods,
    )


def _is_kept(name: str, value: Any) -> bool:
    return not isinstance(value, ModuleType) and name not in ("device", "inf", "nan", "NoneType")


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_module"]


def _path(node: fx.Node) -> tuple[str, ...]:
    return tuple(str(node.target).split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Following:
    """What follows batch-norm in a graph and is computed with it: nodes in their order, the residual and how it is
    added, whether ReLU is the last, and the calls of layers that are not called then."""

    nodes: tuple[fx.Node, ...] = ()
    residual: fx.Node | None = None
    in_place: bool = False
    relu: bool = False
    passed: tuple[fx.Node, ...] = ()


def _following(norm: fx.Node, layers: dict[Any, nn.Module]) -> _Following | None:
    """Return the addition and the ReLU after a call of batch-norm that nothing else uses, None if neither follows."""
    found, last, complete = _Following(), norm, None
    while not found.relu and len(last.users) == 1:
        (user,) = last.users
        layer, nodes, residual = layers.get(user), (*found.nodes, user), _residual(user, last)
        passed = (*found.passed, *([user] if layer is not None else []))
        if _is_relu(user, last, layer):
            complete = found = replace(found, nodes=nodes, relu=True, passed=passed)
        elif layer is not None and _is(nn.Identity, layer) and user.args == (last,) and not user.kwargs:
            found = replace(found, nodes=nodes, passed=passed)
        elif found.residual is None and residual is not None and _may_move(norm, layers):
            in_place = user.target is operator.iadd
            complete = found = replace(found, nodes=nodes, residual=residual, in_place=in_place)
        else:
            break
        last = user
    return complete


def _is_relu(node: fx.Node, before: fx.Node, layer: nn.Module | None) -> bool:
    if node.args[:1] != (before,):
        return False
    if layer is not None:
        return _is(nn.ReLU, layer) and len(node.args) == 1 and not node.kwargs
    functions = (functional.relu, functional.relu_, torch.relu, torch.relu_)
    by_function = node.op == "call_function" and any(node.target is each for each in functions)
    return by_function or (node.op == "call_method" and node.target in ("relu", "relu_"))


def _residual(node: fx.Node, normalized: fx.Node) -> fx.Node | None:
    """Return what a node adds to the outputs of batch-norm."""
    functions = (operator.add, operator.iadd, torch.add)
    if node.op != "call_function" or node.kwargs or len(node.args) != 2:
        return None
    if not any(node.target is each for each in functions):
        return None
    first, second = node.args
    if second is normalized and node.target is not operator.iadd:
        first, second = second, first
    return second if first is normalized and isinstance(second, fx.Node) else None


def _may_move(norm: fx.Node, layers: dict[Any, nn.Module]) -> bool:
    """Return whether a call of batch-norm may be computed later, where its outputs are added: nothing in between can
    change its input, a new tensor that nothing else has."""
    made: Any = norm.args[0]
    return isinstance(layers.get(made), nn.Conv2d) and type(layers[made]) in CONVOLUTIONS and len(made.users) == 1


def _join(graph: fx.Graph, norm: fx.Node, chain: _Following) -> fx.Node:
    """Replace batch-norm and what follows by one call."""
    last = chain.nodes[-1]
    options: dict[str, Any] = {"relu": True} if chain.relu else {}
    if chain.residual is None:
        norm.kwargs = options
        fused = norm
        last.replace_all_uses_with(norm)
    else:
        with graph.inserting_before(last):
            options |= {"in_place": True} if chain.in_place else {}
            fused = graph.call_module(str(norm.target), (norm.args[0], chain.residual), options)
        last.replace_all_uses_with(fused)
    for node in reversed(chain.nodes):
        graph.erase_node(node)
    if fused is not norm:
        graph.erase_node(norm)
    return fused


def _share_gradients(graph: fx.Graph, layers: dict[Any, nn.Module]) -> list[tuple[fx.Node, fx.Node]]:
    """Let modules that use their input twice add up its gradients where a module of the graph has made it and nothing
    else has it. Returns the calls of both."""
    found = []
    for node in _calls(graph):
        made: Any = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        user, maker = layers.get(node), layers.get(made)
        if not (isinstance(user, FusedModule) and isinstance(maker, FusedModule)) or len(made.users) != 1:
            continue
        if user.fusions[0].reuses and maker.fusions[0].reusable:
            node.kwargs = {SOLE_USER: True}
            found.append((made, node))
    return found


def _takes_second(graph: fx.Graph, layers: dict[Any, nn.Module], parts: dict[str, Part]) -> bool:
    """Give the second use of the only input another argument, if neither use can keep it. Returns whether."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != 1 or len(placeholders[0].users) != 2:
        return False
    (images,) = placeholders
    first, second = sorted(images.users, key=list(graph.nodes).index)
    for user in (first, second):
        layer = layers.get(user)
        adds = user.args[1:] == (images,) and str(user.target) in parts
        if layer is None or [*user.args, *user.kwargs.values()].count(images) != 1:
            return False
        if not adds:
            if type(layer) not in KEEP_NOTHING:
                return False
            parts.setdefault(str(user.target), Part(path=_path(user), kinds=KEEP_NOTHING))
    with graph.inserting_after(images):
        alias = graph.placeholder("second_use_of_input")
    second.replace_input_with(images, alias)
    return True


@cache
def _fused_class(kind: Any, plain: Any) -> type[nn.Module]:
    """Return the class derived from `plain` that computes as `kind`."""

    @wraps(plain.forward)  # whose arguments tracers read
    def forward(module: Any, *inputs: Any, **named: Any) -> Any:
        return kind.forward(module, *inputs, **named)

    about = {"plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__, "forward": forward}
    return type(plain.__name__, (kind, plain), about)


def _without_values(kind: Any, plain: Any) -> nn.Module:
    return object.__new__(_fused_class(kind, plain))


class _Derived(Native):
    """Base class of native classes that are derived from the plain class of a layer."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and store the class, which has no name in a module, by what it was made of."""
        reduced: Any = super().__reduce_ex__(protocol)
        if self.plain.__reduce__ is not object.__reduce__:  # makes a module of the plain class
            return reduced
        kind = next(base for base in type(self).__mro__ if base in (FusedModule, FusedBatchNormAct2d))
        return (_without_values, (kind, self.plain), *reduced[2:])


class FusedModule(_Derived):
    """A module whose forward pass is computed with fused layers, as long as it then computes the same."""

    fusions: tuple[Fusion, ...] = ()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Compute what the plain module does."""
        sole = named.pop(SOLE_USER, False)
        fusion = self.fusion_for(inputs) if runs_eagerly() and not named else None
        if fusion is None or fusion.obstacle(self):
            return self.plain.forward(self, *inputs, **named)
        return fusion.run(self, inputs, sole_user=sole)

    def fusion_for(self, inputs: tuple[Any, ...]) -> Fusion | None:
        """Return the fused forward pass for arguments of these classes."""
        tensors = all(isinstance(each, Tensor) for each in inputs)
        found = (each for each in self.fusions if each.tensors == tensors and each.inputs == len(inputs))
        return None if any(each is None for each in inputs) else next(found, None)

    def undo(self) -> None:
        """Undo what was done to the layer when its class was replaced."""
        super().undo()
        vars(self).pop("fusions", None)


class FusedBatchNormAct2d(_Derived, FusedBatchNorm2d):
    """timm's BatchNormAct2d, which has a dropout and an activation as children."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(N, C, H, W) -> (N, C, H, W)."""
        if not self._supports(x, None):
            return cast(Tensor, self.by_torch(x))
        act, drop = (self.get_submodule(name) for name in ("act", "drop"))
        if _is(nn.ReLU, act) and _is(nn.Identity, drop) and calls_are_plain(nn.ReLU, nn.Identity):
            return super().forward(x, relu=True)
        return cast(Tensor, act(drop(super().forward(x))))


KEEP_NOTHING = (nn.Identity, nn.AvgPool2d, nn.MaxPool2d, *CONVOLUTIONS, *FUSED, *FUSED.values())
"""Classes of layers that keep no inputs, except those that autograd saves."""
