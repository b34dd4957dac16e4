"""Weights in 8 or 4 bits: a language model's matrices and embeddings as small integers
times scales.

Of a matrix that maps inputs to outputs, every output has scales of its own: one in 8
bits, one for each group of inputs in 4. The largest weight of a group becomes the
largest integer, so no weight is off by more than half a scale. An embedding counts as
the matrix to the logits: its inputs are the features. Norms and biases stay.

Quantised parameters go wherever parameters do: `LM` expands them as it runs, inside the
compiled program, so what is kept is small and what is computed is the same in the
model's own precision.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from chex import ArrayTree
from jax.typing import DTypeLike

Array = jax.Array
# The axis of the inputs, by the name of the parameter.
_INPUTS = {
    "kernel": 0,
    "embedding": 1,
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["bits", "axis", "size"],
)
@dataclasses.dataclass(frozen=True)
class Quantised:
    """A matrix whose axis `axis`, of length `size`, is cut into groups (the last one
    filled up with zeros).

    codes: int8, with [groups, members] in place of the axis; in 4 bits each holds two
        members, the lower half of it one of the group's first half and the upper half
        one of the second.
    scales: float32, members = 1.
    """

    codes: Array
    scales: Array
    bits: int
    axis: int
    size: int

    def expand(self, dtype: DTypeLike = jnp.float32) -> Array:
        """Returns the matrix itself."""
        codes = self.codes
        members = self.axis + 1
        if self.bits == 4:
            # Shifts keep the sign.
            codes = jnp.concatenate([(codes << 4) >> 4, codes >> 4], axis=members)
        grouped = (codes.astype(self.scales.dtype) * self.scales).astype(dtype)
        shape = grouped.shape
        flat = grouped.reshape(
            *shape[: self.axis],
            shape[self.axis] * shape[members],
            *shape[members + 1 :],
        )
        return jax.lax.slice_in_dim(flat, 0, self.size, axis=self.axis)


def quantise(params: ArrayTree, bits: int, group: int = 32) -> ArrayTree:
    """Quantises every matrix and embedding of an `LM` to 8 or 4 bits. group: inputs
    that share a scale in 4 bits; in 8 bits all inputs do."""

    def one(path, leaf):
        axis = _INPUTS.get(path[-1].key)
        if axis is None:
            return leaf
        return quantise_matrix(
            leaf, axis, bits, group if bits == 4 else leaf.shape[axis]
        )

    return jax.tree_util.tree_map_with_path(one, params)


@functools.partial(jax.jit, static_argnames=("axis", "bits", "group"))
def quantise_matrix(matrix: Array, axis: int, bits: int, group: int) -> Quantised:
    size = matrix.shape[axis]
    most = 2 ** (bits - 1) - 1
    fill = [(0, 0)] * matrix.ndim
    fill[axis] = (0, -size % group)
    filled = jnp.pad(jnp.asarray(matrix, jnp.float32), fill)
    shape = filled.shape
    grouped = filled.reshape(
        *shape[:axis], shape[axis] // group, group, *shape[axis + 1 :]
    )
    scales = jnp.max(jnp.abs(grouped), axis=axis + 1, keepdims=True) / most
    codes = jnp.round(grouped / jnp.where(scales > 0, scales, 1)).astype(jnp.int8)
    if bits == 4:
        low, high = jnp.split(codes, 2, axis=axis + 1)
        codes = (low & 15) | (high << 4)
    return Quantised(codes, scales, bits, axis, size)


def expand(params: ArrayTree, dtype: DTypeLike = jnp.float32) -> ArrayTree:
    """Returns the parameters without anything quantised in them."""
    quantised = lambda leaf: isinstance(leaf, Quantised)
    return jax.tree.map(
        lambda x: x.expand(dtype) if quantised(x) else x, params, is_leaf=quantised
    )
