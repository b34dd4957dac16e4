"""Known tokens: what of an image stays as it is while the rest is generated.

The order of an image then begins with its known tokens, and its generation at the place
of MAR's schedule where that many tokens are known: the AR steps before it are left out,
and of the step in which that place lies only the tokens that are missing are drawn.
Every method reads known tokens as it reads tokens it has made, so what is exact of a
whole image is exact of the rest of one, given what is known.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from cspd_jax.check import UserError

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """Tokens that stay, for `Options(known=...)`.

    tokens: [..., L, d] of each image, by position, or of all images; what is not kept
        may be anything.
    mask: [..., L] true where a token stays.
    """

    tokens: Any
    mask: Any

    def first(self, order: Array) -> Array:
        """Returns an order [B, L] with the positions of the known tokens first;
        otherwise as it was."""
        drawn = ~jnp.take_along_axis(self.mask, order, axis=1)
        known_first = jnp.argsort(drawn, axis=1, stable=True)
        return jnp.take_along_axis(order, known_first, axis=1)

    def given(self, order: Array, dtype: DTypeLike) -> Given:
        """Returns what is known in an order [B, L] that begins with it."""
        tokens = jnp.take_along_axis(jnp.asarray(self.tokens), order[..., None], axis=1)
        return Given(tokens.astype(dtype), jnp.sum(self.mask, axis=1, dtype=jnp.int32))


class Given(NamedTuple):
    """Known tokens in the order of generation, which begins with them.

    tokens: [B, L, d]
    number: [B] of known tokens.
    """

    tokens: Array
    number: Array


def of_every_image(
    known: Known, images: int, length: int, dim: int, causal: bool
) -> Known:
    """Returns what is known of every image: tokens [images, length, dim],
    mask [images, length].

    Raises a UserError for shapes that do not fit, and for a mask of a causal model
    that is no prefix.
    """
    mask = np.asarray(known.mask)
    tokens = np.asarray(known.tokens)
    if mask.dtype != bool or mask.shape not in ((length,), (images, length)):
        raise UserError(
            f"the mask of known tokens is {mask.dtype} {list(mask.shape)}; it must be"
            f" bool [{images}, {length}], or [{length}] for all images"
        )
    mask = np.broadcast_to(mask, (images, length))
    tokens = np.broadcast_to(tokens, (images, length, dim))
    if causal and (mask != (np.arange(length) < np.sum(mask, axis=1)[:, None])).any():
        raise UserError(
            "a causal model draws each token given those before it, row by row, so only"
            " the first tokens of an image can be kept (--keep top-half, for example):"
            " it knows nothing of what comes later"
        )
    kept = jnp.where(mask[..., None], jnp.asarray(tokens, jnp.float32), 0)
    return dataclasses.replace(known, tokens=kept, mask=jnp.asarray(mask))


def put_back(given: Given | None, tokens: Array) -> Array:
    """Returns tokens [B, L + padding, d] with what is known at its places, whatever was
    written there."""
    if given is None:
        return tokens
    length = min(given.tokens.shape[1], tokens.shape[1])
    known = (jnp.arange(length) < given.number[:, None])[..., None]
    own = given.tokens[:, :length].astype(tokens.dtype)
    return tokens.at[:, :length].set(jnp.where(known, own, tokens[:, :length]))
