"""A critic of patches (PatchGAN): images -> how real each patch of them looks. Used in training only."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from cspd_jax.networks.autoencoder import GroupNorm

Array = jax.Array
_HALVINGS = 2  # a patch is about 22 pixels wide


class Critic(nn.Module):
    """[N, H, W, C] in [-1, 1] -> [N, h, w]; above 0 is real.

    width: channels of the first layer, a multiple of 4.
    """

    width: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images: Array) -> Array:
        x = images.astype(self.dtype)
        for i in range(_HALVINGS):
            x = nn.Conv(self.width * 2**i, (4, 4), (2, 2), 1, dtype=self.dtype, name=f"halve_{i}")(x)
            if i:
                x = GroupNorm(self.width // 4, self.dtype, name=f"norm_{i}")(x)
            x = nn.leaky_relu(x, 0.2)
        x = nn.Conv(self.width * 2**_HALVINGS, (4, 4), padding=1, dtype=self.dtype, name="widen")(x)
        x = nn.leaky_relu(GroupNorm(self.width // 4, self.dtype, name="norm_widen")(x), 0.2)
        x = nn.Conv(1, (4, 4), padding=1, dtype=self.dtype, name="judge")(x)
        return x[..., 0].astype(jnp.promote_types(self.dtype, jnp.float32))
