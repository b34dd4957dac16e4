"""Lossy shortcuts of the plain sampler: fewer denoising steps for later tokens (DiSA),
and a checkerboard that is completed in a few AR steps (GtR).

Both shortcuts draw from another distribution than the plain sampler. docs/benchmarks.md
measures what this costs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from cspd_jax.check import UserError
from cspd_jax.diffusion.schedule import NUM_TRAIN_STEPS
from cspd_jax.image.order import (
    Group,
    Order,
    check_square,
    reveal_groups,
)

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Annealing:
    """A number of denoising steps that falls linearly along the AR steps (DiSA). It is
    lossy.

    first: the number of denoising steps of the first tokens.
    last: the number of denoising steps of the last tokens.
    levels: the most different numbers of denoising steps. The sampler is compiled for
        each of them.
    """

    first: int = 50
    last: int = 5
    levels: int = 8

    def steps(self, ar_steps: int) -> list[int]:
        """Returns the number of denoising steps of each AR step. From 50 to 5 in three
        AR steps the numbers are [50, 28, 5]."""
        levels = min(self.levels, ar_steps)
        found = []
        for step in range(ar_steps):
            level = min(levels - 1, step * levels // max(1, ar_steps - 1))
            progress = level / max(1, levels - 1)
            found.append(
                math.floor(self.first + (self.last - self.first) * progress + 0.5)
            )
        return found

    def respacings(self, respacing: str, ar_steps: int) -> list[str]:
        """Returns the respacing of each AR step, such as "50". If `respacing` is a DDIM
        respacing, so are these, such as "ddim50"."""
        return [_of_kind(respacing, steps) for steps in self.steps(ar_steps)]

    @property
    def why(self) -> str:
        """The reason why annealing is lossy, as one clause."""
        return (
            f"denoising steps are annealed from {self.first} to {self.last} along the"
            " AR steps (DiSA), which is another distribution than the plain sampler's"
        )


def _of_kind(respacing: str, steps: int) -> str:
    """Returns the respacing to this many steps, of the same kind as `respacing`. DDIM
    takes whole strides, so it gets the nearest number of steps that is possible."""
    if respacing.startswith("ddim"):
        counts = {
            len(range(0, NUM_TRAIN_STEPS, stride))
            for stride in range(1, NUM_TRAIN_STEPS)
        }
        return f"ddim{min(counts, key=lambda count: (abs(count - steps), count))}"
    if not respacing.strip().isdecimal():
        raise UserError(
            f"annealing has no schedules of the kind of {respacing!r:.40}; it goes with"
            " a respacing such as 100 or ddim100"
        )
    return str(steps)


@dataclasses.dataclass(frozen=True)
class Checkerboard(Order):
    """Reveals the tokens of one colour of a checkerboard in random order, and then the
    tokens of the other colour in few AR steps (GtR). It is lossy.

    last_steps: the number of AR steps for the second colour. With one step all its
        tokens are drawn at once, independently of one another.
    """

    last_steps: int = 1
    name: ClassVar[str] = "checkerboard"

    def of_first_colour(self, length: int) -> int:
        """Returns the number of tokens of the first colour."""
        return -(-length // 2)

    def most_steps(self, length: int) -> int:
        """Returns the number of AR steps if the tokens of the first colour come one by
        one."""
        return self.of_first_colour(length) + self.last_steps

    def groups(self, length: int, num_iter: int) -> tuple[Group, ...]:
        """Returns the groups of all AR steps. Each of the two colours has a cosine
        schedule over its own tokens."""
        check_square(length)
        if num_iter <= self.last_steps:
            raise UserError(
                f"num_iter is {num_iter}, and the last {self.last_steps} AR steps"
                f" complete the checkerboard; it must be at least {self.last_steps + 1}"
            )
        first = self.of_first_colour(length)
        stages = (
            (0, first, num_iter - self.last_steps),
            (first, length - first, self.last_steps),
        )
        return tuple(
            Group(
                start + g.start,
                g.size,
                min(start + g.start + g.size, length - 1) / length,
            )
            for start, tokens, steps in stages
            for g in reveal_groups(tokens, steps)
        )

    def order(self, key: Array, length: int) -> Array:
        """Returns a random order of the positions [L] in which the first colour comes
        before the second."""
        order = jax.random.permutation(key, length)
        return order[jnp.argsort(_colour(order, length), stable=True)]

    @property
    def why(self) -> str:
        """The reason why the checkerboard is lossy, as one clause."""
        steps = "one AR step" if self.last_steps == 1 else f"{self.last_steps} AR steps"
        return (
            f"one colour of a checkerboard is drawn first and the other in {steps}"
            " (GtR), which is another distribution than the plain sampler's"
        )


def _colour(positions: Array, length: int) -> Array:
    """Returns the colour, 0 or 1, of positions that count the tokens of a square row by
    row."""
    side = math.isqrt(length)
    return (positions // side + positions % side) % 2
