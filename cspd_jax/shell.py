"""The loop around an algorithm: all rounds in one program, or round by round, with a
bar, or spread over a mesh. It knows nothing of how they are generated."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cspd_jax._utils.compilation import outermost_jit
from cspd_jax._utils.progress import Bar
from cspd_jax.info import Generated
from cspd_jax.parallel import replicate, spread

Array = jax.Array
Algo = TypeVar("Algo", bound="Algorithm")


class Algorithm(Protocol):
    """Generates B rows, round by round. It is a pytree: sizes are static, arrays data.

    A state is a named tuple with a field `cache`, whatever that is.
    """

    def begin(self) -> Any:
        """Returns the state before the first round."""

    def unfinished(self, state: Any) -> Array:
        """Returns whether there is another round, [] or [B]."""

    def advance(self, state: Any) -> Any:
        """Takes a round, and adds what happened to the state's counts."""

    def output(self, state: Any) -> Generated:
        """Returns what there is after some round."""

    def split(self) -> tuple[Any, Any]:
        """Returns what is by row, arrays [B, ...], and what all rows share."""

    @classmethod
    def joined(cls: type[Algo], rows: Any, shared: Any) -> Algo:
        """Returns the algorithm of some rows."""


@outermost_jit
def run(algorithm: Algorithm) -> Generated:
    """Takes all rounds in one loop on the device."""
    more = lambda state: jnp.any(algorithm.unfinished(state))
    end = jax.lax.while_loop(more, algorithm.advance, algorithm.begin())
    return algorithm.output(end)


def stream(algorithm: Algorithm) -> Iterator[Generated]:
    """Yields (tokens, info) after each round, which is a jitted call of its own."""
    state = _begin(algorithm)
    while np.any(_unfinished(algorithm, state)):
        state = _advance(algorithm, state._replace(cache=None), state.cache)
        yield _output(algorithm, state)


def generate(
    algorithm: Algorithm, mesh: Mesh | None, progress: bool, total: int
) -> Generated:
    """Does what `run` does, on the mesh on which the models lie.

    progress: shows a bar of `total` tokens, for which each round is a call of its own;
        not on a mesh, nor inside `jit`.
    """
    if mesh is not None:
        return _on_mesh(replicate(mesh, algorithm), mesh)
    if not progress:
        return run(algorithm)
    made = None
    with Bar(total=total, desc="texts", unit="token") as bar:
        for made in stream(algorithm):
            bar.update(int(jnp.sum(made.info.made)) - bar.n)
    return _output(algorithm, _begin(algorithm)) if made is None else made


_begin = jax.jit(lambda algorithm: algorithm.begin())
_unfinished = jax.jit(lambda algorithm, state: algorithm.unfinished(state))
_output = jax.jit(lambda algorithm, state: algorithm.output(state))


@functools.partial(outermost_jit, donate_argnames="cache")
def _advance(algorithm: Algorithm, state: Any, cache: Any) -> Any:
    """Takes a round, whose cache is written where the one before was, not beside it."""
    return algorithm.advance(state._replace(cache=cache))


@functools.partial(outermost_jit, static_argnames="mesh")
def _on_mesh(algorithm: Algorithm, mesh: Mesh) -> Generated:
    """Has each group of devices generate its own share of the rows."""
    rows, shared = algorithm.split()
    kind = type(algorithm)
    own = lambda rows, shared: run(kind.joined(rows, shared))
    return spread(own, mesh, rows, shared)
