"""Rounds of drafting and verifying with a tree of drafts in place of one draft after the other.

In a round a drafter grows a tree from the last token of the text. One pass of the target gives its
distribution after every node. From the root, the children of a node are tested in their order: the first one
that is accepted is the next token, and its own children come next; if none is, the token is drawn from what
they left of the target's distribution, and the round ends. The keys and values of the accepted nodes are
moved to where the text goes on. State, inputs and what is counted are those of `text.rounds`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.coupling import SiblingDistributions, accept_sibling, uniform
from cspd_jax.text.drafters import DraftRequest, Drafts
from cspd_jax.text.info import CallCounts, RoundInfo, add
from cspd_jax.text.protocol import TreeLanguageModel
from cspd_jax.text.rounds import Inputs, TextState, commit, with_states
from cspd_jax.text.rounds import begin as begin_rounds
from cspd_jax.text.rules import Verdict
from cspd_jax.text.sampling import (
    NO_TOKEN,
    Purpose,
    fit_vocabulary,
    gumbel,
    gumbel_max,
    log_probs,
    most_probable,
    round_keys,
)
from cspd_jax.text.trees.drafter import Branches, keep_path, see_nodes, tree_of
from cspd_jax.text.trees.tree import Tree

Array = jax.Array

# A rule for trees is a function of (uniforms [k], log p [V], log q [V], drafts [k]) -> (which draft is
# accepted, or k; the distributions): see `coupling.accept_sibling`.
Rule = Callable[[Array, Array, Array, Array], tuple[Array, SiblingDistributions]]
TREE_RULES: dict[str, Rule] = {"tree": accept_sibling}


class Brancher(Protocol):
    """A drafter of trees, besides how it begins."""

    tree: Tree

    def draft(self, params: Any, state: Any, request: DraftRequest) -> tuple[Branches, Any]:
        """The drafts of a round, and the next state."""

    def keep(self, state: Any, length: Array, path: Array, tau: Array) -> Any:
        """The state when the first tau [B] nodes of path [B, depth] have been accepted after `length` [B]."""


def _drafter(inputs: Inputs) -> Brancher:
    assert tree_of(inputs.drafter) is not None
    return cast(Brancher, inputs.drafter)


def _target(inputs: Inputs) -> TreeLanguageModel:
    return cast(TreeLanguageModel, inputs.target)


def begin(inputs: Inputs) -> TextState:
    """The state before the first round: the prompts have been read, and the caches have room for a tree."""
    return begin_rounds(inputs, spare=_drafter(inputs).tree.drafts)


def advance(inputs: Inputs, state: TextState) -> TextState:
    """Takes one turn of the loop: a round, and the sum of what happened."""
    next_state, happened = run_round(inputs, state)
    return next_state._replace(info=add(state.info, happened))


def run_round(inputs: Inputs, state: TextState) -> tuple[TextState, RoundInfo]:
    """Takes one round, and returns what happened in it."""
    drafter = _drafter(inputs)
    tree = drafter.tree
    # A row near its limit uses fewer levels: a round adds one token more than it accepts drafts.
    room = inputs.limit - state.length - 1
    levels = jnp.where(state.done, 0, jnp.minimum(tree.depth, room))
    branches, drafter_state = drafter.draft(
        inputs.drafter_params, state.drafter_state, _request(inputs, state, levels)
    )
    verdict, path, cache, states = verify_step(inputs, state, branches, levels)
    accepted = Drafts(
        jnp.take_along_axis(branches.tokens, path, axis=1), levels, None, branches.passes, branches.rows
    )
    next_state, counts = commit(inputs, state, accepted, verdict)
    counts = counts._replace(drafted=jnp.asarray(np.cumsum(tree.levels) - 1, jnp.int32)[levels])
    next_state = next_state._replace(
        cache=keep_path(_target(inputs), cache, tree, state.length, path, verdict.tau),
        states=states,
        drafter_state=drafter.keep(drafter_state, state.length, path, verdict.tau),
    )
    rows = jnp.int32(len(state.length) * (tree.drafts + 1))
    return next_state, RoundInfo(counts, CallCounts(jnp.int32(1), rows, branches.passes, branches.rows))


def _request(inputs: Inputs, state: TextState, levels: Array) -> DraftRequest:
    return DraftRequest(
        tokens=state.tokens,
        length=state.length,
        count=levels,
        keys=None if inputs.keys is None else round_keys(inputs.keys, Purpose.DRAFT, state.length),
        sampling=inputs.sampling,
        stop_ids=inputs.stop_ids,
        confidence=None,
        max_gamma=_drafter(inputs).tree.depth,
        num_ids=inputs.num_ids,
        needs_log_q=True,
        states=state.states,
    )


def verify_step(
    inputs: Inputs, state: TextState, branches: Branches, levels: Array
) -> tuple[Verdict, Array, Any, Array | None]:
    """Makes one target pass over the nodes: the verdict, the accepted nodes [B, depth], the cache, and the
    states.

    Nodes deeper than levels [B] are not used.
    """
    tree = _drafter(inputs).tree
    logits, cache, *told = see_nodes(
        (_target(inputs), inputs.params), branches.tokens, state.cache, tree, state.length, ~state.done,
        range(tree.depth + 1), inputs.entering,
    )  # fmt: skip
    logits = fit_vocabulary(logits, inputs.num_ids, inputs.num_ids)
    if inputs.sampling.greedy:
        best = most_probable(logits)
        walk = lambda *row: _walk_greedily(tree, *row)
        tau, path, token = jax.vmap(walk)(best, branches.tokens, levels)
        states = _states_of_path(state, told, path, tau)
        return Verdict(tau, token, jnp.zeros(tau.shape, bool)), path, cache, states
    assert inputs.keys is not None
    log_p = log_probs(logits, inputs.sampling)
    keys = round_keys(inputs.keys, Purpose.TEST, state.length)
    shape = tree.depth, max(tree.widths)
    u = jax.vmap(lambda key: uniform(key, shape, log_p.dtype))(keys)
    walk = lambda *row: _walk_by_rule(tree, TREE_RULES[inputs.rule], *row)
    tau, path, log_next, truncated = jax.vmap(walk)(u, log_p, branches.log_q, branches.tokens, levels)
    noise = gumbel(round_keys(inputs.keys, Purpose.RESIDUAL, state.length), inputs.num_ids, log_p.dtype)
    token = jnp.where(jnp.any(jnp.isnan(log_next), axis=-1), NO_TOKEN, gumbel_max(log_next, noise))
    return Verdict(tau, token, truncated), path, cache, _states_of_path(state, told, path, tau)


def _states_of_path(state: TextState, told: list[Array], path: Array, tau: Array) -> Array | None:
    """The states with those of the root and the accepted nodes, of all nodes' [B, drafts + 1, S D]."""
    if state.states is None:
        return None
    nodes = jnp.pad(path, ((0, 0), (1, 0)))
    index = jnp.arange(nodes.shape[1])
    positions = jnp.where(index <= tau[:, None], state.length[:, None] - 1 + index, state.states.shape[1])
    return with_states(state.states, positions, [jnp.take_along_axis(told[0], nodes[:, :, None], axis=1)])


def _walk_greedily(tree: Tree, best: Array, tokens: Array, levels: Array) -> tuple[Array, ...]:
    """Accepts the child that is the target's own token, best [drafts + 1] of each node: (tau, the nodes on
    the way, the token after them)."""

    def choose(depth: int, node: Array, drafts: Array):
        hits = jnp.append((drafts == best[node]) & (depth < levels), True)
        return jnp.argmax(hits).astype(jnp.int32), best[node]

    return _walk(tree, tokens, choose)


def _walk_by_rule(
    tree: Tree,
    rule: Rule,
    u: Array,
    log_p: Array,
    log_q: tuple[Array, ...],
    tokens: Array,
    levels: Array,
) -> tuple[Array, ...]:
    """(tau, the nodes on the way, the distribution [V] of the token after them, whether it is truncated).

    u [depth, width] for the tests; log_p [drafts + 1, V] after each node; log_q as in `Branches`.
    """

    def choose(depth: int, node: Array, drafts: Array):
        p, count = log_p[node], len(drafts)
        if not count:
            return jnp.int32(0), (p, jnp.zeros((), bool))
        q = log_q[depth][node - tree.starts[depth]].astype(p.dtype)
        q = jnp.where(depth < levels, q, -jnp.inf)  # beyond them there are no drafts
        index, law = rule(u[depth, :count], p, q, drafts)
        return index, (law.log_next, jnp.any(law.empty & (jnp.arange(count) < index)))

    tau, path, (log_next, truncated) = _walk(tree, tokens, choose)
    return tau, path, log_next, truncated


def _walk(tree: Tree, tokens: Array, choose: Callable) -> tuple[Array, Array, Any]:
    """From the root down while `choose` accepts a child: how many, the nodes [depth] on the way, and what
    `choose` said where it accepted none.

    choose: maps a depth, a node at it and its children's tokens [k] to (which of them is accepted, or k; any
        pytree).
    """
    node, tau, walking = jnp.int32(0), jnp.int32(0), jnp.ones((), bool)
    said, path = None, []
    for depth, width in enumerate((*tree.widths, 0)):
        first = tree.starts[depth + 1] + (node - tree.starts[depth]) * width if width else 0
        children = first + jnp.arange(width, dtype=jnp.int32)
        index, new = choose(depth, node, tokens[children])
        said = new if said is None else jax.tree.map(functools.partial(jnp.where, walking), new, said)
        walking &= index < width
        if width:
            # Where the walk has ended, a first child stands for none, so that the numbers stay in the tree.
            node = children[jnp.where(walking, index, 0)]
            path.append(node)
            tau += walking.astype(jnp.int32)
    return tau, jnp.stack(path), said
