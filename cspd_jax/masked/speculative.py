"""Self-speculation: one pass drafts several moves, and the next pass verifies them all and drafts again.

A move is a place and a token. The logits of a text give gamma + 1 moves, in the order in which the stepwise
rule would take them if the logits did not change. The first one is the stepwise move itself. One pass then
reads the texts after 1, 2, ..., gamma + 1 moves side by side, and a move is accepted if the rule, applied to
the text before it, gives the same place and the same token. The text with all accepted moves already has its
logits, which draft the next moves, so a rejection costs no pass.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.masked import passes
from cspd_jax.masked.canvas import Canvas, Window, fill, is_masked, window_at
from cspd_jax.masked.info import CallCounts, DraftCounts, RoundInfo, count_calls
from cspd_jax.masked.rule import Candidates, candidates, choose, drawn_from, eligible, scores
from cspd_jax.text.info import add

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Speculation:
    """How far to draft, and what to accept.

    max_gamma: bound D on gamma (static).
    gamma: [B] moves tested per round.
    accept_top_k: None is exact. A number is lossy: a move with the right token is accepted if its place is
        among so many most confident ones.
    """

    max_gamma: int = dataclasses.field(metadata={"static": True})
    gamma: Array
    accept_top_k: Array | None


class Moves(NamedTuple):
    """Moves in the order in which they would be taken.

    place: [B, D + 1]
    token: [B, D + 1]
    exists: [B, D + 1] false where there is nothing left to fill.
    """

    place: Array
    token: Array
    exists: Array


class MaskedState(NamedTuple):
    """What the rounds carry.

    text: [B, G] tokens, with the mask's id at places to be filled.
    step: [B] places filled.
    moves: the next ones, of which the first is certain. A row that has completed its block has none until the
        next block begins.
    cache: None without a cache.
    order: [B, G] the step at which each place was filled.
    rounds: [B, G] the round in which each place was filled.
    info: the sum of what happened so far.
    """

    text: Array
    step: Array
    moves: Moves
    cache: Any
    order: Array
    rounds: Array
    info: RoundInfo


class Verdict(NamedTuple):
    """What a verifying pass says.

    passed: [B, D] which moves after the first are accepted.
    moves: drafted from the text with all accepted moves.
    calls: network calls.
    """

    passed: Array
    moves: Moves
    calls: CallCounts


def begin(canvas: Canvas, speculation: Speculation) -> MaskedState:
    """Before the first round; without a cache, after the pass that drafts the first moves."""
    batch, gamma = len(canvas.start), speculation.max_gamma
    text, step = canvas.empty(), jnp.zeros(batch, jnp.int32)
    no_moves, by_place = (jnp.zeros((batch, n), jnp.int32) for n in (gamma + 1, canvas.places))
    by_position = jnp.zeros((batch, gamma), jnp.int32)
    if canvas.cached:
        moves, calls = Moves(no_moves, no_moves, no_moves > 0), count_calls()
    else:
        window = window_at(canvas, text, _width(canvas, speculation))
        logits = passes.whole(canvas, window, text[:, None])[:, 0]
        moves = draft(canvas, speculation, window, text, logits, step)
        calls = count_calls(whole=1, rows=len(canvas.base))
    return MaskedState(
        text=text,
        step=step,
        moves=moves,
        cache=passes.empty_cache(canvas) if canvas.cached else None,
        order=by_place,
        rounds=by_place,
        info=RoundInfo(DraftCounts(step, by_position, by_position), calls),
    )


def least_passes(places: int, block: int, gamma: int, cached: bool) -> int:
    """Returns the passes for one row if every draft is accepted.

    A round fills gamma + 1 places. The last place of the text (with a cache, of each block) needs no pass.
    """
    sizes = [min(block, places - i) for i in range(0, places, block)] if cached else [places]
    return sum(1 + -(-(size - 1) // (gamma + 1)) for size in sizes)


def unfinished(canvas: Canvas, state: Any) -> Array:
    """Returns whether each row has places to fill: [B]"""
    return jnp.any(state.text == canvas.mask_id, axis=1)


@jax.jit
def run(canvas: Canvas, speculation: Speculation) -> MaskedState:
    """Takes all rounds in one loop on the device."""
    more = lambda state: jnp.any(unfinished(canvas, state))
    turn = lambda state: advance(canvas, speculation, state)
    return jax.lax.while_loop(more, turn, begin(canvas, speculation))


def advance(canvas: Canvas, speculation: Speculation, state: MaskedState) -> MaskedState:
    """Takes one turn of the loop: a round, and the sum of what happened."""
    next_state, happened = run_round(canvas, speculation, state)
    return next_state._replace(info=add(state.info, happened))


def run_round(canvas: Canvas, speculation: Speculation, state: MaskedState) -> tuple[MaskedState, RoundInfo]:
    """Takes one round, and returns what happened in it."""
    state, calls = refresh_step(canvas, speculation, state)
    texts = texts_after(state.text, state.moves)
    verdict = verify_step(canvas, speculation, state, texts)
    next_state, drafts = commit(canvas, speculation, state, texts, verdict)
    return next_state, RoundInfo(drafts, add(calls, verdict.calls))


def refresh_step(
    canvas: Canvas, speculation: Speculation, state: MaskedState
) -> tuple[MaskedState, CallCounts]:
    """With a cache, a pass over everything and moves from it once all unfinished rows complete their blocks.

    Rows that get there first wait: one pass that serves all rows saves more than a round of a few of them.
    """
    if not canvas.cached:
        return state, count_calls()
    waiting = ~state.moves.exists[:, 0]
    needed = unfinished(canvas, state) & waiting

    def refresh(state: MaskedState) -> tuple[MaskedState, CallCounts]:
        window = window_at(canvas, state.text, canvas.block)
        logits, cache = passes.refresh(canvas, window, state.text, state.cache, needed)
        drafted = draft(canvas, speculation, window, state.text, logits, state.step, begins=True)
        moves = jax.tree.map(lambda new, old: jnp.where(needed[:, None], new, old), drafted, state.moves)
        return state._replace(moves=moves, cache=cache), count_calls(whole=1, rows=len(canvas.base))

    return jax.lax.cond(jnp.all(waiting), refresh, lambda state: (state, count_calls()), state)


def verify_step(canvas: Canvas, speculation: Speculation, state: MaskedState, texts: Array) -> Verdict:
    """Makes one pass over texts [B, D + 1, G], unless no row has more than its certain move."""
    window = window_at(canvas, state.text, _width(canvas, speculation))

    def verify(_) -> Verdict:
        if canvas.cached:
            logits = passes.beside(canvas, window, texts, state.cache)
        else:
            logits = passes.whole(canvas, window, texts)
        passed, moves = _judge(canvas, speculation, window, state, texts, logits)
        rows = texts.shape[0] * texts.shape[1] * canvas.halves
        kind = {"block": 1} if canvas.cached else {"whole": 1}
        return Verdict(passed, moves, count_calls(**kind, rows=rows))

    def take_the_certain(_) -> Verdict:
        none_passed = jnp.zeros(texts.shape[:2], bool)[:, 1:]
        return Verdict(none_passed, jax.tree.map(jnp.zeros_like, state.moves), count_calls())

    return jax.lax.cond(jnp.any(state.moves.exists[:, 1:]), verify, take_the_certain, None)


def commit(
    canvas: Canvas, speculation: Speculation, state: MaskedState, texts: Array, verdict: Verdict
) -> tuple[MaskedState, DraftCounts]:
    """Every row takes its certain move and those accepted after it."""
    assert state.info.drafts is not None
    certain = state.moves.exists[:, 0]
    taken = jnp.concatenate([certain[:, None], verdict.passed], axis=1)
    last = _count(verdict.passed)
    text = jnp.where(certain[:, None], texts[jnp.arange(len(texts)), last], state.text)
    steps = state.step[:, None] + jnp.arange(speculation.max_gamma + 1)
    finished = ~jnp.any(text == canvas.mask_id, axis=1)
    wanted = jnp.arange(speculation.max_gamma) < speculation.gamma[:, None]
    reached = jnp.concatenate([certain[:, None], verdict.passed[:, :-1]], axis=1)
    tested = reached & state.moves.exists[:, 1:] & wanted
    exists = verdict.moves.exists & (certain & ~finished)[:, None]  # a row that waits has no moves
    next_state = state._replace(
        text=text,
        step=state.step + _count(taken),
        moves=verdict.moves._replace(exists=exists),
        order=fill(state.order, state.moves.place, steps, taken),
        rounds=fill(state.rounds, state.moves.place, state.info.drafts.rounds[:, None], taken),
    )
    counts = (certain, tested, verdict.passed)
    return next_state, DraftCounts(*(flags.astype(jnp.int32) for flags in counts))


def draft(
    canvas: Canvas,
    speculation: Speculation,
    window: Window,
    text: Array,
    logits: Array,
    step: Array,
    begins: bool = False,
) -> Moves:
    """Drafts the moves that the rule takes in turn if logits [B, W, V] of text [B, G] do not change.

    Move k has the noise of step [B] + k. begins: the logits are from a pass at the beginning of a block.
    """
    known = scores(canvas, logits)
    candidates_at = lambda k: drawn_from(canvas, known, window.places, step + k)
    always = candidates_at(0) if canvas.keys is None else None  # without noise they are the same at each step
    first_only = begins and canvas.network.config.shifted

    def move(free, k):
        offered = candidates_at(k) if always is None else always
        now = free
        if first_only:
            now = free & ((k > 0) | (jnp.arange(free.shape[1]) == 0))
        choice = choose(offered, now, window.blocks)
        place = jnp.take_along_axis(window.places, choice.index[:, None], axis=1)[:, 0]
        free &= jnp.arange(free.shape[1]) != choice.index[:, None]
        return free, (place, choice.token, choice.exists)

    free = is_masked(canvas, window, text)
    _, made = jax.lax.scan(move, free, jnp.arange(speculation.max_gamma + 1, dtype=jnp.int32))
    return Moves(*(a.swapaxes(0, 1) for a in made))


def texts_after(text: Array, moves: Moves) -> Array:
    """Returns the texts after 1, 2, ... moves: [B, D + 1, G]."""
    number = jnp.arange(moves.place.shape[1], dtype=jnp.int32)
    never = jnp.full_like(text, len(number))
    filled_by = fill(never, moves.place, number, moves.exists)  # the move that fills each place: [B, G]
    complete = fill(text, moves.place, moves.token, moves.exists)
    return jnp.where(filled_by[:, None] <= number[:, None], complete[:, None], text[:, None])


def _judge(
    canvas: Canvas, speculation: Speculation, window: Window, state: MaskedState, texts: Array, logits: Array
) -> tuple[Array, Moves]:
    """Returns which moves after the first are accepted [B, D], and the next moves.

    logits: [B, D + 1, W, V] of the texts [B, D + 1, G].
    """
    number = jnp.arange(texts.shape[1], dtype=jnp.int32)
    steps = state.step[:, None] + 1 + number
    places = jnp.broadcast_to(window.places[:, None], (*texts.shape[:2], window.places.shape[1]))
    offered = candidates(canvas, logits, places, steps)
    free = is_masked(canvas, window, texts)
    right = _agree(speculation, window, state.moves, offered, free)
    right &= state.moves.exists[:, 1:] & (number[:-1] < speculation.gamma[:, None])
    passed = jnp.cumprod(right, axis=1).astype(bool)
    last = _count(passed)
    rows = jnp.arange(len(texts))
    text, chosen = texts[rows, last], logits[rows, last]
    return passed, draft(canvas, speculation, window, text, chosen, state.step + 1 + last)


def _agree(speculation: Speculation, window: Window, moves: Moves, offered: Candidates, free: Array) -> Array:
    """[B, D], entry k: whether the rule for the text after k + 1 moves gives move k + 2, counted from 1."""
    before = jax.tree.map(lambda a: a[:, :-1], offered)
    blocks = jnp.broadcast_to(window.blocks[:, None], free.shape)[:, :-1]
    index = moves.place[:, 1:] - window.places[:, :1]
    index = jnp.clip(index, 0, free.shape[-1] - 1)
    take = lambda a: jnp.take_along_axis(a, index[..., None], axis=-1)[..., 0]
    if speculation.accept_top_k is None:
        choice = choose(before, free[:, :-1], blocks)
        return (choice.index == index) & (choice.token == moves.token[:, 1:])
    open_places = eligible(free[:, :-1], blocks)
    surer = open_places & (before.confidence > take(before.confidence)[..., None])
    near = take(open_places) & (jnp.sum(surer, axis=-1) < speculation.accept_top_k)
    return near & (take(before.tokens) == moves.token[:, 1:])


def _count(true: Array) -> Array:
    """[B, N] -> [B]"""
    return jnp.sum(true, axis=1, dtype=jnp.int32)


def _width(canvas: Canvas, speculation: Speculation) -> int:
    """Places that a round can involve, from the first open block on: its own moves and those it drafts."""
    if canvas.cached:
        return canvas.block
    blocks = 1 + -(-(2 * speculation.max_gamma + 1) // canvas.block)
    return min(blocks, -(-canvas.places // canvas.block)) * canvas.block
