"""NextStep-1: a language model that goes on from a text with the tokens of an image, and a flow head.

The sequence is the prompt's ids and then the image's tokens row by row. The hidden state of the element
before a token is what its chain depends on.

An image's class is its prompt. Prompts are bound to a model (`bind`) as one more parameter, a table of ids
whose last row is the unconditional prompt: so whatever asks for classes asks for prompts by their number.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.errors import UserError
from cspd_jax.networks.attention import Cache
from cspd_jax.networks.head import Head
from cspd_jax.networks.layers import LayerNorm, dense, take_rows
from cspd_jax.networks.lm import Transformer, empty_cache
from cspd_jax.networks.nextstep_config import NextStepConfig
from cspd_jax.networks.two_parts import TwoPartModel

Array = jax.Array
PROMPTS = "prompts"  # among the parameters, where there are any
PADDING = -1  # in place of an id, at the left of a prompt


def place_table(side: int, width: int) -> np.ndarray:
    """float32 [side^2, width]: of the column, and then of the row, sines and then cosines."""
    frequencies = 10_000.0 ** (-np.arange(width // 4) / (width // 4))
    rows, columns = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    angles = [places.reshape(-1, 1) * frequencies for places in (columns, rows)]
    parts = [f(angle) for angle in angles for f in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1).astype(np.float32)


class Backbone(nn.Module):
    config: NextStepConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.lm = Transformer(self.config.lm, self.dtype)
        self.image_in_projector = dense(self.config.lm.width, "image_in_projector", self.dtype)
        self.image_out_projector = dense(self.config.lm.width, "image_out_projector", self.dtype)

    def embed(self, tokens: Array, prompt: Array, elements: Array) -> Array:
        """The elements [B, Q] of the sequences of prompts [B, N] and tokens [B, L, C]: [B, Q, D]."""
        last = prompt.shape[1] - 1
        ids = jnp.take_along_axis(prompt, jnp.minimum(elements, last), axis=1)
        image = take_rows(tokens, jnp.maximum(elements - last - 1, 0)).astype(self.dtype)
        of_text, of_image = self.lm.embedded(jnp.maximum(ids, 0)), self.image_in_projector(image)
        return jnp.where((elements <= last)[:, :, None], of_text, of_image)

    def __call__(self, tokens: Array, prompt: Array, elements: Array, cache: Cache | None) -> tuple:
        """The hidden states [B, Q, D] at elements [B, Q], and the cache with them in it.

        Without a cache the elements must be the first ones, in order: they see each other alone.
        """
        places = elements.shape[1] if cache is None else cache.max_len
        shown = jnp.pad(prompt != PADDING, ((0, 0), (0, places)), constant_values=True)[:, :places]
        visible = (jnp.arange(places) <= elements[:, :, None]) & shown[:, None]
        return self.lm.hidden(self.embed(tokens, prompt, elements), elements, visible, cache)[:2]

    def context(self, hidden: Array, rows: Array) -> Array:
        """Hidden states [B, Q, D] of the elements before tokens `rows` [B, Q] -> z [B, Q, D]."""
        c = self.config
        if c.positions:
            hidden = hidden + jnp.asarray(place_table(c.position_side, c.lm.width), self.dtype)[rows]
        return self.image_out_projector(hidden)


def make_head(config: NextStepConfig, dtype=jnp.float32) -> Head:
    """MAR's, of times from 0 to 1 as they are."""
    return Head(config.token_dim, config.head_width, config.head_depth, dtype, velocity=True)


def full_forward(config: NextStepConfig, params, tokens: Array, prompt: Array, dtype=jnp.float32) -> Array:
    """z [B, L, D] of all tokens [B, L, C] of whole images, each from the prompt [B, N] and those before it.

    params: the backbone's.
    """
    batch, last = len(tokens), prompt.shape[1] - 1
    rows = jnp.broadcast_to(jnp.arange(config.seq_len), (batch, config.seq_len))
    elements = jnp.broadcast_to(jnp.arange(last + config.seq_len), (batch, last + config.seq_len))

    def forward(module: Backbone):
        hidden, _ = module(tokens, prompt, elements, None)
        return module.context(hidden[:, last:], rows)

    return nn.apply(forward, Backbone(config, dtype))({"params": params})


def init_params(config: NextStepConfig, key: Array) -> dict:
    """Fresh parameters {"backbone": ..., "head": ...}."""
    backbone_key, head_key = jax.random.split(key)
    token, start = jnp.zeros((1, 1, config.token_dim)), jnp.zeros((1, 1), int)

    def touch_everything(module: Backbone):
        hidden, _ = module(token, start, start, None)
        return module.lm.logits(hidden), module.context(hidden, start)

    backbone = Backbone(config).init(backbone_key, method=touch_everything)
    z = jnp.zeros((1, config.context_width))
    head = make_head(config).init(head_key, token[:, 0], jnp.zeros(1), z)
    return {"backbone": backbone["params"], "head": head["params"]}


def abstract_params(config: NextStepConfig):
    """Shapes and dtypes of the parameters, without allocating them. Prompts are none of them."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class NextStepModel(TwoPartModel):
    """A NextStep-1 model as pure functions: a `TokenModel` with a cache, for the order row by row."""

    config: NextStepConfig

    parts: ClassVar = (Backbone, make_head)

    @property
    def linear_guidance(self) -> str:
        return "linear-falling"

    def finish(self, x: Array) -> Array:
        """x [..., C], of mean 0 and variance 1 if the model normalises its tokens."""
        if not self.config.normalise:
            return x
        normalised: Any = LayerNorm(x.dtype, affine=False).apply({}, x)
        return normalised

    def embed_class(self, params, labels: Array, unconditional: Array) -> Array:
        """Numbers of prompts [B] -> their ids [B, N], with `PADDING` at the left."""
        if PROMPTS not in params:
            raise UserError("the model has no prompts; bind them first (cspd_jax.image.prompts.bind)")
        return params[PROMPTS][jnp.where(unconditional, self.config.prompts, labels)]

    def context(self, params, tokens, reveal, n_known, class_embedding, rows, *, bucket: int) -> Array:
        """rows: at most n_known; what comes later is not known to a causal model."""
        known = (jnp.arange(self.seq_len) < n_known[:, None])[:, :, None]
        z = full_forward(
            self.config, params["backbone"], jnp.where(known, tokens, 0), class_embedding, self.dtype
        )
        return take_rows(z, rows)

    def init_cache(self, params, reveal: Array, class_embedding: Array) -> Cache:
        """With the prompt in it, but for its last id, which is read with the first token."""
        batch, last = class_embedding.shape[0], class_embedding.shape[1] - 1
        cache = empty_cache(self.config.lm, batch, last + self.seq_len, self.dtype)
        if not last:
            return cache
        none = jnp.zeros((batch, 1, self.token_dim), self.dtype)
        elements = jnp.broadcast_to(jnp.arange(last), (batch, last))
        return self._backbone(params, none, class_embedding, elements, cache)[1]

    def extend(
        self, params, cache: Cache, tokens, reveal, n_known, class_embedding, rows, *, bucket: int
    ) -> tuple[Array, Cache]:
        """rows: consecutive; the token before the first of them is the newest that is not in the cache."""

        def forward(module: Backbone):
            elements = class_embedding.shape[1] - 1 + rows
            hidden, after = module(tokens, class_embedding, elements, cache)
            return module.context(hidden, rows), after

        return nn.apply(forward, self.backbone)({"params": params["backbone"]})
