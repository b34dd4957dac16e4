"""Training of the S-VAE: images through a sample of their posterior, and back.

The loss is that of SphereAR but for its perceptual term, which needs the weights of another network: absolute
error, the KL of the posterior to the uniform law on the sphere, and what a critic of patches, trained
alongside by the hinge loss, says of the reconstruction.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from cspd_jax.errors import UserError
from cspd_jax.networks import sphere_vae
from cspd_jax.networks.critic import Critic
from cspd_jax.networks.sphere_config import SphereVAEConfig
from cspd_jax.training.config import VAETrainConfig
from cspd_jax.training.data.source import Source
from cspd_jax.training.image.trainer import grid
from cspd_jax.training.placement import Placement
from cspd_jax.training.run import RunOptions, Steps, run
from cspd_jax.training.step import Purpose, TrainState, descend, first_state, run_key

Array = jax.Array
_SHOWN = 16  # held-out images in a picture, each beside its reconstruction
_MEASURED = 256


class Terms(NamedTuple):
    """Of a batch.

    error: absolute error of the reconstruction.
    kl: of the posterior to the uniform law, by token.
    fooled: what the critic thinks of the reconstruction, negative: above 0 it finds it made.
    critic: the critic's own hinge loss.
    """

    error: Array
    kl: Array
    fooled: Array
    critic: Array


class VAEMetrics(NamedTuple):
    """Scalars of one step.

    loss: of the autoencoder, what the critic says included.
    error, kl, fooled, critic: see `Terms`.
    norm: global norm of the gradient before clipping, the critic's included.
    rate: learning rate.
    """

    loss: Array
    error: Array
    kl: Array
    fooled: Array
    critic: Array
    norm: Array
    rate: Array


@functools.partial(jax.jit, static_argnames="config")
def init_state(config: VAETrainConfig) -> TrainState:
    """The state of a run that starts from random weights: {"vae": ..., "critic": ...}."""
    of_vae, of_critic = jax.random.split(run_key(config.seed, Purpose.INIT))
    vae = sphere_vae.init_params(config.model, of_vae)
    images = jnp.zeros((1, *[_least(config.model)] * 2, config.model.image_channels))
    critic = Critic(config.critic_width).init(of_critic, images)["params"]
    return first_state(config, {"vae": vae, "critic": critic})


def _least(model: SphereVAEConfig) -> int:
    """Pixels along the side of an image that the critic can read."""
    return max(model.stride, 16)


def reconstruct(config: SphereVAEConfig, params: Any, images: Array, tokens: Callable, dtype=jnp.float32):
    """(images again, the posterior), by way of `tokens` of the posterior."""
    network, given = sphere_vae.SphereVAE(config, dtype), {"params": params}
    posterior = sphere_vae.posterior(network.apply(given, images, method="moments"))  # type: ignore[arg-type]
    made: Any = network.apply(given, tokens(posterior), method="decode")
    return made.astype(jnp.promote_types(dtype, jnp.float32)), posterior


def objective(
    config: VAETrainConfig, params: Any, images: Array, tokens: Callable, weight: Array | float
) -> tuple[Array, Terms]:
    """What is minimised, and its terms. The critic's loss reaches the critic alone, and the autoencoder's
    the autoencoder.

    images: [B, H, W, C]. tokens: draws from a posterior. weight: of what the critic says.
    """
    dtype = jnp.dtype(config.dtype)
    made, posterior = reconstruct(config.model, params["vae"], images, tokens, dtype)
    critic: Any = Critic(config.critic_width, dtype)
    judge = lambda params, images: critic.apply({"params": params}, images)
    terms = Terms(
        error=jnp.mean(jnp.abs(made - images)),
        kl=jnp.mean(sphere_vae.kl_divergence(posterior)),
        fooled=-jnp.mean(judge(jax.lax.stop_gradient(params["critic"]), made)),
        critic=hinge(judge(params["critic"], images), judge(params["critic"], jax.lax.stop_gradient(made))),
    )
    return autoencoder_loss(config, terms, weight) + terms.critic, terms


def autoencoder_loss(config: VAETrainConfig, terms: Terms, weight: Array | float) -> Array:
    return terms.error + config.kl_weight * terms.kl + weight * terms.fooled


def hinge(real: Array, made: Array) -> Array:
    """The loss of a critic that should be above 1 for what is real, and below -1 for what is made."""
    return 0.5 * (jnp.mean(jax.nn.relu(1 - real)) + jnp.mean(jax.nn.relu(1 + made)))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def vae_step(config: VAETrainConfig, state: TrainState, images: Array) -> tuple[TrainState, VAEMetrics]:
    """One optimiser step. images: [B, H, W, C]."""
    key = jax.random.fold_in(run_key(config.seed, Purpose.STEP), state.step)
    keys = jax.random.split(key, len(images))
    weight = jnp.where(state.step >= config.critic_from, config.critic_weight, 0.0)

    def loss_of(part):
        images, keys = part
        tokens = lambda posterior: jax.vmap(lambda key, p: sphere_vae.sample(p, key=key))(keys, posterior)
        return lambda params: objective(config, params, images, tokens, weight)

    state, update = descend(config, state, loss_of, (images, keys), (0, 0))
    terms: Terms = update.aux
    loss = autoencoder_loss(config, terms, weight)
    return state, VAEMetrics(loss, *terms, update.norm, update.rate)


def train(
    config: VAETrainConfig, source: Source, out: pathlib.Path, options: RunOptions = RunOptions()
) -> TrainState:
    """Trains in the folder `out` and returns the final state."""
    placement = options.placement_for(config)

    def steps(state: TrainState, end: int) -> Steps:
        return _steps(config, source, state, end, placement)

    return run(config, out, init_state(config), steps, options)


def _steps(
    config: VAETrainConfig, source: Source, state: TrainState, end: int, placement: Placement
) -> Iterator[tuple[int, TrainState, VAEMetrics]]:
    placed = jax.tree.map(lambda array: array.sharding, state)
    for step in range(int(state.step), end):
        images, _ = source.batch(step, config.batch, seed=config.seed)
        (images,) = placement.put_batch((images,))
        state, metrics = vae_step(config, state, images)
        state = jax.device_put(state, placed)
        jax.block_until_ready(metrics)
        yield step + 1, state, metrics


def check_fit(config: VAETrainConfig, source: Source) -> None:
    """UserError unless the autoencoder fits the data."""
    height, width, channels = source.shape
    model, least = config.model, _least(config.model)
    if height != width or height % model.stride or height < least:
        raise UserError(
            f"images of {height}x{width} pixels do not fit the autoencoder: they must be square, their side a"
            f" multiple of {model.stride} and at least {least}"
        )
    if channels != model.image_channels:
        raise UserError(f"the images have {channels} channels, the autoencoder {model.image_channels}")


@functools.partial(jax.jit, static_argnames="config")
def _means(config: SphereVAEConfig, params: Any, images: Array) -> tuple[Array, Array]:
    """Images from the directions of their posteriors, which nothing is drawn from; and the KL of each."""
    radius = config.latent_dim**0.5
    made, posterior = reconstruct(config, params, images, lambda posterior: radius * posterior.mu)
    return made, sphere_vae.kl_divergence(posterior)


def pictures(config: VAETrainConfig, source: Source, folder: pathlib.Path) -> Callable[[int, Any], None]:
    """An `on_sample` that writes `step_<number>.png` into `folder`: held-out images, each beside its
    reconstruction."""
    images, _ = source.batch(0, _SHOWN, seed=config.seed, split="held-out")

    def write(step: int, params: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        made, _ = _means(config.model, params["vae"], images)
        beside = np.stack([images, np.asarray(made)], axis=1).reshape(-1, *images.shape[1:])
        Image.fromarray(grid(beside, 8)).save(folder / f"step_{step:07d}.png")

    return write


def measure(config: VAETrainConfig, params: Any, source: Source) -> dict[str, Any]:
    """Of held-out images: the absolute error and the peak signal-to-noise ratio of what comes back of the
    directions of their posteriors, and nats per token."""
    images, _ = source.batch(0, _MEASURED, seed=config.seed, split="held-out")
    made, kl = _means(config.model, params, images)
    made = np.clip(np.asarray(made, np.float64), -1, 1)
    squared = ((made - images) ** 2).mean(axis=(1, 2, 3))
    return {
        "absolute_error": round(float(np.abs(made - images).mean()), 4),
        "psnr_db": round(float((10 * np.log10(4 / np.maximum(squared, 1e-12))).mean()), 2),
        "nats_per_token": round(float(kl.mean()), 3),
        "images": _MEASURED,
    }
