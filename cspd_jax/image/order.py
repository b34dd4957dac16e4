"""The orders in which tokens are revealed, and the groups of tokens that are revealed
together."""

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
    """The tokens that one AR step reveals together.

    start: the index of the group's first token in reveal order.
    size: the number of tokens in the group.
    revealed: the share of the tokens that are known after the step, as MAR's linear
        guidance counts them. It counts one token less after the last step.
    """

    start: int
    size: int
    revealed: float


def prefix_lengths(length: int, buckets: int) -> list[int]:
    """Returns the prefix lengths for which the encoder is compiled, at most `buckets`
    of them. An AR step uses the shortest prefix that holds its known tokens.

    For 10 tokens and 4 buckets the lengths are [3, 6, 9, 10].
    """
    unit = -(-length // buckets)
    return [min(length, unit * (i + 1)) for i in range(-(-length // unit))]


def mask_lengths(length: int, num_iter: int) -> list[int]:
    """Returns the numbers of tokens that MAR leaves masked after each of the `num_iter`
    AR steps. The last number is at least 1, although the last AR step reveals all
    tokens.

    For 8 tokens in 4 AR steps the numbers are [7, 5, 3, 1].
    """
    lengths = []
    previous = length
    for step in range(num_iter):
        cosine = math.floor(length * math.cos(math.pi / 2 * (step + 1) / num_iter))
        previous = max(1, min(previous - 1, cosine))
        lengths.append(previous)
    return lengths


def reveal_groups(length: int, num_iter: int) -> tuple[Group, ...]:
    """Returns the groups of all AR steps that reveal something. With num_iter > L some
    AR steps reveal nothing.

    For 8 tokens in 4 AR steps the groups (start, size) are (0, 1), (1, 2), (3, 2) and
    (5, 3).
    """
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
    """Raises a UserError if this number of tokens does not fill a square grid."""
    if math.isqrt(length) ** 2 != length:
        raise UserError(
            f"the model's {length} tokens are no square, which this order needs"
        )


@dataclasses.dataclass(frozen=True)
class Order:
    """The order in which tokens are revealed. It is random, unless a subclass defines
    another order."""

    name: ClassVar[str]

    def most_steps(self, length: int) -> int:
        """Returns the largest useful number of AR steps: one for each token."""
        return length

    def groups(self, length: int, num_iter: int) -> tuple[Group, ...]:
        """Returns the groups of all AR steps that reveal something."""
        return reveal_groups(length, num_iter)

    def order(self, key: Array, length: int) -> Array:
        """Returns the positions [L] in the order in which they are revealed."""
        return jax.random.permutation(key, length)


@dataclasses.dataclass(frozen=True)
class Random(Order):
    """Reveals the tokens in a random order, as MAR does."""

    name: ClassVar[str] = "random"


@dataclasses.dataclass(frozen=True)
class Raster(Order):
    """Reveals one token after the other, row by row. This is the order of causal
    models."""

    name: ClassVar[str] = "raster"

    def groups(self, length: int, num_iter: int) -> tuple[Group, ...]:
        return tuple(Group(i, 1, (i + 1) / length) for i in range(length))

    def order(self, key: Array, length: int) -> Array:
        return jnp.arange(length)


@dataclasses.dataclass(frozen=True)
class Spread(Order):
    """Reveals each token far from the last revealed ones, on a square grid. The next
    token is the one whose distance to the nearest of them is the greatest. The images
    have the distribution of the plain sampler with this order, which is not its
    distribution with a random order.

    last: the number of last revealed tokens from which the next one keeps away.
    """

    last: int = 8
    name: ClassVar[str] = "spread"

    def groups(self, length: int, num_iter: int) -> tuple[Group, ...]:
        check_square(length)
        return reveal_groups(length, num_iter)

    def order(self, key: Array, length: int) -> Array:
        """Returns the positions [L] in the order in which they are revealed. If several
        tokens are equally far, the first of them in a random order is next."""
        positions = jax.random.permutation(key, length)
        side = math.isqrt(length)
        row = positions // side
        column = positions % side
        last = min(self.last, length)

        def reveal(
            state: tuple[Array, Array], step: Array
        ) -> tuple[tuple[Array, Array], Array]:
            # The state has the squared distances to the last revealed tokens, [last,
            # L], and a mask of the tokens that are still hidden, [L].
            squares, hidden = state
            i = jnp.argmax(jnp.where(hidden, squares.min(axis=0), -1))
            to_it = (row - row[i]) ** 2 + (column - column[i]) ** 2
            return (squares.at[step % last].set(to_it), hidden.at[i].set(False)), i

        none = jnp.full((last, length), 2 * length)  # greater than any squared distance
        _, chosen = jax.lax.scan(
            reveal, (none, jnp.ones(length, bool)), jnp.arange(length)
        )
        return positions[chosen]


# Published samplers mean different things by "linear" guidance. In SphereAR the scale
# rises with the number of tokens before the current one, and begins at exactly 1.
RISING = "linear-before"
# In NextStep-1 the scale falls from cfg, with the number of tokens that are left, the
# current one included.
FALLING = "linear-falling"


_SHARES = {
    "linear": lambda g: g.revealed,
    RISING: lambda g: g.revealed * g.start / (g.start + g.size),
    FALLING: lambda g: 1 - g.revealed * g.start / (g.start + g.size),
}


def guidance_scale(groups: tuple[Group, ...], cfg: ArrayLike, schedule: str) -> Array:
    """Returns the guidance scale of each group, [S] or [S, B]. It is constant, or
    linear in the share of the tokens that are revealed.

    cfg: the guidance scale, one number or one for each image, [B].
    schedule: "constant", "linear", or one of the schedules above.
    """
    cfg = jnp.asarray(cfg, float)
    if schedule == "constant":
        return jnp.broadcast_to(cfg, (len(groups), *cfg.shape))
    shares = jnp.array([_SHARES[schedule](g) for g in groups], float)
    return 1 + (cfg - 1) * shares.reshape((-1,) + (1,) * cfg.ndim)
