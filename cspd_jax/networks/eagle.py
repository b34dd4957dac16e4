"""A head in the form of EAGLE-3, which drafts from its target's hidden states.

The head predicts the token after the next. Place i reads token i + 1 and a state at
token i. For a token that the target has read, the state comes from the hidden states
that entered some of the target's layers. For a later token it is the state that the
head itself computed at place i - 1. One decoder layer reads both, attends to the places
before, and gives the logits of token i + 2.

The logits are over ids of the head's own, which are the most frequent ids of the
target. The head's parameter `ids` holds the target's id of each of them.
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

    layer: the head's one decoder layer, whose vocabulary is the head's own ids.
    entering: layers of the target, counted from 0. The head reads the hidden states
        that enter them, side by side. If it is empty, the layers are the
        `published_layers` of the target to which the head is bound.
    state_width: the width of one such state, which is the target's width.
    target_ids: the number of the target's ids.
    own_embedding: whether the head has its own table of the target's ids; otherwise it
        reads the target's table.
    norm_before_residual: whether the state is normalised before the layer's result is
        added to it.
    """

    layer: LMConfig
    entering: tuple[int, ...]
    state_width: int
    target_ids: int
    own_embedding: bool = False
    norm_before_residual: bool = False

    @property
    def states(self) -> int:
        """The number of layers whose states the head reads."""
        return len(self.entering) or len(published_layers(6))

    def bound_to(self, depth: int | None) -> EagleConfig:
        """Returns the configuration for a target.

        depth: the number of the target's layers; None if the target does not say it.
        """
        if self.entering:
            return self
        if depth is None:
            raise UserError(
                "the head names no layers, and the target does not say how many it has"
            )
        return dataclasses.replace(self, entering=published_layers(depth))

    @property
    def ids(self) -> int:
        """The number of the head's own ids."""
        return self.layer.vocab_size


def published_layers(depth: int) -> tuple[int, int, int]:
    """Returns the low, middle and high layer that EAGLE-3's heads read in a target of
    `depth` layers.

    For example, published_layers(32) is (2, 16, 29).
    """
    low, high = (2, depth - 3) if depth >= 6 else (0, depth - 1)
    return low, depth // 2, high


class EagleLayer(nn.Module):
    """The three parts of the head: `joined` maps the target's states to one state,
    `next` maps this state and an embedding to the next state, and `logits` maps a state
    to logits."""

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
        """Maps the target's states [B, Q, S D'], side by side, to one state
        [B, Q, D]."""
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
        """Maps embeddings and states to the next states [B, Q, D]. Returns them and the
        updated slots.

        embedded, state: [B, Q, D] the embeddings and the states.
        positions: [B, Q] the position of each place.
        places: [B, Q] the slots that store the keys and values.
        """
        normed = self.state_norm(state)
        both = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        cos_sin = rotation(self.config.layer, positions, self.dtype)
        attended, slots = self.attention(both, cos_sin, visible, places, slots)
        x = (normed if self.config.norm_before_residual else state) + attended
        return x + self.mlp(self.mlp_norm(x)), slots

    def logits(self, state: Array) -> Array:
        """Maps states [..., D] to logits [..., ids]."""
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
    """The head as pure functions of explicit parameters, just as `LM` is a language
    model."""

    config: EagleConfig
    dtype: DTypeLike = jnp.float32
    by_outputs: bool = False

    @property
    def entering(self) -> tuple[int, ...]:
        """The layers of the target whose inputs, the hidden states, the head reads."""
        return self.config.entering

    def empty_cache(self, batch: int, max_len: int) -> Cache:
        return LM(self.config.layer, self.dtype).empty_cache(batch, max_len)

    def joined(self, params: ArrayTree, states: Array) -> Array:
        """Maps the target's states [B, Q, S D'], side by side, to one state
        [B, Q, D]."""
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
        """Returns the next states [B, Q, D], and the cache with the places in it.

        tokens: [B, Q] the target's ids. Each is the token after its place.
        state: [B, Q, D] the state at each place.
        positions: [B, Q] the position of each place.
        slots: [B, Q] the slots that store the places, by default the slots of their
            positions.
        visible: [B or 1, Q or 1, max_len] bool, the slots that each place sees, by
            default the slots up to its position.
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
        """Maps the target's ids [...] to embeddings [..., D]."""
        return jnp.take(params["embedding"], tokens, axis=0).astype(self.dtype)

    def logits(self, params: ArrayTree, state: Array) -> Array:
        """Maps states [..., D] to logits [..., ids]."""
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
    """Makes fresh float32 parameters. The head's ids are the first ids of the
    target."""
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
