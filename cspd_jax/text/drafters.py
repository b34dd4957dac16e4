"""What proposes tokens for the target to verify. Any hashable object with these two functions will do."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cspd_jax.networks.lm import LM, Cache
from cspd_jax.text.sampling import Sampling, choose, fit, log_law, noise_at

Array = jax.Array


class Wanted(NamedTuple):
    """What a drafter is asked for.

    tokens [B, max_len], of which the first `length` [B] are final; the drafts go on from there.
    count [B]: how many drafts at most; 0 for rows that need none.
    keys [B]: to be folded with a draft's position for its noise; None when greedy.
    sampling: the law to draw from. stop_ids [S]: nothing needs to be drafted after one of these.
    confidence: None, or a probability: a draft less probable than this should be the row's last.
    most, ids, laws (static): drafts per row, the size of laws, and whether log_q is needed.
    """

    tokens: Array
    length: Array
    count: Array
    keys: Array | None
    sampling: Sampling
    stop_ids: Array
    confidence: Array | None
    most: int
    ids: int
    laws: bool


class Drafts(NamedTuple):
    """tokens [B, most], of which the first `count` [B] are drafts.

    log_q [B, most, ids]: the law that each was drawn from, given those before it. None: each is certain given
    those before it (or laws were not needed).
    passes, rows []: of the network that made them, one after the other, and the tokens in them.

    Whether the row goes on after a draft may depend on that draft and those before it. A draft that was drawn
    is handed over: one that is held back because of what it is would bias the output.
    """

    tokens: Array
    count: Array
    log_q: Array | None
    passes: Array
    rows: Array


class Drafter(Protocol):
    """Pure functions of explicit parameters and of a state, which is any pytree."""

    def begin(self, params: Any, prompts: Array, lengths: Array, max_len: int) -> Any:
        """The state for prompts [B, P] of `lengths` [B] in texts of up to max_len tokens."""

    def draft(self, params: Any, state: Any, wanted: Wanted) -> tuple[Drafts, Any]:
        """Drafts, and the next state. A row's drafts depend on that row alone."""


def no_drafts(batch: int) -> Drafts:
    zero = jnp.int32(0)
    return Drafts(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32), None, zero, zero)


def among(tokens: Array, ids: Array) -> Array:
    """Which of the tokens [...] are one of `ids` [S]."""
    return jnp.any(tokens[..., None] == ids, axis=-1)


# Drafts from another language model, token by token, with a cache of its own.


def read_prompts(model: LM, params: Any, prompts: Array, lengths: Array, max_len: int) -> Cache:
    """The cache with all but the last token of each prompt: prompts [B, P] of `lengths` [B]."""
    batch, longest = prompts.shape
    cache = model.empty_cache(batch, max_len)
    if longest == 1:
        return cache
    steps = jnp.arange(longest - 1)
    positions = jnp.where(steps < lengths[:, None] - 1, steps, max_len)
    no_logits = jnp.zeros((batch, 1), jnp.int32)  # nobody looks at these, so nothing computes them
    return model.apply(params, prompts[:, :-1], positions, cache, rows=no_logits)[1]


class _Run(NamedTuple):
    """step []: drafts so far. tokens, count, log_q: as in `Drafts`."""

    step: Array
    tokens: Array
    count: Array
    log_q: Array | None
    cache: Cache


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """A smaller, quantised or distilled model over the target's ids; each may pad its vocabulary its own way.

    Between rounds its cache lacks the last one or two of the row's tokens: two when all drafts were
    accepted, for the last draft was never fed. So the first pass of a round always feeds the last two.
    """

    model: LM

    def begin(self, params: Any, prompts: Array, lengths: Array, max_len: int) -> Cache:
        return read_prompts(self.model, params, self._known(prompts), lengths, max_len)

    def draft(self, params: Any, cache: Cache, wanted: Wanted) -> tuple[Drafts, Cache]:
        batch, max_len = wanted.tokens.shape
        last_two = wanted.length[:, None] + jnp.arange(-2, 0)
        tokens = jnp.take_along_axis(wanted.tokens, jnp.maximum(last_two, 0), axis=1)
        second = jnp.ones((batch, 1), jnp.int32)
        logits, cache = self.model.apply(params, self._known(tokens), last_two, cache, rows=second)
        log_q = None
        if wanted.laws and not wanted.sampling.greedy:
            log_q = jnp.zeros((batch, wanted.most, wanted.ids), jnp.promote_types(logits.dtype, jnp.float32))
        nothing = jnp.zeros((batch, wanted.most), jnp.int32)
        run = self._extend(wanted, _Run(jnp.int32(0), nothing, wanted.count, log_q, cache), logits[:, 0])

        def body(run: _Run) -> _Run:
            newest = jax.lax.dynamic_slice_in_dim(run.tokens, run.step - 1, 1, axis=1)
            at = jnp.where(run.step < run.count, wanted.length + run.step - 1, max_len)
            logits, cache = self.model.apply(params, self._known(newest), at[:, None], run.cache)
            return self._extend(wanted, run._replace(cache=cache), logits[:, 0])

        run = jax.lax.while_loop(lambda run: run.step < jnp.max(run.count), body, run)
        rows = batch * (run.step + 1)
        return Drafts(run.tokens, run.count, run.log_q, run.step, rows), run.cache

    def _extend(self, wanted: Wanted, run: _Run, logits: Array) -> _Run:
        """The next draft of every row, from logits [B, V]."""
        logits = fit(logits, self.model.config.known_ids, wanted.ids)
        log_q = run.log_q
        if wanted.sampling.greedy:
            drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            law = log_law(logits, wanted.sampling)
            drawn = choose(law, noise_at(wanted.keys, wanted.length + run.step, wanted.ids, law.dtype))
            log_q = None if log_q is None else log_q.at[:, run.step].set(law)
        last = among(drawn, wanted.stop_ids)
        if wanted.confidence is not None:
            sure = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), drawn[:, None], axis=1)[:, 0]
            last |= sure < wanted.confidence
        tokens = run.tokens.at[:, run.step].set(jnp.where(run.step < run.count, drawn, 0))
        count = jnp.where(last, jnp.minimum(run.count, run.step + 1), run.count)
        return _Run(run.step + 1, tokens, count, log_q, run.cache)

    def _known(self, tokens: Array) -> Array:
        """Any id will do for one that the draft model does not have."""
        return jnp.minimum(tokens, self.model.vocab_size - 1)


# Drafts copied from the row's own text: what followed the last time it read as it does now.


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Looks for the last `longest` tokens earlier in the text, then for fewer of them, down to `shortest`; of
    several places it takes the most recent. A copy that reaches the end of the text goes on with itself.

    It has no parameters and no state, and is certain of its drafts; a row without a match has none.
    """

    longest: int = 3
    shortest: int = 1

    def begin(self, params: Any, prompts: Array, lengths: Array, max_len: int) -> None:
        return None

    def draft(self, params: Any, state: None, wanted: Wanted) -> tuple[Drafts, None]:
        start = self._continuation(wanted.tokens, wanted.length)
        period = wanted.length - start
        index = start[:, None] + jnp.arange(wanted.most) % jnp.maximum(period, 1)[:, None]
        tokens = jnp.take_along_axis(wanted.tokens, jnp.minimum(index, wanted.tokens.shape[1] - 1), axis=1)
        count = jnp.where(period > 0, wanted.count, 0)
        zero = jnp.int32(0)
        return Drafts(tokens, count, None, zero, zero), None

    def _continuation(self, tokens: Array, length: Array) -> Array:
        """Where the text goes on after the best match: [B]; `length` [B] if there is none."""
        ends = jnp.arange(tokens.shape[1])  # an index of the last token of a match
        run = ends < length[:, None] - 1
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.longest):
            ending = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - back, 0)[:, None], axis=1)
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
            run &= (shifted == ending) & (ends >= back)
            matched += run
        best = jnp.argmax(matched * tokens.shape[1] + ends * (matched > 0), axis=1)
        found = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0] >= self.shortest
        return jnp.where(found, best + 1, length)
