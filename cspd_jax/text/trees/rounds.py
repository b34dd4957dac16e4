"""Rounds of drafting and verifying in which the drafts form a tree.

In a round the drafter grows a tree from the last token of the text, and one pass of the
target gives its distribution after every node. The tests start at the root and look at
the children of a node in their order. The first child that is accepted is the next
token, and the tests continue with its own children. If no child is accepted, the next
token is drawn from what the children left of the target's distribution, and the round
ends. The keys and values of the accepted nodes are then moved to the slots where the
text continues. State, inputs and counts are the same as in `text.rounds`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree

from cspd_jax.coupling.acceptance import uniform
from cspd_jax.coupling.categorical import gumbel, gumbel_max
from cspd_jax.coupling.siblings import SiblingDistributions, accept_sibling
from cspd_jax.info import Calls, Counts
from cspd_jax.language_models import TreeLanguageModel
from cspd_jax.sampling import (
    NO_TOKEN,
    Purpose,
    fit_vocabulary,
    log_probs,
    most_probable,
    round_keys,
)
from cspd_jax.text.drafters import Drafts
from cspd_jax.text.rounds import (
    Inputs,
    TextState,
    commit,
    draft_request,
    with_states,
)
from cspd_jax.text.rules import Verdict
from cspd_jax.text.trees.drafter import Branches, keep_path, see_nodes, tree_of
from cspd_jax.text.trees.tree import TreeShape

Array = jax.Array

# A rule for trees is a function of (uniforms [k], log p [V], log q [V], drafts [k]). It
# returns the index of the accepted draft, or k if none is accepted, and the
# distributions: see `coupling.siblings.accept_sibling`.
Rule = Callable[[Array, Array, Array, Array], tuple[Array, SiblingDistributions]]
TREE_RULES: dict[str, Rule] = {"tree": accept_sibling}


def run_round(inputs: Inputs, state: TextState) -> tuple[TextState, Counts]:
    """Makes one round. Returns the next state and what happened in the round."""
    drafter: Any = inputs.drafter
    tree = drafter.tree
    request = draft_request(inputs, state, tree.depth)
    levels = request.count  # a row near its limit uses fewer levels
    branches, drafter_state = drafter.draft(
        inputs.drafter_params, state.drafter_state, request
    )
    verdict, path, cache, states = verify_step(inputs, state, branches, levels)
    accepted = Drafts(
        jnp.take_along_axis(branches.tokens, path, axis=1),
        levels,
        None,
        branches.passes,
        branches.rows,
    )
    next_state, happened = commit(inputs, state, accepted, verdict)
    nodes = jnp.int32(len(state.length) * (tree.drafts + 1))
    target = Calls(jnp.int32(1), nodes)
    happened = happened._replace(calls={**happened.calls, "target": target})
    drafted = jnp.asarray(np.cumsum(tree.levels) - 1, jnp.int32)[levels]
    next_state = next_state._replace(
        cache=keep_path(
            cast(TreeLanguageModel, inputs.target),
            cache,
            tree,
            state.length,
            path,
            verdict.tau,
        ),
        states=states,
        drafted=state.drafted + drafted,
        drafter_state=drafter.keep(drafter_state, state.length, path, verdict.tau),
    )
    return next_state, happened


def verify_step(
    inputs: Inputs, state: TextState, branches: Branches, levels: Array
) -> tuple[Verdict, Array, ArrayTree, Array | None]:
    """Makes one target pass over the nodes. Returns the verdict, the accepted nodes
    [B, depth], the new cache and the new states.

    levels: [B] the number of levels that each row uses. Deeper nodes are never
        accepted.
    """
    tree = tree_of(inputs.drafter)
    assert tree is not None
    target = cast(TreeLanguageModel, inputs.target), inputs.params
    logits, cache, told = see_nodes(
        target,
        branches.tokens,
        state.cache,
        tree,
        state.length,
        ~state.done,
        range(tree.depth + 1),
        inputs.entering,
    )
    logits = fit_vocabulary(logits, inputs.num_ids, inputs.num_ids)
    if inputs.sampling.greedy:
        walk = functools.partial(_walk_greedily, tree)
        tau, path, token = jax.vmap(walk)(
            most_probable(logits), branches.tokens, levels
        )
        states = _states_of_path(state, told, path, tau)
        return Verdict(tau, token, jnp.zeros(tau.shape, bool)), path, cache, states
    assert inputs.keys is not None
    log_p = log_probs(logits, inputs.sampling)
    keys = round_keys(inputs.keys, Purpose.TEST, state.length)
    shape = tree.depth, max(tree.widths)
    u = jax.vmap(lambda key: uniform(key, shape, log_p.dtype))(keys)
    by_rule = lambda *row: _walk_by_rule(tree, TREE_RULES[inputs.rule], *row)
    tau, path, log_next, truncated = jax.vmap(by_rule)(
        u, log_p, branches.log_q, branches.tokens, levels
    )
    noise = gumbel(
        round_keys(inputs.keys, Purpose.RESIDUAL, state.length),
        inputs.num_ids,
        log_p.dtype,
    )
    token = jnp.where(
        jnp.any(jnp.isnan(log_next), axis=-1), NO_TOKEN, gumbel_max(log_next, noise)
    )
    return (
        Verdict(tau, token, truncated),
        path,
        cache,
        _states_of_path(state, told, path, tau),
    )


def _states_of_path(
    state: TextState, told: Array | None, path: Array, tau: Array
) -> Array | None:
    """Returns the states with the new states of the root and of the accepted nodes in
    them.

    told: [B, nodes, S D] the new states of all nodes.
    path: [B, depth] the nodes on the way down from the root.
    tau: [B] the number of nodes of the path that are accepted.
    """
    if state.states is None or told is None:
        return None
    nodes = jnp.pad(path, ((0, 0), (1, 0)))
    index = jnp.arange(nodes.shape[1])
    positions = jnp.where(
        index <= tau[:, None], state.length[:, None] - 1 + index, state.states.shape[1]
    )
    return with_states(
        state.states,
        positions,
        jnp.take_along_axis(told, nodes[:, :, None], axis=1),
    )


def _walk_greedily(
    tree: TreeShape, best: Array, tokens: Array, levels: Array
) -> tuple[Array, ...]:
    """Walks down one row's tree, and accepts the child that is the target's own token.
    Returns (tau, the nodes on the way [depth], the token after them).

    best: [drafts + 1] the target's token after each node.
    tokens: [drafts + 1] the token of each node.
    levels: [] the number of levels that the row uses.
    """

    def choose(depth: int, node: Array, drafts: Array):
        hits = jnp.append((drafts == best[node]) & (depth < levels), True)
        return jnp.argmax(hits).astype(jnp.int32), best[node]

    return _walk(tree, tokens, choose)


def _walk_by_rule(
    tree: TreeShape,
    rule: Rule,
    u: Array,
    log_p: Array,
    log_q: tuple[Array, ...],
    tokens: Array,
    levels: Array,
) -> tuple[Array, ...]:
    """Walks down one row's tree by a rule. Returns (tau, the nodes on the way [depth],
    the distribution [V] of the token after them, whether rounding left nothing of a
    residual).

    u: [depth, width] the uniforms for the tests.
    log_p: [drafts + 1, V] the target's distribution after each node.
    log_q: the arrays of `Branches.log_q` for this row.
    tokens: [drafts + 1] the token of each node.
    levels: [] the number of levels that the row uses.
    """

    def choose(depth: int, node: Array, drafts: Array):
        p = log_p[node]
        count = len(drafts)
        if not count:
            return jnp.int32(0), (p, jnp.zeros((), bool))
        q = log_q[depth][node - tree.starts[depth]].astype(p.dtype)
        q = jnp.where(depth < levels, q, -jnp.inf)  # deeper drafts do not count
        index, law = rule(u[depth, :count], p, q, drafts)
        return index, (law.log_next, jnp.any(law.empty & (jnp.arange(count) < index)))

    tau, path, (log_next, truncated) = _walk(tree, tokens, choose)
    return tau, path, log_next, truncated


def _walk(
    tree: TreeShape, tokens: Array, choose: Callable
) -> tuple[Array, Array, ArrayTree]:
    """Goes down from the root while `choose` accepts a child. Returns the number of
    accepted nodes, the nodes [depth] on the way, and the second result of `choose` at
    the node where it accepted no child.

    tokens: [drafts + 1] the token of each node.
    choose: maps a depth, a node at this depth and the tokens [k] of its children to a
        pair: the index of the accepted child, or k if no child is accepted; and any
        pytree.

    For example, the tree has the widths (2, 1). `choose` accepts node 2, the second
    child of the root, and then node 4, the only child of node 2. The result has tau = 2
    and the path [2, 4].
    """
    node = jnp.int32(0)
    tau = jnp.int32(0)
    walking = jnp.ones((), bool)
    said = None
    path = []
    for depth, width in enumerate((*tree.widths, 0)):
        first = (
            tree.starts[depth + 1] + (node - tree.starts[depth]) * width if width else 0
        )
        children = first + jnp.arange(width, dtype=jnp.int32)
        index, new = choose(depth, node, tokens[children])
        said = (
            new
            if said is None
            else jax.tree.map(functools.partial(jnp.where, walking), new, said)
        )
        walking &= index < width
        if width:
            # After the end of the walk the first child stands in, so that `node` is
            # always a node of the tree.
            node = children[jnp.where(walking, index, 0)]
            path.append(node)
            tau += walking.astype(jnp.int32)
    return tau, jnp.stack(path), said
