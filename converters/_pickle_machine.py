"""Runs a pickle without Python's unpickler: containers and scalars are built, nothing is imported.

A global name becomes a `Name`, which is not callable. Calling one hands the name and its arguments to the
`construct` function given by the caller. Every name must be in the caller's allow-list, every instruction in
the table below, so that there is nothing a hostile file could reach.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable, Set
from typing import IO, Any

from cspd_jax._utils import limits
from cspd_jax.errors import UserError

_MARK = object()
_KEYS = (str, int, float, bool, bytes, type(None))


@dataclasses.dataclass(frozen=True)
class Name:
    """A global that the pickle mentions, as "module name"."""

    name: str


class Malformed(Exception):
    """The pickle does not describe what it should."""


def check_key(key: Any) -> None:
    """Only scalars may be dictionary keys: hashing anything else could recurse without bound."""
    if type(key) not in _KEYS:
        raise Malformed(f"a dictionary key is a {type(key).__name__}")


def run(
    pickle: bytes | IO[bytes],
    construct: Callable[[str, tuple], Any],
    persistent: Callable[[Any], Any],
    allowed: Set[str],
    where: str,
) -> Any:
    """The object that `pickle` describes, read up to its end. `where` names the file in error messages."""
    machine = _Machine(construct, persistent, allowed, where)
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            machine.spend(1)
            machine.step(opcode.name, argument)
        return machine.result()
    except UserError:
        raise
    except (Malformed, ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, Malformed) else str(error)
        raise UserError(f"{where} is damaged: its description of objects is broken ({reason})") from None


class _Machine:
    def __init__(self, construct, persistent, allowed, where):
        self.construct, self.persistent, self.allowed, self.where = construct, persistent, allowed, where
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.spent = 0

    def spend(self, work: int) -> None:
        """Counts instructions and copied values: one byte can make an object, or copy a long list again."""
        self.spent += work
        if self.spent > limits.PICKLE_WORK:
            raise UserError(
                f"{self.where} describes its tensors in more than {limits.PICKLE_WORK} steps;"
                " no checkpoint needs so many"
            )

    def step(self, opcode: str, argument: Any) -> None:
        if opcode in _PUSH:
            if type(argument) is int and abs(argument) >= 2**63:
                raise Malformed("a number does not fit into 64 bits")
            self.stack.append(argument)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode]())
        elif opcode in _ACTIONS:
            _ACTIONS[opcode](self, argument)
        elif opcode not in _IGNORED:
            raise UserError(f"{self.where} contains the pickle instruction {opcode}, which is not allowed")

    def result(self) -> Any:
        if len(self.stack) != 1:
            raise Malformed("it does not end with one object")
        return self.pop()

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise Malformed("a value is missing")
        return value

    def pop_to_mark(self) -> list:
        items = []
        while (value := self.stack.pop()) is not _MARK:
            items.append(value)
        return items[::-1]

    def push_tuple(self, count: int) -> None:
        self.stack.append(tuple([self.pop() for _ in range(count)][::-1]))

    def global_name(self, name: str) -> None:
        if name not in self.allowed:
            raise UserError(
                f"{self.where} asks for {name.replace(' ', '.')}, which is not among the few names that a"
                " checkpoint may use; re-save it with tensors and plain containers only"
            )
        self.stack.append(Name(name))

    def stack_global(self, _) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Malformed("a global is not named by strings")
        self.global_name(f"{module} {name}")

    def call(self, _) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise Malformed("something that is not a known name is called")
        self.spend(sum(len(value) for value in arguments if isinstance(value, list | tuple | dict)))
        self.stack.append(self.construct(function.name, arguments))

    def build(self, _) -> None:
        """Attributes: those of a namespace (a dict here) are kept, those of an OrderedDict are dropped."""
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, dict) or not isinstance(state, dict):
            raise Malformed("attributes are set on something that is not a namespace or dictionary")
        if type(target) is not dict:
            self.spend(len(state))
            target.update(state)

    def set_items(self, items: list) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise Malformed("items are set on something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2]):
            check_key(key)
            target[key] = value

    def make_dict(self, _) -> None:
        items = self.pop_to_mark()
        self.stack.append({})
        self.set_items(items)

    def append_items(self, items: list) -> None:
        if type(self.stack[-1]) is not list:
            raise Malformed("items are appended to something that is not a list")
        self.stack[-1].extend(items)

    def put(self, index: int) -> None:
        if self.stack[-1] is _MARK:
            raise Malformed("a value is missing")
        self.memo[index] = self.stack[-1]


_PUSH = frozenset(
    {
        "INT",
        "LONG",
        "LONG1",
        "LONG4",
        "BININT",
        "BININT1",
        "BININT2",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
    }
)
_CONSTANTS: dict[str, Any] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_IGNORED = frozenset(("PROTO", "FRAME", "STOP"))
_ACTIONS: dict[str, Any] = {
    "GLOBAL": _Machine.global_name,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": lambda m, _: m.stack.append(m.persistent(m.pop())),
    "SETITEM": lambda m, _: m.set_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "APPEND": lambda m, _: m.append_items([m.pop()]),
    "APPENDS": lambda m, _: m.append_items(m.pop_to_mark()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.push_tuple(1),
    "TUPLE2": lambda m, _: m.push_tuple(2),
    "TUPLE3": lambda m, _: m.push_tuple(3),
    "LIST": lambda m, _: m.stack.append(m.pop_to_mark()),
    "DICT": _Machine.make_dict,
    "POP": lambda m, _: m.stack.pop(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "GET": lambda m, index: m.stack.append(m.memo[index]),
    "BINGET": lambda m, index: m.stack.append(m.memo[index]),
    "LONG_BINGET": lambda m, index: m.stack.append(m.memo[index]),
}
