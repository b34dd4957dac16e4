"""The loop around an algorithm: all rounds in one program, or round by round, with a
bar, or spread over a mesh. It knows nothing of what a round does."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
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
    """Rows that are to be generated: a pytree, in which sizes are static and arrays are
    data."""

    def generate(self) -> Generated:
        """Generates them; traceable."""

    def stream(self) -> Iterator[Generated]:
        """Yields what there is after each round, which is a jitted call of its own."""

    def split(self) -> tuple[ArrayTree, ArrayTree]:
        """Returns what is by row, arrays [B, ...], and what all rows share."""

    @classmethod
    def joined(cls, rows: ArrayTree, shared: ArrayTree) -> Rows:
        """Puts both together again, for some of the rows."""


class Algorithm(Protocol):
    """Generates B rows, round by round. It is a pytree, and its states are named
    tuples.

    in_place: the field of the state whose buffers a round may overwrite.
    """

    in_place: ClassVar[str]

    def begin(self) -> ArrayTree:
        """Returns the state before the first round."""

    def unfinished(self, state: ArrayTree) -> Array:
        """Returns whether there is another round, [] or [B]."""

    def advance(self, state: ArrayTree) -> ArrayTree:
        """Takes a round, and adds what happened to the state's counts."""

    def output(self, state: ArrayTree) -> Generated:
        """Returns what there is after some round."""


@outermost_jit
def run(algorithm: Algorithm) -> Generated:
    """Takes all rounds in one loop on the device."""
    more = lambda state: jnp.any(algorithm.unfinished(state))
    end = jax.lax.while_loop(more, algorithm.advance, algorithm.begin())
    return algorithm.output(end)


def stream(algorithm: Algorithm) -> Iterator[Generated]:
    """Yields (tokens, info) after each round, which is a jitted call of its own."""
    state = _begin(algorithm)
    name = algorithm.in_place
    while np.any(_unfinished(algorithm, state)):
        rest = state._replace(**{name: None})
        state = _advance(algorithm, rest, getattr(state, name))
        yield _output(algorithm, state)


def generate(parts: Iterable[Rows], mesh: Mesh | None, bar: Bar) -> list[Generated]:
    """Generates parts, one after the other.

    mesh: the devices that the models lie on; each part is spread over them.
    bar: counts tokens, for which a part is streamed; not on a mesh.
    """
    found = []
    with bar:
        for part in parts:
            if mesh is not None:
                found.append(_on_mesh(replicate(mesh, part), mesh))
            elif bar.disable:
                found.append(part.generate())
            else:
                found.append(_watched(bar, part))
    return found


def _watched(bar: Bar, part: Rows) -> Generated:
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
    """Has each group of devices generate its own share of the rows."""
    rows, shared = part.split()
    own = lambda rows, shared: part.joined(rows, shared).generate()
    return spread(own, mesh, rows, shared)
