"""Known tokens, which stay as they are while the rest of an image is generated.

The known tokens of an image come first in its reveal order. Its generation begins at
the place of MAR's schedule at which that number of tokens is known. AR steps before
this place are skipped. If the place lies within the group of an AR step, this step
draws only the missing tokens.

Say the groups have 1, 2, 2 and 3 tokens, and 4 tokens are known. The first two AR steps
are skipped, the third one draws one token, and the fourth one draws three.

A method reads known tokens in the same way as tokens that it has generated. So a method
that is exact for a whole image is also exact for the rest of an image, given the known
tokens.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from cspd_jax.check import UserError, check_kind

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """Tokens that stay as they are, for `Options(known=...)`.

    tokens: [..., L, d] the tokens by position, for each image or once for all images. A
        token that does not stay may have any value.
    mask: [..., L] true where a token stays.
    """

    tokens: ArrayLike
    mask: ArrayLike

    def move_to_front(self, order: Array) -> Array:
        """Returns an order [B, L] with the positions of the known tokens moved to the
        front. The order 3, 1, 0, 2 becomes 1, 2, 3, 0 if positions 1 and 2 are known.
        """
        drawn = ~jnp.take_along_axis(self.mask, order, axis=1)
        known_first = jnp.argsort(drawn, axis=1, stable=True)
        return jnp.take_along_axis(order, known_first, axis=1)

    def in_order(self, order: Array, dtype: DTypeLike) -> Given:
        """Returns the known tokens in an order [B, L] that begins with them."""
        tokens = jnp.take_along_axis(jnp.asarray(self.tokens), order[..., None], axis=1)
        return Given(tokens.astype(dtype), jnp.sum(self.mask, axis=1, dtype=jnp.int32))


class Given(NamedTuple):
    """The known tokens in reveal order, in which they come first.

    tokens: [B, L, d] the tokens, of which the first `number` are known.
    number: [B] the number of known tokens of each image.
    """

    tokens: Array
    number: Array


def of_every_image(
    known: Known, images: int, length: int, dim: int, causal: bool
) -> Known:
    """Returns the known tokens for every image: tokens [images, length, dim] and mask
    [images, length].

    Raises a UserError if the mask does not fit. In a causal model the known tokens must
    be the first ones of each image, and any other mask raises a UserError, too.
    """
    check_kind("known is", known, Known)
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
    """Returns tokens [B, L + padding, d], in reveal order, with the known tokens
    written over the first entries of each image."""
    if given is None:
        return tokens
    length = min(given.tokens.shape[1], tokens.shape[1])
    known = (jnp.arange(length) < given.number[:, None])[..., None]
    own = given.tokens[:, :length].astype(tokens.dtype)
    return tokens.at[:, :length].set(jnp.where(known, own, tokens[:, :length]))
