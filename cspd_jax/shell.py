"""The loop that runs an algorithm: all rounds in one program, or round by round with a
bar, or spread over a mesh. It does not depend on what a round does."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree
from jax.sharding import Mesh

from cspd_jax._utils.compilation import outermost_jit
from cspd_jax._utils.progress import Bar
from cspd_jax.info import Generated
from cspd_jax.parallel import replicate, spread

Array = jax.Array


class Rows(Protocol):
    """A job that generates B rows. It is a pytree, in which sizes are static and arrays
    are data."""

    def generate(self) -> Generated:
        """Generates the rows. It can be traced."""

    def stream(self) -> Iterator[Generated]:
        """Yields the tokens so far after each round. Each round is a jitted call of its
        own."""

    def split(self) -> tuple[ArrayTree, ArrayTree]:
        """Returns two pytrees: the data of each row, arrays [B, ...], and the data that
        all rows share."""

    @classmethod
    def joined(cls, rows: ArrayTree, shared: ArrayTree) -> Rows:
        """Makes a job from the two pytrees of `split`, whose first may have only some
        of the rows."""


class Algorithm(Protocol):
    """An algorithm that generates B rows, round by round. It is a pytree, and its
    states are named tuples.

    in_place: the name of the state's field whose buffers a round may overwrite.
    """

    in_place: ClassVar[str]

    def begin(self) -> ArrayTree:
        """Returns the state before the first round, or after it."""

    def unfinished(self, state: ArrayTree) -> Array:
        """Returns whether another round is needed, [] for all rows or [B]."""

    def advance(self, state: ArrayTree) -> ArrayTree:
        """Takes a round, and adds its counts to the state's counts."""

    def output(self, state: ArrayTree) -> Generated:
        """Returns the tokens and the info of a state, after any number of rounds."""


@outermost_jit
def run(algorithm: Algorithm) -> Generated:
    """Takes all rounds in one loop on the device."""
    more = lambda state: jnp.any(algorithm.unfinished(state))
    end = jax.lax.while_loop(more, algorithm.advance, algorithm.begin())
    return algorithm.output(end)


def stream(algorithm: Algorithm) -> Iterator[Generated]:
    """Yields (tokens, info) after each round. Each round is a jitted call of its
    own."""
    state = _begin(algorithm)
    name = algorithm.in_place
    found = _output(algorithm, state)
    if np.any(found.info.made):  # a first round was made to begin with
        yield found
    while np.any(_unfinished(algorithm, state)):
        rest = state._replace(**{name: None})
        state = _advance(algorithm, rest, getattr(state, name))
        yield _output(algorithm, state)


def generate(parts: Sequence[Rows], mesh: Mesh | None, bar: Bar) -> list[Generated]:
    """Generates the parts of a request, one after the other.

    mesh: the devices that hold the models; the rows of each part are spread over them.
    bar: a bar that counts tokens. It advances after each part. A single part without a
        mesh is generated round by round, and the bar advances after each round.
    """
    found = []
    with bar:
        for part in parts:
            if mesh is not None:
                found.append(_on_mesh(replicate(mesh, part), mesh))
            elif bar.disable:
                found.append(part.generate())
            elif len(parts) == 1:
                found.append(_watched(bar, part))
            else:
                found.append(part.generate())
                bar.update(int(jnp.sum(found[-1].info.made)))
    return found


def _watched(bar: Bar, part: Rows) -> Generated:
    """Generates a part round by round, and advances the bar by its new tokens."""
    made = None
    before = bar.n
    for made in part.stream():
        bar.update(before + int(jnp.sum(made.info.made)) - bar.n)
    return part.generate() if made is None else made


_begin = jax.jit(lambda algorithm: algorithm.begin())
_unfinished = jax.jit(lambda algorithm, state: algorithm.unfinished(state))
_output = jax.jit(lambda algorithm, state: algorithm.output(state))


@functools.partial(outermost_jit, donate_argnames="place")
def _advance(algorithm: Algorithm, rest: ArrayTree, place: ArrayTree) -> ArrayTree:
    return algorithm.advance(rest._replace(**{algorithm.in_place: place}))


@functools.partial(outermost_jit, static_argnames="mesh")
def _on_mesh(part: Rows, mesh: Mesh) -> Generated:
    """Generates a part on a mesh, where each group of devices generates its own share
    of the rows."""
    rows, shared = part.split()
    own = lambda rows, shared: part.joined(rows, shared).generate()
    return spread(own, mesh, rows, shared)
