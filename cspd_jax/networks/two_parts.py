"""The two parts of every image model, as pure functions: a backbone that reads tokens,
and a head that denoises one token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from cspd_jax.networks.layers import take_rows

Array = jax.Array


def fresh_params(
    backbone: nn.Module, read: Callable, head: nn.Module, config: Any, key: Array
) -> dict:
    """Makes parameters {"backbone": ..., "head": ...}.

    read: a method of the backbone that uses all of its parameters.
    """
    backbone_key, head_key = jax.random.split(key)
    x = jnp.zeros((1, config.token_dim))
    z = jnp.zeros((1, config.context_width))
    return {
        "backbone": backbone.init(backbone_key, method=read)["params"],
        "head": head.init(head_key, x, jnp.zeros(1), z)["params"],
    }


@dataclasses.dataclass(frozen=True)
class TwoPartModel:
    """An image model as pure functions of parameters {"backbone": ..., "head": ...}.
    See `image.protocol.TokenModel` for the functions.

    A model is hashable and holds no arrays, so that it can be a static argument of
    jitted functions.

    parts: two functions that map (config, dtype) to the backbone and to the head.
    """

    config: Any
    dtype: DTypeLike = jnp.float32

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

    def embed_class(self, params, labels: Array, unconditional: Array) -> Array:
        return self._backbone(params, labels, unconditional, method="embed_class")

    def embed_time(self, params, timesteps: Array) -> Array:
        return self._head(params, timesteps, method="embed_time")

    def modulate(self, params, time: Array, z: Array) -> tuple[Array, ...]:
        return self._head(params, time, z, method="modulate")

    def denoise(self, params, x: Array, modulations) -> Array:
        return self._head(params, x, modulations, method="denoise")

    def context_of_all(
        self, full_forward, params, tokens, n_known, class_embedding, rows
    ) -> Array:
        """Returns z [B, Q, D] of the tokens at `rows` of a causal model. Tokens from
        n_known on are replaced by zeros."""
        known = (jnp.arange(self.seq_len) < n_known[:, None])[:, :, None]
        tokens = jnp.where(known, tokens, 0)
        z = full_forward(
            self.config, params["backbone"], tokens, class_embedding, self.dtype
        )
        return take_rows(z, rows)

    def _backbone(self, params, *args, **kwargs):
        return self.backbone.apply({"params": params["backbone"]}, *args, **kwargs)

    def _head(self, params, *args, **kwargs):
        return self.parts[1](self.config, self.dtype).apply(
            {"params": params["head"]}, *args, **kwargs
        )
