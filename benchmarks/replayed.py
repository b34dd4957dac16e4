"""A drafter of text for timing models whose weights are not at hand: right as often as it is told."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from cspd_jax.text import ModelDrafter


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A draft model that is run for its time, while each of its tokens is right with a given probability.

    Parameters: (the model's, right [B, N] tokens, use [B, N] whether to propose them).
    """

    inner: ModelDrafter

    def begin(self, params, prompts, max_len):
        return self.inner.begin(params[0], prompts, max_len)

    def draft(self, params, state, request):
        weights, right, use = params
        drafts, state = self.inner.draft(weights, state, request)
        at = request.length[:, None] + jnp.arange(request.max_gamma)
        take = lambda a: jnp.take_along_axis(a, jnp.minimum(at, a.shape[1] - 1), axis=1)
        wrong = (take(right) + 1 + drafts.tokens % 2) % request.num_ids  # so that the draft is not left out
        return drafts._replace(tokens=jnp.where(take(use), take(right), wrong)), state
