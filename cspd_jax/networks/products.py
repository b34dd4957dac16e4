"""Products of large matrices with few rows on a CPU. Such products take most of the
time of decoding, which reads one token, or one token and its drafts.

A matrix that does not fit into a core's cache is read from memory once for all rows, so
two to eight rows should not take much longer than one. But XLA's product of rows [M, K]
with a kernel [K, N] takes two to three times as long. It takes half as long if the
matrix lies by outputs, [N, K], and comes first. It takes even less if the rows are
given as [M, K] and are not transposed. The kernels of XLA are made for 8, 16, 32, ...
rows: 5 rows take a tenth longer than 8, and 28 rows half as long again as 32. So some
numbers of rows are filled up.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import ArrayTree
from jax.typing import DTypeLike

from cspd_jax.networks.quantised import Quantised

Array = jax.Array
# The number of weights of a large matrix: a megabyte in float32. A smaller matrix is
# faster as [K, N].
_LARGE = 2**18


def by_outputs(params: ArrayTree) -> ArrayTree:
    """Returns the parameters with every large kernel [K, N] transposed to [N, K], for
    modules with `by_outputs` set."""

    def one(path, leaf):
        return (
            jnp.transpose(leaf)
            if path[-1].key == "kernel" and is_large(leaf.shape)
            else leaf
        )

    return jax.tree_util.tree_map_with_path(one, params)


def gains_by_outputs(params: ArrayTree, dtype: DTypeLike) -> bool:
    """Returns whether `by_outputs` makes products faster. The parameters must have
    large kernels, and must lie on a CPU that computes in this dtype, which is float32
    or wider."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda leaf: isinstance(leaf, Quantised)
    )
    if not all(
        isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        for _, leaf in leaves
    ):
        return False
    on_cpu = {device.platform for _, leaf in leaves for device in leaf.devices()} == {
        "cpu"
    }
    large = any(
        path[-1].key == "kernel" and is_large(leaf.shape) for path, leaf in leaves
    )
    return on_cpu and large and jnp.dtype(dtype).itemsize >= 4


def is_large(shape: tuple[int, ...]) -> bool:
    """Returns whether a matrix of this shape is faster by outputs."""
    return math.prod(shape) >= _LARGE


def product(x: Array, matrix: Array, wide: DTypeLike | None = None) -> Array:
    """Returns the product of x [..., K] with the transposed matrix, [..., N], in the
    type `wide` if it is given.

    matrix: [N, K] a kernel by outputs.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    count = len(rows)
    rows = jnp.pad(rows, ((0, filled_up(count) - count), (0, 0)))
    found = jax.lax.dot_general(
        matrix, rows, (((1,), (1,)), ((), ())), preferred_element_type=wide
    )
    # Without the barrier XLA merges the transposition into the product and computes it
    # the slow way.
    found = jax.lax.optimization_barrier(found)
    return found.T[:count].reshape(*x.shape[:-1], len(matrix))


def filled_up(count: int) -> int:
    """Returns the number of rows that a product of `count` rows computes.

    For example, 4 rows stay 4, 5 rows become 8, 20 rows stay 20, and 28 rows become 32.
    """
    full = 1 << max(count - 1, 0).bit_length()
    worth = count > full / 2 if full <= 16 else count > 0.8 * full
    return full if count > 4 and worth else count


class Dense(nn.Module):
    """Maps x [..., K] to x kernel + bias, [..., N]. The kernel is [N, K] if it is large
    and `by_outputs` is set, and otherwise [K, N]."""

    features: int
    use_bias: bool
    dtype: DTypeLike
    kernel_init: nn.initializers.Initializer
    by_outputs: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = x.shape[-1], self.features
        turned = self.by_outputs and is_large(shape)
        kernel = self.param(
            "kernel", self.kernel_init, shape[::-1] if turned else shape, jnp.float32
        )
        x = x.astype(self.dtype)
        kernel = kernel.astype(self.dtype)
        y = product(x, kernel) if turned else jnp.matmul(x, kernel)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, shape[1:], jnp.float32)
            y = y + bias.astype(self.dtype)
        return y
