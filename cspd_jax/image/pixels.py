"""Images as sequences of tokens."""

from __future__ import annotations

from typing import TypeVar

Array = TypeVar("Array")  # of numpy or jax


def patchify(images: Array, patch: int) -> Array:
    """[B, H, W, C] -> tokens [B, (H/p)(W/p), C p p]; inside a token the order is channel, row, column."""
    b, h, w, c = images.shape
    grid = images.reshape(b, h // patch, patch, w // patch, patch, c)
    return grid.transpose(0, 1, 3, 5, 2, 4).reshape(b, (h // patch) * (w // patch), c * patch * patch)


def unpatchify(tokens: Array, patch: int) -> Array:
    """The inverse of `patchify` for square images: [B, L, C p p] -> [B, H, W, C]."""
    b, length, dim = tokens.shape
    side, c = round(length**0.5), dim // patch**2
    grid = tokens.reshape(b, side, side, c, patch, patch)
    return grid.transpose(0, 1, 4, 2, 5, 3).reshape(b, side * patch, side * patch, c)
