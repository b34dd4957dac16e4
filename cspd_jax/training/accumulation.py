"""The gradient of a batch, as the mean over its parts, which run one after the other in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Loss = Callable[[Any], tuple[jax.Array, Any]]


def mean_gradient(
    loss_of: Callable[[Any], Loss], params: Any, batch: Any, axes: Any = 0, parts: int = 1
) -> tuple[Any, Any]:
    """The gradient of a batch's loss at `params`, and the auxiliary output.

    loss_of: takes some rows of the batch and returns their loss, `params -> (scalar, aux)`. Both outputs are
        means over the rows, each of which weighs the same; so the mean over equal parts is that of the batch.
    batch: a pytree of arrays, among them everything random, so that no row depends on its part.
    axes: which axis the rows are on, like `in_axes` of `jax.vmap`; None for what all rows share.
    parts: how many, of equal size.
    """
    if parts == 1:
        return jax.grad(loss_of(batch), has_aux=True)(params)

    def of_part(part):
        return jax.grad(loss_of(part), has_aux=True)(params)

    cut = jax.tree.map(
        lambda axis, group: jax.tree.map(lambda a: _cut(a, axis, parts), group),
        axes,
        batch,
        is_leaf=lambda axis: axis is None,
    )
    shapes = jax.eval_shape(of_part, jax.tree.map(lambda a: a[0], cut))
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(lambda sum, part: (jax.tree.map(jnp.add, sum, of_part(part)), None), nothing, cut)
    return jax.tree.map(lambda sum: sum / parts, total)


def _cut(array: jax.Array, axis: int | None, parts: int) -> jax.Array:
    """[..., B, ...] -> [parts, ..., B / parts, ...]. Part i has rows i, i + parts, ...: where rows are
    spread over devices, each device keeps its own."""
    if axis is None:
        return jnp.broadcast_to(array, (parts, *jnp.shape(array)))
    before, rows, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
    return jnp.moveaxis(array.reshape(*before, rows // parts, parts, *after), axis + 1, 0)
