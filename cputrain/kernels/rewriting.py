"""Which batch-norm layers of a network can be native, and which forward passes can be computed with fused layers."""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, cast

import torch
from torch import fx, nn

from cputrain.kernels.activations import LAYERS, RELU, Activation, activation_of, activation_of_layer
from cputrain.kernels.batchnorm import FUSED, FusedBatchNorm2d, Kernels
from cputrain.kernels.convolution import CONVOLUTIONS
from cputrain.kernels.evidence import Native, departure, is_silent, replaced_functions
from cputrain.kernels.fusion import (
    SOLE_USER,
    FusedBatchNormAct2d,
    FusedModule,
    Fusion,
    Part,
    activated,
    derived_class,
    is_exactly,
)
from cputrain.kernels.tracing import NotTraceable, Reference, Traced, is_sequential, plain_of, trace

KEEP_NOTHING = (nn.Identity, nn.AvgPool2d, nn.MaxPool2d, *CONVOLUTIONS, *FUSED, *FUSED.values())
"""Classes of layers that keep no inputs, except those that autograd saves."""


def native_norms(network: nn.Module) -> dict[str, str]:
    """Return the batch-norm layers that are torch's, by name, with why they must stay so, "" if they can be native.

    Only layers as built can: of exactly these classes, with options that the kernels have, without hooks, and without
    attributes in the place of methods. Hooks and layers that are set later count from the next call on.
    """
    return {
        name: _unfit(layer)
        for name, layer in network.named_modules()
        if isinstance(layer, nn.BatchNorm2d) and not isinstance(layer, FusedBatchNorm2d)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What a trace says of the forward pass of the module called `layer`: it with fused layers, once for tensors and
    once for other arguments, nothing if there is nothing to fuse, or why it is not known.

    `separate` are batch-norm layers, by name, whose activation or addition stays a pass of its own, and why.
    """

    layer: str
    fusions: tuple[Fusion, ...] = ()
    refused: str = ""
    separate: tuple[tuple[str, str], ...] = ()


def fused_forwards(network: nn.Module) -> dict[nn.Module, Forward]:
    """Return the forward passes of the modules that call batch-norm layers, or other such modules.

    All layers are taken as native that can be.
    """
    forwards: dict[nn.Module, Forward] = {}
    fused: dict[nn.Module, tuple[Fusion, ...]] = {}
    for name, module in reversed(list(network.named_modules())):  # children first
        if isinstance(module, FusedModule):
            fused[module] = module.fusions
        elif not isinstance(module, Native) and _has_norms(module, fused):
            why = departure(module)
            forwards[module] = Forward(layer=name, refused=why) if why else _forward_of(name, module, fused)
            if fusions := forwards[module].fusions:
                fused[module] = fusions
    return forwards


def replace_norms(network: nn.Module, names: list[str], kernels: Kernels) -> None:
    """Make batch-norm layers native."""
    for name in names:
        layer = cast(nn.BatchNorm2d, network.get_submodule(name))
        plain: Any = type(layer)
        kind: Any = derived_class(FusedBatchNormAct2d, plain) if _has_activation(layer) else FUSED[plain]
        layer.__class__ = kind
        norm = cast(FusedBatchNorm2d, layer)
        norm.kernels = kernels
        if activated(norm) and (activation := activation_of_layer(norm.act)) and is_exactly(nn.Identity, norm.drop):
            norm._forward_hooks.clear()
            norm.activation = activation


def fuse_forwards(forwards: Mapping[nn.Module, Forward]) -> None:
    """Let modules compute their forward passes with fused layers."""
    for module, forward in forwards.items():
        if forward.fusions:
            module.__class__ = derived_class(FusedModule, cast(Any, type(module)))
            cast(FusedModule, module).fusions = forward.fusions


def left_to_torch(network: nn.Module, refused: Mapping[str, str]) -> str:
    """Return a line with the layers that stay torch's, by class and reason; "" if there are none. `refused` are the
    reasons why forward passes are not fused, by layer."""
    if replaced := replaced_functions():
        return f"not native, but torch's: all layers, because torch.nn.functional.{replaced[0]} is replaced"
    reasons = dict(refused) | obstacles(network)
    lines = (f"{type(network.get_submodule(name)).__name__} ({why})" for name, why in reasons.items())
    layers = ", ".join(f"{count} {what}" for what, count in sorted(Counter(lines).items()))
    return f"not native, but torch's: {layers}" if layers else ""


def obstacles(network: nn.Module) -> dict[str, str]:
    """Return why torch computes layers now, though there are kernels for them, by name."""
    reasons = native_norms(network)
    for name, module in network.named_modules():
        if type(module) in LAYERS and not is_silent(module):
            reasons[name] = "hooks"
        elif isinstance(module, FusedModule):
            reasons[name] = next(filter(None, (fusion.obstacle(module) for fusion in module.fusions)), "")
    return {name: why for name, why in reasons.items() if why}


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
    if missing := [option for option, chosen in options.items() if chosen]:
        return missing[0]
    return "" if activated(layer) else departure(layer)


def _has_activation(layer: nn.Module) -> bool:
    return f"{type(layer).__module__}.{type(layer).__name__}" == "timm.layers.norm_act.BatchNormAct2d"


def _has_norms(module: nn.Module, fused: Mapping[nn.Module, tuple[Fusion, ...]]) -> bool:
    """Return whether a module calls native batch-norm layers, or several modules whose forward passes are fused."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    parts = list(_called_by(module))
    return sum(part in fused for part in parts) > 1 or any(map(_can_join, parts))


def _called_by(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children, and in the place of containers theirs."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or is_sequential(child):
            yield from _called_by(child)
        yield child


def _can_join(layer: nn.Module) -> bool:
    """Return whether a layer is a batch-norm layer, native or to become so, without an activation of its own."""
    if type(layer) in FUSED.values():
        return is_silent(layer) and not layer.activation
    return type(layer) in FUSED and not activated(layer) and not _unfit(cast(nn.BatchNorm2d, layer))


def _forward_of(name: str, module: nn.Module, fused: Mapping[nn.Module, tuple[Fusion, ...]]) -> Forward:
    """Return the forward pass of a module, given the fused ones of its children."""
    try:
        traces = [trace(module)]
        if traces[0].asks:
            traces.append(trace(module, tensors=False))
        separate = _separate_norms(name, traces[0].graph, _layers(module, traces[0].graph))
        fusions = [_fused(module, traced, fused, tensors=number == 0) for number, traced in enumerate(traces)]
    except NotTraceable as error:
        return Forward(layer=name, refused=str(error))
    return Forward(layer=name, fusions=tuple(filter(None, fusions)), separate=separate)


def _layers(module: nn.Module, graph: fx.Graph) -> dict[Any, nn.Module]:
    """Return the layers that a graph calls."""
    return {node: module.get_submodule(str(node.target)) for node in _calls(graph)}


def _separate_norms(name: str, graph: fx.Graph, layers: dict[Any, nn.Module]) -> tuple[tuple[str, str], ...]:
    """Return the batch-norm layers before an activation or an addition that cannot be joined, as others use the same
    maps."""
    return tuple(
        (f"{name}.{node.target}".strip("."), f"its outputs are used {len(node.users)} times, and must be kept")
        for node in layers
        if _can_join(layers[node])
        and len(node.users) > 1
        and any(activation_of(user, node, layers.get(user)) or residual_of(user, node) for user in node.users)
    )


def _fused(
    module: nn.Module, traced: Traced, fused: Mapping[nn.Module, tuple[Fusion, ...]], *, tensors: bool
) -> Fusion | None:
    """Return the forward pass with batch-norm, additions and activations in one call, None if there are none."""
    graph, layers = traced.graph, _layers(module, traced.graph)
    parts: dict[str, Part] = {}
    ends: set[fx.Node] = set()
    for node in list(layers):
        has_input = len(node.args) == 1 and not node.kwargs
        if has_input and _can_join(layers[node]) and (chain := _following(node, layers)) is not None:
            parts[str(node.target)] = Part(path=_path(node), kinds=tuple(FUSED.values()), norm=True)
            parts |= {str(call.target): _passed(call, layers[call]) for call in chain.passed}
            joined = _join(graph, node, chain)
            layers[joined] = layers[node]
            if chain.residual is not None and chain.activation == RELU:
                ends.add(joined)
    for pair in _share_gradients(graph, layers, fused):
        parts |= {str(node.target): Part(path=_path(node), kinds=(FusedModule,)) for node in pair}
    if not parts:
        return None
    reuses = tensors and _takes_alias(graph, layers, parts)
    code = graph.python_code("self")
    (output,) = next(node for node in graph.nodes if node.op == "output").args
    for path in traced.inlined:
        part = Part(path=tuple(path.split(".")), kinds=(plain_of(module.get_submodule(path)),))
        parts.setdefault(path, part)
    return Fusion(
        source=code.src,
        functions=tuple((name, Reference.to(value)) for name, value in code.globals.items() if _is_kept(name, value)),
        inputs=sum(node.op == "placeholder" for node in graph.nodes) - reuses,
        tensors=tensors,
        reuses=reuses,
        reusable=output in ends,
        parts=tuple(parts.values()),
        reads=traced.reads,
        containers=tuple((tuple(path.split(".")) if path else (), names) for path, names in traced.containers),
        methods=traced.methods,
    )


def _is_kept(name: str, value: Any) -> bool:
    return not isinstance(value, ModuleType) and name not in ("device", "inf", "nan", "NoneType")


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_module"]


def _path(node: fx.Node) -> tuple[str, ...]:
    return tuple(str(node.target).split("."))


def _passed(call: fx.Node, layer: nn.Module) -> Part:
    return Part(path=_path(call), kinds=(type(layer),), activation=activation_of_layer(layer))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Following:
    """What follows batch-norm in a graph and is computed with it: nodes in their order, the residual and how it is
    added, the activation, which is the last, and the calls of layers that are not called then."""

    nodes: tuple[fx.Node, ...] = ()
    residual: fx.Node | None = None
    in_place: bool = False
    activation: Activation | None = None
    passed: tuple[fx.Node, ...] = ()


def _following(norm: fx.Node, layers: dict[Any, nn.Module]) -> _Following | None:
    """Return the addition and the activation after a call of batch-norm that nothing else uses, None if neither
    follows."""
    chain, last, complete = _Following(), norm, None
    while not chain.activation and len(last.users) == 1:
        (user,) = last.users
        layer, nodes, residual = layers.get(user), (*chain.nodes, user), residual_of(user, last)
        passed = (*chain.passed, *([user] if layer is not None else []))
        if activation := activation_of(user, last, layer):
            complete = chain = replace(chain, nodes=nodes, activation=activation, passed=passed)
        elif layer is not None and is_exactly(nn.Identity, layer) and user.args == (last,) and not user.kwargs:
            chain = replace(chain, nodes=nodes, passed=passed)
        elif chain.residual is None and residual is not None and _may_move(norm, user, layers):
            in_place = user.target is operator.iadd
            complete = chain = replace(chain, nodes=nodes, residual=residual, in_place=in_place)
        else:
            break
        last = user
    return complete


def residual_of(node: fx.Node, normalized: fx.Node) -> fx.Node | None:
    """Return what a node adds to the outputs of batch-norm."""
    functions = (operator.add, operator.iadd, torch.add)
    if node.op != "call_function" or node.kwargs or len(node.args) != 2:
        return None
    if not any(node.target is function for function in functions):
        return None
    first, second = node.args
    if second is normalized and node.target is not operator.iadd:
        first, second = second, first
    if first is not normalized or second is normalized:
        return None
    return second if isinstance(second, fx.Node) else None


def _may_move(norm: fx.Node, addition: fx.Node, layers: dict[Any, nn.Module]) -> bool:
    """Return whether a call of batch-norm may be computed later, where its outputs are added: its input is a new tensor
    that nothing else has, and nothing in between can use or change the layer."""
    conv: Any = norm.args[0]
    if type(layers.get(conv)) not in CONVOLUTIONS or len(conv.users) != 1:
        return False
    nodes = list(norm.graph.nodes)
    between = nodes[nodes.index(norm) + 1 : nodes.index(addition)]
    used = any(layers[norm] in layers[node].modules() for node in between if node in layers)
    return not used and not any(
        str(node.target).startswith(f"{norm.target}.") for node in nodes if node.op == "get_attr"
    )


def _join(graph: fx.Graph, norm: fx.Node, chain: _Following) -> fx.Node:
    """Replace batch-norm and what follows by one call."""
    last = chain.nodes[-1]
    options: dict[str, Any] = {"activation": chain.activation.name} if chain.activation else {}
    if chain.activation and chain.activation.slope:
        options["slope"] = chain.activation.slope
    if chain.residual is None:
        norm.kwargs = options
        fused = norm
        last.replace_all_uses_with(norm)
    else:
        # Where the addition is: until the activation, its other operand may change.
        with graph.inserting_before(next(node for node in chain.nodes if chain.residual in node.args)):
            options |= {"in_place": True} if chain.in_place else {}
            fused = graph.call_module(str(norm.target), (norm.args[0], chain.residual), options)
        last.replace_all_uses_with(fused)
    for node in reversed(chain.nodes):
        graph.erase_node(node)
    if fused is not norm:
        graph.erase_node(norm)
    return fused


def _share_gradients(
    graph: fx.Graph, layers: dict[Any, nn.Module], fused: Mapping[nn.Module, tuple[Fusion, ...]]
) -> list[tuple[fx.Node, fx.Node]]:
    """Let modules that use their input twice add up its gradients where a module of the graph has made it and nothing
    else has it. Returns the calls of both."""
    pairs = []
    for node in _calls(graph):
        before: Any = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        second, first = fused.get(layers[node]), fused.get(cast(Any, layers.get(before)))
        if second and first and second[0].reuses and first[0].reusable and len(before.users) == 1:
            node.kwargs = {SOLE_USER: True}
            pairs.append((before, node))
    return pairs


def _takes_alias(graph: fx.Graph, layers: dict[Any, nn.Module], parts: dict[str, Part]) -> bool:
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
            if type(layer) not in KEEP_NOTHING or (
                type(layer) is nn.Identity and not _is_only_added(user, layers, parts)
            ):
                return False
            parts.setdefault(str(user.target), Part(path=_path(user), kinds=KEEP_NOTHING))
    with graph.inserting_after(images):
        alias = graph.placeholder("alias_of_input")
    second.replace_input_with(images, alias)
    return True


def _is_only_added(identity: fx.Node, layers: dict[Any, nn.Module], parts: dict[str, Part]) -> bool:
    """Return whether all uses of a layer's outputs, which are its input, are additions after batch-norm."""
    return all(user in layers and user.args[1:] == (identity,) and str(user.target) in parts for user in identity.users)
