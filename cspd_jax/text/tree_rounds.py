"""Rounds of drafting and verifying with a tree of drafts in place of one draft after the other.

In a round a drafter grows a tree from the last token of the text. One pass of the target gives its
distribution after every node. From the root, the children of a node are tested in their order: the first one
that is accepted is the next token, and its own children come next; if none is, the token is drawn from what
they left of the target's distribution, and the round ends. The keys and values of the accepted nodes are
moved to where the text goes on. State, inputs and what is counted are those of `text.rounds`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.coupling import couple_siblings
from cspd_jax.text.drafters import DraftRequest, Drafts
from cspd_jax.text.info import CallCounts, RoundInfo, add
from cspd_jax.text.rounds import Inputs, TextState, commit
from cspd_jax.text.rounds import begin as begin_rounds
from cspd_jax.text.rules import Verdict
from cspd_jax.text.sampling import Purpose, fit_vocabulary, log_probs, round_keys
from cspd_jax.text.tree import Tree
from cspd_jax.text.tree_drafter import Branches, keep_path, see_nodes

Array = jax.Array

# A rule for trees is a function of (key, log p [V], log q [V], drafts [k]) -> `coupling.Sibling`.
TREE_RULES: dict[str, Callable] = {"tree": couple_siblings}


def begin(inputs: Inputs) -> TextState:
    """The state before the first round: the prompts have been read, and the caches have room for a tree."""
    return begin_rounds(inputs, spare=inputs.drafter.tree.drafts)


def advance(inputs: Inputs, state: TextState) -> TextState:
    """One turn of the loop: a round, and the sum of what happened."""
    next_state, happened = run_round(inputs, state)
    return next_state._replace(info=add(state.info, happened))


def run_round(inputs: Inputs, state: TextState) -> tuple[TextState, RoundInfo]:
    """One round, and what happened in it."""
    drafter, tree = inputs.drafter, inputs.drafter.tree
    # A row near its limit uses fewer levels: a round adds one token more than it accepts drafts.
    room = inputs.limit - state.length - 1
    levels = jnp.where(state.done, 0, jnp.minimum(tree.depth, room))
    branches, drafter_state = drafter.draft(
        inputs.drafter_params, state.drafter_state, _request(inputs, state, levels)
    )
    verdict, path, cache = verify_step(inputs, state, branches, levels)
    accepted = Drafts(
        jnp.take_along_axis(branches.tokens, path, axis=1), levels, None, branches.passes, branches.rows
    )
    next_state, counts = commit(inputs, state, accepted, verdict)
    counts = counts._replace(drafted=jnp.asarray(np.cumsum(tree.levels) - 1, jnp.int32)[levels])
    next_state = next_state._replace(
        cache=keep_path(inputs.target, cache, tree, state.length, path, verdict.tau),
        drafter_state=keep_path(drafter.network, drafter_state, tree, state.length, path, verdict.tau),
    )
    rows = jnp.int32(len(state.length) * (tree.drafts + 1))
    return next_state, RoundInfo(counts, CallCounts(jnp.int32(1), rows, branches.passes, branches.rows))


def _request(inputs: Inputs, state: TextState, levels: Array) -> DraftRequest:
    return DraftRequest(
        tokens=state.tokens,
        length=state.length,
        count=levels,
        keys=None if inputs.sampling.greedy else round_keys(inputs.keys, Purpose.DRAFT, state.length),
        sampling=inputs.sampling,
        stop_ids=inputs.stop_ids,
        confidence=None,
        max_gamma=inputs.drafter.tree.depth,
        num_ids=inputs.num_ids,
        needs_log_q=True,
    )


def verify_step(
    inputs: Inputs, state: TextState, branches: Branches, levels: Array
) -> tuple[Verdict, Array, Any]:
    """One target pass over the nodes: the verdict, the accepted nodes [B, depth], and the cache.

    Nodes deeper than levels [B] are not used.
    """
    tree = inputs.drafter.tree
    logits, cache = see_nodes(
        inputs.target, inputs.params, branches.tokens, state.cache, tree, state.length, ~state.done,
        0, tree.depth + 1,
    )  # fmt: skip
    logits = fit_vocabulary(logits, inputs.num_ids, inputs.num_ids)
    if inputs.sampling.greedy:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (*jax.vmap(lambda *row: _walk_greedily(tree, *row))(best, branches.tokens, levels), cache)
    log_p = log_probs(logits, inputs.sampling)
    keys = round_keys(inputs.keys, Purpose.TEST, state.length)
    walk = lambda *row: _walk_by_rule(tree, TREE_RULES[inputs.rule], *row)
    return (*jax.vmap(walk)(keys, log_p, branches.log_q, branches.tokens, levels), cache)


def _walk_greedily(tree: Tree, best: Array, tokens: Array, levels: Array) -> tuple[Verdict, Array]:
    """Accepts the child that is the target's own token, best [drafts + 1] of each node."""

    def choose(depth: int, node: Array, drafts: Array):
        hits = (drafts == best[node]) & (depth < levels)
        index = jnp.where(jnp.any(hits), jnp.argmax(hits), len(drafts)) if len(drafts) else jnp.int32(0)
        return index, best[node], jnp.zeros((), bool)

    return _walk(tree, tokens, choose)


def _walk_by_rule(
    tree: Tree,
    rule: Callable,
    key: Array,
    log_p: Array,
    log_q: tuple[Array, ...],
    tokens: Array,
    levels: Array,
) -> tuple[Verdict, Array]:
    """log_p [drafts + 1, V] after each node; log_q as in `Branches`."""

    def choose(depth: int, node: Array, drafts: Array):
        p = log_p[node]
        q = log_q[depth][node - tree.starts[depth]].astype(p.dtype) if len(drafts) else p
        q = jnp.where(depth < levels, q, -jnp.inf)  # no draft is there
        found = rule(jax.random.fold_in(key, depth), p, q, drafts)
        return found.index, found.value, found.info.truncated

    return _walk(tree, tokens, choose)


def _walk(tree: Tree, tokens: Array, choose: Callable) -> tuple[Verdict, Array]:
    """From the root down while `choose` accepts a child: the verdict, and the nodes [depth] on the way.

    choose: maps a depth, a node at it and its children's tokens [k] to (which one is accepted, or k; the next
    token; whether it is truncated).
    """
    node, tau, walking = jnp.int32(0), jnp.int32(0), jnp.ones((), bool)
    token, truncated, path = jnp.int32(0), jnp.zeros((), bool), []
    for depth, width in enumerate((*tree.widths, 0)):
        children = jnp.zeros(0, jnp.int32)
        if width:
            first = tree.starts[depth + 1] + (node - tree.starts[depth]) * width
            children = first + jnp.arange(width, dtype=jnp.int32)
        index, value, lost = choose(depth, node, tokens[children])
        token = jnp.where(walking, value, token)
        truncated |= walking & lost
        walking &= index < width
        if width:
            # Off the path, a first child stands for none, so that the numbers stay inside the tree.
            node = children[jnp.where(walking, index, 0)]
            path.append(node)
            tau += walking.astype(jnp.int32)
    return Verdict(tau, token, truncated), jnp.stack(path)
