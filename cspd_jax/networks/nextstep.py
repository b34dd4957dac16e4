"""NextStep-1: a language model that continues a text with the tokens of an image, and a
flow head.

The sequence consists of the prompt's ids and then of the image's tokens, row by row.
Each entry of the sequence is called an element. A token's chain depends on the hidden
state of the element before the token.

For example, the prompt a b c and the tokens x0 x1 are the elements 0 to 4. The chain of
x0 depends on the hidden state of element 2, and the chain of x1 on element 3.

An image's class is its prompt. `image.prompts.with_prompts` gives a model prompts as
one more parameter, a table of ids whose last row is the unconditional prompt. So code
that works with classes works with prompts, too: a class is the number of a prompt.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.check import UserError
from cspd_jax.networks.attention import Cache
from cspd_jax.networks.config import check_respacing
from cspd_jax.networks.head import Head
from cspd_jax.networks.layers import LayerNorm, dense, described, take_rows
from cspd_jax.networks.lm import LM, LMConfig, Transformer
from cspd_jax.networks.two_parts import TwoPartModel, fresh_params

Array = jax.Array
PROMPTS = "prompts"  # the name of the prompts among the parameters, if there are any
PADDING = -1  # stands for an id at the left of a shorter prompt


@dataclasses.dataclass(frozen=True)
class NextStepConfig:
    """A NextStep-1 model: a language model over text and the tokens of an image, and a
    flow head.

    lm: the language model.
    token_dim: the number of values per token, channels * patch_size^2.
    head_depth, head_width: the sizes of the flow head.
    rows, columns: the number of tokens along the height and along the width of an
        image.
    prompts: the number of prompts that are bound to the model as its classes; 0 in a
        checkpoint.
    positions: whether a table of places is added to the head's input.
    position_side: the number of tokens along a side of this table.
    normalise: whether tokens are normalised at the end of their chains.
    image_ids: the id after which an image begins.
    respacing: the steps of sampling, see `diffusion.flow`.
    patch_size: the number of latents along one side of a token.
    vae_stride: the number of pixels per latent.
    """

    lm: LMConfig
    token_dim: int = 64
    head_depth: int = 12
    head_width: int = 1536
    rows: int = 32
    columns: int = 32
    prompts: int = 0
    positions: bool = False
    position_side: int = 32
    normalise: bool = False
    image_ids: tuple[int, ...] = ()
    respacing: str = "flow-calls20"
    patch_size: int = 2
    vae_stride: int = 8

    def __post_init__(self):
        check_respacing(self.respacing, flow=True)
        if self.positions and self.seq_len > self.position_side**2:
            raise UserError(
                f"an image of {self.rows} x {self.columns} tokens is larger than the"
                f" model's table of {self.position_side}^2 places"
            )

    @property
    def seq_len(self) -> int:
        return self.rows * self.columns

    @property
    def num_classes(self) -> int:
        """The number of classes. Each class is a prompt."""
        return self.prompts

    @property
    def kv_heads(self) -> int:
        return self.lm.kv_heads

    @property
    def context_width(self) -> int:
        """The number of values in each z."""
        return self.lm.width

    @property
    def latent_channels(self) -> int:
        return self.token_dim // self.patch_size**2

    @property
    def latent_scale(self) -> float:
        """Tokens are latents times this factor, which is 1. The autoencoder itself
        applies the scale that its own file gives."""
        return 1.0

    @property
    def image_size(self) -> int:
        """The number of pixels along the longer side of the image."""
        return max(self.rows, self.columns) * self.patch_size * self.vae_stride


def place_table(side: int, width: int) -> np.ndarray:
    """Makes the table of places, [side^2, width]. The first half of an entry depends on
    the column of the place, and the second half on its row. Each half has sines and
    then cosines."""
    frequencies = 10_000.0 ** (-np.arange(width // 4) / (width // 4))
    rows, columns = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    angles = [places.reshape(-1, 1) * frequencies for places in (columns, rows)]
    parts = [f(angle) for angle in angles for f in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1).astype(np.float32)


class Backbone(nn.Module):
    """The backbone of NextStep-1: a language model with projections for the tokens of
    images."""

    config: NextStepConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.lm = Transformer(self.config.lm, self.dtype)
        self.image_in_projector = dense(
            self.config.lm.width, "image_in_projector", self.dtype
        )
        self.image_out_projector = dense(
            self.config.lm.width, "image_out_projector", self.dtype
        )

    def embed(self, tokens: Array, prompt: Array, elements: Array) -> Array:
        """Returns the embeddings [B, Q, D] of elements of the sequences.

        tokens: [B, L, C] the tokens of the images.
        prompt: [B, N] the ids of the prompts.
        elements: [B, Q] which elements are embedded.
        """
        last = prompt.shape[1] - 1
        ids = jnp.take_along_axis(prompt, jnp.minimum(elements, last), axis=1)
        image = take_rows(tokens, jnp.maximum(elements - last - 1, 0)).astype(
            self.dtype
        )
        of_text = self.lm.embedded(jnp.maximum(ids, 0))
        of_image = self.image_in_projector(image)
        return jnp.where((elements <= last)[:, :, None], of_text, of_image)

    def __call__(
        self, tokens: Array, prompt: Array, elements: Array, cache: Cache | None
    ) -> tuple:
        """Returns the hidden states [B, Q, D] of the elements, and the cache with the
        elements in it.

        tokens: [B, L, C] the tokens of the images.
        prompt: [B, N] the ids of the prompts.
        elements: [B, Q] which elements are read. Without a cache they must be the first
            ones, in order, because they see only each other.
        """
        places = elements.shape[1] if cache is None else cache.max_len
        shown = jnp.pad(prompt != PADDING, ((0, 0), (0, places)), constant_values=True)[
            :, :places
        ]
        visible = (jnp.arange(places) <= elements[:, :, None]) & shown[:, None]
        return self.lm.hidden(
            self.embed(tokens, prompt, elements), elements, visible, cache
        )[:2]

    def context(self, hidden: Array, rows: Array) -> Array:
        """Returns z [B, Q, D] of the tokens at `rows`.

        hidden: [B, Q, D] the hidden states of the elements before these tokens.
        rows: [B, Q] the places of the tokens in the image.
        """
        c = self.config
        if c.positions:
            hidden = (
                hidden
                + jnp.asarray(place_table(c.position_side, c.lm.width), self.dtype)[
                    rows
                ]
            )
        return self.image_out_projector(hidden)


def make_head(config: NextStepConfig, dtype=jnp.float32) -> Head:
    """Makes a head like MAR's that predicts velocities. Its times, from 0 to 1, are not
    scaled."""
    return Head(
        config.token_dim, config.head_width, config.head_depth, dtype, velocity=True
    )


def full_forward(
    config: NextStepConfig, params, tokens: Array, prompt: Array, dtype=jnp.float32
) -> Array:
    """Returns z [B, L, D] of all tokens of whole images. Each z depends on the prompt
    and on the tokens before its own.

    params: the parameters of the backbone.
    tokens: [B, L, C] the tokens of the images.
    prompt: [B, N] the ids of the prompts.
    """
    batch = len(tokens)
    last = prompt.shape[1] - 1
    rows = jnp.broadcast_to(jnp.arange(config.seq_len), (batch, config.seq_len))
    elements = jnp.broadcast_to(
        jnp.arange(last + config.seq_len), (batch, last + config.seq_len)
    )

    def forward(module: Backbone):
        hidden, _ = module(tokens, prompt, elements, None)
        return module.context(hidden[:, last:], rows)

    return nn.apply(forward, Backbone(config, dtype))({"params": params})


def init_params(config: NextStepConfig, key: Array) -> dict:
    """Makes fresh parameters {"backbone": ..., "head": ...}."""
    token = jnp.zeros((1, 1, config.token_dim))
    start = jnp.zeros((1, 1), int)

    def touch_everything(module: Backbone):
        hidden, _ = module(token, start, start, None)
        return module.lm.logits(hidden), module.context(hidden, start)

    return fresh_params(
        Backbone(config), touch_everything, make_head(config), config, key
    )


abstract_params = described(init_params)


@dataclasses.dataclass(frozen=True)
class NextStepModel(TwoPartModel):
    """A NextStep-1 model as pure functions of explicit parameters: a `TokenModel` with
    a cache, for tokens that are revealed row by row."""

    config: NextStepConfig

    parts: ClassVar = (Backbone, make_head)
    linear_guidance: ClassVar = "linear-falling"

    def finish(self, x: Array) -> Array:
        """Returns x [..., C] with mean 0 and variance 1 if the model normalises its
        tokens, and otherwise x itself."""
        if not self.config.normalise:
            return x
        norm = LayerNorm(x.dtype, affine=False)
        return nn.apply(lambda norm: norm(x), norm)({})

    def embed_class(self, params, labels: Array, unconditional: Array) -> Array:
        """Returns the ids [B, N] of prompts, with `PADDING` at the left.

        labels: [B] the numbers of the prompts.
        unconditional: [B] whether a row gets the unconditional prompt instead.
        """
        if PROMPTS not in params:
            raise UserError(
                "the model has no prompts; bind them first"
                " (cspd_jax.image.prompts.with_prompts)"
            )
        return params[PROMPTS][jnp.where(unconditional, self.config.prompts, labels)]

    def context(
        self, params, tokens, order, n_known, class_embedding, rows, *, bucket: int
    ) -> Array:
        """Does what `TokenModel.context` does, for rows that are at most n_known."""
        return self.context_of_all(
            full_forward, params, tokens, n_known, class_embedding, rows
        )

    def init_cache(self, params, order: Array, class_embedding: Array) -> Cache:
        """Makes a cache with all ids of the prompt but the last, which is read with the
        first token."""
        batch = class_embedding.shape[0]
        last = class_embedding.shape[1] - 1
        cache = LM(self.config.lm, self.dtype).empty_cache(batch, last + self.seq_len)
        if not last:
            return cache
        none = jnp.zeros((batch, 1, self.token_dim), self.dtype)
        elements = jnp.broadcast_to(jnp.arange(last), (batch, last))
        return self._backbone(params, none, class_embedding, elements, cache)[1]

    def extend(
        self,
        params,
        cache: Cache,
        tokens,
        order,
        n_known,
        class_embedding,
        rows,
        *,
        bucket: int,
    ) -> tuple[Array, Cache]:
        """Does what `CachedTokenModel.extend` does, for consecutive rows. The token
        before the first row is the newest token that is not in the cache yet."""

        def forward(module: Backbone):
            elements = class_embedding.shape[1] - 1 + rows
            hidden, after = module(tokens, class_embedding, elements, cache)
            return module.context(hidden, rows), after

        return nn.apply(forward, self.backbone)({"params": params["backbone"]})
