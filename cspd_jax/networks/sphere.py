"""SphereAR: a causal transformer over the tokens of an image, with a cache, and a flow
head.

The sequence consists of the class, as several tokens, and then of the image's tokens,
row by row. Each entry of the sequence is called an element. A token's chain depends on
the output at the element before the token. Positions are rotary, in two dimensions.

For example, with 16 class tokens the elements 0 to 15 are the class, and the first
token of the image is element 16. Its chain depends on the output at element 15.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from cspd_jax.check import UserError
from cspd_jax.networks.attention import Cache
from cspd_jax.networks.config import SquareGrid, check_respacing
from cspd_jax.networks.head import FlowHead
from cspd_jax.networks.layers import RMSNorm, dense, described, take_rows
from cspd_jax.networks.sphere_layers import Block, rotary_2d
from cspd_jax.networks.two_parts import TwoPartModel, fresh_params

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SphereConfig(SquareGrid):
    """A SphereAR model: a causal backbone, and a flow head whose blocks share
    modulations.

    The defaults are the sizes of SphereAR-B at 256x256.

    seq_len: the number of tokens per image, which is a square number.
    token_dim: the number of values per token.
    num_classes: the number of classes on which an image can be conditioned.
    class_tokens: the number of tokens that carry the class.
    width, depth, heads: the sizes of the backbone.
    head_depth, head_width: the sizes of the flow head.
    head_modulations: the number of modulations of the head. Consecutive blocks share
        one, and some modulations may be left over.
    respacing: the steps of sampling, see `diffusion.flow`.
    on_sphere: whether tokens are put on the sphere of radius sqrt(token_dim) at the end
        of their chains.
    patch_size: the number of latents (or pixels) along one side of a token.
    vae_stride: the number of pixels per latent; 1 if tokens are patches of pixels.
    """

    seq_len: int = 256
    token_dim: int = 16
    num_classes: int = 1000
    class_tokens: int = 16
    width: int = 768
    depth: int = 24
    heads: int = 12
    head_depth: int = 6
    head_width: int = 768
    head_modulations: int = 2
    respacing: str = "flow100"
    on_sphere: bool = True
    patch_size: int = 1
    vae_stride: int = 16

    def __post_init__(self):
        check_respacing(self.respacing, flow=True)
        self.check_grid()
        if self.width % (4 * self.heads):
            raise UserError(
                f"width {self.width} with {self.heads} heads: the width of a head must"
                " be a multiple of 4"
            )
        together = self.blocks_together
        if (
            self.head_depth % together
            or self.head_depth // together > self.head_modulations
        ):
            raise UserError(
                f"{self.head_depth} blocks of the head cannot share"
                f" {self.head_modulations} modulations"
            )

    @property
    def blocks_together(self) -> int:
        """The number of consecutive blocks of the head that share a modulation."""
        return max(1, self.head_depth // self.head_modulations)

    @property
    def context_width(self) -> int:
        """The number of values in each z."""
        return self.width


SPHERE_PRESETS = {
    "sphere-b": SphereConfig(),
    "sphere-l": SphereConfig(
        width=1024, depth=32, heads=16, head_depth=8, head_width=1024
    ),
    "sphere-h": SphereConfig(
        width=1280,
        depth=40,
        heads=20,
        head_depth=12,
        head_width=1280,
        head_modulations=3,
    ),
}


class Backbone(nn.Module):
    """The backbone of SphereAR: a causal transformer over the class and the tokens."""

    config: SphereConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        dtype = self.dtype
        normal = nn.initializers.normal(0.02)
        self.cls_embedding = nn.Embed(
            c.num_classes + 1, c.class_tokens * c.width, embedding_init=normal
        )
        self.proj_in = dense(c.width, "proj_in", dtype)
        self.emb_norm = RMSNorm(dtype, name="emb_norm")
        self.layers = [
            Block(c.heads, dtype, name=f"layers_{i}") for i in range(c.depth)
        ]
        self.norm = RMSNorm(dtype, name="norm")
        self.pos_for_diff = nn.Embed(c.seq_len, c.width, embedding_init=normal)

    def embed_class(self, labels: Array, unconditional: Array) -> Array:
        """Returns the embeddings [B, K D] of the class, side by side for the K class
        tokens.

        labels: [B] the class of each row.
        unconditional: [B] whether a row gets the embedding of no class instead.
        """
        return self.cls_embedding(
            jnp.where(unconditional, self.config.num_classes, labels)
        )

    def embed(self, tokens: Array, class_embedding: Array, elements: Array) -> Array:
        """Returns the embeddings [B, Q, D] of elements of the sequences.

        tokens: [B, L, C] the tokens of the images.
        class_embedding: [B, K D] the embeddings of the class tokens.
        elements: [B, Q] which elements are embedded.
        """
        c = self.config
        first = class_embedding.reshape(len(tokens), c.class_tokens, c.width)
        of_class = take_rows(first, jnp.minimum(elements, c.class_tokens - 1))
        of_image = self.proj_in(
            take_rows(tokens, jnp.maximum(elements - c.class_tokens, 0)).astype(
                self.dtype
            )
        )
        is_class = (elements < c.class_tokens)[:, :, None]
        return self.emb_norm(jnp.where(is_class, of_class.astype(self.dtype), of_image))

    def __call__(
        self,
        tokens: Array,
        class_embedding: Array,
        elements: Array,
        cache: Cache | None,
    ) -> tuple:
        """Returns the outputs [B, Q, D] at the elements, before the last norm, and the
        cache with the elements in it.

        tokens: [B, L, C] the tokens of the images.
        class_embedding: [B, K D] the embeddings of the class tokens.
        elements: [B, Q] which elements are read. They are consecutive, and the same for
            all rows. Without a cache they are the first ones.
        """
        c = self.config
        table = rotary_2d(c.grid, c.width // c.heads, c.class_tokens)
        cos, sin = (jnp.asarray(part)[elements] for part in table)
        x = self.embed(tokens, class_embedding, elements)
        slots: list[Any] = [None] * c.depth if cache is None else list(zip(*cache))
        places = elements.shape[1] if cache is None else cache.max_len
        visible = jnp.arange(places) <= elements[:, :, None]
        for i, layer in enumerate(self.layers):
            x, slots[i] = layer(x, (cos, sin), visible, elements[0, 0], slots[i])
        return x, None if cache is None else Cache(*zip(*slots))

    def context(self, x: Array, rows: Array) -> Array:
        """Returns z [B, Q, D] of the tokens at `rows`.

        x: [B, Q, D] the outputs at the elements before these tokens.
        rows: [B, Q] the places of the tokens in the image.
        """
        return self.norm(x) + self.pos_for_diff(rows).astype(self.dtype)


def make_head(config: SphereConfig, dtype=jnp.float32) -> FlowHead:
    """Makes the flow head of a SphereAR model."""
    sizes = config.token_dim, config.head_width, config.head_depth
    return FlowHead(*sizes, dtype, modulations=config.head_modulations)


def full_forward(
    config: SphereConfig,
    params,
    tokens: Array,
    class_embedding: Array,
    dtype=jnp.float32,
) -> Array:
    """Returns z [B, L, D] of all tokens of whole images, as in training. Each z depends
    on the class and on the tokens before its own.

    params: the parameters of the backbone.
    tokens: [B, L, C] the tokens of the images.
    class_embedding: [B, K D] the embeddings of the class tokens.
    """

    def counted(count: int) -> Array:
        return jnp.broadcast_to(jnp.arange(count), (len(tokens), count))

    elements = counted(config.class_tokens + config.seq_len - 1)
    rows = counted(config.seq_len)

    def forward(module: Backbone):
        x, _ = module(tokens, class_embedding, elements, None)
        return module.context(x[:, config.class_tokens - 1 :], rows)

    return nn.apply(forward, Backbone(config, dtype))({"params": params})


def init_params(config: SphereConfig, key: Array) -> dict:
    """Makes fresh parameters {"backbone": ..., "head": ...}."""
    tokens = jnp.zeros((1, config.seq_len, config.token_dim))

    def touch_everything(module: Backbone):
        embedding = module.embed_class(jnp.zeros(1, int), jnp.zeros(1, bool))
        start = jnp.zeros((1, 1), int)
        x, _ = module(tokens, embedding, start, None)
        return module.context(x, start)

    return fresh_params(
        Backbone(config), touch_everything, make_head(config), config, key
    )


abstract_params = described(init_params)


@dataclasses.dataclass(frozen=True)
class SphereModel(TwoPartModel):
    """A SphereAR model as pure functions of explicit parameters: a `TokenModel` with a
    cache, for tokens that are revealed row by row."""

    config: SphereConfig

    parts: ClassVar = (Backbone, make_head)
    linear_guidance: ClassVar = "linear-before"

    def finish(self, x: Array) -> Array:
        """Returns x [..., C] scaled to the length of a token, sqrt(token_dim), if
        tokens are on the sphere, and otherwise x itself."""
        if not self.config.on_sphere:
            return x
        length = jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x * (self.config.token_dim**0.5 / jnp.maximum(length, 1e-7))

    def context(
        self, params, tokens, order, n_known, class_embedding, rows, *, bucket: int
    ) -> Array:
        """Does what `TokenModel.context` does, for rows that are at most n_known."""
        return self.context_of_all(
            full_forward, params, tokens, n_known, class_embedding, rows
        )

    def init_cache(self, params, order: Array, class_embedding: Array) -> Cache:
        """Makes a cache with the class tokens in it."""
        c = self.config
        shape = (len(order), c.heads, c.class_tokens + c.seq_len, c.width // c.heads)
        empty = Cache(
            *(
                tuple(jnp.zeros(shape, self.dtype) for _ in range(c.depth))
                for _ in range(2)
            )
        )
        elements = jnp.broadcast_to(
            jnp.arange(c.class_tokens), (len(order), c.class_tokens)
        )
        none = jnp.zeros((len(order), 1, c.token_dim), self.dtype)
        return self._backbone(params, none, class_embedding, elements, empty)[1]

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
        """Does what `CachedTokenModel.extend` does, for rows that are consecutive and
        the same for all images. The token before the first row is the newest token that
        is not in the cache yet."""

        def forward(module: Backbone):
            x, after = module(
                tokens, class_embedding, self.config.class_tokens - 1 + rows, cache
            )
            return module.context(x, rows), after

        return nn.apply(forward, self.backbone)({"params": params["backbone"]})
