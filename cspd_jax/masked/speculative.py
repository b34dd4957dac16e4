"""Self-speculation: one pass drafts several moves, and the next pass verifies them all
and drafts again.

A move is a place and a token. The logits of a text draft moves: they rank the places in
the order in which the stepwise rule would take them if the logits did not change. The
first drafted move is the stepwise move itself, and is called certain. The next pass
reads a table of R texts side by side (`sets`). Each text has the certain move and some
of the other drafted moves: the first 1, 2, ..., gamma + 1 moves, or a chosen table.

A walk then finds which moves stepwise decoding makes. It starts at the text with the
certain move alone. The rule, applied to the logits of this text, names the next move.
If the pass has read the text with that move added, the walk goes on to that text, and
applies the rule again. All moves of the walk are accepted. The logits of the last
visited text are at hand and draft the next moves, so a rejection costs no pass.

For example, let the drafted moves have the places 5, 2 and 7 (ranks 0, 1 and 2), and
let the table have four texts, each with the drafted tokens at its places:

    text 0: 5    text 1: 5, 2    text 2: 5, 7    text 3: 5, 2, 7

Suppose that the rule at text 0 takes place 7 with the drafted token. Then the walk goes
on to text 2. Suppose that the rule at text 2 takes place 2 with the drafted token. Then
the walk goes on to text 3. The round has made the moves at 5, 7 and 2, in this order,
by one pass. Had the rule at text 2 taken place 4, the round would have made the moves
at 5 and 7, and the logits of text 2 would draft place 4 as the next certain move.
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
    """The texts that a pass reads, and the most moves that a round accepts.

    sets: the table of R texts (static). A text has at most D moves after the certain
        one. They fill places of ranks up to K with one of the T most probable tokens.
    gamma: [B] the most moves that a round accepts after the certain one.
    """

    sets: MoveSets = dataclasses.field(metadata={"static": True})
    gamma: Array

    @property
    def depth(self) -> int:
        """D, the most moves that a text has after the certain one; at least 1."""
        return max(1, int(self.sets.sizes.max()))

    @property
    def claim(self) -> Exactness:
        """The claim that the text equals the text of stepwise decoding, and the
        reason."""
        return Exactness(
            True, "every move, place and token, is the one that stepwise decoding makes"
        )

    def begin(self, canvas: Canvas) -> MaskedState:
        """Returns the state before the first round."""
        return begin(canvas, self)

    def after(
        self, window: Window, moves: Moves, choice: Choice
    ) -> tuple[Array, Array]:
        """Returns two arrays [B, R]: the place that the rule takes next at each text,
        and the number of the text with that move, or -1 if there is none.

        For example, with the drafted places 5, 2 and 7, let the rule at text 0 take
        place 7. This place has rank 2, so the number is `sets.after[0, 2, 0]` if the
        rule's token is the drafted one. If the rule takes place 4, which is not
        drafted, it is -1.
        """
        place = jnp.take_along_axis(window.places, choice.index, axis=1)
        # Whether the rule's place at a text has this rank: [B, R, K + 1].
        here = (moves.place[:, None] == place[..., None]) & moves.exists[:, None]
        same = here[..., None] & (
            moves.tokens[:, None] == choice.token[..., None, None]
        )
        return place, jnp.max(
            jnp.where(same, jnp.asarray(self.sets.after), -1), axis=(2, 3)
        )

    def unfinished(self, canvas: Canvas, state: MaskedState) -> Array:
        """Returns [B], whether each row still has places to fill."""
        return jnp.any(state.text == canvas.mask_id, axis=1)

    def advance(self, canvas: Canvas, state: MaskedState) -> MaskedState:
        """Takes one round, and adds its counts to the state's counts."""
        next_state, happened = run_round(canvas, self, state)
        return next_state._replace(counts=add(state.counts, happened))


class Moves(NamedTuple):
    """Drafted moves: places in the order in which the rule would take them, with the
    tokens that are tried at each place.

    place: [B, K + 1] the places by rank, as indices into the text [B, G].
    tokens: [B, K + 1, T] the token of the move, then the next most probable tokens.
    exists: [B, K + 1] false where no place is left to fill.
    """

    place: Array
    tokens: Array
    exists: Array


class Walk(NamedTuple):
    """The walk of each row over the texts of a pass, from the text with the certain
    move alone.

    last: [B] the number of the last text that was visited.
    place: [B, D] the place that the rule took after 0, 1, ..., D - 1 accepted moves.
    tested: [B, D] entry d says whether the walk made d moves and reached a text to
        which the table adds a further move.
    passed: [B, D] entry d says whether move d + 1 was accepted.
    """

    last: Array
    place: Array
    tested: Array
    passed: Array


class MaskedState(NamedTuple):
    """The state that a round takes and returns.

    text: [B, G] tokens, with the mask's id at places to be filled.
    step: [B] the number of places filled.
    moves: the drafted moves; the first one is certain. With a cache, a row that has
        completed its block has no moves until the next block begins.
    cache: the stored keys and values; None without a cache.
    steps: [B, G] the step at which each place was filled.
    rounds: [B, G] the round in which each place was filled.
    counts: the counts of all rounds so far.
    """

    text: Array
    step: Array
    moves: Moves
    cache: ArrayTree
    steps: Array
    rounds: Array
    counts: Counts


class Verdict(NamedTuple):
    """The result of a verifying pass.

    walk: the walk, which says which moves after the certain one are accepted.
    moves: the moves drafted from the text that has all accepted moves.
    calls: the network calls that the pass made.
    """

    walk: Walk
    moves: Moves
    calls: dict[str, Calls]


def begin(canvas: Canvas, speculation: Speculation) -> MaskedState:
    """Returns the state before the first round. Without a cache, this makes the pass
    that drafts the first moves."""
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
        steps=by_place,
        rounds=by_place,
        counts=Counts(step, by_position, by_position, step, calls),
    )


def run_round(
    canvas: Canvas, speculation: Speculation, state: MaskedState
) -> tuple[MaskedState, Counts]:
    """Takes one round, and returns the next state and the counts of this round."""
    state, calls = refresh_step(canvas, speculation, state)
    texts = texts_after(speculation.sets, state.text, state.moves)
    verdict = verify_step(canvas, speculation, state, texts)
    next_state, happened = commit(canvas, speculation, state, texts, verdict)
    return next_state, happened._replace(calls=add(calls, verdict.calls))


def refresh_step(
    canvas: Canvas, speculation: Speculation, state: MaskedState
) -> tuple[MaskedState, dict[str, Calls]]:
    """With a cache, stores keys and values anew and drafts, once all unfinished rows
    have completed their blocks. Otherwise returns the state as it is.

    A row that completes its block early waits for the other rows. One such pass for all
    rows saves more time than the rounds that the waiting rows miss.
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
    """Makes one pass over texts [B, R, G], and walks over them. If no row has a move
    after its certain one, makes no pass and accepts the certain moves alone."""
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
    """Writes the certain move of each row, and the accepted moves after it, into its
    text. Returns the next state and the counts of this round."""
    certain = state.moves.exists[:, 0]
    walk = verdict.walk
    taken = jnp.concatenate([certain[:, None], walk.passed], axis=1)
    place = jnp.concatenate([state.moves.place[:, :1], walk.place], axis=1)
    text = jnp.where(
        certain[:, None], texts[jnp.arange(len(texts)), walk.last], state.text
    )
    steps = state.step[:, None] + jnp.arange(speculation.depth + 1)
    finished = ~jnp.any(text == canvas.mask_id, axis=1)
    # A row that waits for a refresh, or is finished, gets no moves.
    exists = verdict.moves.exists & (certain & ~finished)[:, None]
    next_state = state._replace(
        text=text,
        step=state.step + _count(taken),
        moves=verdict.moves._replace(exists=exists),
        steps=fill(state.steps, place, steps, taken),
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
    """Drafts the K + 1 moves that the rule takes one after the other if the logits [B,
    W, V] of text [B, G] do not change.

    For example, if the places 2, 5 and 7 are open in one block, with the confidences
    0.6, 0.9 and 0.3, the drafted moves have the places 5, 2 and 7.

    step: [B] the step of the first move; move k has the noise of step + k.
    begins: whether the logits are from a pass at the beginning of a block. A shifted
        model then has logits for the first place of the block, which later passes
        lack, so that place is taken first.
    certain: the first move, if it is known already. Computing it again from arrays of
        another shape might round differently, and the text would then differ from the
        text of stepwise decoding.
    """
    known = scores(canvas, logits)
    candidates_at = lambda k: drawn_from(canvas, known, window.places, step + k)
    # Without noise the candidates are the same at each step.
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
    """Returns the texts [B, R, G] that a pass reads: text [B, G] with the moves of each
    set of the table.

    For example, let the drafted moves have the places 5, 2 and 7, and the tokens 11, 12
    and 13. The set {(2, 0)} writes 11 at place 5, because every text has the move of
    rank 0, and 13 at place 7. It leaves place 2 masked.
    """
    ranks = jnp.arange(sets.ranks + 1, dtype=jnp.int32)
    # The rank of each place, or K + 1 for a place that is not drafted: [B, G].
    rank = fill(jnp.full_like(text, len(ranks)), moves.place, ranks, moves.exists)
    # The number of the token that each text has at each place: [R, B, G].
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
    """Returns the walk over texts [B, R, G] by their logits [B, R, W, V], and the moves
    that the logits of the last visited text draft.

    The rule at a text of size n (n moves after the certain one) uses the noise of step
    state.step + 1 + n, because 1 + n moves of this round precede its move.
    """
    sizes = jnp.asarray(speculation.sets.sizes)
    steps = state.step[:, None] + 1 + sizes
    places = jnp.broadcast_to(
        window.places[:, None], (*texts.shape[:2], window.places.shape[1])
    )
    offered = candidates(canvas, logits, places, steps)
    free = is_masked(canvas, window, texts)
    blocks = jnp.broadcast_to(window.blocks[:, None], free.shape)
    choice = choose(offered, free, blocks)
    place, after = speculation.after(window, state.moves, choice)
    walk = _walk(speculation, state.moves, place, after)
    text, seen, certain = jax.tree.map(
        lambda a: a[jnp.arange(len(texts)), walk.last], (texts, logits, choice)
    )
    step = state.step + 1 + sizes[walk.last]
    return walk, draft(canvas, speculation, window, text, seen, step, certain=certain)


def _walk(speculation: Speculation, moves: Moves, place: Array, after: Array) -> Walk:
    """Walks from text to text by the table `after` [B, R]; `after` and `place` [B, R]
    are the results of `Speculation.after`.

    For example, let a row have place = [7, 4, 2, 9] and after = [2, -1, 3, -1] for four
    texts of sizes 0, 1, 1 and 2, and let gamma be 2. The walk starts at text 0, takes
    place 7 to text 2, and takes place 2 to text 3. So last = 3, place = [7, 2] and
    passed = [True, True]. With gamma = 1 it stops at text 2: last = 2, passed = [True,
    False].
    """
    sets = speculation.sets
    rows = jnp.arange(len(after))
    # [R, K + 1]: whether the table adds a move of this rank to a text.
    more = jnp.asarray(np.any(sets.after >= 0, axis=2))
    offers = jnp.any(more & moves.exists[:, None], axis=2)  # [B, R]

    def go_on(at: Array, depth: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        # False if the walk stopped before it made `depth` moves.
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
    """Returns the leaves of `new` in the rows where `chosen` [B] is true, and the
    leaves of `old` in the other rows."""
    one = lambda a, b: jnp.where(chosen.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    return jax.tree.map(one, new, old)


def _count(true: Array) -> Array:
    """Counts the true entries in each row: [B, N] -> [B]."""
    return jnp.sum(true, axis=1, dtype=jnp.int32)


def width(canvas: Canvas, speculation: Speculation) -> int:
    """Returns W, the number of places from the first open block on that a round needs
    logits for.

    A round makes up to K + 1 moves and drafts K + 1 more, at 2 K + 2 places. The first
    open block has at least one of them, and the next ceil((2 K + 1) / block) blocks
    have room for the rest. With K = 4 and blocks of 8, W is (1 + 2) * 8 = 24, or less
    if the text is shorter. With a cache, W is one block.
    """
    if canvas.cached:
        return canvas.block
    blocks = 1 + -(-(2 * speculation.sets.ranks + 1) // canvas.block)
    return min(blocks, -(-canvas.places // canvas.block)) * canvas.block
