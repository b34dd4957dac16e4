"""Products of bfloat16 operands whose sums are float32, as matrix units make them, those of a CPU too.

JAX has a setting for them, `jax.default_matmul_precision("bfloat16")`, which XLA heeds on a TPU alone.
`matmul` heeds it everywhere. On a CPU with AMX they take a quarter of the time of float32 products, if
each operand lies in memory as the product reads it.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

Array = jax.Array
_NARROW = "bfloat16"


def products_of(kind: str) -> contextlib.AbstractContextManager:
    """A context in which operands of products are rounded to bfloat16, or in which all is as it was."""
    return jax.default_matmul_precision(_NARROW) if kind == "bfloat16" else contextlib.nullcontext()


def is_asked_for() -> bool:
    return jax.config.jax_default_matmul_precision == _NARROW  # type: ignore[attr-defined]


def matmul(x: Array, kernel: Array, turned: bool = False) -> Array:
    """x [..., K] and a kernel [K, N], or [N, K] if `turned`, -> [..., N], as is asked for in this context."""
    if is_asked_for():
        made = _product(turned, x.reshape(-1, x.shape[-1]), kernel)
        return made.reshape(*x.shape[:-1], -1)
    return jnp.einsum("...k,nk->...n", x, kernel) if turned else jnp.matmul(x, kernel)


def narrowed(params: Any) -> Any:
    """The parameters with their matrices rounded, once for many products."""
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim == 2 else a, params)


def as_read(params: Any) -> Any:
    """The parameters as many products in a row read them, of what is asked for in this context."""
    return narrowed(params) if is_asked_for() else params


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(turned: bool, x: Array, kernel: Array) -> Array:
    return _forward(turned, x, kernel)[0]


def _forward(turned: bool, x: Array, kernel: Array) -> tuple[Array, Any]:
    # An empty array tells the type that the gradient has.
    kept = _round(x), _round(kernel), (jnp.zeros(0, x.dtype), jnp.zeros(0, kernel.dtype))
    return _dot(kept[0], kept[1], 1 if turned else 0).astype(_wide(x)), kept


def _backward(turned: bool, kept: Any, cotangent: Array) -> tuple[Array, Array]:
    x, kernel, (of_x, of_kernel) = kept
    narrow = _round(cotangent)
    to_x = _dot(narrow, kernel, 0 if turned else 1)
    to_kernel = _dot(_turn(narrow), x, 0) if turned else _dot(_turn(x), narrow, 0)
    return to_x.astype(of_x.dtype), to_kernel.astype(of_kernel.dtype)


_product.defvjp(_forward, _backward)


def _round(a: Array) -> Array:
    return a.astype(jnp.bfloat16)


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """a [R, K] and b, whose `axis` has K entries: [R, N] in float32."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _turn(a: Array) -> Array:
    """The transpose as an array of its own; XLA would have the product read `a` itself, five times slower."""
    return with_layout_constraint(a.T, Layout((0, 1)))
