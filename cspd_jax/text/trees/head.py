"""Trees of drafts from a head that reads its target's states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.check import UserError
from cspd_jax.language_models import Prompts
from cspd_jax.networks.eagle import Eagle
from cspd_jax.text.drafters import Drafter, Drafting, DraftRequest
from cspd_jax.text.states import HeadDrafter
from cspd_jax.text.trees.drafter import Branches, draw_children
from cspd_jax.text.trees.tree import TreeShape

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class HeadTreeDrafter:
    """Draws a tree of tokens with a head, one level per pass. A node reads the state
    that the head computed at its parent.

    The cache has one slot for each token of a text, and after them one slot for each
    draft. No entry of a draft is used again: the next round reads the last places of
    its text anew, with the target's states.
    """

    head: Eagle
    tree: TreeShape

    @property
    def entering(self) -> tuple[int, ...]:
        return self.head.entering

    def begin(
        self, params: ArrayTree, prompts: Prompts, max_len: int, states: Array | None
    ) -> ArrayTree:
        return HeadDrafter(self.head).begin(
            params, prompts, max_len + self.tree.drafts, states
        )

    def draft(
        self, params: ArrayTree, cache: ArrayTree, request: DraftRequest
    ) -> tuple[Branches, ArrayTree]:
        tree = self.tree
        batch = request.tokens.shape[0]
        count = tree.depth + 1
        last = request.length[:, None] - 1
        seen, cache = HeadDrafter(self.head).see(params, cache, request, count)
        state = seen[:, -1:]
        tokens = [jnp.take_along_axis(request.tokens, last, axis=1)]
        log_q = []
        for depth in range(tree.depth):
            if depth > 0:
                parents = jnp.repeat(state, tree.widths[depth - 1], axis=1)
                state, cache = self._level(
                    params, cache, request, depth, tokens[-1], parents
                )
            logits = self.head.logits(params, state)
            drawn, distributions = draw_children(
                tree, request, logits, depth, params["ids"]
            )
            tokens.append(drawn.reshape(batch, -1))
            log_q.append(distributions)
        rows = batch * (count + sum(tree.levels[1:-1]))
        return Branches(
            jnp.concatenate(tokens, axis=1),
            None if request.sampling.greedy else tuple(log_q),
            jnp.int32(tree.depth),
            jnp.int32(rows),
        ), cache

    def keep(
        self, cache: ArrayTree, length: Array, path: Array, tau: Array
    ) -> ArrayTree:
        return cache

    def _level(
        self,
        params: ArrayTree,
        cache: ArrayTree,
        request: DraftRequest,
        depth: int,
        tokens: Array,
        parents: Array,
    ) -> tuple[Array, ArrayTree]:
        """Returns the head's states [B, nodes, D] at the nodes of a depth, and the new
        cache. The place of a node is the position of its parent's token.

        tokens: [B, nodes] the tokens of the nodes.
        parents: [B, nodes, D] the head's state at the parent of each node.
        """
        tree = self.tree
        text = request.tokens.shape[1]
        nodes = tree.starts[depth] + jnp.arange(tree.levels[depth])
        slots = jnp.where(
            request.count[:, None] > 0, text + nodes - 1, text + tree.drafts
        )
        positions = jnp.broadcast_to(request.length[:, None] - 2 + depth, tokens.shape)
        seen = jnp.arange(text) < request.length[:, None, None] - 1
        drafts = jnp.asarray(tree.ancestors)[nodes, 1:]
        visible = jnp.concatenate(
            [jnp.broadcast_to(a, (*tokens.shape, a.shape[-1])) for a in (seen, drafts)],
            axis=-1,
        )
        return self.head.apply(
            params, tokens, parents, positions, cache, slots=slots, visible=visible
        )


def head_tree(drafter: Drafting, widths: Sequence[int] = (3, 2, 1)) -> Drafting:
    """Makes a drafter of trees from a drafter that `draft_from_states` returned."""
    inner = drafter.drafter
    if not isinstance(inner, HeadDrafter):
        raise UserError(
            "a tree is drafted by a model, or by what draft_from_states returns"
        )
    return Drafting(
        cast(Drafter, HeadTreeDrafter(inner.head, TreeShape(tuple(widths)))),
        drafter.params,
    )
