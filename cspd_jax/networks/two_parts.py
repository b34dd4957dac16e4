"""What all image models are: a backbone that reads tokens and a head that denoises one, as pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TwoPartModel:
    """Parameters {"backbone": ..., "head": ...} in, arrays out; for what, see `image.protocol.TokenModel`.

    It is hashable and holds no arrays, so it is a static argument of jitted functions.

    parts: (config, dtype) -> the backbone, and the head.
    """

    config: Any
    dtype: Any = jnp.float32

    parts: ClassVar[tuple[Callable[..., nn.Module], Callable[..., nn.Module]]]

    @property
    def seq_len(self) -> int:
        return self.config.seq_len

    @property
    def token_dim(self) -> int:
        return self.config.token_dim

    @property
    def backbone(self) -> nn.Module:
        return self.parts[0](self.config, self.dtype)

    def embed_time(self, params, timesteps: Array) -> Array:
        return self._head(params, timesteps, method="embed_time")

    def modulate(self, params, time: Array, z: Array) -> tuple[Array, ...]:
        return self._head(params, time, z, method="modulate")

    def denoise(self, params, x: Array, modulations) -> Array:
        return self._head(params, x, modulations, method="denoise")

    def _backbone(self, params, *args, **kwargs):
        return self.backbone.apply({"params": params["backbone"]}, *args, **kwargs)

    def _head(self, params, *args, **kwargs):
        return self.parts[1](self.config, self.dtype).apply({"params": params["head"]}, *args, **kwargs)
