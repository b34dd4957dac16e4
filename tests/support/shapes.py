"""Checks the shapes that docstrings of the package promise, while the tests run.

A line such as `x: [R, d] the states` in the docstring of a record or a function says
the shape of a field or an argument. Symbols mean one number within a record or a call.
A dimension may be a number, a symbol (B, d, max_len, B'), a sum (T + 1), a product (S
D, 2R) or a choice (B or 1); an ellipsis stands for any dimensions. Values that are no
arrays are not looked at; of a pytree every array has the shape.

Records are checked where the package makes them by name: what `jax.tree.map` or `vmap`
makes of them may have other dimensions.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

LINE = re.compile(
    r"^ *(?P<names>\w+(?:, \w+)*): (?:(?:bool|u?int\d*) )?\[(?P<shape>[^\]]*)\]",
    re.MULTILINE,
)
ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
SYMBOL = re.compile(r"[A-Za-z_]\w*'?")


def shapes_in(doc: str | None) -> dict[str, tuple[str, ...]]:
    """Returns the shape of each name that a docstring gives one."""
    return {
        name: tuple(part.strip() for part in found["shape"].split(",") if part.strip())
        for found in LINE.finditer(doc or "")
        for name in found["names"].split(", ")
    }


def value_of(dimension: str, known: Mapping[str, int]) -> int | None:
    """Computes a dimension; None where one of its symbols is not known."""
    if dimension in known:
        return known[dimension]
    if any(symbol not in known for symbol in SYMBOL.findall(dimension)):
        return None
    numbers = SYMBOL.sub(lambda found: f" {known[found[0]]} ", dimension)
    terms = [re.findall(r"\d+", term) for term in numbers.split("+")]
    return sum(int(np.prod([int(n) for n in term])) for term in terms)


def fits(dimension: str, size: int, known: dict[str, int]) -> bool:
    """Says whether a dimension may have a size; a symbol that is new gets it."""
    choices = dimension.split(" or ")
    if len(choices) > 1:
        return any(value_of(one, known) in (size, None) for one in choices)
    found = value_of(dimension, known)
    if found is None:
        known[dimension] = size
    return found in (size, None)


def mismatch(
    where: str, promised: Mapping[str, tuple[str, ...]], values: Mapping[str, Any]
) -> str | None:
    """Returns what is wrong with the arrays among the values, if something is."""
    known: dict[str, int] = {}
    # Symbols that stand alone are bound before sums and products of them.
    simple = lambda item: sum(not SYMBOL.fullmatch(part) for part in item[1])
    for name, shape in sorted(promised.items(), key=simple):
        for array in jax.tree.leaves(values.get(name)):
            if not isinstance(array, ARRAYS):
                continue
            sizes = array.shape
            wanted = shape
            if "..." in shape:
                at = shape.index("...")
                behind = len(shape) - at - 1
                wanted = (*shape[:at], *shape[at + 1 :])
                sizes = (*sizes[:at], *sizes[max(at, len(sizes) - behind) :])
            if len(sizes) != len(wanted) or not all(
                fits(one, size, known) for one, size in zip(wanted, sizes)
            ):
                return (
                    f"{where}: {name} is {list(array.shape)} and not"
                    f" [{', '.join(shape)}], with {known}"
                )
    return None


def check(where: str, promised: Mapping[str, tuple[str, ...]], values: Any) -> None:
    found = mismatch(where, promised, values)
    assert found is None, found


def checked(function: Callable, where: str) -> Callable:
    """Returns the function, which looks at its arguments first."""
    promised = shapes_in(function.__doc__)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(where, promised, signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return call


def check_record(cls: type, where: str) -> None:
    """Has a record look at its fields where the package itself makes it."""
    promised = shapes_in(cls.__doc__)
    maker = "__init__" if dataclasses.is_dataclass(cls) else "__new__"
    make = getattr(cls, maker)
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("cspd_jax"):
            check(where, promised, signature.bind(self, *args, **kwargs).arguments)
        return make(self, *args, **kwargs)

    setattr(cls, maker, made)


def is_record(value: Any) -> bool:
    return isinstance(value, type) and (
        hasattr(value, "_fields") or dataclasses.is_dataclass(value)
    )


def check_package() -> list[str]:
    """Checks from now on the records and functions of all modules of the package that
    are imported; returns their names."""
    modules = [m for name, m in list(sys.modules.items()) if m is not None]
    replaced: dict[int, tuple[Any, Any]] = {}
    names = []
    for module in modules:
        if not getattr(module, "__name__", "").startswith("cspd_jax"):
            continue
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            where = f"{module.__name__}.{name}"
            if is_record(value) and shapes_in(value.__doc__):
                check_record(value, where)
                names.append(where)
            methods = vars(value).items() if isinstance(value, type) else ()
            for own, method in list(methods):
                if isinstance(method, types.FunctionType) and shapes_in(method.__doc__):
                    setattr(value, own, checked(method, f"{where}.{own}"))
                    names.append(f"{where}.{own}")
            if isinstance(value, types.FunctionType) and shapes_in(value.__doc__):
                replaced[id(value)] = value, checked(value, where)
                names.append(where)
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in replaced and replaced[id(value)][0] is value:
                setattr(module, name, replaced[id(value)][1])
    return names
