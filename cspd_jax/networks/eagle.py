"""A head that drafts from its target's states, in the form of EAGLE-3.

It makes the token after the next. Place i is given what entered some of the target's
layers at token i, or, where the target has not been, what the head itself made of place
i - 1; and token i + 1. One decoder layer reads both, attends to the places before, and
gives logits of token i + 2 over ids of its own, the most frequent of the target's. Its
parameters `ids` say which of the target's ids each of them is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from chex import ArrayTree
from jax.typing import DTypeLike

from cspd_jax.check import UserError
from cspd_jax.networks.attention import Cache
from cspd_jax.networks.layers import Norm, described
from cspd_jax.networks.lm import LM, Attention, Head, LMConfig, Made, Mlp, rotation
from cspd_jax.networks.products import Dense

Array = jax.Array
_NORMAL = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """A drafting head in the form of EAGLE-3.

    layer: its one decoder layer, and how many ids it has of its own.
    entering: layers of the target, counted from 0; what enters them is read, side by
        side. Without any they are those of `published_layers`, for whatever target it
        is bound to.
    state_width: numbers of one such state, the target's width.
    target_ids: ids of the target.
    own_embedding: it has a table of the target's ids; otherwise it reads the target's.
    norm_before_residual: the state is normalised before it is added to what the layer
        makes of it.
    """

    layer: LMConfig
    entering: tuple[int, ...]
    state_width: int
    target_ids: int
    own_embedding: bool = False
    norm_before_residual: bool = False

    @property
    def states(self) -> int:
        """How many layers' states it reads."""
        return len(self.entering) or len(published_layers(6))

    def bound_to(self, depth: int | None) -> EagleConfig:
        """Returns the configuration for a target with this many layers; None is a
        target that does not say."""
        if self.entering:
            return self
        if depth is None:
            raise UserError(
                "the head names no layers, and the target does not say how many it has"
            )
        return dataclasses.replace(self, entering=published_layers(depth))

    @property
    def ids(self) -> int:
        """Of its own."""
        return self.layer.vocab_size


def published_layers(depth: int) -> tuple[int, int, int]:
    """Returns the low, middle and high layer of a target of `depth` layers that
    EAGLE-3's heads read."""
    low, high = (2, depth - 3) if depth >= 6 else (0, depth - 1)
    return low, depth // 2, high


class EagleLayer(nn.Module):
    """Maps in three parts the target's states to one, that and an embedding to the
    next, and it to logits."""

    config: EagleConfig
    dtype: DTypeLike = jnp.float32
    by_outputs: bool = False

    def setup(self):
        layer = self.config.layer
        norm = lambda: Norm(layer.norm, layer.norm_eps, self.dtype)
        self.join = Dense(layer.width, False, self.dtype, _NORMAL, self.by_outputs)
        self.embedding_norm = norm()
        self.state_norm = norm()
        self.mlp_norm = norm()
        self.norm = norm()
        self.attention = Attention(layer, self.dtype, self.by_outputs)
        self.mlp = Mlp(layer, self.dtype, self.by_outputs)
        self.head = Head(layer.vocab_size, self.dtype, self.by_outputs)

    def joined(self, states: Array) -> Array:
        """Maps the target's states [B, Q, S D'] to one [B, Q, D]."""
        return self.join(states)

    def next(
        self,
        embedded: Array,
        state: Array,
        positions: Array,
        visible: Array,
        places: Array,
        slots: tuple[Array, Array] | None,
    ) -> tuple[Array, ArrayTree]:
        """Maps embeddings and states [B, Q, D] to the states after them, and the
        updated slots, with them in `places` [B, Q]."""
        normed = self.state_norm(state)
        both = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        cos_sin = rotation(self.config.layer, positions, self.dtype)
        attended, slots = self.attention(both, cos_sin, visible, places, slots)
        x = (normed if self.config.norm_before_residual else state) + attended
        return x + self.mlp(self.mlp_norm(x)), slots

    def logits(self, state: Array) -> Array:
        """Maps states [..., D] to [..., ids]."""
        return self.head(self.norm(state))

    def __call__(
        self, states: Array, embedded: Array, positions: Array, visible: Array
    ) -> Array:
        state, _ = self.next(
            embedded, self.joined(states), positions, visible, positions, None
        )
        return self.logits(state)


@dataclasses.dataclass(frozen=True)
class Eagle:
    """The head as pure functions of explicit parameters, as `LM` is a language
    model."""

    config: EagleConfig
    dtype: DTypeLike = jnp.float32
    by_outputs: bool = False

    @property
    def entering(self) -> tuple[int, ...]:
        """The layers of the target whose states it reads."""
        return self.config.entering

    def empty_cache(self, batch: int, max_len: int) -> Cache:
        return LM(self.config.layer, self.dtype).empty_cache(batch, max_len)

    def joined(self, params: ArrayTree, states: Array) -> Array:
        """Maps the target's states [B, Q, S D'] to one [B, Q, D]."""
        return self._run(EagleLayer.joined, params, states)

    def apply(
        self,
        params: ArrayTree,
        tokens: Array,
        state: Array,
        positions: Array,
        cache: Cache,
        *,
        slots: Array | None = None,
        visible: Array | None = None,
    ) -> tuple[Array, Cache]:
        """Returns the states [B, Q, D] after those given, at positions [B, Q], and the
        cache with them in it.

        tokens: [B, Q] target's ids, each the one after its position.
        slots [B, Q]: where they are stored; without them, by their positions.
        visible [B or 1, Q, max_len] (bool): the slots that each sees; without it, those
            up to its position.
        """
        if visible is None:
            visible = cache.seen_from(positions)
        places = positions if slots is None else slots
        (kept,) = zip(*cache)
        embedded = self.embedded(params, tokens)
        state, kept = self._run(
            EagleLayer.next, params, embedded, state, positions, visible, places, kept
        )
        return state, Cache(*zip(kept))

    def embedded(self, params: ArrayTree, tokens: Array) -> Array:
        """Maps the target's ids [...] to [..., D]."""
        return jnp.take(params["embedding"], tokens, axis=0).astype(self.dtype)

    def logits(self, params: ArrayTree, state: Array) -> Array:
        """Maps states [..., D] to [..., ids]."""
        return self._run(EagleLayer.logits, params, state)

    def _run(
        self, function: Callable[..., Made], params: ArrayTree, *args: ArrayTree
    ) -> Made:
        own = {
            name: part
            for name, part in params.items()
            if name not in ("ids", "embedding")
        }
        layer = EagleLayer(self.config, self.dtype, self.by_outputs)
        return nn.apply(function, layer)({"params": own}, *args)


def init_params(config: EagleConfig, key: Array) -> dict:
    """Makes fresh float32 parameters, whose ids are the target's first ones."""
    width = config.layer.width
    states = jnp.zeros((1, 1, config.states * config.state_width))
    embedded = jnp.zeros((1, 1, width))
    positions = jnp.zeros((1, 1), jnp.int32)
    params = EagleLayer(config).init(
        key, states, embedded, positions, jnp.ones((1, 1, 1), bool)
    )["params"]
    params = {**params, "ids": jnp.arange(config.ids, dtype=jnp.int32)}
    if config.own_embedding:
        params["embedding"] = 0.02 * jax.random.normal(key, (config.target_ids, width))
    return params


abstract_params = described(init_params)
