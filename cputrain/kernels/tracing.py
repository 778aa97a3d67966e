"""A module's forward pass as a graph of the calls of its children and of torch's functions, if it provably is nothing
else.

torch.fx records what is done with tensors, and is blind to all else: a counter, a branch on an attribute that changes
later, a random number become constants of the graph. Here a forward pass is traced only if each instruction, each
function that it calls and each value that it reads is known to be harmless, and what it has read is part of the result.
"""

import builtins
import dis
import math
import operator
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import Parameter, ismethod, signature
from pathlib import Path
from traceback import walk_tb
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import get_overridable_functions

from cputrain.kernels.evidence import (
    Native,
    calls_are_plain,
    is_as_written,
    is_in_source,
    is_silent,
    random_numbers_kept,
)

MISSING = object()
MOVE = "move it into a layer that forward calls, or out of forward"
"""What the author of most refused forward passes can do: layers are called, and not traced."""
TRACING = threading.RLock()
"""Held while functions of torch are replaced."""
IN_PLACE = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
TORCH = Path(torch.__file__).parent
RECORDING = {str(TORCH / "fx/proxy.py"), __file__}
CONTAINERS = str(TORCH / "nn/modules/container.py")
FUNCTIONS = {str(TORCH / name) for name in ("nn/functional.py", "functional.py", "_tensor.py", "_jit_internal.py")}
"""Files of functions that compute from tensors and nothing else."""
CONSTANT = {getattr(torch.jit, name).__code__ for name in ("is_scripting", "is_tracing")}
"""Functions that return False wherever native layers are used."""
HARMLESS = (abs, all, any, divmod, getattr, iter, len, max, min, next, repr, round, sorted, sum)
UNKNOWN = {"issubclass", "hasattr", "callable", "type", "id", "hash", "vars", "dir", "locals", "globals"}
"""Functions whose results for a proxy are not those for a tensor."""
FORBIDDEN = {
    "STORE_ATTR": "assigns the attribute {}",
    **dict.fromkeys(("STORE_SUBSCR", "STORE_SLICE"), "assigns an item"),
    **dict.fromkeys(("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF"), "assigns {}, which other functions read"),
    **dict.fromkeys(("DELETE_ATTR", "DELETE_SUBSCR", "DELETE_GLOBAL"), "has a del statement"),
    "IMPORT_NAME": "imports {}",
    **dict.fromkeys(("SETUP_WITH", "SETUP_ASYNC_WITH", "BEFORE_WITH", "LOAD_SPECIAL"), "has a with statement"),
    **dict.fromkeys(("SETUP_", "PUSH_EXC_INFO"), "has a try statement"),
    **dict.fromkeys(("YIELD_VALUE", "RETURN_GENERATOR", "GEN_START"), "has a generator"),
    **{"MATCH_": "has a match statement", "GET_AWAITABLE": "awaits", "LOAD_BUILD_CLASS": "defines a class"},
}
"""What instructions do that may change something or run other code, by the beginnings of their names."""
MODULES = ("torch", "math", "operator")
"""Python modules whose functions may be named; what they do is known at the call."""
SKIPPED = {"CACHE", "RESUME", "NOP", "EXTENDED_ARG", "PRECALL", "PUSH_NULL", "COPY_FREE_VARS", "MAKE_CELL", "TO_BOOL"}
COMPARES_BY_IDENTITY = ("IS_OP", "_IF_NONE", "_IF_NOT_NONE")
"""Ends of the names of instructions."""


class NotTraceable(Exception):  # noqa: N818  a reason, which its caller words
    """Why a forward pass is not traced, and what its author can do."""

    def __init__(self, why: str, advice: str = MOVE) -> None:
        super().__init__(why)
        self.advice = advice


@dataclass(frozen=True, slots=True)
class Reference:
    """A function by its place in a Python module, as some of torch's cannot be pickled."""

    module: str
    name: str

    @classmethod
    def to(cls, function: Any) -> "Reference":
        """Return a reference to a function. Raises NotTraceable if it has no place in its module, nor in torch's."""
        for module in (function.__module__, "torch.nn.functional", "torch"):
            space = vars(sys.modules[module]) if module in sys.modules else {}
            for name in (function.__name__, *space):
                if space.get(name) is function:
                    return cls(module, name)
        raise NotTraceable(f"calls {function.__name__}, which has no name in a Python module")

    @property
    def function(self) -> Any:
        """The function, or the module if there is no name."""
        module = import_module(self.module)
        return getattr(module, self.name) if self.name else module


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A value that a traced forward pass has read: attribute `name` of the module at `path`, or global `name` of the
    Python module called `path`. Of a module the value is nn.Module, of a tensor Tensor."""

    path: str
    name: str
    value: Any
    is_global: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """Store functions by reference."""
        value = Reference.to(self.value) if _is_function(self.value) else self.value
        if isinstance(value, ModuleType):
            value = Reference(value.__name__, "")
        return _read, (self.path, self.name, value, self.is_global)

    def still_holds(self, root: nn.Module) -> bool:
        """Return whether the same value would be read now."""
        if self.is_global:
            value = vars(sys.modules[self.path]).get(self.name, vars(builtins).get(self.name))
        else:
            owner = root.get_submodule(self.path) if self.path else root
            if self.value is nn.Module:
                return owner._modules.get(self.name) is not None
            value = getattr(owner, self.name, MISSING)
            if self.value is Tensor:
                return isinstance(value, Tensor)
        return value is self.value or (
            isinstance(self.value, int | float | str | tuple)
            and type(value) is type(self.value)
            and value == self.value
        )


def _read(path: str, name: str, value: Any, is_global: bool) -> Read:
    return Read(
        path=path, name=name, value=value.function if isinstance(value, Reference) else value, is_global=is_global
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A forward pass of one module: its graph, what it has read, and the names of the methods that ran.

    `containers` are those whose children it has gone through, with their names; `inlined` are the paths of modules like
    nn.Sequential whose children are called in the graph. `asks` is whether it has asked if its arguments are tensors.
    """

    graph: fx.Graph
    reads: tuple[Read, ...]
    containers: tuple[tuple[str, tuple[str, ...]], ...]
    inlined: tuple[str, ...]
    methods: tuple[str, ...]
    asks: bool


def trace(module: nn.Module, *, tensors: bool = True) -> Traced:
    """Trace the forward pass of a module, whose children are called, but not computed, except that of nn.Sequential.

    Arguments with defaults are not part of the graph: it is that of a call without them. The others are tensors, or
    something else with tensors=False, such as lists of tensors.

    Raises NotTraceable with the reason if the forward pass might do something else, or something else another time.
    """
    tracer = _Tracer(module)
    watch = _Watch(module, tracer, tensors=tensors)
    try:
        inputs = [tracer.create_proxy("placeholder", name, (), {}) for name in watch.inputs()]
        watch.adopt(watch.kind.forward)
        with TRACING, random_numbers_kept(), torch.no_grad(), watch.watching():
            outputs = watch.kind.forward(module, *inputs)
        tracer.create_node("output", "output", (tracer.create_arg(outputs),), {})
    except Exception as error:  # noqa: BLE001  a forward pass may raise any exception for proxies
        raise NotTraceable(watch.reason(error)) from None
    return Traced(
        graph=tracer.graph,
        reads=tuple(dict.fromkeys(watch.reads)),
        containers=tuple(watch.containers.items()),
        inlined=tuple(watch.inlined),
        methods=tuple(watch.methods),
        asks=watch.asks,
    )


class _Proxy(fx.Proxy):
    """A proxy whose `a += b` is recorded as such, where torch.fx records a + b, and which has no text and no hash."""

    def __repr__(self, *_: Any) -> str:
        raise NotTraceable("writes a tensor as text")

    __format__ = __repr__

    def __hash__(self) -> int:
        raise NotTraceable("looks up a tensor in a set or dict")

    def __getattr__(self, k: str) -> Any:
        if not k.startswith("__") and not hasattr(Tensor, k):
            raise NotTraceable(f"reads {k}, which tensors do not have")
        return _Attribute(self, k)


def _in_place(name: str) -> Any:
    function = getattr(operator, name)
    return lambda self, operand: self.tracer.create_proxy("call_function", function, (self, operand), {})


class _Attribute(_Proxy, fx.proxy.Attribute):
    """An attribute of a value, or a method to call."""


for _name in IN_PLACE.split():
    setattr(_Proxy, f"__i{_name}__", _in_place(f"i{_name}"))


class _Tracer(fx.Tracer):
    """Tracer of one module: all its children are leaves, and parameters and buffers are read when the graph runs."""

    proxy_buffer_attributes = True

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root, self.graph = root, fx.Graph(tracer_cls=_Tracer)
        self.submodule_paths = {module: path for path, module in root.named_modules()}
        self.proxies: dict[str, fx.Proxy] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            raise NotTraceable("makes a tensor that is not a parameter or buffer", "register it as a buffer")
        return super().create_arg(a)


class _Watch:
    """What a module's forward pass calls and reads while it is traced; anything not known to be harmless ends it."""

    def __init__(self, module: nn.Module, tracer: _Tracer, *, tensors: bool) -> None:
        self.module, self.tracer, self.tensors = module, tracer, tensors
        self.kind = type(module)
        self.reads: list[Read] = []
        self.containers: dict[str, tuple[str, ...]] = {}
        self.inlined: list[str] = []
        self.methods: list[str] = []
        self.called: set[str] = set()
        self.asks = False
        self.originals: dict[Any, Any] = {}
        self.arguments = list(signature(self.kind.forward).parameters.values())[1:]
        self.defaults = {argument.name for argument in self.arguments if argument.default is not Parameter.empty}
        self.followed: set[CodeType] = set()
        self.functions: dict[CodeType, FunctionType] = {}
        self.pending: FrameType | None = None
        self.inspected: tuple[CodeType, int] | None = None  # code that does not run now, and an offset in it
        for base in reversed(self.kind.__mro__):
            if issubclass(base, nn.Module) and base is not nn.Module:
                methods = (item.__func__ if isinstance(item, staticmethod) else item for item in vars(base).values())
                self.functions |= {method.__code__: method for method in methods if isinstance(method, FunctionType)}

    def inputs(self) -> list[str]:
        """Return the names of the arguments of forward without defaults."""
        required = [argument for argument in self.arguments if argument.default is Parameter.empty]
        if any(argument.kind is not Parameter.POSITIONAL_OR_KEYWORD for argument in required):
            raise NotTraceable("forward takes any arguments", "name them")
        return [argument.name for argument in required]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what this thread computes, and follow each call and each attribute of a module that is read."""
        call, parameter, thread = nn.Module.__call__, nn.Module.__getattr__, threading.get_ident()
        tracer, is_instance = self.tracer, builtins.isinstance

        def called(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
            if threading.get_ident() != thread:
                return call(module, *inputs, **keywords)
            path = tracer.path_of_module(module)
            if is_sequential(module) and is_silent(module) and len(inputs) == 1 and not keywords:
                self.inlined.append(path)
                self.containers[path] = tuple(module._modules)
                if any(type(child).__call__ is not called for child in module.children()):
                    raise NotTraceable("calls a layer with a __call__ of its own")
                for child in module._modules.values():
                    inputs = (child(*inputs),)  # type: ignore[misc]
                return inputs[0]
            self.called.add(path)
            return tracer.create_proxy("call_module", path, inputs, keywords)

        def value_of(module: nn.Module, name: str) -> Any:
            value = parameter(module, name)
            recorded = threading.get_ident() == thread and is_instance(value, Tensor)
            return tracer.getattr(name, value, tracer.proxies) if recorded else value

        def read(module: nn.Module, name: str) -> Any:
            if threading.get_ident() == thread and sys._getframe(1).f_code in self.followed:
                self._read(module, name)
            return object.__getattribute__(module, name)

        def asks(value: Any, kind: Any) -> bool:
            if not is_instance(value, fx.Proxy) or sys._getframe(1).f_code not in self.followed:
                return is_instance(value, kind)
            if value.node.op != "placeholder" or kind is not Tensor:
                raise NotTraceable("asks for the class of a value")
            self.asks = True
            return self.tensors

        def concatenated(tensors: Any, *inputs: Any, **keywords: Any) -> Any:
            if is_instance(tensors, fx.Proxy):  # of a list, which torch 2.8's cat does not take
                return tracer.create_proxy("call_function", cat, (tensors, *inputs), keywords)
            return cat(tensors, *inputs, **keywords)

        cat = torch.cat
        self.originals = {asks: is_instance, concatenated: cat}
        profiler = sys.getprofile()
        with ExitStack() as stack:
            for name, function in (("__call__", called), ("__getattr__", value_of), ("__getattribute__", read)):
                stack.enter_context(_replaced(nn.Module, name, function))
            stack.enter_context(_replaced(builtins, "isinstance", asks))
            stack.enter_context(_replaced(torch, "cat", concatenated))
            stack.callback(sys.setprofile, profiler)
            sys.setprofile(self._event)
            yield

    def _read(self, module: nn.Module, name: str) -> None:
        """Keep a value that decides what is computed; tensors, and what modules compute, are in the graph."""
        attributes = ChainMap(vars(module), *(vars(module)[kind] for kind in ("_parameters", "_buffers", "_modules")))
        of_class = name not in attributes
        value = getattr(type(module), name, MISSING) if of_class else attributes[name]
        if isinstance(value, FunctionType) and of_class:
            if module is not self.module and value.__code__.co_filename != CONTAINERS:
                raise NotTraceable(f"calls {plain_of(module).__name__}.{name}")
            return
        path = "" if module is self.module else self.tracer.path_of_module(module)
        where = ".".join(filter(None, ("self", path, name)))
        if isinstance(value, Tensor) and not of_class:
            value = Tensor
        elif isinstance(value, nn.Module):
            value = nn.Module
        elif name != "training" and path and any(f"{path}.".startswith(f"{call}.") for call in self.called):
            raise NotTraceable(f"reads {where}, which the call before may change", "read it before the call")
        elif isinstance(value, property):
            raise NotTraceable(f"reads {where}, a property", "store its value in __init__")
        elif ismethod(value):
            raise NotTraceable(f"calls {where}, a class method", "make it a plain method")
        elif not _is_constant(value) and not _is_function(value):
            raise NotTraceable(f"reads {where}, a {type(value).__name__}", "read numbers, text, functions or layers")
        self.reads.append(Read(path=path, name=name, value=value, is_global=False))

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        caller = frame.f_back if event == "call" else frame
        if event == "call" and frame.f_code.co_filename in RECORDING and self.pending is caller:
            self.pending = None  # torch's function has handed the proxy over
        if caller is None or caller.f_code not in self.followed:
            return
        if event == "call":
            self._python(frame, caller)
        elif event == "c_call":
            self._builtin(frame, argument)
        elif event in ("c_return", "c_exception") and self.pending is frame:
            raise NotTraceable(f"calls {argument.__name__} without a tensor")

    def _python(self, frame: FrameType, caller: FrameType) -> None:
        code = frame.f_code
        if code in self.followed or code.co_filename in RECORDING or code in CONSTANT:
            return
        if code.co_filename == CONTAINERS:
            container = frame.f_locals.get("self")
            path = next((path for path, module in self.module.named_modules() if module is container), None)
            if path is None or not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                raise NotTraceable(f"calls {code.co_name} of a container")
            self.containers[path] = tuple(container._modules)
            return
        if code.co_filename in FUNCTIONS and any(map(_has_proxy, frame.f_locals.values())):
            return
        if code not in self.functions:
            raise NotTraceable(f"calls {code.co_name}")
        self.adopt(self.functions[code])

    def _builtin(self, frame: FrameType, function: Any) -> None:
        if any(function is harmless for harmless in HARMLESS) or function in vars(math).values():
            return
        if function not in _overridable():
            raise NotTraceable(f"calls {function.__name__}")
        self.pending = frame

    def reason(self, error: Exception) -> str:
        """Return where the trace has ended (FILE:LINE), why, and what the network's author can do."""
        lines = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__) if frame.f_code in self.followed]
        if self.inspected is not None:
            code, offset = self.inspected
            lines = [(code, line) for start, line in dis.findlinestarts(code) if line and start <= offset]
        at = f"{Path(lines[-1][0].co_filename).name}:{lines[-1][1]} " if lines else ""
        why = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, fx.proxy.TraceError) or "_Proxy" in why:
            why = "branches or loops by a tensor's values or shape"
        return f"{at}{why}: {getattr(error, 'advice', MOVE)}"

    def adopt(self, function: Any) -> None:
        """Take a function as part of the forward pass after proving what it does not do."""
        if not isinstance(function, FunctionType):
            raise NotTraceable(f"{getattr(function, '__name__', function)} is no Python function")
        name, code = function.__name__, function.__code__
        self.inspected = code, 0
        if getattr(self.kind, name, None) is function:
            if not is_as_written(self.kind, name):
                raise NotTraceable(f"replaces the method {name}")
            self.methods.append(name)
        elif any(vars(base).get(name) is function for base in self.kind.__mro__):
            self.methods.append(name)  # overridden, called by super()
            if not is_in_source(function, function.__module__):
                raise NotTraceable(f"replaces the method {name}")
        elif not is_in_source(function, function.__module__):
            raise NotTraceable(f"replaces the function {name}")
        if outer := sorted(set(code.co_freevars) - {"__class__"}):
            raise NotTraceable(f"uses {outer[0]}, of the function around {name}", "pass it as an argument")
        home = sys.modules.get(function.__module__)
        if home is None or function.__globals__ is not vars(home):
            raise NotTraceable("has globals of its own")
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not (_is_constant(value) or _is_function(value) or isinstance(value, torch.dtype)):
                raise NotTraceable(f"has a {type(value).__name__} as default of {name}", "use a number, text or None")
        for part in _codes(code):
            self._inspect(function, part)
        self.followed |= set(_codes(code))
        self.inspected = None

    def _inspect(self, function: FunctionType, code: CodeType) -> None:
        instructions = [step for step in dis.get_instructions(code) if step.opname not in SKIPPED]
        for number, step in enumerate(instructions):
            name = step.opname
            self.inspected = code, step.offset
            if what := next((what for start, what in FORBIDDEN.items() if name.startswith(start)), ""):
                raise NotTraceable(what.format(step.argval))
            before, by_value = instructions[:number], name == "IS_OP" and not _is_none(instructions[number - 1])
            if name.endswith(COMPARES_BY_IDENTITY) and (by_value or not self._is_known(function, code, before)):
                raise NotTraceable("compares by `is`", "compare numbers by `==`, layers by their index")
            if name in ("LOAD_ATTR", "LOAD_METHOD") and step.argval.startswith("__"):
                raise NotTraceable(f"reads {step.argval}")
            if name == "LOAD_GLOBAL":
                self._global(function, step.argval, instructions[number + 1 :])

    def _is_known(self, function: FunctionType, code: CodeType, before: list[dis.Instruction]) -> bool:
        """Return whether the value before a comparison is an attribute of the module, which is then among its reads, or
        an argument with its default value."""
        values = [step for step in before if not _is_none(step)]
        attribute = False
        while values and values[-1].opname == "LOAD_ATTR":
            values.pop()
            attribute = True
        if not values or not values[-1].opname.startswith("LOAD_FAST"):
            return False
        name = values[-1].argval
        if attribute:
            is_method = any(vars(base).get(function.__name__) is function for base in self.kind.__mro__)
            return is_method and code is function.__code__ and bool(name == code.co_varnames[0])
        stores = [step.argval for step in dis.get_instructions(code) if step.opname.startswith("STORE_FAST")]
        return code is self.kind.forward.__code__ and name in self.defaults and name not in stores

    def _global(self, function: FunctionType, name: str, following: list[dis.Instruction]) -> None:
        """Check what is read from a global, through attributes of Python modules."""
        owner, value = function.__globals__, function.__globals__.get(name, vars(builtins).get(name, MISSING))
        path = function.__module__
        if isinstance(value, ModuleType):
            self.reads.append(Read(path=path, name=name, value=value, is_global=True))
        for after in following:
            if not isinstance(value, ModuleType):
                break
            if after.opname not in ("LOAD_ATTR", "LOAD_METHOD") or value.__name__.partition(".")[0] not in MODULES:
                raise NotTraceable(f"uses the module {value.__name__}")
            path, owner, name = value.__name__, vars(value), after.argval
            value = owner.get(name, MISSING)
        if isinstance(value, FunctionType):
            value = self.originals.get(value, value)
        if name in UNKNOWN or value is MISSING:
            raise NotTraceable(f"uses {name}")
        if isinstance(value, type | FunctionType | BuiltinFunctionType) and after.opname in (
            "LOAD_ATTR",
            "LOAD_METHOD",
        ):
            if not _is_of(value, "torch") and not isinstance(vars(value).get(after.argval), FunctionType):
                raise NotTraceable(f"reads {after.argval} of {name}")
        elif isinstance(value, type) and not _is_of(value, "torch", "builtins") and not _is_argument(after):
            raise NotTraceable(f"reads the global {name}, a class")
        if isinstance(value, FunctionType):
            self.functions.setdefault(value.__code__, value)
        elif not (_is_constant(value) or isinstance(value, BuiltinFunctionType | type | torch.dtype)):
            raise NotTraceable(f"reads the global {name}, a {type(value).__name__}")
        self.reads.append(Read(path=path, name=name, value=value, is_global=True))


@contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    before = vars(owner).get(name, MISSING)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if before is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def plain_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or that which a native one has replaced."""
    return module.plain if isinstance(module, Native) else type(module)


def is_sequential(module: nn.Module) -> bool:
    """Return whether a module calls its children one after the other, as nn.Sequential does."""
    kind = plain_of(module)
    if not issubclass(kind, nn.Sequential) or not calls_are_plain(nn.Sequential):
        return False
    return all(getattr(kind, name) is getattr(nn.Sequential, name) for name in ("forward", "__iter__", "__call__"))


def _is_none(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_CONST" and instruction.argval is None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(_is_constant, value))
    return value is None or type(value) in (bool, int, float, str)


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType | BuiltinFunctionType)


def _is_of(value: Any, *packages: str) -> bool:
    return str(value.__module__).partition(".")[0] in packages


def _is_argument(after: dis.Instruction) -> bool:
    """Return whether the instruction after a class passes it as an argument, as to isinstance."""
    return after.opname in ("CALL", "PRECALL", "CALL_FUNCTION") and bool(after.argval)


def _has_proxy(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(_has_proxy, value.values() if isinstance(value, dict) else value))
    return isinstance(value, fx.Proxy)


@cache
def _overridable() -> frozenset[Callable[..., Any]]:
    """Return torch's functions that hand over to a proxy what they are called with."""
    return frozenset(value for names in get_overridable_functions().values() for value in names if callable(value))
