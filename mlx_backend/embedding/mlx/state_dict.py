"""Reads the pickle in which PyTorch describes tensors, as the list of instructions that it is.

A pickle is a program for a machine with a stack. Python's own reader runs it in full: it calls what the pickle
names, sets attributes, and nests tuples until the process crashes. This one knows the instructions that a dictionary of
tensors is made of, calls nothing, and keeps nothing but the tensors. Instructions, the depth of tuples and the bytes of
a pickle are bounded.

Knows no numbers of a tensor, no files and no MLX.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 1 << 22
"""Of a pickle: a tensor takes about 200, and models of this kind have some hundred."""
MAX_INSTRUCTIONS = 300_000
_MAX_DEPTH = 4  # of tuples: a tensor's arguments hold its shape

STORAGES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool_",
}
"""PyTorch's names of storages, and the names of what they hold."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of `count` numbers in the file `key` of the archive."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """Which of a storage's numbers a tensor has. Shape and strides are as written: nothing about them is checked."""

    storage: Storage
    offset: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]


def read_state_dict(data: bytes) -> dict[str, TensorView]:
    """Return the tensors of a pickle by name. Raises ValueError for anything but a dictionary of tensors."""
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"its description of the tensors has {len(data)} bytes; at most {MAX_BYTES} are read"
        )
    return _Machine().run(data)


@dataclass(frozen=True, slots=True)
class _Name:
    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Tuple:
    items: tuple[Any, ...]
    depth: int


class _Dict:
    """A dictionary of which only the tensors are kept. Two are never compared."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorView] = {}


class _Other:
    """Stands for a value that no tensor is made of. `kind` says what it is, for an error."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


_MARK = _Other("mark")
_LIST = _Other("list")
_KNOWN = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    *(("torch", name) for name in STORAGES),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"),
        *("BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE", "UNICODE"),
    }
)
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> dict[str, TensorView]:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_INSTRUCTIONS:
                raise ValueError(
                    f"its description of the tensors has more than {MAX_INSTRUCTIONS} instructions"
                )
            if opcode.name == "STOP":
                break
            self._step(opcode.name, argument)
        match self._pop():
            case _Dict(tensors=tensors):
                return tensors
            case other:
                raise ValueError(f"it holds a {_kind(other)} instead of tensors by name")

    def _step(self, name: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        match name:
            case "PROTO" | "FRAME":
                pass
            case _ if name in _LITERALS:
                stack.append(argument)
            case _ if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case _ if name in _TUPLES:
                stack.append(_tuple([self._pop() for _ in range(_TUPLES[name])][::-1]))
            case "TUPLE":
                stack.append(_tuple(self._pop_to_mark()))
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_DICT":
                stack.append(_Dict())
            case "EMPTY_LIST":
                stack.append(_LIST)
            case "APPEND":
                self._pop()
            case "APPENDS":
                self._pop_to_mark()
            case "SETITEM":
                value, key = self._pop(), self._pop()
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._pop_to_mark())
            case "MEMOIZE":
                memo[len(memo)] = self._top()
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                memo[int(argument)] = self._top()
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(memo[int(argument)])
            case "GLOBAL":
                module, _, attribute = argument.partition(" ")
                stack.append(_known(module, attribute))
            case "STACK_GLOBAL":
                attribute, module = self._pop(), self._pop()
                stack.append(_known(module, attribute))
            case "BINPERSID":
                stack.append(_storage(self._pop()))
            case "REDUCE":
                arguments, function = self._pop(), self._pop()
                stack.append(_called(function, arguments))
            case "BUILD":  # what an OrderedDict has beside its items: the versions of layers
                self._pop()
                if not isinstance(self._top(), _Dict):
                    raise ValueError("it sets attributes of something other than a dictionary")
            case _:
                raise ValueError(f"it uses the instruction {name}, which no dictionary of tensors needs")

    def _set_items(self, items: list[Any]) -> None:
        match self._top():
            case _Dict(tensors=tensors):
                pairs = zip(items[::2], items[1::2], strict=True)
                tensors |= {str(key): value for key, value in pairs if isinstance(value, TensorView)}
            case other:
                raise ValueError(f"it sets items of a {_kind(other)}")

    def _top(self) -> Any:
        if not self._stack:
            raise ValueError("its description of the tensors is broken")
        return self._stack[-1]

    def _pop(self) -> Any:
        value = self._top()
        del self._stack[-1]
        if value is _MARK:
            raise ValueError("its description of the tensors is broken")
        return value

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (value := self._top()) is not _MARK:
            items.append(value)
            del self._stack[-1]
        del self._stack[-1]
        return items[::-1]


def _tuple(items: list[Any]) -> _Tuple:
    depth = 1 + max((item.depth for item in items if isinstance(item, _Tuple)), default=0)
    if depth > _MAX_DEPTH:
        raise ValueError(f"it nests tuples more than {_MAX_DEPTH} levels deep")
    return _Tuple(tuple(items), depth)


def _known(module: Any, name: Any) -> _Name:
    if not (isinstance(module, str) and isinstance(name, str)) or (module, name) not in _KNOWN:
        raise ValueError(f"it wants to use {_shown(module)}.{_shown(name)}")
    return _Name(module, name)


def _storage(pid: Any) -> Storage:
    match pid:
        case _Tuple(items=("storage", _Name("torch", name), str(key), _, int(count))) if name in STORAGES:
            return Storage(STORAGES[name], key, count)
    raise ValueError("it holds something other than tensors")


def _called(function: Any, arguments: Any) -> Any:
    """Return what one of the few known functions makes of its arguments."""
    match function, arguments:
        case _Name(name="OrderedDict"), _Tuple(items=()):
            return _Dict()
        case (
            _Name(name="_rebuild_tensor_v2"),
            _Tuple(items=(Storage() as storage, offset, _Tuple() as shape, _Tuple() as strides, *_)),
        ):
            return TensorView(storage, offset, shape.items, strides.items)
        case _Name(name="_rebuild_parameter"), _Tuple(items=(TensorView() as tensor, *_)):
            return tensor
    raise ValueError(f"it calls {_kind(function)} in a way that makes no tensor")


def _kind(value: Any) -> str:
    match value:
        case _Name(module, name):
            return f"{module}.{name}"
        case _Other(kind=kind):
            return kind
        case _Tuple():
            return "tuple"
        case Storage() | TensorView():
            return "tensor"
        case _Dict():
            return "dict"
        case _:
            return type(value).__name__


def _shown(name: Any) -> str:
    return str(name)[:100] if isinstance(name, str) else type(name).__name__
