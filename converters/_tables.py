"""Turns a checkpoint's tensors into a Flax tree by a table of names. No tensor and no
parameter may be left over.

A table maps the path of a Flax module to the name of the module in the checkpoint.
Parameters follow one fixed rule: Flax's `kernel`, `scale` and `embedding` are all
called `weight` in the checkpoint. The expected paths and shapes come from the Flax
network itself, so a table cannot silently miss a parameter. The error messages here do
not name the file; the module `source` adds its name.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from chex import ArrayTree
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from cspd_jax.check import UserError

Shape = tuple[int, ...]
# The values that a file holds in addition to its tensors, such as training arguments.
Args = Mapping[str, object]
NO_ARGS: Args = types.MappingProxyType({})
# (path of a parameter, its array) -> the value to put into the tree
Put = Callable[[tuple[str, ...], np.ndarray], ArrayTree]
# (pattern of the Flax module path, checkpoint's module name)
Table = tuple[tuple[str, str], ...]

_LEAVES = {
    "kernel": ".weight",
    "scale": ".weight",
    "embedding": ".weight",
    "bias": ".bias",
}
_LISTED = 5


class Tensor(Protocol):
    """The interface of a tensor for converters. The tensor is not read before `numpy`
    is called."""

    shape: Shape
    dtype: DTypeLike

    def numpy(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings from the caller, which override the file. None means that a setting is
    not given.

    heads: the numbers of attention heads of a MAR model's encoder and decoder, or the
        number of a causal model's heads.
    patch_size: the number of latents along one side of a token (MAR).
    respacing: the respacing of the denoising (MAR, SphereAR, NextStep-1).
    vae_stride: the number of pixels per latent (MAR, SphereAR, NextStep-1).
    groups: the number of groups of the group normalisation (KL-16, FLUX-type
        autoencoders).
    """

    heads: tuple[int, ...] | None = None
    patch_size: int | None = None
    respacing: str | None = None
    vae_stride: int | None = None
    groups: int | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter, and its tensor in the checkpoint.

    path: the parameter's path in the Flax tree.
    name: the name of the tensor.
    source_shape: the shape of the tensor.
    rows: a function of the tensor's array. It returns the rows of this parameter, in
        the order of this library.
    """

    path: tuple[str, ...]
    name: str
    source_shape: Shape
    rows: Callable[[np.ndarray], np.ndarray] = lambda array: array

    def to_flax(self, array: np.ndarray) -> np.ndarray:
        """Returns the parameter from the tensor's array. Kernels are transposed: [out,
        in] -> [in, out], and [out, in, h, w] -> [h, w, in, out]."""
        array = self.rows(array)
        if self.path[-1] != "kernel":
            return array
        return array.T if array.ndim == 2 else array.transpose(2, 3, 1, 0)


def entries(table: Table, tree: Mapping) -> list[Entry]:
    """Returns an entry for every parameter of an abstract Flax tree, whose leaves have
    a `shape`."""
    return [
        _entry(table, path, tuple(leaf.shape))
        for path, leaf in flatten_dict(tree).items()
    ]


def _entry(table: Table, path: tuple[str, ...], shape: Shape) -> Entry:
    module, ending = (
        (path[:-1], _LEAVES[path[-1]]) if path[-1] in _LEAVES else (path, "")
    )
    if path[-1] == "kernel":
        shape = shape[::-1] if len(shape) == 2 else (shape[3], shape[2], *shape[:2])
    return Entry(path, _translate(table, "/".join(module)) + ending, shape)


def _translate(table: Table, module: str) -> str:
    for pattern, name in table:
        if match := re.fullmatch(pattern, module):
            return match.expand(name).replace("/", ".")
    raise LookupError(
        f"the converter's table has no row for the network's module {module}"
    )


class Shapes(dict[str, Shape]):
    """The shapes of a checkpoint's tensors by name. Converters read sizes from them."""

    def size(self, name: str, axis: int) -> int:
        """Returns the size of a tensor along an axis."""
        if name not in self:
            raise UserError(f"the tensors do not fit the network: missing {name}")
        if axis >= len(self[name]):
            raise UserError(
                f"the tensors do not fit the network: misshapen {name} is"
                f" {list(self[name])}"
            )
        return self[name][axis]

    def count(self, prefix: str) -> int:
        """Returns how many different numbers follow a prefix in the names. Raises
        UserError if there are none."""
        found = len(self.indices(rf"{re.escape(prefix)}(\d+)\."))
        if not found:
            raise UserError(f"the tensors do not fit the network: missing {prefix}0.*")
        return found

    def indices(self, pattern: str) -> tuple[int, ...]:
        """Returns, in increasing order, the numbers that group 1 of a pattern matches.
        The pattern is matched at the start of each name."""
        return tuple(
            sorted({int(m[1]) for m in map(re.compile(pattern).match, self) if m})
        )


def check_shapes(have: Mapping[str, Shape], need: Mapping[str, Shape]) -> None:
    """Raises UserError unless the names and shapes are equal. The message lists the
    tensors that are missing, unknown or misshapen."""
    wrong = {
        name: shape
        for name, shape in need.items()
        if tuple(have.get(name, shape)) != tuple(shape)
    }
    problems = {
        "missing": [name for name in need if name not in have],
        "unknown": [name for name in have if name not in need],
        "misshapen": [
            f"{n} is {list(have[n])} instead of {list(shape)}"
            for n, shape in wrong.items()
        ],
    }
    if any(problems.values()):
        told = "; ".join(
            _list(what, names) for what, names in problems.items() if names
        )
        raise UserError(f"the tensors do not fit the network: {told}")


class Format:
    """The layout of the checkpoints of one kind.

    table: the names of the tensors.
    abstract_params: a function of a configuration. It returns the paths and shapes of
        the network's parameters.
    ignored: a pattern for the names of tensors that are not parameters.
    """

    def __init__(
        self, table: Table, abstract_params: Callable[..., Mapping], ignored: str = ""
    ):
        self.table = table
        self.abstract_params = abstract_params
        self.ignored = re.compile(ignored)

    def wanted(self, config: object) -> list[Entry]:
        """Returns an entry for every parameter of the network with this
        configuration."""
        return entries(self.table, self.abstract_params(config))

    def parameters(self, named: Mapping[str, ArrayTree]) -> dict[str, ArrayTree]:
        """Returns the tensors (or shapes) of a file without the ignored ones."""
        return {
            name: value
            for name, value in named.items()
            if not self.ignored.fullmatch(name)
        }

    def plan(self, config: object, shapes: Mapping[str, Shape]) -> list[Entry]:
        """Returns the entries for a file with these shapes. Raises UserError like
        `check_shapes`."""
        wanted = self.wanted(config)
        check_shapes(
            self.parameters(shapes),
            {entry.name: entry.source_shape for entry in wanted},
        )
        return wanted

    def check(self, config: object, tensors: Mapping[str, Tensor]) -> list[Entry]:
        """Returns the entries for a file. Raises UserError unless names, shapes and
        types fit. Does not read the values of tensors."""
        wanted = self.plan(
            config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        )
        for entry in wanted:
            dtype = tensors[entry.name].dtype
            # Quantised integers, for example, would need scales.
            if not jnp.issubdtype(dtype, jnp.floating):
                raise UserError(
                    f"tensor {entry.name} has type {dtype}; weights are floating point"
                )
        return wanted

    def convert(
        self,
        config: object,
        tensors: Mapping[str, Tensor],
        dtype: DTypeLike = np.float32,
        put: Put | None = None,
    ) -> dict:
        """Reads the tensors one by one into a Flax tree of `dtype` arrays. Raises
        UserError for NaN and infinity.

        put: a function of a parameter's path and array. It returns the value to put
            into the tree in place of the array, so that only one array at a time need
            be in memory.
        """
        found = {}
        for entry in self.check(config, tensors):
            array = _read(entry, tensors[entry.name], dtype)
            found[entry.path] = array if put is None else put(entry.path, array)
        return unflatten_dict(found)


def _read(entry: Entry, tensor: Tensor, dtype: DTypeLike) -> np.ndarray:
    with np.errstate(over="ignore"):
        array = np.array(entry.to_flax(tensor.numpy()), dtype, order="C")
    if not np.isfinite(array).all():
        raise UserError(
            f"tensor {entry.name} holds NaN or infinity (or overflows"
            f" {np.dtype(dtype)})"
        )
    return array


def _list(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {what} ({', '.join(names[:_LISTED])}{more})"
