"""A network bound to a batch of images: its parameters, the orders of the tokens, and
the features that all network calls share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.diffusion.chain import Chains
from cspd_jax.diffusion.flow import FlowSchedule
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.known import Given
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.recipe import Batch, Recipe
from cspd_jax.keys import Purpose, chain_noise, initial_noise, purpose_keys, window_keys

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BoundModel:
    """A network with the values that stay the same during a generation, except that
    each round has keys of its own. B' is B, or 2B with guidance: first the conditional
    half, then the unconditional half.

    network: the network (static).
    params: the parameters, a pytree of arrays.
    recipe: how the images are made.
    keys: [B] the key of each image.
    order: [B', L] the positions of the tokens, in the order in which they are generated
        (the reveal order).
    class_embedding: [B', De] the embedding of each row's class, or of "no class".
    time: [T, ...] the features of the timesteps.
    noise: the same as in `Batch`.
    given: the known tokens, which come first in the order; None if there are none.
    """

    network: TokenModel = dataclasses.field(metadata={"static": True})
    params: ArrayTree
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
    def halves(self) -> int:
        """The number of rows that a network call has for each token: 2 with guidance,
        else 1."""
        return 1 + self.recipe.guided

    @property
    def steps(self) -> int:
        """T, the number of denoising steps."""
        return sampling_schedule(self.recipe.respacing).num_steps

    @property
    def dtype(self) -> jnp.dtype:
        return float_type(self.network)

    def chains(self, z: Array, scale: Array | float | None) -> Chains:
        """Returns the denoising chains of tokens with contexts z [R, D] ([2R, D] with
        guidance). Without guidance `scale` is ignored."""
        schedule = sampling_schedule(self.recipe.respacing)
        return Chains(
            self.network,
            self.params,
            self.time,
            z,
            coefficients(schedule, self.dtype),
            temperature=self.recipe.temperature,
            scale=scale if self.recipe.guided else None,
            final_noise=self.recipe.final_noise,
            known_variance=isinstance(schedule, FlowSchedule),
        )

    def chain_noise(self, positions: Array) -> Array:
        """Draws the noise [T + 1, R, d] of plain chains at `positions` [B, G], where R
        is B G."""
        if self.noise is None:
            noise = chain_noise(
                self.keys, positions, self.steps, self.network.token_dim
            )
        else:
            noise = jnp.take_along_axis(
                self.noise[:, : self.images], positions[None, :, :, None], axis=2
            )
        return noise.reshape(self.steps + 1, positions.size, -1).astype(self.dtype)

    def initial_noise(self, positions: Array) -> Array:
        """Draws x_T [R, d] of speculated chains at `positions` [B, G], where R is B
        G."""
        if self.noise is None:
            x = initial_noise(self.keys, positions, self.network.token_dim)
        else:
            x = jnp.take_along_axis(
                self.noise[-1, : self.images], positions[..., None], axis=1
            )
        return x.reshape(positions.size, -1).astype(self.dtype)

    def window_keys(self, positions: Array, keys: Array | None = None) -> Array:
        """Returns the keys [R] with which speculated chains draw everything after x_T.

        positions: [B, G] the positions of the tokens; R is B G.
        keys: [B] the keys of the images; None takes the keys of the bound model.
        """
        return window_keys(self.keys if keys is None else keys, positions).reshape(-1)


def bind(batch: Batch) -> BoundModel:
    """Draws the order of each image, and computes the features that all network calls
    share."""
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
        order = recipe.known.move_to_front(order)
        given = recipe.known.in_order(order, float_type(network))
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


def embed_time(network: TokenModel, params: ArrayTree, respacing: str) -> Array:
    return network.embed_time(
        params, jnp.asarray(sampling_schedule(respacing).timestep_map)
    )


def float_type(network: TokenModel) -> jnp.dtype:
    """Returns the type of tokens, noise and densities: float32, or the network's own
    type if that is more precise."""
    return jnp.promote_types(getattr(network, "dtype", jnp.float32), jnp.float32)


def by_position(tokens: Array, order: Array) -> Array:
    """Rearranges tokens from reveal order to the order of their positions. For example,
    the tokens a, b, c with the order 2, 0, 1 become b, c, a.

    tokens: [B, L, ...] the tokens in reveal order.
    order: [B, L] the position of each token.
    """
    return jax.vmap(lambda a, index: a[index])(tokens, jnp.argsort(order, axis=1))
