"""Drafts from the target's own states: a head that reads what entered some of the target's layers.

Place i of the head pairs the state at token i with token i + 1, and gives token i + 2. For tokens of the text
the state is the target's, known since its pass; for drafts it is what the head made of the place before.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp

from cspd_jax.errors import UserError, check_range, shown
from cspd_jax.networks.eagle_config import EagleConfig
from cspd_jax.networks.quantised import expand
from cspd_jax.text.checks import require
from cspd_jax.text.drafters import Drafter, Drafting, DraftRequest, Drafts, entering_of, one_by_one
from cspd_jax.text.prompts import Prompts
from cspd_jax.text.protocol import Model, bound
from cspd_jax.weights.checks import check_floats, check_parameters
from cspd_jax.weights.models import check_head_ids

Array = jax.Array
CONFIDENCE = 0.2  # in a token, below which a head drafts nothing more


class StatesHead(Protocol):
    """Pure functions of explicit parameters, which hold `ids` [V]: which of the target's ids each of its own
    is."""

    @property
    def entering(self) -> tuple[int, ...]:
        """The layers of the target whose states it reads."""

    def empty_cache(self, batch: int, max_len: int) -> Any:
        """A cache (any pytree) with one slot for each of max_len places of each row."""

    def joined(self, params: Any, states: Array) -> Array:
        """The target's states [B, Q, S D'] as one [B, Q, D]."""

    def apply(
        self,
        params: Any,
        tokens: Array,
        state: Array,
        positions: Array,
        cache: Any,
        *,
        slots: Array | None = None,
        visible: Array | None = None,
    ) -> tuple[Array, Any]:
        """The states [B, Q, D] after those given at places `positions` [B, Q], each with the token after it,
        tokens [B, Q]; and the cache. Padding and going back are as in a `LanguageModel`; slots and visible,
        for trees, as in a `TreeLanguageModel`."""

    def logits(self, params: Any, state: Array) -> Array:
        """States [..., D] -> [..., V]."""


class _Newest(NamedTuple):
    """What the next draft is made from.

    state: [B, D] the head's, at the place of the newest draft.
    cache: of the head.
    """

    state: Array
    cache: Any


@dataclasses.dataclass(frozen=True)
class HeadDrafter:
    """Drafts token by token with a head that reads the target's states.

    Between rounds its cache lacks at most the G + 1 places that the last round added, and what it has of
    drafts is not the target's. The first pass of a round therefore always reads the last G + 1 again.

    confidence: it drafts nothing more where it gives no token as much, unless a request says otherwise. A
        draft that is hardly ever right costs more than it saves; the default is about what a draft and its
        place in the target's pass cost, as a share of a pass.
    """

    head: StatesHead
    confidence: float = CONFIDENCE

    @property
    def entering(self) -> tuple[int, ...]:
        return self.head.entering

    def lacks(self, gamma: int) -> int:
        """How many of the last tokens its state may lack before a round with gamma drafts."""
        return gamma + 1

    def begin_with(self, params: Any, prompts: Prompts, max_len: int, states: Array) -> Any:
        cache = self.head.empty_cache(len(prompts.tokens), max_len)
        start = jnp.zeros(len(prompts.tokens), jnp.int32)
        return self.read_on(params, cache, prompts, start, prompts.tokens.shape[1], states)

    def read_on(self, params: Any, cache: Any, texts: Prompts, read: Array, count: int, states: Array) -> Any:
        """The cache after `count` more tokens of texts of which `read` [B] were known."""
        first = jnp.maximum(read - 1, 0)
        return self._see(params, cache, texts, first, count, states)[1]

    def draft(self, params: Any, cache: Any, request: DraftRequest) -> tuple[Drafts, Any]:
        count = request.max_gamma + 1
        seen, cache = self.see(params, cache, request, count)
        newest = _Newest(seen[:, -1], cache)
        confidence = jnp.asarray(self.confidence) if request.confidence is None else request.confidence
        wanted = jnp.where(request.length > 1, request.count, 0)
        request = request._replace(count=wanted, confidence=confidence)

        def further(newest: _Newest, token: Array, position: Array) -> tuple[Array, _Newest]:
            # The draft lies at `position`, its place is that of the token before it.
            place = jnp.where(position < request.tokens.shape[1], position - 1, request.tokens.shape[1])
            state, cache = self.head.apply(
                params, token[:, None], newest.state[:, None], place[:, None], newest.cache
            )
            return self.head.logits(params, state[:, 0]), _Newest(state[:, 0], cache)

        logits = self.head.logits(params, newest.state)
        drafts, newest = one_by_one(request, logits, newest, further, params["ids"])
        rows = drafts.rows + len(request.length) * (count - 2)
        return drafts._replace(rows=rows), newest.cache

    def see(self, params: Any, cache: Any, request: DraftRequest, count: int) -> tuple[Array, Any]:
        """The head's states at the last `count` places of the texts, and the cache with them."""
        assert request.states is not None
        texts, first = Prompts(request.tokens, request.length), request.length - 1 - count
        return self._see(params, cache, texts, first, count, request.states)

    def _see(
        self, params: Any, cache: Any, texts: Prompts, first: Array, count: int, states: Array
    ) -> tuple[Array, Any]:
        """The head's states at `count` places of texts from `first` [B] on; those that there are not yet, for
        lack of a token after them, are padding."""
        places = first[:, None] + jnp.arange(count)
        there = (places >= 0) & (places < texts.lengths[:, None] - 1)
        last = texts.tokens.shape[1] - 1
        index = jnp.clip(places, 0, max(last - 1, 0))
        tokens = jnp.take_along_axis(texts.tokens, jnp.minimum(index + 1, last), axis=1)
        known = jnp.take_along_axis(states, index[:, :, None], axis=1)
        places = jnp.where(there, places, states.shape[1])
        return self.head.apply(params, tokens, self.head.joined(params, known), places, cache)


def draft_from_states(head: Any, target: Model, confidence: float = CONFIDENCE) -> Drafting:
    """Makes a drafter of a head that reads the target's states, as `cspd_jax.load_head` returns it.

    confidence: as in `HeadDrafter`.
    """
    require(
        isinstance(confidence, float | int), f"confidence is {shown(confidence)}; it must be a number, as 0.2"
    )
    check_range("confidence", confidence, least=0, most=1)
    network: Any = getattr(head, "network", None)
    params: Any = getattr(head, "params", None)
    if type(head) is tuple and len(head) == 2:
        network, params = head
    is_head = isinstance(getattr(network, "config", None), EagleConfig)
    if not is_head or not isinstance(params, Mapping) or "ids" not in params:
        raise UserError(f"head is of type {type(head).__name__}; it must be what cspd_jax.load_head returns")
    _check_own(network, params)
    network, params = getattr(head, "for_decoding", (network, params))
    lm, of_target = bound(target)
    network = dataclasses.replace(network, config=network.config.bound_to(getattr(lm.config, "depth", None)))
    check_head(network.config, lm.config)
    if not network.config.own_embedding:
        params = {**params, "embedding": embedding_of(of_target, network.dtype)}
    return Drafting(cast(Drafter, HeadDrafter(network, confidence)), params)


def _check_own(network: Any, params: Any) -> None:
    """UserError for parameters that are not the head's; those by outputs were checked before they were."""
    where = "the parameters of the head"
    check_floats(where, network.config, {name: part for name, part in params.items() if name != "ids"})
    if not network.by_outputs:
        check_parameters(where, network.config, params)
    if not isinstance(params["ids"], jax.core.Tracer):
        check_head_ids("the head", network.config, params["ids"])


def embedding_of(params: Any, dtype: Any) -> Array:
    """The target's table of embeddings, which a head without its own reads."""
    try:
        return expand(params["embed"], dtype)["embedding"]
    except (KeyError, TypeError):
        raise UserError(
            "the head reads the target's table of embeddings, and the target's parameters have none called"
            " embed"
        ) from None


def check_head(head: EagleConfig, target: Any) -> None:
    """UserError unless a head can read the states of a target, both by their configurations."""
    depth, width = getattr(target, "depth", None), getattr(target, "width", None)
    if not target.causal:
        raise UserError("a head drafts for causal models, and the target is a masked-diffusion model")
    if head.target_ids not in (target.vocab_size, target.known_ids):
        raise UserError(
            f"the head is for a target of {head.target_ids} ids, and this one has {target.known_ids}"
        )
    if width is not None and head.state_width != width:
        raise UserError(f"the head reads states of {head.state_width} numbers, and the target's have {width}")
    if depth is not None and max(head.entering) > depth:
        raise UserError(
            f"the head reads what enters layer {max(head.entering)}, and the target has {depth} layers"
        )


def check_reads(drafter: Any, params: Any, target: Any) -> None:
    """UserError for a drafter that reads states which the network `target` does not have."""
    if not entering_of(drafter):
        return
    if params is None:
        raise UserError("a drafter that reads the target's states needs parameters; see draft_from_states")
    inner = getattr(drafter, "other", drafter)  # of look-up before another
    if isinstance(config := getattr(getattr(inner, "head", None), "config", None), EagleConfig):
        check_head(config, target.config)
    if "entering" not in inspect.signature(target.apply).parameters:
        raise UserError("the drafter reads the target's states, which its network does not tell")
