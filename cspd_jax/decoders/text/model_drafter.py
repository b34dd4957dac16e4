"""Drafts from another language model, token by token, with a cache of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.decoders.text.drafter import Drafts, Wanted, among
from cspd_jax.decoders.text.randomness import choose, noise_at
from cspd_jax.decoders.text.sampling import fit, log_law
from cspd_jax.networks.lm import LM, Cache

Array = jax.Array


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
