"""Distillation: a small draft model learns the target's Gaussians on states of the
target's own process.

A draft path X is accepted with probability at most min(1, p(X) / q(X)). So the draft's
distribution of paths q has to be close to the target's distribution of paths p. Their
divergence is a sum over the T transitions of sampling,

    KL(p || q) = sum_i E_{x ~ p} KL(p(. | x, z_p) || q(. | x, z_q)),

which has a closed form for Gaussians. To lower it is to match eps and the variance,
with the largest weights at small noise levels. The loss estimates it at random steps i
of the *sampling* schedule, and at states x that are made by noising a token of the
data. The squared difference of eps is added to the loss, because the divergence of
paths hardly depends on high noise levels, where an untrained draft is far off.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree

from cspd_jax.diffusion.gaussian import Gaussian, transition
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.generation import generate
from cspd_jax.image.methods import DraftSpeculation
from cspd_jax.models import ImageModel
from cspd_jax.networks.mar import MARModel
from cspd_jax.training.config import TrainConfig
from cspd_jax.training.image import mar
from cspd_jax.training.image.mar import Bucket, Draws
from cspd_jax.training.run import MASK, MEASURE, Learning, run_key

Array = jax.Array

# Numbers that are folded into the key of a step.
_DRAWS = 0
_STEPS = 1
_IMAGES = 16  # images on which acceptance is measured


def learning(config: TrainConfig, target: tuple[MARModel, ArrayTree]) -> Learning:
    """Returns the `Learning` of a draft model, which learns the target's Gaussians on
    contexts from the data."""
    teacher, target_params = target
    draft = MARModel(config.model, teacher.dtype)
    steps = sampling_schedule(config.model.respacing).num_steps

    def loss(
        bucket: Bucket,
        params: ArrayTree,
        key: Array,
        known: Array,
        batch: ArrayTree,
        target_params: ArrayTree,
    ):
        tokens, labels, _ = batch
        draws = mar.draw(
            jax.random.fold_in(key, _DRAWS), tokens.shape, bucket, known, config.copies
        )
        at = jax.random.randint(
            jax.random.fold_in(key, _STEPS), draws.t.shape, 0, steps
        )
        # Each model embeds the class itself. The context, the states and the steps are
        # the same for both.
        inputs = (tokens, labels, draws, at, bucket)
        eps, p = gaussians(teacher, target_params, *inputs)
        draft_eps, q = gaussians(draft, params, *inputs)
        path = steps * jnp.sum(mar.kl_divergence(p, q), axis=-1)
        square = jnp.mean((draft_eps - eps) ** 2, axis=-1)
        both = (
            mar.mean_of_unknown(square, draws)
            + mar.mean_of_unknown(path, draws) / tokens.shape[2]
        )
        return both, both

    most = config.model.seq_len - 1
    return Learning(
        mar.batches(config), mar.in_buckets(config, loss, n_known, most, target_params)
    )


def n_known(config: TrainConfig, step: int) -> int:
    """Draws the number of tokens that the step `step` shows. All lengths of contexts
    are equally frequent, as in generation."""
    random = np.random.default_rng([MASK, config.seed, step])
    return int(random.integers(config.model.seq_len))


def gaussians(
    model: MARModel,
    params: ArrayTree,
    tokens: Array,
    labels: Array,
    draws: Draws,
    at: Array,
    bucket: Bucket,
) -> tuple[Array, Gaussian]:
    """Returns eps [M, B, Q, C] and the transition, whose arrays are [M, B, Q, C], for
    the last Q tokens at steps `at` [M, B, Q] of the sampling schedule."""
    x0, z = mar.contexts(model, params, tokens, labels, draws, bucket.most)
    c, x, eps, v = mar.denoised(
        model, params, model.config.respacing, x0, z, at, draws.noise
    )
    return eps, transition(c, x, eps, v)


def measure(
    target: ImageModel, config: TrainConfig, params: ArrayTree
) -> dict[str, float]:
    """Generates some images by the target with the draft model. Returns the share of
    the drafts that are accepted."""
    draft = ImageModel("draft", MARModel(config.model), params)
    labels = np.arange(_IMAGES) % config.model.num_classes
    _, info = generate(
        run_key(config.seed, MEASURE), target, labels, DraftSpeculation(draft)
    )
    return {"acceptance": round(float(info.acceptance or 0.0), 4)}
