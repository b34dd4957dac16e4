"""Coupled drafts: the drafts behind a rejected token are kept, and get a new law.

A path was drawn from a law q, which the tokens before it decided. A new round knows a
better law p for it: the law in the context that shows this round's drafts. Block
verification within the path keeps its first transitions and draws the next state from
the residual. The chain goes on from there under p. The new path has exactly the law p,
and p is the q of the next round. So a rejection drops no draft: the drafts behind it
follow the changes in the tokens before them. (With a `draft_cost`, an image that wants
fewer drafts than before drops the last ones.)

The first drafted groups that are kept whole, and the group after them, were verified in
the target's own context. They are final. The paths of later groups are completed
together with the last final group, as new paths are (`criterion.Criterion.shift`). Only
the blocks differ: `PathCriterion` makes one of all tokens.

The law of a token may not depend on the tokens behind it, or it would change with them.
So each token is a block of its own, with its own noise and coins in every round. The
number of final groups, and the number of groups that are drafted, depend only on the
groups up to the first one that is not kept whole.
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
    """Verifies each drafted path by itself, and keeps the drafts behind a rejected one.
    This is exact."""

    name: ClassVar[str] = "coupled"
    why: ClassVar[str] = (
        "every drafted path is coupled with the law that the drafts before it give it,"
        " and has exactly this law from then on; a token is final when all before it"
        " are, and has the distribution of the plain sampler"
    )

    def block_keys(self, keys: Array, tokens: int) -> Array:
        """Returns a key for each drafted token, [B, tokens]: every token is a block.

        keys: [B] the key of each image.
        tokens: the number of drafted tokens of an image, padding included.
        """
        return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(
            keys, jnp.arange(tokens)
        )
