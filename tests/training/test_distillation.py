"""Distillation: the draft approaches the target's path distribution, and acceptance is measured right."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_run import TINY

from cspd_jax.errors import UserError
from cspd_jax.image.pixels import patchify
from cspd_jax.networks.mar import MARModel, init_params
from cspd_jax.training.data.digits import Digits
from cspd_jax.training.image.distillation import (
    Teacher,
    buckets,
    check_pair,
    distill_step,
    n_known,
    path_acceptance,
)
from cspd_jax.training.image.recipes import from_target
from cspd_jax.training.image.step import init_state

DIGITS = Digits(TINY.data)
RUN = dataclasses.replace(TINY, steps=150, decay=50, batch=16, learning_rate=1e-2)


def shaken(config, seed, scale=0.3):
    """Fresh parameters with noise on top: MAR's initial head is zero, and all fresh models alike."""
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(seed))
    random = np.random.default_rng(seed + 1)
    return jax.tree.map(lambda p: p + 0.3 * scale * random.standard_normal(p.shape, np.float32), params)


@functools.cache
def teacher():
    return Teacher(TINY.model, shaken(TINY.model, 0))


def acceptance(params, count=64, config=TINY.model):
    images, labels = DIGITS.batch(0, count, split="held-out")
    return path_acceptance(
        (MARModel(teacher().config), MARModel(config)),
        (teacher().params, params),
        jax.random.key(5),
        jnp.asarray(patchify(images, 4)),
        jnp.asarray(labels),
        jnp.arange(count) % TINY.model.seq_len,
    )


def test_the_target_accepts_itself():
    """The drafted path is the target's own: log p = log q up to float32 rounding of the T terms."""
    found = acceptance(teacher().params)
    np.testing.assert_allclose(found.log_ratio, 0, atol=0.05)
    assert float(found.probability.min()) > 0.95


@pytest.mark.slow
def test_another_model_is_accepted_less():
    assert float(acceptance(shaken(TINY.model, 7)).probability.mean()) < 0.7


@pytest.mark.slow
def test_distilling_brings_the_draft_closer():
    """Path divergence on fresh batches falls to less than a third; without learning it does not."""
    learning, state, fresh = from_target(RUN, teacher(), DIGITS), init_state(RUN), init_state(RUN)

    def divergence(state, step):
        state, metrics = learning.step(step, state, learning.batch(step))
        return state, float(metrics["vb"])

    found = []
    for step in range(RUN.steps):
        state, of_step = divergence(state, step)
        found.append(of_step)
    first, last = np.mean(found[:5]), np.mean(found[-20:])
    assert last < first / 3
    idle = [divergence(jax.tree.map(jnp.copy, fresh), step)[1] for step in range(RUN.steps - 20, RUN.steps)]
    assert np.mean(idle) > first / 2


@pytest.mark.slow
def test_divergence_of_the_target_from_itself_is_zero():
    state = init_state(RUN)._replace(params=jax.tree.map(jnp.copy, teacher().params))
    images, labels = DIGITS.batch(0, RUN.batch)
    (bucket,) = buckets(RUN)
    tokens = patchify(images, 4)
    _, metrics = distill_step(RUN, TINY.model, bucket, teacher().params, state, tokens, labels, np.int32(2))
    assert float(metrics["mse"]) < 1e-9 and abs(float(metrics["vb"])) < 1e-4


def test_contexts_of_every_length_are_drawn_equally_often():
    counts = np.bincount([n_known(TINY, i) for i in range(2000)], minlength=4)
    assert len(counts) == 4 and np.abs(counts - 500).max() < 100  # 5 standard deviations
    assert buckets(dataclasses.replace(TINY, buckets=2)) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "change,match",
    [
        ({"respacing": "ddim20"}, "respacing is ddim20, the target's is ddim10"),
        ({"num_classes": 9}, "it has 9 classes, the target 10 classes"),
        ({"seq_len": 9}, "it has 9 tokens per image"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(change, match):
    with pytest.raises(UserError, match=match):
        check_pair(dataclasses.replace(TINY.model, **change), TINY.model)
