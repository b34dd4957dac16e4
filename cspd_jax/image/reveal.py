"""In which order tokens are revealed, and how many at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.errors import UserError

Array = jax.Array

_MOST_STEPS = 2**16  # far more than any model has tokens: the others reveal nothing


class Group(NamedTuple):
    """Tokens revealed together by one AR step: `size` of them, from index `start` of the reveal order.

    `revealed` is the share of tokens known after the step as MAR's linear guidance counts it (it keeps one
    token back at the last step).
    """

    start: int
    size: int
    revealed: float


def random_reveal(key: Array, length: int) -> Array:
    """A random order of the positions, [L]: the first entry is generated first."""
    return jax.random.permutation(key, length)


def reveal_from_orders(orders: Array) -> Array:
    """MAR's `orders` [..., L] mask positions from the front, so they are revealed from the end."""
    return orders[..., ::-1]


def mask_lengths(length: int, num_iter: int) -> list[int]:
    """How many tokens MAR leaves masked after each of the `num_iter` AR steps (the last one aside)."""
    if not 1 <= num_iter <= _MOST_STEPS:
        raise UserError(f"num_iter is {num_iter}; it must be from 1 to {_MOST_STEPS}")
    lengths, previous = [], length
    for step in range(num_iter):
        cosine = math.floor(length * math.cos(math.pi / 2 * (step + 1) / num_iter))
        previous = max(1, min(previous - 1, cosine))
        lengths.append(previous)
    return lengths


def reveal_groups(length: int, num_iter: int) -> tuple[Group, ...]:
    """The groups of all AR steps that reveal something (with num_iter > L some reveal nothing)."""
    groups, known = [], 0
    lengths = mask_lengths(length, num_iter)
    for step, masked in enumerate(lengths):
        until = length if step == num_iter - 1 else length - masked
        if until > known:
            groups.append(Group(known, until - known, (length - masked) / length))
        known = until
    return tuple(groups)


def guidance_scale(groups: tuple[Group, ...], cfg: Array | float, schedule: str) -> Array:
    """The guidance scale of each group: constant, or linear in the share of tokens revealed.

    cfg: one number, or one for each image, [B]. -> [S], or [S, B].
    """
    cfg = jnp.asarray(cfg, float)
    each = (-1,) + (1,) * cfg.ndim
    if schedule == "constant":
        return jnp.broadcast_to(cfg, (len(groups), *cfg.shape))
    if schedule == "linear":
        return 1 + (cfg - 1) * jnp.array([g.revealed for g in groups], float).reshape(each)
    raise UserError(f"guidance schedule {schedule!r} is unknown; it is 'linear' or 'constant'")
