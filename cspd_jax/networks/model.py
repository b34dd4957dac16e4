"""A MAR model as the pure functions that decoders call: parameters in, arrays out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax.networks.config import MARConfig
from cspd_jax.networks.mar import Backbone, make_head
from cspd_jax.parts import in_parts

Array = jax.Array

# Attention scores of a layer that are in memory at once: of 218 sequences of MAR-B.
_SCORES = 2**28


@dataclasses.dataclass(frozen=True)
class MARModel:
    """Hashable and without arrays: a static argument of jitted functions. See `decoders.TokenModel`."""

    config: MARConfig
    dtype: Any = jnp.float32

    @property
    def seq_len(self) -> int:
        return self.config.seq_len

    @property
    def token_dim(self) -> int:
        return self.config.token_dim

    def embed_class(self, params, labels: Array, unconditional: Array) -> Array:
        return self._backbone(params, labels, unconditional, method="embed_class")

    def context(self, params, tokens, reveal, n_known, class_embedding, rows, *, bucket: int) -> Array:
        c = self.config
        scores = max(c.encoder_heads, c.decoder_heads) * (c.buffer_size + c.seq_len) ** 2
        some = functools.partial(self._backbone, params, bucket=bucket)
        return in_parts(some, _SCORES // scores, tokens, reveal, n_known, class_embedding, rows)

    def embed_time(self, params, timesteps: Array) -> Array:
        return self._head(params, timesteps, method="embed_time")

    def modulate(self, params, time: Array, z: Array) -> tuple[Array, ...]:
        return self._head(params, time, z, method="modulate")

    def denoise(self, params, x: Array, modulations) -> Array:
        return self._head(params, x, modulations, method="denoise")

    def _backbone(self, params, *args, **kwargs):
        return Backbone(self.config, self.dtype).apply({"params": params["backbone"]}, *args, **kwargs)

    def _head(self, params, *args, **kwargs):
        return make_head(self.config, self.dtype).apply({"params": params["head"]}, *args, **kwargs)
