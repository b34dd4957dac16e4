"""Distillation: a small draft learns the target's Gaussians on states of the target's own process.

A draft path is accepted with probability min(1, p(X) / q(X)), so what matters is how far the draft's
distribution q of paths is from the target's p. Their divergence is a sum over the T transitions of sampling,

    KL(p || q) = sum_i E_{x ~ p} KL(p(. | x, z_p) || q(. | x, z_q)),

in closed form for Gaussians. It amounts to a weighted matching of eps and of the variance, in which small
noise levels weigh most. It is estimated at random steps i of the *sampling* schedule, at states x made by
noising a token of the data. The squared difference of eps is added, because the path KL alone says little
about high noise levels, where an untrained draft is far off.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.check import UserError, check_draft
from cspd_jax.diffusion.chain import Chains, path_log_density, sample_path
from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, coefficients, transition
from cspd_jax.diffusion.schedule import make_schedule, sampling_schedule
from cspd_jax.image.pixels import patchify
from cspd_jax.networks.config import MARConfig
from cspd_jax.networks.mar import MARModel
from cspd_jax.training.config import TrainConfig
from cspd_jax.training.data.source import Source
from cspd_jax.training.image import mar
from cspd_jax.training.image.mar import Bucket, Draws, kl_divergence, masked_mean, noised
from cspd_jax.training.run import Learning
from cspd_jax.training.state import Purpose, TrainState, descend, run_key, step_key

Array = jax.Array

_DRAWS, _STEPS = 0, 1  # what the key of a step is folded with
_CONTEXTS = 512  # held-out contexts on which acceptance is reported


def learning(config: TrainConfig, target: MARModel, target_params: Any, source: Source) -> Learning:
    """Returns how a draft learns the target's Gaussians on contexts from a source."""
    ranges = buckets(config)

    def step(number: int, state: TrainState, batch: Any) -> tuple[TrainState, Array]:
        known = n_known(config, number)
        bucket, (tokens, labels, *_) = mar.find_bucket(ranges, known), batch
        return distill_step(config, target, bucket, target_params, state, tokens, labels, np.int32(known))

    return Learning(mar.learning(config, source).batch, step)


def buckets(config: TrainConfig) -> tuple[Bucket, ...]:
    """Returns ranges of all numbers of known tokens: contexts of every length are equally frequent, as in
    generation."""
    length = config.model.seq_len
    edges = [round(length * i / config.buckets) for i in range(config.buckets + 1)]
    return tuple(Bucket(a, b - 1) for a, b in itertools.pairwise(edges) if b > a)


def n_known(config: TrainConfig, step: int) -> int:
    """Draws the number of tokens shown in step `step`."""
    random = np.random.default_rng([int(Purpose.MASK), config.seed, step])
    return int(random.integers(config.model.seq_len))


def check_pair(draft: MARConfig, target: Any) -> None:
    """Raises UserError unless the draft can be distilled from the target: it fits, with the same schedule."""
    check_draft(target, draft)
    if draft.respacing != target.respacing:
        raise UserError(
            f"the draft's respacing is {draft.respacing}, the target's is {target.respacing};"
            " they must be equal"
        )


@functools.partial(jax.jit, static_argnames=("config", "target", "bucket"), donate_argnames=("state",))
def distill_step(
    config: TrainConfig,
    target: MARModel,
    bucket: Bucket,
    target_params: Any,
    state: TrainState,
    tokens: Array,
    labels: Array,
    known: Array,
) -> tuple[TrainState, Array]:
    """Takes one step of distillation.

    tokens: [B, L, C] by position. labels: [B]. known: [], the number of tokens shown, within `bucket`.
    """
    draft, key = MARModel(config.model, target.dtype), step_key(config, state)
    draws = mar.draw(jax.random.fold_in(key, _DRAWS), tokens.shape, bucket, known, config.copies)
    steps = sampling_schedule(draft.config.respacing).num_steps
    at = jax.random.randint(jax.random.fold_in(key, _STEPS), draws.t.shape, 0, steps)
    inputs = (tokens, labels, draws, at, bucket)
    eps, p = jax.lax.stop_gradient(gaussians(target, target_params, *inputs))

    def loss(params):
        # Each model embeds the class itself; context, states and steps are shared.
        draft_eps, q = gaussians(draft, params, *inputs)
        path = steps * jnp.sum(kl_divergence(p, q), axis=-1)
        square = jnp.mean((draft_eps - eps) ** 2, axis=-1)
        shown = tokens.shape[1] - draws.t.shape[-1]
        unknown = (shown + jnp.arange(draws.t.shape[-1]) >= draws.n_known).astype(path.dtype)
        both = masked_mean(square, unknown) + masked_mean(path, unknown) / tokens.shape[2]
        return both, both

    return descend(config, state, loss)


def gaussians(
    model: MARModel, params: Any, tokens: Array, labels: Array, draws: Draws, at: Array, bucket: Bucket
) -> tuple[Array, Gaussian]:
    """Returns eps and the transition at steps `at` [M, B, Q] of the sampling schedule, for the last Q tokens:
    arrays [M, B, Q, C]."""
    batch, length, _ = tokens.shape
    shown = length - at.shape[-1]
    rows = jnp.broadcast_to(jnp.arange(shown, length), (batch, length - shown))
    ordered = jnp.take_along_axis(tokens, draws.reveal[:, :, None], axis=1)
    embedding = model.embed_class(params, labels, draws.dropped)
    n_known = jnp.broadcast_to(draws.n_known, (batch,))
    z = model.context(params, ordered, draws.reveal, n_known, embedding, rows, bucket=bucket.most)
    schedule = make_schedule(model.config.respacing)
    x0 = ordered[:, shown:]
    x = noised(schedule, x0, at, draws.noise)
    time = model.embed_time(params, jnp.asarray(schedule.timestep_map))[at]
    eps, v = jnp.split(model.denoise(params, x, model.modulate(params, time, z)), 2, axis=-1)
    c = Coefficients(*(a[at][..., None] for a in coefficients(schedule, x0.dtype)))
    return eps, transition(c, x, eps, v)


@functools.partial(jax.jit, static_argnames=("models",))
def path_log_ratio(
    models: tuple[MARModel, MARModel],
    params: tuple[Any, Any],
    key: Array,
    tokens: Array,
    labels: Array,
    known: Array,
) -> Array:
    """Returns log p - log q [B] of one drafted path per image, in a context that both models share, without
    guidance and with noise in the last step. It is accepted with probability min(1, p / q).

    models, params: of the target and of the draft.
    tokens: [B, L, C] by position. labels: [B]. known: [B], the number of random tokens the context shows.
    """
    (target, draft), (target_params, draft_params) = models, params
    order, chain = jax.random.split(key)
    batch, length, dim = tokens.shape
    reveal = jnp.argsort(jax.random.uniform(order, (batch, length)), axis=1)
    ordered = jnp.take_along_axis(tokens, reveal[:, :, None], axis=1)
    schedule = sampling_schedule(target.config.respacing)
    c = coefficients(schedule)
    timesteps = jnp.asarray(schedule.timestep_map)

    def chains(model: MARModel, params: Any) -> Chains:
        embedding = model.embed_class(params, labels, jnp.zeros(batch, bool))
        z = model.context(params, ordered, reveal, known, embedding, known[:, None], bucket=length)[:, 0]
        return Chains(model, params, model.embed_time(params, timesteps), z, c, scale=None, final_noise=True)

    noise = jax.random.normal(chain, (schedule.num_steps + 1, batch, dim))
    drafted = sample_path(chains(draft, draft_params), noise)
    path = jnp.concatenate([drafted.states, noise[-1:]])
    of_target = path_log_density(chains(target, target_params), path)
    return of_target - drafted.log_density(final_noise=True)


def measure(target: tuple[MARModel, Any], config: TrainConfig, params: Any, source: Source) -> dict[str, Any]:
    """Measures the path acceptance of the draft on held-out images with random contexts."""
    images, labels = source.batch(0, _CONTEXTS, seed=config.seed, split="held-out")
    tokens = patchify(images, config.model.patch_size)
    shown = np.arange(_CONTEXTS) % config.model.seq_len
    models, both = (target[0], MARModel(config.model)), (target[1], params)
    key = run_key(config.seed, Purpose.MEASURE)
    log_ratio = path_log_ratio(models, both, key, tokens, labels, shown)
    probability = np.exp(np.minimum(0.0, np.asarray(log_ratio, np.float64)))
    return {
        "path_acceptance": round(float(probability.mean()), 4),
        "standard_error": round(float(probability.std() / np.sqrt(_CONTEXTS)), 4),
        "contexts": _CONTEXTS,
    }
