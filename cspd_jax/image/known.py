"""Known tokens: what of an image stays as it is while the rest is generated.

The order of an image then begins with its known tokens, and its generation at the place of MAR's schedule
where so many tokens are known: the AR steps before it are left out, and of the step in which that place lies
only the tokens that are missing are drawn. Every method reads known tokens as it reads tokens it has made, so
what is exact of a whole image is exact of the rest of one, given what is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.arrays import as_array
from cspd_jax.errors import UserError
from cspd_jax.image.order import Group

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """Tokens that stay, for `Options(known=...)`.

    tokens: [N, L, d] by position, or [L, d] for all images; what is not kept may be anything.
    mask: [N, L] or [L], true where a token stays.
    """

    tokens: Any
    mask: Any

    @property
    def count(self) -> Any:
        """[N] tokens that stay."""
        mask = self.mask if hasattr(self.mask, "sum") else np.asarray(self.mask)
        return mask.sum(axis=-1)


def of_images(known: Known, index: Any) -> Known:
    """What is known of some of the images, by an array of their numbers or a slice."""
    of_all = np.ndim(known.tokens) == 2, np.ndim(known.mask) == 1  # one for all images
    return Known(*(a if same else a[index] for a, same in zip((known.tokens, known.mask), of_all)))


def in_turn(known: Known, numbers: np.ndarray) -> Known:
    """What is known of images with these numbers, which take the pictures in turn."""
    pictures = len(known.tokens) if np.ndim(known.tokens) == 3 else len(np.atleast_2d(known.mask))
    return of_images(known, numbers % pictures)


class Kept(NamedTuple):
    """The same in the order of generation, which begins with what is known.

    tokens: [B, L, d]
    number: [B] of known tokens.
    """

    tokens: Array
    number: Array


def checked(known: Known, images: int, length: int, dim: int) -> Known:
    """For so many images of `length` tokens, in numpy; UserError for what cannot be kept."""
    try:
        tokens, mask = as_array(known.tokens), as_array(known.mask)
    except ValueError:
        raise UserError("known tokens and their mask must be arrays of numbers") from None
    if mask.dtype != bool or mask.shape not in ((length,), (images, length)):
        raise UserError(
            f"the mask of known tokens is {mask.dtype} {list(mask.shape)}; it must be bool"
            f" [{images}, {length}], or [{length}] for all images"
        )
    if not _are_numbers(tokens) or tokens.shape not in ((length, dim), (images, length, dim)):
        raise UserError(
            f"the known tokens are {tokens.dtype} {list(tokens.shape)}; they must be numbers"
            f" [{images}, {length}, {dim}], or [{length}, {dim}] for all images"
        )
    mask = np.broadcast_to(mask, (images, length))
    tokens = np.broadcast_to(np.asarray(tokens, np.float32), (images, length, dim))
    if not np.isfinite(tokens[mask]).all():
        raise UserError("the known tokens hold NaN or infinity where the mask keeps them")
    return Known(np.where(mask[..., None], tokens, 0), mask)


def check_traced(known: Known, images: int, length: int, dim: int) -> Known:
    """The same for arrays that may be traced, one for each image: only shapes and types are looked at."""
    try:
        tokens, mask = jnp.asarray(known.tokens), jnp.asarray(known.mask)
    except (TypeError, ValueError, RuntimeError):
        raise UserError("known tokens and their mask must be arrays of numbers") from None
    fit = tokens.shape == (images, length, dim) and mask.shape == (images, length)
    if not _are_numbers(tokens) or not fit or mask.dtype != bool:
        raise UserError(
            f"the known tokens are {tokens.dtype} {list(tokens.shape)} and their mask {mask.dtype}"
            f" {list(mask.shape)}; traced, they must be numbers [{images}, {length}, {dim}] and bool"
            f" [{images}, {length}]"
        )
    return Known(tokens, mask)


def _are_numbers(tokens: Any) -> bool:
    kinds = jnp.floating, jnp.integer
    return any(jnp.issubdtype(tokens.dtype, kind) for kind in kinds)


def check_prefix(known: Known) -> None:
    """UserError unless each image's known tokens are the first ones, row by row."""
    length = known.mask.shape[1]
    if (known.mask != (np.arange(length) < known.count[:, None])).any():
        raise UserError(
            "a causal model draws each token given those before it, row by row, so only the first tokens of"
            " an image can be kept (--keep top-half, for example): it knows nothing of what comes later"
        )


def known_first(order: Array, mask: Array) -> Array:
    """The order [B, L] with the positions of the mask [B, L] first; otherwise as it was."""
    drawn = ~jnp.take_along_axis(mask, order, axis=1)
    return jnp.take_along_axis(order, jnp.argsort(drawn, axis=1, stable=True), axis=1)


def in_order(known: Known, order: Array, dtype: Any) -> Kept:
    """order: [B, L], as `known_first` has it."""
    tokens = jnp.take_along_axis(jnp.asarray(known.tokens), order[..., None], axis=1)
    return Kept(tokens.astype(dtype), jnp.sum(known.mask, axis=1, dtype=jnp.int32))


def put_back(kept: Kept | None, tokens: Array) -> Array:
    """tokens [B, L + padding, d] with what is known at its places, whatever was written there."""
    if kept is None:
        return tokens
    length = min(kept.tokens.shape[1], tokens.shape[1])
    known = (jnp.arange(length) < kept.number[:, None])[..., None]
    own = kept.tokens[:, :length].astype(tokens.dtype)
    return tokens.at[:, :length].set(jnp.where(known, own, tokens[:, :length]))


def steps_left(groups: Sequence[Group], counts: np.ndarray) -> list[bool]:
    """Which AR steps a batch makes whose images have `counts` known tokens."""
    least = counts.min() if len(counts) else 0
    return [bool(group.start + group.size > least) for group in groups]
