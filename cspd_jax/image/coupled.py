"""Coupled drafts: what lies behind the token that is rejected is kept, with a new law.

A path was drawn from q, a law that everything before its place decides. A round knows a
better one, p, which sees this round's drafts before it. Block verification inside the
path keeps its first transitions, the next state comes from the residual, and the chain
goes on under p: what comes out has exactly the law p, which is the q of the next round.
So a draft is never dropped; it follows what changes before it.

The first groups of the window that are kept whole, and the one after them, had the
target's own context and are final. Paths behind them go on beside that one, as new ones
do (`criterion.Criterion.shift`; the blocks differ here, and nothing else).

Nothing that a place does may depend on places behind it, or its law would change with
them: each token is a block of its own, has noise and coins of its own in every round,
and how many groups are final and how many are drafted is decided by the places up to
the first that is not kept whole.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from cspd_jax.image.criterion import PathCriterion

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class CoupledCriterion(PathCriterion):
    """Verifies each drafted path by itself, and keeps what lies behind a rejected one.
    Exact."""

    name: ClassVar[str] = "coupled"
    why: ClassVar[str] = (
        "every drafted path is coupled with the law that the drafts before it give it,"
        " and has exactly this law from then on; a token is final when all before it"
        " are, and has the distribution of the plain sampler"
    )

    def block_keys(self, keys: Array, tokens: int) -> Array:
        """Returns a key for each token, [B, tokens]: every token is a block."""
        return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(
            keys, jnp.arange(tokens)
        )
