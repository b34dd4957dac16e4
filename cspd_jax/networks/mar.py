"""The MAR backbone, a masked bidirectional transformer over image tokens.

All functions work in **reveal order**: the tokens of an image are stored in the order
in which they become known. So the known tokens are a prefix of length `n_known`. The
encoder runs on a static prefix of `bucket` >= n_known tokens, in which the unknown
tokens are hidden. Attention does not depend on the order of its inputs. Positions enter
through the learned embeddings, which are gathered by `order`.

For example, an image of 4 tokens with order = [2, 0, 3, 1] and n_known = 2 knows the
tokens at the positions 2 and 0. With a bucket of 3 the encoder also reads a place for
the token at position 3, and hides it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from cspd_jax._utils.loops import map_chunks
from cspd_jax.check import UserError
from cspd_jax.networks.config import SquareGrid, check_respacing
from cspd_jax.networks.head import Head
from cspd_jax.networks.layers import Block, LayerNorm, dense, described
from cspd_jax.networks.two_parts import TwoPartModel, fresh_params

Array = jax.Array
LATENT_SCALE = 0.2325  # MAR's tokens are the autoencoder's latents times this number


@dataclasses.dataclass(frozen=True)
class MARConfig(SquareGrid):
    """A MAR model: a masked bidirectional backbone and a small diffusion head.

    The defaults are the sizes of MAR-B at 256x256.

    seq_len: the number of tokens per image, which is a square number.
    token_dim: the number of values per token, channels * patch_size^2.
    num_classes: the number of classes on which an image can be conditioned.
    buffer_size: the number of extra tokens that carry the class.
    encoder_width, encoder_depth, encoder_heads: the sizes of the encoder.
    decoder_width, decoder_depth, decoder_heads: the sizes of the decoder.
    mlp_ratio: the hidden width of an MLP as a multiple of its transformer's width.
    head_depth, head_width: the sizes of the diffusion head.
    respacing: the denoising steps of sampling, see `diffusion.schedule.respace`.
    patch_size: the number of latents (or pixels) along one side of a token.
    vae_stride: the number of pixels per latent; 1 if tokens are patches of pixels.
    """

    seq_len: int = 256
    token_dim: int = 16
    num_classes: int = 1000
    buffer_size: int = 64
    encoder_width: int = 768
    encoder_depth: int = 12
    encoder_heads: int = 12
    decoder_width: int = 768
    decoder_depth: int = 12
    decoder_heads: int = 12
    mlp_ratio: float = 4.0
    head_depth: int = 6
    head_width: int = 1024
    respacing: str = "100"
    patch_size: int = 1
    vae_stride: int = 16

    def __post_init__(self):
        check_respacing(self.respacing, flow=False)
        self.check_grid()
        for name in ("encoder", "decoder"):
            width = getattr(self, f"{name}_width")
            heads = getattr(self, f"{name}_heads")
            if width % heads:
                raise UserError(
                    f"{name} width {width} is not divisible by its number of heads"
                    f" {heads}"
                )

    @property
    def context_width(self) -> int:
        """The number of values in each z."""
        return self.decoder_width


def _mar(
    width: int, depth: int, heads: int, head_depth: int, head_width: int
) -> MARConfig:
    return MARConfig(
        encoder_width=width,
        encoder_depth=depth,
        encoder_heads=heads,
        decoder_width=width,
        decoder_depth=depth,
        decoder_heads=heads,
        head_depth=head_depth,
        head_width=head_width,
    )


MAR_PRESETS = {
    "mar-base": _mar(768, 12, 12, 6, 1024),
    "mar-large": _mar(1024, 16, 16, 8, 1280),
    "mar-huge": _mar(1280, 20, 16, 12, 1536),
}


class Backbone(nn.Module):
    """The backbone of MAR: an encoder over the known tokens and a decoder over all
    tokens."""

    config: MARConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        dtype = self.dtype
        normal = nn.initializers.normal(0.02)
        self.class_emb = nn.Embed(
            c.num_classes, c.encoder_width, embedding_init=normal, name="class_emb"
        )
        total = c.buffer_size + c.seq_len
        self.fake_latent = self.param("fake_latent", normal, (1, c.encoder_width))
        self.mask_token = self.param("mask_token", normal, (1, 1, c.decoder_width))
        self.encoder_pos = self.param(
            "encoder_pos_embed_learned", normal, (1, total, c.encoder_width)
        )
        self.decoder_pos = self.param(
            "decoder_pos_embed_learned", normal, (1, total, c.decoder_width)
        )
        self.output_pos = self.param(
            "diffusion_pos_embed_learned", normal, (1, c.seq_len, c.decoder_width)
        )
        self.z_proj = dense(c.encoder_width, "z_proj", dtype)
        self.z_proj_ln = LayerNorm(dtype=dtype, name="z_proj_ln")
        self.encoder_blocks = [
            Block(c.encoder_heads, c.mlp_ratio, dtype, name=f"encoder_blocks_{i}")
            for i in range(c.encoder_depth)
        ]
        self.encoder_norm = LayerNorm(dtype=dtype, name="encoder_norm")
        self.decoder_embed = dense(c.decoder_width, "decoder_embed", dtype)
        self.decoder_blocks = [
            Block(c.decoder_heads, c.mlp_ratio, dtype, name=f"decoder_blocks_{i}")
            for i in range(c.decoder_depth)
        ]
        self.decoder_norm = LayerNorm(dtype=dtype, name="decoder_norm")

    def embed_class(self, labels: Array, unconditional: Array) -> Array:
        """Returns the class embeddings [B, De].

        labels: [B] the class of each row.
        unconditional: [B] whether a row gets the embedding of no class instead, which
            is MAR's "fake latent".
        """
        known = self.class_emb(jnp.where(unconditional, 0, labels))
        return jnp.where(unconditional[:, None], self.fake_latent, known)

    def encode(
        self, tokens: Array, order: Array, n_known: Array, class_embedding: Array
    ) -> Array:
        """Encodes the buffer and the first tokens in reveal order,
        [B, buffer + bucket, De]. The outputs from place buffer + n_known on are
        meaningless.

        tokens: [B, bucket, C] the first tokens.
        order: [B, bucket] the positions of these tokens.
        n_known: [B] the number of known tokens, at most the bucket.
        class_embedding: [B, De] the embedding of each row's class.
        """
        buffer = self.config.buffer_size
        bucket = order.shape[1]
        # Hidden keys get the weight 0, but 0 times NaN is NaN. So unknown tokens are
        # set to 0, because their values must not matter.
        tokens = jnp.where(
            (jnp.arange(bucket) < n_known[:, None])[:, :, None], tokens, 0
        )
        x = self.z_proj(tokens.astype(self.dtype)) + self._at(
            self.encoder_pos, buffer + order
        )
        start = class_embedding[:, None] + self.encoder_pos[:, :buffer]
        x = self.z_proj_ln(jnp.concatenate([start.astype(self.dtype), x], axis=1))
        visible = jnp.arange(buffer + bucket) < buffer + n_known[:, None]
        for block in self.encoder_blocks:
            x = block(x, visible)
        return self.encoder_norm(x)

    def decode(
        self, encoded: Array, order: Array, n_known: Array, rows: Array | None
    ) -> Array:
        """Returns z [B, Q, Dd] of the tokens at `rows`.

        encoded: [B, buffer + bucket, De] the output of `encode`.
        order: [B, L] the positions of all tokens.
        n_known: [B] the number of known tokens.
        rows: [B, Q] the places in reveal order whose z is returned; None for all. The
            last block computes no other places.
        """
        batch, length = order.shape
        buffer = self.config.buffer_size
        bucket = encoded.shape[1] - buffer
        x = self.decoder_embed(encoded)
        mask = jnp.broadcast_to(
            self.mask_token.astype(self.dtype), (batch, length, x.shape[-1])
        )
        known = (jnp.arange(bucket) < n_known[:, None])[:, :, None]
        tokens = jnp.where(known, x[:, buffer:], mask[:, :bucket])
        positions = self._at(self.decoder_pos, buffer + order)
        tokens = jnp.concatenate([tokens, mask[:, bucket:]], axis=1) + positions
        x = jnp.concatenate(
            [x[:, :buffer] + self.decoder_pos[:, :buffer].astype(self.dtype), tokens],
            axis=1,
        )
        if rows is None:
            rows = jnp.broadcast_to(jnp.arange(length), (batch, length))
        for block in self.decoder_blocks[:-1]:
            x = block(x)
        x = self.decoder_blocks[-1](x, rows=buffer + rows)
        return self.decoder_norm(x) + self._at(
            self.output_pos, jnp.take_along_axis(order, rows, axis=1)
        )

    def _at(self, table: Array, positions: Array) -> Array:
        return table[0].astype(self.dtype)[positions]

    def __call__(
        self,
        tokens: Array,
        order: Array,
        n_known: Array,
        class_embedding: Array,
        rows: Array | None = None,
        *,
        bucket: int,
    ) -> Array:
        """Returns z [B, Q, Dd] of the tokens at `rows`.

        tokens: [B, L, C] the tokens in reveal order.
        order: [B, L] the positions of the tokens.
        n_known: [B] the number of known tokens.
        class_embedding: [B, De] the embedding of each row's class.
        rows: [B, Q] places in reveal order; None for all.
        bucket: the number of tokens that the encoder reads, at least n_known.
        """
        encoded = self.encode(
            tokens[:, :bucket], order[:, :bucket], n_known, class_embedding
        )
        return self.decode(encoded, order, n_known, rows)


def make_head(config: MARConfig, dtype=jnp.float32) -> Head:
    """Makes the diffusion head of a MAR model."""
    return Head(config.token_dim, config.head_width, config.head_depth, dtype)


def init_params(config: MARConfig, key: Array) -> dict:
    """Makes fresh parameters {"backbone": ..., "head": ...} with MAR's
    initialisation."""
    tokens = jnp.zeros((1, config.seq_len, config.token_dim))
    order = jnp.arange(config.seq_len)[None]

    def touch_everything(module: Backbone):
        embedding = module.embed_class(jnp.zeros(1, int), jnp.zeros(1, bool))
        return module(tokens, order, jnp.ones(1, int), embedding, bucket=1)

    return fresh_params(
        Backbone(config), touch_everything, make_head(config), config, key
    )


abstract_params = described(init_params)


# The number of attention scores of a layer that may be in memory at once. MAR-B has
# this number for 218 sequences.
_SCORES = 2**28


@dataclasses.dataclass(frozen=True)
class MARModel(TwoPartModel):
    """A MAR model as pure functions of explicit parameters. See
    `image.protocol.TokenModel`."""

    config: MARConfig

    parts: ClassVar = (Backbone, make_head)

    def context(
        self, params, tokens, order, n_known, class_embedding, rows, *, bucket: int
    ) -> Array:
        c = self.config
        scores = (
            max(c.encoder_heads, c.decoder_heads) * (c.buffer_size + c.seq_len) ** 2
        )
        some = functools.partial(self._backbone, params, bucket=bucket)
        return map_chunks(
            some, _SCORES // scores, tokens, order, n_known, class_embedding, rows
        )
