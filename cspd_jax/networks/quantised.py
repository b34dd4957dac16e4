"""Weights in 8 or 4 bits. A language model's matrices and embeddings are stored as
small integers times scales.

Every output of a matrix has scales of its own: one scale in 8 bits, and one scale for
each group of inputs in 4 bits. The largest weight of a group becomes the largest
integer, so that no weight is off by more than half a scale. An embedding counts as the
matrix that maps features to logits, so its inputs are the features. Norms and biases
are not quantised.

For example, in 4 bits the largest integer is 7. The group 0.7 -0.3 0.14 has the scale
0.1 and the integers 7 -3 1, which stand for 0.7 -0.3 0.1.

Quantised parameters can take the place of any parameters. `LM` expands them while it
runs, inside the compiled program. So the stored weights are small, and the computation
is the same, in the model's own precision.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from chex import ArrayTree
from jax.typing import DTypeLike

Array = jax.Array
# The axis of the inputs, by the name of a parameter.
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
    """A matrix whose axis `axis`, of length `size`, is cut into groups. The last group
    is filled up with zeros.

    codes: the integers, int8, with the axes [groups, members] in place of `axis`. In 4
        bits each code holds two members: its lower half a member of the group's first
        half, its upper half a member of the second half.
    scales: the scales, float32, with the axes [groups, 1] in place of `axis`.
    bits: 8 or 4.
    """

    codes: Array
    scales: Array
    bits: int
    axis: int
    size: int

    def expand(self, dtype: DTypeLike = jnp.float32) -> Array:
        """Returns the matrix itself in the type `dtype`."""
        codes = self.codes
        members = self.axis + 1
        if self.bits == 4:
            # Shifts of int8 keep the sign.
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
    """Quantises every matrix and embedding of an `LM` to 8 or 4 bits.

    group: the number of inputs that share a scale in 4 bits. In 8 bits all inputs share
        one.
    """

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
    """Quantises a matrix along the axis of its inputs, in groups of `group` inputs."""
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
    """Returns the parameters with every quantised matrix expanded."""
    quantised = lambda leaf: isinstance(leaf, Quantised)
    return jax.tree.map(
        lambda x: x.expand(dtype) if quantised(x) else x, params, is_leaf=quantised
    )
