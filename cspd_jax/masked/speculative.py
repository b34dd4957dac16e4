"""Self-speculation: one pass drafts several steps, and the next pass verifies them all
and drafts again.

The logits of a text say which step the rule takes: which places it fills, and with
which tokens. They also draft the steps after it, as the rule would take them if the
logits did not change. The next pass reads a table of R texts side by side (`sets`): the
text after the step, and texts that also have some of the drafted steps, such as the
first 1, 2, ..., gamma of them.

A walk then finds which of these texts the reference would write. It starts at the text
without drafts. The rule, applied to the logits of this text, takes a step. If the pass
has read the text after this step, the walk goes on to that text, and applies the rule
again. The last step of the walk leads to a text that was not read. All steps of the
walk are steps of the reference, whether they were drafted or not. The logits of the
last visited text are at hand and draft the next steps, so a rejection costs no pass.

For example, let the rule fill one place per step, let the drafted steps fill the places
5, 2 and 7 (ranks 1, 2 and 3), and let the table have four texts, each with the drafted
tokens at its places:

    text 0: none    text 1: 5    text 2: 5, 7    text 3: 5, 2, 7

Suppose that the rule at text 0 fills place 5 with the drafted token. Then the walk goes
on to text 1. Suppose that the rule there fills place 7 with the drafted token. Then the
walk goes on to text 2. If the rule at text 2 fills place 4, no text of the pass has the
places 4, 5 and 7, so the walk ends. The round has taken three steps, at 5, 7 and 4, by
one pass. A rule that fills several places per step goes from text to text in the same
way: if it fills 5 and 7 at text 0, the walk goes from text 0 to text 2.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.info import Counts, Exactness, add
from cspd_jax.masked import passes
from cspd_jax.masked.canvas import Canvas, Window, fill, is_masked, window_at
from cspd_jax.masked.rule import candidates, drawn_from, scores, taken
from cspd_jax.masked.sets import MoveSets
from cspd_jax.masked.stepwise import count_calls

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Speculation:
    """The texts that a pass reads, and the most drafts that a round accepts.

    sets: the table of R texts (static). A text has up to D of the K drafted steps. They
        fill their places with one of the T most probable tokens.
    gamma: [B] the most drafted steps that an accepted text has.
    """

    sets: MoveSets = dataclasses.field(metadata={"static": True})
    gamma: Array

    @property
    def depth(self) -> int:
        """D, the most drafted steps that a text has; at least 1."""
        return max(1, int(self.sets.sizes.max()))

    @property
    def claim(self) -> Exactness:
        """The claim that the text equals the text of stepwise decoding, and the
        reason."""
        return Exactness(
            True, "every step, place and token, is the one that stepwise decoding takes"
        )

    def width(self, canvas: Canvas) -> int:
        """Returns W, the number of places that a pass gives logits for.

        A round takes up to K + 1 steps and drafts K more. If the model sees the whole
        text, the window has room for them, unless they fill more places than
        `per_step`. The first open place can be the last one of its block: with K = 4,
        one place per step and blocks of 8, W is (1 + 1) * 8 = 16.

        If blocks are stored, the window is all that a pass reads, of every text. So it
        has room for the steps and for half of the next drafts; drafts end where it
        ends. Its first block can be finished: W is (1 + 1) * 8 = 16 again. W is not
        longer than the text.
        """
        drafts = self.sets.ranks
        per_step = canvas.options.per_step
        if block := canvas.network.config.block:
            places = (drafts + drafts // 2 + 1) * per_step
            most = canvas.base.shape[1]
        else:
            places = (2 * drafts + 1) * per_step - 1
            block = canvas.block
            most = canvas.places
        return min(1 + -(-places // block), -(-most // block)) * block

    def agrees(self, texts: Array, after: Array) -> Array:
        """Returns [B, R], which of the texts [B, R, G] of a pass are the text `after`
        [B, G] that the rule writes."""
        return jnp.all(texts == after[:, None], axis=-1)

    def begin(self, canvas: Canvas) -> MaskedState:
        """Returns the state after a first round, which reads a single text."""
        rows = len(canvas.start)
        by_row = jnp.zeros(rows, jnp.int32)
        by_place = jnp.zeros((rows, canvas.places), jnp.int32)
        by_position = jnp.zeros((rows, self.depth), jnp.int32)
        text = canvas.empty()
        tokens = jnp.zeros((*text.shape, self.sets.tokens), jnp.int32)
        state = MaskedState(
            text=text,
            step=by_row,
            moves=Moves(by_place, tokens),
            stored=passes.begin(canvas),
            steps=by_place,
            rounds=by_place,
            counts=Counts(
                by_row, by_position, by_position, by_row, count_calls(canvas, 0, 0)
            ),
        )
        return run_round(canvas, self, state, text[:, None])

    def unfinished(self, canvas: Canvas, state: MaskedState) -> Array:
        """Returns [B], whether each row still has places to fill."""
        return jnp.any(state.text == canvas.mask_id, axis=1)

    def advance(self, canvas: Canvas, state: MaskedState) -> MaskedState:
        """Takes one round, and adds its counts to the state's counts."""
        texts = texts_after(self.sets, state.text, state.moves)
        return run_round(canvas, self, state, texts)


class Moves(NamedTuple):
    """The drafted steps of each row.

    rank: [B, G] the number of the drafted step, from 1 to K, that fills each place; 0
        for a place that no drafted step fills.
    tokens: [B, G, T] the token of the step, then the next most probable tokens.
    """

    rank: Array
    tokens: Array


class MaskedState(NamedTuple):
    """The state that a round takes and returns.

    text: [B, G] tokens, with the mask's id at places to be filled.
    step: [B] the number of steps taken.
    moves: the steps that are drafted after this text.
    stored: the stored blocks; None for a model that sees the whole text.
    steps: [B, G] the step at which each place was filled.
    rounds: [B, G] the round in which each place was filled.
    counts: the counts of all rounds so far.
    """

    text: Array
    step: Array
    moves: Moves
    stored: passes.Stored | None
    steps: Array
    rounds: Array
    counts: Counts


class Walk(NamedTuple):
    """The walk of each row over the texts of a pass.

    last: [B] the number of the last text that was visited.
    going_on: [B] whether the last step led to that text. Otherwise the walk has ended.
    text: [B, G] the text after the last step.
    step: [B] the number of steps taken, earlier rounds included.
    steps: [B, G] the step at which each place was filled.
    """

    last: Array
    going_on: Array
    text: Array
    step: Array
    steps: Array


def run_round(
    canvas: Canvas, speculation: Speculation, state: MaskedState, texts: Array
) -> MaskedState:
    """Makes one pass over texts [B, R, G], walks over them, and drafts."""
    reached = None if state.stored is None else state.stored.end
    window = window_at(canvas, state.text, speculation.width(canvas), reached)
    logits, fresh = passes.read(canvas, window, texts, state.stored)
    walk, tested, accepted = walk_over(
        canvas, speculation, window, state, texts, logits
    )
    seen, of_seen = (a[jnp.arange(len(texts)), walk.last] for a in (texts, logits))
    happened = Counts(
        rounds=speculation.unfinished(canvas, state).astype(jnp.int32),
        tested=tested,
        accepted=accepted,
        truncated=jnp.zeros_like(state.step),  # the walk is exact
        calls=count_calls(canvas, 1, canvas.rows * texts.shape[1]),
    )
    return MaskedState(
        text=walk.text,
        step=walk.step,
        moves=draft(canvas, speculation, window, walk.text, of_seen, walk.step),
        stored=passes.keep(
            canvas, window, state.stored, fresh, walk.last, seen, walk.text
        ),
        steps=walk.steps,
        rounds=jnp.where(
            walk.text == state.text, state.rounds, state.counts.rounds[:, None]
        ),
        counts=add(state.counts, happened),
    )


def walk_over(
    canvas: Canvas,
    speculation: Speculation,
    window: Window,
    state: MaskedState,
    texts: Array,
    logits: Array,
) -> tuple[Walk, Array, Array]:
    """Walks over texts [B, R, G] by their logits [B, R, W, V].

    Returns the walk, and two arrays [B, D] of 0 and 1. Entry d says whether the walk,
    after d steps to texts of the pass, was at a text to which the pass adds drafts, and
    whether it went on.

    A step has the noise of its own number, whatever the text before it.
    """
    rows = jnp.arange(len(texts))
    sizes = speculation.sets.sizes[: texts.shape[1]]
    allowed = jnp.asarray(sizes) <= speculation.gamma[:, None]

    def visit(walk: Walk, _) -> tuple[Walk, tuple[Array, Array]]:
        seen = texts[rows, walk.last]
        of_seen = logits[rows, walk.last]
        offered = candidates(canvas, of_seen, window.places, walk.step)
        masked = is_masked(canvas, window, seen) & walk.going_on[:, None]
        chosen = taken(canvas, offered, masked, window)
        stepped = jnp.any(chosen, axis=1)
        after = fill(seen, window.places, offered.tokens, chosen)
        agreed = speculation.agrees(texts, after) & allowed & stepped[:, None]
        going_on = jnp.any(agreed, axis=1)
        # The texts that have all tokens of this one, and more.
        same = texts == seen[:, None]
        more = jnp.all(same | (seen == canvas.mask_id)[:, None], axis=2) & allowed
        tested = jnp.any(more & ~jnp.all(same, axis=2), axis=1) & stepped
        next_walk = Walk(
            last=jnp.where(going_on, _first(agreed), walk.last),
            going_on=going_on,
            text=jnp.where(stepped[:, None], after, walk.text),
            step=walk.step + stepped,
            steps=fill(walk.steps, window.places, walk.step[:, None], chosen),
        )
        return next_walk, (tested, going_on)

    first = jnp.zeros_like(state.step)
    start = Walk(first, first == 0, state.text, state.step, state.steps)
    walk, flags = jax.lax.scan(visit, start, length=int(sizes.max()) + 1)
    # The last visit tests nothing, since no text has more drafts.
    by_position = ((0, 0), (0, speculation.depth))
    tested, accepted = (
        jnp.pad(a.T.astype(jnp.int32), by_position)[:, : speculation.depth]
        for a in flags
    )
    return walk, tested, accepted


def draft(
    canvas: Canvas,
    speculation: Speculation,
    window: Window,
    text: Array,
    logits: Array,
    step: Array,
) -> Moves:
    """Drafts the K steps that the rule takes one after the other if the logits [B, W,
    V] of text [B, G] do not change.

    For example, if the places 2, 5 and 7 are open in one block, with the confidences
    0.6, 0.9 and 0.3, and a step fills one place, then place 5 has rank 1, place 2 rank
    2 and place 7 rank 3.

    step: [B] the number of the first of these steps. Step k after it has the noise of
        step + k.
    """
    known = scores(canvas, logits)
    candidates_at = lambda k: drawn_from(canvas, known, window.places, step + k)
    # Without noise the candidates are the same at each step.
    always = candidates_at(0) if canvas.keys is None else None

    def one(masked: Array, k: Array) -> tuple[Array, tuple[Array, Array]]:
        offered = candidates_at(k) if always is None else always
        chosen = taken(canvas, offered, masked, window)
        return masked & ~chosen, (chosen, offered.tokens)

    ranks = jnp.arange(speculation.sets.ranks, dtype=jnp.int32)
    _, (chosen, tokens) = jax.lax.scan(one, is_masked(canvas, window, text), ranks)
    drafted = jnp.any(chosen, axis=0)
    into_text = lambda values: fill(
        jnp.zeros_like(text), window.places, values, drafted
    )
    by_number = [jnp.sum(jnp.where(chosen, tokens, 0), axis=0)]
    if speculation.sets.tokens > 1:
        best = jax.lax.top_k(known.clean, speculation.sets.tokens)[1]
        by_number += [best[..., i] for i in range(1, speculation.sets.tokens)]
    return Moves(
        into_text(jnp.argmax(chosen, axis=0) + 1),
        jnp.stack([into_text(values) for values in by_number], axis=-1),
    )


def _first(flags: Array) -> Array:
    """Returns [...], the index of the first true flag of flags [..., N]."""
    return jnp.argmax(flags, axis=-1).astype(jnp.int32)


def texts_after(sets: MoveSets, text: Array, moves: Moves) -> Array:
    """Returns the texts [B, R, G] that a pass reads: text [B, G] with the drafted steps
    of each set of the table.

    For example, let the drafted steps fill the places 5, 2 and 7 with the tokens 11, 12
    and 13. The set {(1, 0), (3, 0)} writes 11 at place 5 and 13 at place 7, and leaves
    place 2 masked.
    """
    # The number of the token that each text has at each place: [R, B, G].
    numbers = jnp.asarray(sets.members)[:, moves.rank]
    tokens = jnp.take_along_axis(
        moves.tokens[None], jnp.maximum(numbers, 0)[..., None], axis=-1
    )[..., 0]
    return jnp.where(numbers >= 0, tokens, text).swapaxes(0, 1)
