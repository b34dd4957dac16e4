"""Drafts from the target's own hidden states. A head reads the states that enter some
of the target's layers.

Place i of the head joins the state at token i with token i + 1, and predicts the token
after them. For tokens of the text this is the target's state, which the target computed
when it read the token. For drafts it is the state that the head computed at the place
before.

For example, with the text t0 t1 t2:

    place 1     reads the target's state at t1, and t2; predicts the first draft d3
    place 2     reads the head's state at place 1, and d3; predicts the draft d4
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.check import UserError, check_head_ids
from cspd_jax.language_models import Model, Prompts, bound
from cspd_jax.models import HeadModel
from cspd_jax.networks.eagle import Eagle, EagleConfig
from cspd_jax.networks.quantised import expand
from cspd_jax.text.drafters import (
    Drafter,
    Drafting,
    DraftRequest,
    Drafts,
    draft_in_turn,
)

Array = jax.Array
CONFIDENCE = 0.2  # a head drafts nothing more where all tokens are less probable


class _Newest(NamedTuple):
    """What the head needs for the next draft.

    state: [B, D] the head's state at its last place, which predicts the next draft.
    cache: the cache of the head.
    """

    state: Array
    cache: ArrayTree


@dataclasses.dataclass(frozen=True)
class HeadDrafter(Drafter):
    """Drafts token by token with a head that reads the target's states.

    Between rounds the head's cache lacks at most the G + 1 places that the last round
    added, and its entries for drafts were not made from the target's states. The first
    pass of a round therefore always reads the last G + 1 places again.

    confidence: a probability. The head drafts nothing more where it gives no token this
        probability, unless a request has its own confidence. A draft that is hardly
        ever accepted costs more than it saves. The default is about the cost of a
        draft, and of its place in the target's pass, as a share of the cost of a target
        pass.
    """

    head: Eagle
    confidence: float = CONFIDENCE

    @property
    def entering(self) -> tuple[int, ...]:
        return self.head.entering

    def begin(
        self, params: ArrayTree, prompts: Prompts, max_len: int, states: Array | None
    ) -> ArrayTree:
        cache = self.head.empty_cache(len(prompts.tokens), max_len)
        first = jnp.zeros(len(prompts.tokens), jnp.int32)
        return self._see(
            params, cache, prompts, first, prompts.tokens.shape[1], states
        )[1]

    def draft(
        self, params: ArrayTree, cache: ArrayTree, request: DraftRequest
    ) -> tuple[Drafts, ArrayTree]:
        count = request.max_gamma + 1
        seen, cache = self.see(params, cache, request, count)
        newest = _Newest(seen[:, -1], cache)
        confidence = (
            jnp.asarray(self.confidence)
            if request.confidence is None
            else request.confidence
        )
        wanted = jnp.where(request.length > 1, request.count, 0)
        request = request._replace(count=wanted, confidence=confidence)

        def further(
            newest: _Newest, token: Array, position: Array
        ) -> tuple[Array, _Newest]:
            # The place that reads the draft is the position of the token before it.
            place = jnp.where(
                position < request.tokens.shape[1],
                position - 1,
                request.tokens.shape[1],
            )
            state, cache = self.head.apply(
                params,
                token[:, None],
                newest.state[:, None],
                place[:, None],
                newest.cache,
            )
            return self.head.logits(params, state[:, 0]), _Newest(state[:, 0], cache)

        logits = self.head.logits(params, newest.state)
        drafts, newest = draft_in_turn(request, logits, newest, further, params["ids"])
        rows = drafts.rows + len(request.length) * (count - 2)
        return drafts._replace(rows=rows), newest.cache

    def see(
        self, params: ArrayTree, cache: ArrayTree, request: DraftRequest, count: int
    ) -> tuple[Array, ArrayTree]:
        """Reads the last `count` places of the texts. Returns the head's states
        [B, count, D] at these places, and the new cache."""
        texts = Prompts(request.tokens, request.length)
        first = request.length - 1 - count
        return self._see(params, cache, texts, first, count, request.states)

    def _see(
        self,
        params: ArrayTree,
        cache: ArrayTree,
        texts: Prompts,
        first: Array,
        count: int,
        states: Array | None,
    ) -> tuple[Array, ArrayTree]:
        """Reads `count` places of the texts. Returns the head's states [B, count, D] at
        these places, and the new cache.

        first: [B] the first place of each row. A place is padding if it is negative, or
            if its text has no token after it yet.
        states: [B, K, S D] the target's states.
        """
        assert states is not None
        places = first[:, None] + jnp.arange(count)
        there = (places >= 0) & (places < texts.lengths[:, None] - 1)
        last = texts.tokens.shape[1] - 1
        index = jnp.clip(places, 0, max(last - 1, 0))
        tokens = jnp.take_along_axis(texts.tokens, jnp.minimum(index + 1, last), axis=1)
        known = jnp.take_along_axis(states, index[:, :, None], axis=1)
        places = jnp.where(there, places, states.shape[1])
        return self.head.apply(
            params, tokens, self.head.joined(params, known), places, cache
        )


def draft_from_states(
    head: HeadModel | tuple[Eagle, ArrayTree],
    target: Model,
    confidence: float = CONFIDENCE,
) -> Drafting:
    """Makes a drafter from a head that reads the target's states.

    head: a head as `cspd_jax.load` returns it, or a pair (network, params).
    confidence: the same as in `HeadDrafter`.
    """
    network, params = head if isinstance(head, tuple) else head.for_decoding
    lm, of_target = bound(target)
    network = dataclasses.replace(
        network, config=network.config.bound_to(getattr(lm.config, "depth", None))
    )
    if not isinstance(params["ids"], jax.core.Tracer):
        check_head_ids("the head", network.config, params["ids"])
    check_head(network.config, lm.config)
    if not network.config.own_embedding:
        params = {
            **params,
            "embedding": expand(of_target["embed"], network.dtype)["embedding"],
        }
    return Drafting(HeadDrafter(network, confidence), params)


def check_head(head: EagleConfig, target: Any) -> None:
    """Raises a UserError unless a head can read the states of a target, judged by their
    configurations."""
    if not target.causal:
        raise UserError(
            "a head drafts for causal models, and the target is a masked-diffusion"
            " model"
        )
    if head.target_ids not in (target.vocab_size, target.known_ids):
        raise UserError(
            f"the head is for a target of {head.target_ids} ids, and this one has"
            f" {target.known_ids}"
        )
    if head.state_width != getattr(target, "width", head.state_width):
        raise UserError(
            f"the head reads states of {head.state_width} numbers, and the target's"
            f" have {target.width}"
        )
    if max(head.entering) > getattr(target, "depth", max(head.entering)):
        raise UserError(
            f"the head reads what enters layer {max(head.entering)}, and the target has"
            f" {target.depth} layers"
        )
