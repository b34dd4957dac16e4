"""Trees of drafts from another language model: several candidates for the next token,
several for the token after each candidate, and so on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.language_models import Model, Pass, Prompts, TreeLanguageModel, bound
from cspd_jax.sampling import log_probs, noise_at
from cspd_jax.text.drafters import (
    Drafter,
    Drafting,
    DraftRequest,
    among_known,
    known_to,
    over_all_ids,
    read_last_two,
    read_prompts,
)
from cspd_jax.text.trees.tree import TreeShape

Array = jax.Array


class Branches(NamedTuple):
    """The drafts of a round.

    tokens: [B, drafts + 1] the token of each node. The root has the last token of the
        text.
    log_q: one array [B, nodes, num_ids] for each depth but the last. It has the log
        probabilities with which the children of each node were drawn, one after the
        other without replacement. None when greedy.
    passes: [] the number of passes of the drafting network, made one after the other.
    rows: [] the number of tokens in these passes.
    """

    tokens: Array
    log_q: tuple[Array, ...] | None
    passes: Array
    rows: Array


@dataclasses.dataclass(frozen=True)
class TreeDrafter:
    """Draws a tree of tokens from a language model, one level per pass. The model has a
    cache of its own.

    The children of a node are drawn from the model's distribution after the node,
    without replacement. In greedy decoding they are its most probable ids. For texts of
    up to max_len tokens the cache has max_len slots, and after them one slot for each
    draft. Between rounds it lacks the last one or two tokens of a row, as in
    `ModelDrafter`.
    """

    network: TreeLanguageModel
    tree: TreeShape
    entering: ClassVar[tuple[int, ...]] = ()

    def begin(
        self, params: ArrayTree, prompts: Prompts, max_len: int, states: Array | None
    ) -> ArrayTree:
        known = prompts._replace(tokens=known_to(self.network, prompts.tokens))
        return read_prompts(self.network, params, known, max_len + self.tree.drafts)[0]

    def draft(
        self, params: ArrayTree, cache: ArrayTree, request: DraftRequest
    ) -> tuple[Branches, ArrayTree]:
        tree = self.tree
        batch = request.tokens.shape[0]
        logits, cache, _ = read_last_two(self.network, params, cache, request)
        last = jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)
        tokens = [last]
        log_q = []
        for depth in range(tree.depth):
            if depth > 0:
                logits, cache, _ = see_nodes(
                    (self.network, params),
                    known_to(self.network, tokens[-1]),
                    cache,
                    tree,
                    request.length,
                    request.count > 0,
                    range(depth, depth + 1),
                )
            ids = self.network.config.known_ids
            drawn, distributions = draw_children(tree, request, logits, depth, ids)
            tokens.append(drawn.reshape(batch, -1))
            log_q.append(distributions)
        passes = tree.depth
        rows = batch * (2 + sum(tree.levels[1:-1]))
        return Branches(
            jnp.concatenate(tokens, axis=1),
            None if request.sampling.greedy else tuple(log_q),
            jnp.int32(passes),
            jnp.int32(rows),
        ), cache

    def keep(
        self, cache: ArrayTree, length: Array, path: Array, tau: Array
    ) -> ArrayTree:
        """Moves the accepted nodes to the slots where the text continues; see
        `keep_path`."""
        return keep_path(self.network, cache, self.tree, length, path, tau)


def draw_children(
    tree: TreeShape, request: DraftRequest, logits: Array, depth: int, ids: Array | int
) -> tuple[Array, Array]:
    """Draws the children of all nodes of a depth. Returns their ids [B, nodes, width],
    and the log probabilities [B, nodes, num_ids] with which they were drawn.

    logits: [B, nodes, V] the logits after each node.
    ids: the same as in `draft_in_turn`.
    """
    logits, own = among_known(logits, ids, request.num_ids)
    if request.sampling.greedy:
        best = jax.lax.top_k(logits, tree.widths[depth])[1].astype(jnp.int32)
        return best if own is None else own[best], logits
    assert request.keys is not None
    log_q = log_probs(logits, request.sampling)
    nodes = tree.starts[depth] + jnp.arange(tree.levels[depth])
    nodes = jnp.broadcast_to(nodes, log_q.shape[:2])
    noise = noise_at(request.keys, nodes, request.num_ids, log_q.dtype)
    log_q = over_all_ids(log_q, own, request.num_ids)
    # The ids with the k largest values of log q + Gumbel noise, in their order, are k
    # draws without replacement.
    return jax.lax.top_k(log_q + noise, tree.widths[depth])[1].astype(jnp.int32), log_q


def draft_tree(model: Model, widths: Sequence[int] = (3, 2, 1)) -> Drafting:
    """Makes a drafter of trees. A node at depth d has widths[d] children, which are
    drawn from `model`."""
    tree = TreeShape(tuple(widths))
    network, params = bound(model)
    return Drafting(cast(Drafter, TreeDrafter(network, tree)), params)


def tree_of(drafter: object) -> TreeShape | None:
    """Returns the tree of a drafter that draws trees, and None for any other
    drafter."""
    tree = getattr(drafter, "tree", None)
    return tree if isinstance(tree, TreeShape) else None


def see_nodes(
    model: tuple[TreeLanguageModel, ArrayTree],
    tokens: Array,
    cache: ArrayTree,
    tree: TreeShape,
    length: Array,
    used: Array,
    levels: range,
    entering: tuple[int, ...] = (),
) -> Pass:
    """Makes a pass over the nodes of some levels. Returns their logits, the new cache,
    and the hidden states that entered the layers `entering`.

    A text has one slot per position. The slots of the drafts come after the slots of
    the longest text. A node sees the text and its ancestors, and has the position that
    it would have in the text.

    tokens: [B, nodes] the tokens of the nodes.
    length: [B] the length of each text.
    used: [B] whether the row's nodes are stored in the cache.

    For example, the tree has the widths (2, 1), the text has 6 tokens, and the longest
    text may have 10:

        node        0   1   2   3   4
        position    5   6   6   7   7
        slot        5  10  11  12  13

    Node 3, a child of node 1, sees the slots 0 to 5, 10 and 12.
    """
    network, params = model
    nodes = tree.starts[levels.start] + jnp.arange(
        sum(tree.levels[depth] for depth in levels)
    )
    last = length[:, None] - 1
    text = cache.max_len - tree.drafts
    slots = jnp.where(nodes == 0, last, text + nodes - 1)
    slots = jnp.where(used[:, None], slots, cache.max_len)
    positions = last + jnp.asarray(tree.depths)[nodes]
    seen = jnp.arange(text) < length[:, None, None]
    drafts = jnp.asarray(tree.ancestors)[nodes, 1:]
    visible = jnp.concatenate(
        [jnp.broadcast_to(a, (*tokens.shape, a.shape[-1])) for a in (seen, drafts)],
        axis=-1,
    )
    return network.apply_seeing(
        params,
        tokens,
        positions,
        cache,
        slots=slots,
        visible=visible,
        entering=entering,
    )


def keep_path(
    network: TreeLanguageModel,
    cache: ArrayTree,
    tree: TreeShape,
    length: Array,
    path: Array,
    tau: Array,
) -> ArrayTree:
    """Moves the accepted nodes in the cache to the slots where the text continues.

    length: [B] the length of each text.
    path: [B, depth] the nodes on the way down from the root.
    tau: [B] the number of nodes of the path that are accepted.

    In the example of `see_nodes`, the path 1 3 with tau = 2 moves the slots 10 and 12
    to 6 and 7.
    """
    text = cache.max_len - tree.drafts
    index = jnp.arange(tree.depth)
    targets = jnp.where(index < tau[:, None], length[:, None] + index, cache.max_len)
    return network.move(cache, text + jnp.maximum(path - 1, 0), targets)
