"""Self-speculation: one pass drafts several moves, and the next pass verifies them all
and drafts again.

A move is a place and a token. The logits of a text rank the places in the order in
which the stepwise rule would take them if the logits did not change. The first move is
the stepwise move itself. One pass then reads several texts side by side, each with that
move and some of the others (`sets`): after 1, 2, ..., gamma + 1 moves, or a chosen
table. From the text with the first move alone the rule is asked for the next one, and
so on, for as long as the text with the move it gives is among those read. The last text
visited already has its logits, which draft the next moves, so a rejection costs no
pass.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree

from cspd_jax.info import Calls, Counts, Exactness, add
from cspd_jax.masked import passes
from cspd_jax.masked.canvas import Canvas, Window, fill, is_masked, window_at
from cspd_jax.masked.rule import Choice, candidates, choose, drawn_from, scores
from cspd_jax.masked.sets import MoveSets
from cspd_jax.masked.stepwise import count_calls

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Speculation:
    """How far to draft, and what to accept.

    sets: the texts of a pass (static): R of them, of at most D moves after the certain
        one, at places of ranks up to K, each with its T most probable tokens.
    gamma: [B] most moves accepted per round after the certain one.
    """

    sets: MoveSets = dataclasses.field(metadata={"static": True})
    gamma: Array

    @property
    def depth(self) -> int:
        """D, at least 1."""
        return max(1, int(self.sets.sizes.max()))

    @property
    def claim(self) -> Exactness:
        """Whether the text is that of stepwise decoding, and why."""
        return Exactness(
            True, "every move, place and token, is the one that stepwise decoding makes"
        )

    def begin(self, canvas: Canvas) -> MaskedState:
        """Returns the state before the first round."""
        return begin(canvas, self)

    def unfinished(self, canvas: Canvas, state: MaskedState) -> Array:
        """Returns whether each row has places to fill: [B]"""
        return jnp.any(state.text == canvas.mask_id, axis=1)

    def advance(self, canvas: Canvas, state: MaskedState) -> MaskedState:
        """Takes one turn of the loop: a round, and the sum of what happened."""
        next_state, happened = run_round(canvas, self, state)
        return next_state._replace(counts=add(state.counts, happened))


class Moves(NamedTuple):
    """Places in the order in which they would be taken, with the tokens that are tried
    there.

    place: [B, K + 1]
    tokens: [B, K + 1, T] the move's, and then the next most probable ones.
    exists: [B, K + 1] false where there is nothing left to fill.
    """

    place: Array
    tokens: Array
    exists: Array


class Walk(NamedTuple):
    """The texts that were visited, from the certain move on.

    last: [B] the last text.
    place: [B, D] of each move made after the certain one.
    tested: [B, D] whether the walk made d moves, and some text with one more was read.
    passed: [B, D] whether it then went on to one.
    """

    last: Array
    place: Array
    tested: Array
    passed: Array


class MaskedState(NamedTuple):
    """What the rounds carry.

    text: [B, G] tokens, with the mask's id at places to be filled.
    step: [B] places filled.
    moves: the next ones, of which the first is certain. A row that has completed its
        block has none until the next block begins.
    cache: None without a cache.
    order: [B, G] the step at which each place was filled.
    rounds: [B, G] the round in which each place was filled.
    counts: what happened so far.
    """

    text: Array
    step: Array
    moves: Moves
    cache: ArrayTree
    order: Array
    rounds: Array
    counts: Counts


class Verdict(NamedTuple):
    """What a verifying pass says.

    walk: which moves after the first are accepted.
    moves: drafted from the text with all accepted moves.
    calls: network calls.
    """

    walk: Walk
    moves: Moves
    calls: dict[str, Calls]


def begin(canvas: Canvas, speculation: Speculation) -> MaskedState:
    """Returns the state before the first round: without a cache, after the pass that
    drafts the first."""
    batch = len(canvas.start)
    sets = speculation.sets
    text = canvas.empty()
    step = jnp.zeros(batch, jnp.int32)
    no_moves, by_place = (
        jnp.zeros((batch, n), jnp.int32) for n in (sets.ranks + 1, canvas.places)
    )
    by_position = jnp.zeros((batch, speculation.depth), jnp.int32)
    if canvas.cached:
        no_tokens = jnp.zeros((*no_moves.shape, sets.tokens), jnp.int32)
        moves = Moves(no_moves, no_tokens, no_moves > 0)
        calls = count_calls()
    else:
        window = window_at(canvas, text, width(canvas, speculation))
        logits = passes.whole(canvas, window, text[:, None])[:, 0]
        moves = draft(canvas, speculation, window, text, logits, step)
        calls = count_calls(whole=1, rows=canvas.rows)
    return MaskedState(
        text=text,
        step=step,
        moves=moves,
        cache=passes.empty_cache(canvas) if canvas.cached else None,
        order=by_place,
        rounds=by_place,
        counts=Counts(step, by_position, by_position, step, calls),
    )


def run_round(
    canvas: Canvas, speculation: Speculation, state: MaskedState
) -> tuple[MaskedState, Counts]:
    """Takes one round, and returns what happened in it."""
    state, calls = refresh_step(canvas, speculation, state)
    texts = texts_after(speculation.sets, state.text, state.moves)
    verdict = verify_step(canvas, speculation, state, texts)
    next_state, happened = commit(canvas, speculation, state, texts, verdict)
    return next_state, happened._replace(calls=add(calls, verdict.calls))


def refresh_step(
    canvas: Canvas, speculation: Speculation, state: MaskedState
) -> tuple[MaskedState, dict[str, Calls]]:
    """Makes a pass over everything and drafts from it, with a cache, once all
    unfinished rows complete their blocks.

    Rows that get there first wait: one pass that serves all rows saves more than a
    round of a few of them.
    """
    if not canvas.cached:
        return state, count_calls()
    waiting = ~state.moves.exists[:, 0]
    needed = speculation.unfinished(canvas, state) & waiting

    def refresh(state: MaskedState) -> tuple[MaskedState, dict[str, Calls]]:
        window = window_at(canvas, state.text, canvas.block)
        logits, cache = passes.refresh(canvas, window, state.text, state.cache, needed)
        drafted = draft(
            canvas, speculation, window, state.text, logits, state.step, begins=True
        )
        moves = _in_rows(needed, drafted, state.moves)
        return state._replace(moves=moves, cache=cache), count_calls(
            whole=1, rows=canvas.rows
        )

    with jax.named_scope("refresh"):
        return jax.lax.cond(
            jnp.all(waiting), refresh, lambda state: (state, count_calls()), state
        )


def verify_step(
    canvas: Canvas, speculation: Speculation, state: MaskedState, texts: Array
) -> Verdict:
    """Makes one pass over texts [B, R, G], unless no row has more than its certain
    move."""
    window = window_at(canvas, state.text, width(canvas, speculation))

    def verify(_) -> Verdict:
        if canvas.cached:
            logits = passes.beside(canvas, window, texts, state.cache)
        else:
            logits = passes.whole(canvas, window, texts)
        walk, moves = _judge(canvas, speculation, window, state, texts, logits)
        rows = texts.shape[0] * texts.shape[1] * canvas.halves
        kind = {"block": 1} if canvas.cached else {"whole": 1}
        return Verdict(walk, moves, count_calls(**kind, rows=rows))

    def take_the_certain(_) -> Verdict:
        none = jnp.zeros((len(texts), speculation.depth), jnp.int32)
        stays = Walk(jnp.zeros(len(texts), jnp.int32), none, none > 0, none > 0)
        return Verdict(stays, jax.tree.map(jnp.zeros_like, state.moves), count_calls())

    with jax.named_scope("verify"):
        return jax.lax.cond(
            jnp.any(state.moves.exists[:, 1:]), verify, take_the_certain, None
        )


def commit(
    canvas: Canvas,
    speculation: Speculation,
    state: MaskedState,
    texts: Array,
    verdict: Verdict,
) -> tuple[MaskedState, Counts]:
    """Gives every row its certain move and those accepted after it."""
    certain = state.moves.exists[:, 0]
    walk = verdict.walk
    taken = jnp.concatenate([certain[:, None], walk.passed], axis=1)
    place = jnp.concatenate([state.moves.place[:, :1], walk.place], axis=1)
    text = jnp.where(
        certain[:, None], texts[jnp.arange(len(texts)), walk.last], state.text
    )
    steps = state.step[:, None] + jnp.arange(speculation.depth + 1)
    finished = ~jnp.any(text == canvas.mask_id, axis=1)
    # A row that waits has no moves.
    exists = verdict.moves.exists & (certain & ~finished)[:, None]
    next_state = state._replace(
        text=text,
        step=state.step + _count(taken),
        moves=verdict.moves._replace(exists=exists),
        order=fill(state.order, place, steps, taken),
        rounds=fill(state.rounds, place, state.counts.rounds[:, None], taken),
    )
    rounds, tested, accepted = (
        flags.astype(jnp.int32) for flags in (certain, walk.tested, walk.passed)
    )
    truncated = jnp.zeros_like(rounds)  # the walk is exact
    return next_state, Counts(rounds, tested, accepted, truncated, verdict.calls)


def draft(
    canvas: Canvas,
    speculation: Speculation,
    window: Window,
    text: Array,
    logits: Array,
    step: Array,
    begins: bool = False,
    certain: Choice | None = None,
) -> Moves:
    """Drafts the moves that the rule takes in turn if logits [B, W, V] of text [B, G]
    do not change.

    Move k has the noise of step [B] + k. begins: the logits are from a pass at the
    beginning of a block. certain: the first move, if it is known already. (The same
    sums over other shapes may round otherwise, and the texts of two ways should not
    part for that.)"""
    known = scores(canvas, logits)
    candidates_at = lambda k: drawn_from(canvas, known, window.places, step + k)
    # Without noise they are the same at each step.
    always = candidates_at(0) if canvas.keys is None else None
    first_only = begins and canvas.network.config.shifted
    free = is_masked(canvas, window, text)
    best = None
    if speculation.sets.tokens > 1:
        best = jax.lax.top_k(known.clean, speculation.sets.tokens)[1].astype(jnp.int32)

    def move(free, k):
        offered = candidates_at(k) if always is None else always
        now = free
        if first_only:
            now = free & ((k > 0) | (jnp.arange(free.shape[1]) == 0))
        choice = choose(offered, now, window.blocks)
        if certain is not None:
            choice = jax.tree.map(
                lambda known, drafted: jnp.where(k == 0, known, drafted),
                certain,
                choice,
            )
        place = jnp.take_along_axis(window.places, choice.index[:, None], axis=1)[:, 0]
        free &= jnp.arange(free.shape[1]) != choice.index[:, None]
        others = [] if best is None else [best[jnp.arange(len(best)), choice.index, 1:]]
        return free, (
            place,
            jnp.concatenate([choice.token[:, None], *others], axis=1),
            choice.exists,
        )

    _, made = jax.lax.scan(
        move, free, jnp.arange(speculation.sets.ranks + 1, dtype=jnp.int32)
    )
    return Moves(*(a.swapaxes(0, 1) for a in made))


def texts_after(sets: MoveSets, text: Array, moves: Moves) -> Array:
    """Returns the texts of the sets: [B, R, G]. The set {(2, 0)} fills those of ranks 0
    (certain) and 2."""
    ranks = jnp.arange(sets.ranks + 1, dtype=jnp.int32)
    # Of each place: [B, G].
    rank = fill(jnp.full_like(text, len(ranks)), moves.place, ranks, moves.exists)
    # [R, B, G]
    members = jnp.pad(jnp.asarray(sets.members), ((0, 0), (0, 1)), constant_values=-1)[
        :, rank
    ]
    tokens = jnp.pad(moves.tokens, ((0, 0), (0, 1), (0, 0)))
    filled = tokens[jnp.arange(len(text))[:, None], rank, jnp.maximum(members, 0)]
    return jnp.where(members >= 0, filled, text).swapaxes(0, 1)


def _judge(
    canvas: Canvas,
    speculation: Speculation,
    window: Window,
    state: MaskedState,
    texts: Array,
    logits: Array,
) -> tuple[Walk, Moves]:
    """Returns the walk over the texts [B, R, G], by their logits [B, R, W, V], and the
    next moves."""
    sizes = jnp.asarray(speculation.sets.sizes)
    steps = state.step[:, None] + 1 + sizes
    places = jnp.broadcast_to(
        window.places[:, None], (*texts.shape[:2], window.places.shape[1])
    )
    offered = candidates(canvas, logits, places, steps)
    free = is_masked(canvas, window, texts)
    blocks = jnp.broadcast_to(window.blocks[:, None], free.shape)
    choice = choose(offered, free, blocks)
    place, after = _after(speculation, window, state.moves, choice)
    walk = _walk(speculation, state.moves, place, after)
    text, seen, certain = jax.tree.map(
        lambda a: a[jnp.arange(len(texts)), walk.last], (texts, logits, choice)
    )
    step = state.step + 1 + sizes[walk.last]
    return walk, draft(canvas, speculation, window, text, seen, step, certain=certain)


def _after(
    speculation: Speculation, window: Window, moves: Moves, choice: Choice
) -> tuple[Array, Array]:
    """Returns the place that the rule takes next at each text, and the text with that
    move, or -1: [B, R]."""
    place = jnp.take_along_axis(window.places, choice.index, axis=1)
    # [B, R, K + 1]
    here = (moves.place[:, None] == place[..., None]) & moves.exists[:, None]
    same = here[..., None] & (moves.tokens[:, None] == choice.token[..., None, None])
    return place, jnp.max(
        jnp.where(same, jnp.asarray(speculation.sets.after), -1), axis=(2, 3)
    )


def _walk(speculation: Speculation, moves: Moves, place: Array, after: Array) -> Walk:
    """Goes from text to text, as the rule says: place and after are those of
    `_after`."""
    sets = speculation.sets
    rows = jnp.arange(len(after))
    # [R, K + 1]: whether the table goes on from a text with a move of this rank.
    more = jnp.asarray(np.any(sets.after >= 0, axis=2))
    offers = jnp.any(more & moves.exists[:, None], axis=2)  # [B, R]

    def go_on(at: Array, depth: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        # Not stopped before.
        walking = (depth == jnp.asarray(sets.sizes)[at]) & (depth < speculation.gamma)
        then = after[rows, at]
        passed = walking & (then >= 0)
        return jnp.where(passed, then, at), (
            place[rows, at],
            walking & offers[rows, at],
            passed,
        )

    start = jnp.zeros(len(after), jnp.int32)
    last, seen = jax.lax.scan(
        go_on, start, jnp.arange(speculation.depth, dtype=jnp.int32)
    )
    return Walk(last, *(a.swapaxes(0, 1) for a in seen))


def _in_rows(chosen: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Takes the leaves of `new` in the rows [B] that are chosen, of `old` in the
    others."""
    one = lambda a, b: jnp.where(chosen.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    return jax.tree.map(one, new, old)


def _count(true: Array) -> Array:
    """Counts what is true in each row: [B, N] -> [B]."""
    return jnp.sum(true, axis=1, dtype=jnp.int32)


def width(canvas: Canvas, speculation: Speculation) -> int:
    """Returns how many places, from the first open block on, a round can make and draft
    moves at."""
    if canvas.cached:
        return canvas.block
    blocks = 1 + -(-(2 * speculation.sets.ranks + 1) // canvas.block)
    return min(blocks, -(-canvas.places // canvas.block)) * canvas.block
