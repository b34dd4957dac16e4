"""From a checkpoint's tensors to a Flax tree, by a table of names, with nothing left over on either side.

A table maps a Flax module path to the checkpoint's module name; leaves follow one fixed rule (`kernel`,
`scale` and `embedding` are all called `weight` there). Expected paths and shapes come from the Flax network
itself, so a table cannot silently miss a parameter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from cspd_jax.errors import UserError

Shape = tuple[int, ...]
# (path of a parameter, the array) -> what becomes of it
Put = Callable[[tuple[str, ...], np.ndarray], Any]
Table = tuple[tuple[str, str], ...]  # (pattern of the Flax module path, checkpoint's module name)

_LEAVES = {"kernel": ".weight", "scale": ".weight", "embedding": ".weight", "bias": ".bias"}
_DTYPES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
_LISTED = 5


class Tensor(Protocol):
    """What a converter needs of a tensor: it is not read before `numpy` is called."""

    shape: Shape
    dtype: Any

    def numpy(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter: its place in the Flax tree and its name and shape in the checkpoint."""

    path: tuple[str, ...]
    name: str
    source_shape: Shape

    def to_flax(self, array: np.ndarray) -> np.ndarray:
        """[out, in] -> [in, out] and [out, in, h, w] -> [h, w, in, out] for kernels, the rest as it is."""
        if self.path[-1] != "kernel":
            return array
        return array.T if array.ndim == 2 else array.transpose(2, 3, 1, 0)


def entries(table: Table, tree: Mapping) -> list[Entry]:
    """Every parameter of an abstract Flax tree (leaves with a `shape`) with its checkpoint name."""
    return [_entry(table, path, tuple(leaf.shape)) for path, leaf in flatten(tree)]


def expected(table: Table, abstract_params, config: Any, where: str) -> list[Entry]:
    """The entries of the network that a configuration read from a stranger's file describes."""
    try:
        tree = abstract_params(config)
    except Exception as error:  # whatever the network stumbles over
        raise UserError(f"{where} describes no possible network ({type(error).__name__})") from error
    return entries(table, tree)


def flatten(tree: Mapping, prefix: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    """(path, leaf) of every leaf of a nested mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _entry(table: Table, path: tuple[str, ...], shape: Shape) -> Entry:
    if path[-1] in _LEAVES:
        name = _translate(table, "/".join(path[:-1])) + _LEAVES[path[-1]]
    else:
        name = _translate(table, "/".join(path))
    if path[-1] == "kernel":
        shape = shape[::-1] if len(shape) == 2 else (shape[3], shape[2], *shape[:2])
    return Entry(path, name, shape)


def _translate(table: Table, module: str) -> str:
    for pattern, name in table:
        if match := re.fullmatch(pattern, module):
            return match.expand(name).replace("/", ".")
    raise LookupError(f"the converter's table has no row for the network's module {module}")


def check_names_and_shapes(wanted: list[Entry], shapes: Mapping[str, Shape], where: str) -> None:
    """Raises UserError naming every missing, unknown or misshapen tensor."""
    wanted = list({entry.name: entry for entry in wanted}.values())  # tied parameters share a tensor
    names = {entry.name for entry in wanted}
    problems = [
        _list("missing", [e.name for e in wanted if e.name not in shapes]),
        _list("unknown", [name for name in shapes if name not in names]),
        _list(
            "misshapen",
            [
                f"{e.name} is {_show(shapes[e.name])} instead of {_show(e.source_shape)}"
                for e in wanted
                if e.name in shapes and tuple(shapes[e.name]) != e.source_shape
            ],
        ),
    ]
    if any(problems):
        raise UserError(f"{where} does not fit the network: {'; '.join(p for p in problems if p)}")


def fill(
    wanted: list[Entry],
    tensors: Mapping[str, Tensor],
    where: str,
    dtype=np.float32,
    put: Put | None = None,
) -> dict:
    """Reads the tensors one by one into a Flax tree of `dtype` arrays; refuses NaN and infinity.

    put: takes each path and array, and returns what becomes of it: then one tensor at a time is in memory.
    """
    tree: dict = {}
    for entry in wanted:
        node = tree
        for key in entry.path[:-1]:
            node = node.setdefault(key, {})
        array = _convert(entry, tensors[entry.name], where, dtype)
        node[entry.path[-1]] = array if put is None else put(entry.path, array)
    return tree


def check_type(tensor: Tensor, name: str, where: str) -> None:
    """UserError unless the tensor holds floating-point numbers."""
    if tensor.dtype not in _DTYPES:
        raise UserError(f"{where}: tensor {name} has type {tensor.dtype}; weights are floating point")


def _convert(entry: Entry, tensor: Tensor, where: str, dtype) -> np.ndarray:
    check_type(tensor, entry.name, where)
    with np.errstate(over="ignore"):
        array = np.array(entry.to_flax(tensor.numpy()), dtype, order="C")
    if not np.isfinite(array).all():
        raise UserError(
            f"{where}: tensor {entry.name} holds NaN or infinity (or overflows {np.dtype(dtype)})"
        )
    return array


class Format:
    """How the checkpoints of one kind are laid out: `table` names the tensors of a network, whose parameters
    `abstract_params(config)` describes. A kind whose files hold more says so by overriding `parameters`."""

    def __init__(self, table: Table, abstract_params: Callable[[Any], Mapping]):
        self.table, self.abstract_params = table, abstract_params

    def wanted(self, config: Any, where: str = "the configuration") -> list[Entry]:
        """Every parameter of the network of these sizes, and the tensor that holds it."""
        return expected(self.table, self.abstract_params, config, where)

    def parameters(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of a file's tensors (or shapes) that are parameters of the network."""
        return named

    def plan(self, config: Any, shapes: Mapping[str, Shape], where: str) -> list[Entry]:
        """Which tensor goes where; UserError unless names and shapes fit exactly."""
        entries = self.wanted(config, where)
        check_names_and_shapes(entries, self.parameters(shapes), where)
        return entries

    def convert(
        self, config: Any, tensors: Mapping[str, Tensor], where: str, dtype=np.float32, put: Put | None = None
    ) -> dict:
        """The Flax parameters as numpy arrays, or what `put` makes of each path and array."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return fill(self.plan(config, shapes, where), tensors, where, dtype, put)


class Shapes:
    """Reads sizes out of tensor shapes, with one sentence for whatever is not there."""

    def __init__(self, shapes: Mapping[str, Shape], where: str):
        self.shapes, self.where = shapes, where

    def size(self, name: str, axis: int, rank: int) -> int:
        if name not in self.shapes:
            raise UserError(f"{self.where} does not fit the network: missing {name}")
        shape = tuple(self.shapes[name])
        if len(shape) != rank or shape[axis] < 1:
            raise UserError(
                f"{self.where} does not fit the network: misshapen {name} is {_show(shape)}"
                f" instead of having {rank} dimensions of at least 1"
            )
        return shape[axis]

    def count(self, pattern: str) -> int:
        """How many different numbers group 1 of `pattern` takes at the start of the names."""
        return len({m[1] for m in map(re.compile(pattern).match, self.shapes) if m})

    def indices(self, pattern: str) -> tuple[int, ...]:
        """The numbers group 1 of `pattern` takes, increasing."""
        return tuple(sorted({int(m[1]) for m in map(re.compile(pattern).match, self.shapes) if m}))


def _list(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {what} ({', '.join(names[:_LISTED])}{more})"


def _show(shape: Shape) -> str:
    return str(list(shape))
