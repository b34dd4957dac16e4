"""A network bound to a batch of images: its parameters, the orders, and what all of its
calls share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.chain import Chains
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.chain import ChainRandomness
from cspd_jax.image.known import Given, in_order, known_first
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.recipe import Batch, Recipe
from cspd_jax.keys import Purpose, chain_ends, chain_noise, purpose_keys, window_keys

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BoundModel:
    """A network with what stays the same during a generation. B' is B, or 2B with
    guidance, the conditional half first.

    network: static.
    params: pytree of arrays.
    recipe: how images are made.
    keys: [B]
    order: [B', L] positions in the order in which they are generated.
    class_embedding: [B', De]
    time: [T, ...] features of the timesteps.
    noise: as of `Batch`.
    given: known tokens, with which the order begins; None where nothing is.
    """

    network: TokenModel = dataclasses.field(metadata={"static": True})
    params: Any
    recipe: Recipe
    keys: Array
    order: Array
    class_embedding: Array
    time: Array
    noise: Array | None
    given: Given | None = None

    @property
    def images(self) -> int:
        return self.keys.shape[0]

    @property
    def steps(self) -> int:
        """T"""
        return sampling_schedule(self.recipe.respacing).num_steps

    @property
    def dtype(self) -> Any:
        return float_type(self.network)

    def chains(self, z: Array, scale: Array | float | None, **more: Any) -> Chains:
        """Returns the chains of tokens with contexts z [R, D], guided by `scale` if
        there is guidance."""
        c = coefficients(sampling_schedule(self.recipe.respacing), self.dtype)
        given = {
            "temperature": self.recipe.temperature,
            "final_noise": self.recipe.final_noise,
            **more,
        }
        scale = scale if self.recipe.guided else None
        return Chains(self.network, self.params, self.time, z, c, scale=scale, **given)

    def chain_noise(self, positions: Array) -> Array:
        """Draws noise [T + 1, R, d] of the chains at `positions` [B, G], R = B G."""
        if self.noise is None:
            noise = chain_noise(
                self.keys, positions, self.steps, self.network.token_dim
            )
        else:
            noise = jnp.take_along_axis(
                self.noise[:, : self.images], positions[None, :, :, None], axis=2
            )
        return noise.reshape(self.steps + 1, positions.size, -1).astype(self.dtype)

    def chain_randomness(
        self, positions: Array, keys: Array | None = None
    ) -> ChainRandomness:
        """Draws what speculation along the chains needs. Of injected noise it uses x_T
        alone. keys: [B] in place of `self.keys`, but for x_T."""
        x = chain_ends(self.keys, positions, self.network.token_dim)
        if self.noise is not None:
            x = jnp.take_along_axis(
                self.noise[-1, : self.images], positions[..., None], axis=1
            )
        own = window_keys(self.keys if keys is None else keys, positions).reshape(-1)
        return ChainRandomness(x.reshape(positions.size, -1).astype(self.dtype), own)


def bind(batch: Batch) -> BoundModel:
    """Draws the orders and prepares what all calls share."""
    network = batch.network
    recipe = batch.recipe
    labels = batch.labels
    order = batch.order
    if order is None:
        order = jax.vmap(recipe.order.order, (0, None))(
            purpose_keys(batch.keys, Purpose.ORDER), network.seq_len
        )
    given = None
    unconditional = labels < 0
    if recipe.known is not None:
        order = known_first(order, recipe.known.mask)
        given = in_order(recipe.known, order, float_type(network))
    if recipe.guided:
        labels = jnp.tile(labels, 2)
        order = jnp.tile(order, (2, 1))
        unconditional = jnp.concatenate([unconditional, jnp.ones_like(unconditional)])
    return BoundModel(
        network=network,
        params=batch.params,
        recipe=recipe,
        keys=batch.keys,
        order=order,
        class_embedding=network.embed_class(batch.params, labels, unconditional),
        time=embed_time(network, batch.params, recipe.respacing),
        noise=batch.noise,
        given=given,
    )


def embed_time(network: TokenModel, params: Any, respacing: str) -> Array:
    return network.embed_time(
        params, jnp.asarray(sampling_schedule(respacing).timestep_map)
    )


def float_type(network: TokenModel) -> Any:
    """Returns what tokens, noise and densities are computed in: float32, unless the
    network has more."""
    return jnp.promote_types(getattr(network, "dtype", jnp.float32), jnp.float32)


def by_position(tokens: Array, order: Array) -> Array:
    """Returns what is in the order of generation, [B, L, ...], by position."""
    return jax.vmap(lambda a, index: a[index])(tokens, jnp.argsort(order, axis=1))
