"""In which order tokens are revealed, and how many at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from cspd_jax.check import UserError

Array = jax.Array


class Group(NamedTuple):
    """Tokens revealed together by one AR step: `size` of them, from index `start` of
    the reveal order.

    `revealed` is the share of tokens known after the step as MAR's linear guidance
    counts it (it keeps one token back at the last step).
    """

    start: int
    size: int
    revealed: float


def prefix_lengths(length: int, buckets: int) -> list[int]:
    """Returns the lengths of the encoder's prefix that are compiled: each AR step has
    the shortest that will do."""
    unit = -(-length // buckets)
    return [min(length, unit * (i + 1)) for i in range(-(-length // unit))]


def random_order(key: Array, length: int) -> Array:
    """Returns a random order of the positions, [L]: the first entry is generated
    first."""
    return jax.random.permutation(key, length)


def mask_lengths(length: int, num_iter: int) -> list[int]:
    """Returns how many tokens MAR leaves masked after each of the `num_iter` AR steps
    (the last one aside)."""
    lengths = []
    previous = length
    for step in range(num_iter):
        cosine = math.floor(length * math.cos(math.pi / 2 * (step + 1) / num_iter))
        previous = max(1, min(previous - 1, cosine))
        lengths.append(previous)
    return lengths


def reveal_groups(length: int, num_iter: int) -> tuple[Group, ...]:
    """Returns the groups of all AR steps that reveal something (with num_iter > L some
    reveal nothing)."""
    groups = []
    known = 0
    lengths = mask_lengths(length, num_iter)
    for step, masked in enumerate(lengths):
        until = length if step == num_iter - 1 else length - masked
        if until > known:
            groups.append(Group(known, until - known, (length - masked) / length))
        known = until
    return tuple(groups)


def check_square(length: int) -> None:
    """Raises a UserError for an order on a square grid of tokens that are no square."""
    if math.isqrt(length) ** 2 != length:
        raise UserError(
            f"the model's {length} tokens are no square, which this order needs"
        )


@dataclasses.dataclass(frozen=True)
class Order:
    """In which order tokens are revealed; where a subclass says nothing else, at
    random."""

    name: ClassVar[str]

    def most_steps(self, length: int) -> int:
        """Returns the AR steps if no two tokens come together."""
        return length

    def groups(self, length: int, num_iter: int) -> tuple[Group, ...]:
        """Returns the groups of all AR steps that reveal something."""
        return reveal_groups(length, num_iter)

    def order(self, key: Array, length: int) -> Array:
        """Returns the positions, [L]."""
        return random_order(key, length)


@dataclasses.dataclass(frozen=True)
class Random(Order):
    """In a random order, as MAR does."""

    name: ClassVar[str] = "random"


@dataclasses.dataclass(frozen=True)
class Raster(Order):
    """One token after the other, row by row: the order of causal models."""

    name: ClassVar[str] = "raster"

    def groups(self, length: int, num_iter: int) -> tuple[Group, ...]:
        return tuple(Group(i, 1, (i + 1) / length) for i in range(length))

    def order(self, key: Array, length: int) -> Array:
        return jnp.arange(length)


@dataclasses.dataclass(frozen=True)
class Spread(Order):
    """Each token far from the last ones, on a square grid: its distance to the nearest
    of them is the greatest there is. Another distribution than in random order: that of
    the plain sampler in this one.

    last: how many of the tokens before it are kept away from.
    """

    last: int = 8
    name: ClassVar[str] = "spread"

    def groups(self, length: int, num_iter: int) -> tuple[Group, ...]:
        check_square(length)
        return reveal_groups(length, num_iter)

    def order(self, key: Array, length: int) -> Array:
        """Returns the positions, [L]. Of several that are as far, the next is the first
        of them in a random order."""
        positions = random_order(key, length)
        side = math.isqrt(length)
        row = positions // side
        column = positions % side
        last = min(self.last, length)

        def reveal(
            state: tuple[Array, Array], step: Array
        ) -> tuple[tuple[Array, Array], Array]:
            # Of the distances to the last ones, [last, L]; what is left, [L].
            squares, hidden = state
            i = jnp.argmax(jnp.where(hidden, squares.min(axis=0), -1))
            to_it = (row - row[i]) ** 2 + (column - column[i]) ** 2
            return (squares.at[step % last].set(to_it), hidden.at[i].set(False)), i

        none = jnp.full((last, length), 2 * length)  # farther than any
        _, chosen = jax.lax.scan(
            reveal, (none, jnp.ones(length, bool)), jnp.arange(length)
        )
        return positions[chosen]


# What "linear" guidance means differs between published samplers.
RISING = "linear-before"  # in the tokens before this one: from exactly 1 (SphereAR)
# In the tokens that are left, this one included: down from cfg (NextStep-1).
FALLING = "linear-falling"


_SHARES = {
    "linear": lambda g: g.revealed,
    RISING: lambda g: g.revealed * g.start / (g.start + g.size),
    FALLING: lambda g: 1 - g.revealed * g.start / (g.start + g.size),
}


def guidance_scale(groups: tuple[Group, ...], cfg: ArrayLike, schedule: str) -> Array:
    """Returns the guidance scale of each group: constant, or linear in the share of
    tokens revealed.

    cfg: one number, or one for each image, [B]. -> [S], or [S, B].
    """
    cfg = jnp.asarray(cfg, float)
    if schedule == "constant":
        return jnp.broadcast_to(cfg, (len(groups), *cfg.shape))
    shares = jnp.array([_SHARES[schedule](g) for g in groups], float)
    return 1 + (cfg - 1) * shares.reshape((-1,) + (1,) * cfg.ndim)
