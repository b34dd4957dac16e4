"""Self-speculation: one pass drafts several moves, the next verifies them all, and drafts again.

A move is a place and a token. From the logits of a text come draft_len + 1 moves, in the order in which the
stepwise rule would take them if the logits did not change. The first is the stepwise move itself. Then one
pass reads the texts after 1, 2, ..., draft_len + 1 moves, side by side; a move is accepted if the rule,
applied to the text before it, gives the same place and the same token. The text with all accepted moves has
its logits already, and they draft the next moves: a rejection costs no pass.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.masked import passes
from cspd_jax.masked.canvas import Canvas, Window, fill, masked, window_at
from cspd_jax.masked.stepwise import Candidates, candidates, choose, eligible
from cspd_jax.networks.lm import Cache

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Speculation:
    """most: static bound D on draft_len [B], the moves tested in a round. top_k: None is exact; a number is
    lossy: a move is accepted if its place is among the top_k surest and its token is right."""

    most: int = dataclasses.field(metadata={"static": True})
    draft_len: Array
    top_k: Array | None


class Moves(NamedTuple):
    """place, token: [B, D + 1]. exists: [B, D + 1]; the others come after the last free place."""

    place: Array
    token: Array
    exists: Array


class Counts(NamedTuple):
    """rounds: [B] in which the row was filled further. tested, accepted: [D] by place in the draft, over all
    rows. passes, block_passes: [] one after the other for the whole batch, over everything and over a block.
    rows: [] texts in them."""

    rounds: Array
    tested: Array
    accepted: Array
    passes: Array
    block_passes: Array
    rows: Array


class State(NamedTuple):
    """text: [B, G]. step: [B], places filled. moves: the next ones, the first of which is certain; none where
    the block is complete. cache: None without. order, rounds: [B, G], the step and the round in which each
    place was filled."""

    text: Array
    step: Array
    moves: Moves
    cache: Cache | None
    order: Array
    rounds: Array
    counts: Counts


def begin(canvas: Canvas, speculation: Speculation) -> State:
    """Before the first round; without a cache after the first pass."""
    batch, most = len(canvas.start), speculation.most
    text, none = canvas.empty(), jnp.zeros((batch, most + 1), jnp.int32)
    zeros, zero = jnp.zeros((batch, canvas.places), jnp.int32), jnp.int32(0)
    by_place = jnp.zeros(most, jnp.int32)
    state = State(
        text=text,
        step=jnp.zeros(batch, jnp.int32),
        moves=Moves(none, none, none > 0),
        cache=passes.empty_cache(canvas) if canvas.cached else None,
        order=zeros,
        rounds=zeros,
        counts=Counts(jnp.zeros(batch, jnp.int32), by_place, by_place, zero, zero, zero),
    )
    if canvas.cached:
        return state
    window = window_at(canvas, text, _width(canvas, speculation))
    logits = passes.whole(canvas, window, text[:, None])[:, 0]
    counts = state.counts._replace(passes=jnp.int32(1), rows=jnp.int32(canvas.halves * batch))
    return state._replace(moves=draft(canvas, speculation, window, text, logits, state.step), counts=counts)


def unfinished(canvas: Canvas, state: State) -> Array:
    """[B]"""
    return jnp.any(state.text == canvas.mask_id, axis=1)


def play(canvas: Canvas, speculation: Speculation, state: State) -> State:
    """A round: moves where a block begins, one pass that verifies them, and the next moves."""
    if canvas.cached:
        state = _begin_blocks(canvas, speculation, state)
    window = window_at(canvas, state.text, _width(canvas, speculation))
    texts = after(state.text, state.moves)

    def verify(_):
        logits = (
            passes.beside(canvas, window, texts, state.cache)
            if canvas.cached
            else passes.whole(canvas, window, texts)
        )
        return _judge(canvas, speculation, window, state, texts, logits)

    def take_the_certain(_):
        nothing = jnp.zeros(texts.shape[:2], bool)[:, 1:]
        return nothing, jax.tree.map(jnp.zeros_like, state.moves)

    needed = jnp.any(state.moves.exists[:, 1:])
    passed, moves = jax.lax.cond(needed, verify, take_the_certain, None)
    return _commit(canvas, speculation, state, texts, passed, moves, needed)


def _judge(canvas, speculation, window, state, texts, logits):
    """Which moves after the first are accepted [B, D], and the next moves; from the texts' logits
    [B, D + 1, W, V]."""
    number = jnp.arange(texts.shape[1], dtype=jnp.int32)
    steps = state.step[:, None] + 1 + number
    places = jnp.broadcast_to(window.places[:, None], (*texts.shape[:2], window.places.shape[1]))
    found = candidates(canvas, logits, places, steps)
    free = masked(canvas, window, texts)
    right = _agree(speculation, window, state.moves, found, free)
    right &= state.moves.exists[:, 1:] & (number[:-1] < speculation.draft_len[:, None])
    passed = jnp.cumprod(right, axis=1).astype(bool)
    last = _count(passed)
    lanes = jnp.arange(len(texts))
    text, chosen = texts[lanes, last], logits[lanes, last]
    moves = draft(canvas, speculation, window, text, chosen, state.step + 1 + last)
    return passed, moves


def _agree(speculation, window: Window, moves: Moves, found: Candidates, free: Array) -> Array:
    """[B, D], entry k: the rule for the text after k + 1 moves gives move k + 2 (counted from 1)."""
    before = jax.tree.map(lambda a: a[:, :-1], found)
    blocks = jnp.broadcast_to(window.blocks[:, None], free.shape)[:, :-1]
    index = moves.place[:, 1:] - window.places[:, :1]
    index = jnp.clip(index, 0, free.shape[-1] - 1)
    take = lambda a: jnp.take_along_axis(a, index[..., None], axis=-1)[..., 0]
    if speculation.top_k is None:
        choice = choose(before, free[:, :-1], blocks)
        return (choice.index == index) & (choice.token == moves.token[:, 1:])
    open_places = eligible(free[:, :-1], blocks)
    surer = open_places & (before.confidence > take(before.confidence)[..., None])
    near = take(open_places) & (jnp.sum(surer, axis=-1) < speculation.top_k)
    return near & (take(before.tokens) == moves.token[:, 1:])


def _commit(canvas, speculation, state: State, texts, passed, moves: Moves, verified) -> State:
    first = state.moves.exists[:, 0]
    taken = jnp.concatenate([first[:, None], passed], axis=1)
    last = _count(passed)
    text = jnp.where(first[:, None], texts[jnp.arange(len(texts)), last], state.text)
    order, rounds = state.order, state.rounds
    for k in range(speculation.most + 1):
        order = fill(order, state.moves.place[:, k], state.step + k, taken[:, k])
        rounds = fill(rounds, state.moves.place[:, k], state.counts.rounds, taken[:, k])
    finished = ~jnp.any(text == canvas.mask_id, axis=1)
    old, wanted = state.counts, jnp.arange(speculation.most) < speculation.draft_len[:, None]
    reached = jnp.concatenate([first[:, None], passed[:, :-1]], axis=1)
    tested = reached & state.moves.exists[:, 1:] & wanted
    once = verified.astype(jnp.int32)
    counts = Counts(
        rounds=old.rounds + first,
        tested=old.tested + _count(tested, axis=0),
        accepted=old.accepted + _count(passed, axis=0),
        passes=old.passes + (0 if canvas.cached else once),
        block_passes=old.block_passes + (once if canvas.cached else 0),
        rows=old.rows + once * texts.shape[0] * texts.shape[1] * canvas.halves,
    )
    moves = moves._replace(exists=moves.exists & (first & ~finished)[:, None])  # a row that waits has none
    return State(text, state.step + _count(taken), moves, state.cache, order, rounds, counts)


def _begin_blocks(canvas: Canvas, speculation: Speculation, state: State) -> State:
    """A pass over everything, and moves from it, when all unfinished rows have completed their blocks.

    Rows that are there first wait: a pass that serves all of them is worth more than a round of theirs.
    """
    waiting = ~state.moves.exists[:, 0]
    needed = unfinished(canvas, state) & waiting

    def run(state: State) -> State:
        window = window_at(canvas, state.text, canvas.block)
        logits, cache = passes.refresh(canvas, window, state.text, state.cache, needed)
        fresh = draft(canvas, speculation, window, state.text, logits, state.step, begins=True)
        moves = jax.tree.map(lambda a, b: jnp.where(needed[:, None], a, b), fresh, state.moves)
        counts = state.counts
        counts = counts._replace(passes=counts.passes + 1, rows=counts.rows + len(canvas.base))
        return state._replace(moves=moves, cache=cache, counts=counts)

    return jax.lax.cond(jnp.all(waiting), run, lambda state: state, state)


def draft(
    canvas: Canvas,
    speculation: Speculation,
    window: Window,
    text: Array,
    logits: Array,
    step: Array,
    begins: bool = False,
) -> Moves:
    """The moves that the rule takes one after the other if logits [B, W, V] of text [B, G] do not change.

    Move k has the noise of step [B] + k. begins: the logits are those of a pass at the beginning of a block.
    """
    at = lambda k: candidates(canvas, logits, window.places, step + k)
    always = at(0) if canvas.keys is None else None  # without noise all steps have the same candidates
    first_only = begins and canvas.model.config.shifted

    def move(free, k):
        found = at(k) if always is None else always
        now = free
        if first_only:
            now = free & ((k > 0) | (jnp.arange(free.shape[1]) == 0))
        choice = choose(found, now, window.blocks)
        place = jnp.take_along_axis(window.places, choice.index[:, None], axis=1)[:, 0]
        free &= jnp.arange(free.shape[1]) != choice.index[:, None]
        return free, (place, choice.token, choice.exists)

    free = masked(canvas, window, text)
    _, made = jax.lax.scan(move, free, jnp.arange(speculation.most + 1, dtype=jnp.int32))
    return Moves(*(a.swapaxes(0, 1) for a in made))


def after(text: Array, moves: Moves) -> Array:
    """The texts after 1, 2, ... moves: [B, D + 1, G]."""
    texts = []
    for k in range(moves.place.shape[1]):
        text = fill(text, moves.place[:, k], moves.token[:, k], moves.exists[:, k])
        texts.append(text)
    return jnp.stack(texts, axis=1)


def _count(true: Array, axis: int = 1) -> Array:
    return jnp.sum(true, axis=axis, dtype=jnp.int32)


def _width(canvas: Canvas, speculation: Speculation) -> int:
    """Places that a round can have to do with: its own moves and those it drafts, from the first block on."""
    if canvas.cached:
        return canvas.block
    blocks = 1 + -(-(2 * speculation.most + 1) // canvas.block)
    return min(blocks, -(-canvas.places // canvas.block)) * canvas.block


@jax.jit
def run(canvas: Canvas, speculation: Speculation) -> State:
    """All rounds."""
    more = lambda state: jnp.any(unfinished(canvas, state))
    return jax.lax.while_loop(more, lambda s: play(canvas, speculation, s), begin(canvas, speculation))
