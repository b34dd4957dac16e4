"""Checks the shapes that docstrings of the package promise, while the tests run.

A line such as `x: [R, d] the states` in the docstring of a record or a function says
the shape of a field or an argument. Symbols mean one number within a record or a call.
A dimension may be a number, a symbol (B, d, max_len, B'), a sum (T + 1), a product (S
D, 2R) or a choice (B or 1); an ellipsis stands for any dimensions. Values that are no
arrays are not looked at; of a pytree every array has the shape.

Records are checked where the package makes them by name: what `jax.tree.map` or `vmap`
makes of them may have other dimensions.
"""

import functools
import inspect
import re
import sys
import types

import jax
import numpy as np

LINE = re.compile(
    r"^ *(?P<names>\w+(?:, \w+)*): (?:(?:bool|u?int\d*) )?\[(?P<shape>[^\]]*)\]",
    re.MULTILINE,
)
ARRAYS = (jax.Array, np.ndarray)
SYMBOL = re.compile(r"[A-Za-z_]\w*'?")


def shapes_in(doc):
    """Returns the shape of each name that a docstring gives one."""
    return {
        name: tuple(part.strip() for part in found["shape"].split(",") if part.strip())
        for found in LINE.finditer(doc or "")
        for name in found["names"].split(", ")
    }


def value_of(dimension, known):
    """Computes a dimension; None where one of its symbols is not known."""
    if dimension in known:
        return known[dimension]
    if any(symbol not in known for symbol in SYMBOL.findall(dimension)):
        return None
    numbers = SYMBOL.sub(lambda found: f" {known[found[0]]} ", dimension)
    terms = [re.findall(r"\d+", term) for term in numbers.split("+")]
    return sum(int(np.prod([int(n) for n in term])) for term in terms)


def fits(dimension, size, known):
    """Says whether a dimension may have a size; a symbol that is new gets it."""
    choices = dimension.split(" or ")
    if len(choices) > 1:
        return any(value_of(one, known) in (size, None) for one in choices)
    found = value_of(dimension, known)
    if found is None:
        known[dimension] = size
    return found in (size, None)


def check(where, promised, values):
    """Raises an AssertionError for arrays that do not have the shape promised."""
    known = {}
    # Symbols that stand alone are bound before sums and products of them.
    composed = lambda item: sum(not SYMBOL.fullmatch(part) for part in item[1])
    for name, shape in sorted(promised.items(), key=composed):
        for array in jax.tree.leaves(values.get(name)):
            if not isinstance(array, ARRAYS):
                continue
            sizes = array.shape
            wanted = shape
            if "..." in shape:
                at = shape.index("...")
                wanted = shape[:at] + shape[at + 1 :]
                sizes = sizes[:at] + sizes[max(at, len(sizes) - len(shape) + at + 1) :]
            right = len(sizes) == len(wanted) and all(
                fits(one, size, known) for one, size in zip(wanted, sizes)
            )
            assert right, f"{where}: {name} is {array.shape} and not {shape}: {known}"


def looking(make, doc, where, always):
    """Returns a function, or what makes a record, which looks at its arguments first;
    always, or where the package calls it."""
    promised = shapes_in(doc)
    signature = inspect.signature(make)

    @functools.wraps(make)
    def call(*args, **kwargs):
        if always or sys._getframe(1).f_globals["__name__"].startswith("cspd_jax"):
            check(where, promised, signature.bind(*args, **kwargs).arguments)
        return make(*args, **kwargs)

    return call


def check_class(cls, where):
    """Checks what is promised of a record, where the package makes it by name, and of
    the methods of a class."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, types.FunctionType) and shapes_in(method.__doc__):
            setattr(cls, name, looking(method, method.__doc__, f"{where}.{name}", True))
    if shapes_in(cls.__doc__):
        maker = "__new__" if hasattr(cls, "_fields") else "__init__"
        made = looking(getattr(cls, maker), cls.__doc__, where, False)
        setattr(cls, maker, made)


def check_package():
    """Checks from now on what the modules of the package that are imported promise."""
    modules = [module for module in sys.modules.values() if module is not None]
    replaced = {}
    for module in modules:
        if not getattr(module, "__name__", "").startswith("cspd_jax"):
            continue
        for name, value in list(vars(module).items()):
            where = f"{module.__name__}.{name}"
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, type):
                check_class(value, where)
            elif isinstance(value, types.FunctionType) and shapes_in(value.__doc__):
                replaced[value] = looking(value, value.__doc__, where, True)
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value in replaced:
                setattr(module, name, replaced[value])
