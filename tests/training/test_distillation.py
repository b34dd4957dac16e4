"""Distillation: the draft approaches the target's path distribution, and acceptance is measured right."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_run import TINY

from cspd_jax.check import UserError
from cspd_jax.image.pixels import patchify
from cspd_jax.networks.mar import MARModel, init_params
from cspd_jax.training.data.digits import Digits
from cspd_jax.training.image.distillation import buckets, check_pair, distill_step, n_known, path_log_ratio
from cspd_jax.training.recipes import from_data, from_target, init_state
from cspd_jax.training.run import Teacher, worth

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


def log_ratio(params, count=64, config=TINY.model):
    images, labels = DIGITS.batch(0, count, split="held-out")
    return path_log_ratio(
        (MARModel(teacher().config), MARModel(config)),
        (teacher().params, params),
        jax.random.key(5),
        jnp.asarray(patchify(images, 4)),
        jnp.asarray(labels),
        jnp.arange(count) % TINY.model.seq_len,
    )


def test_the_target_accepts_itself():
    """The drafted path is the target's own: log p = log q up to float32 rounding of the T terms."""
    np.testing.assert_allclose(log_ratio(teacher().params), 0, atol=0.05)


@pytest.mark.slow
def test_another_model_is_accepted_less():
    assert float(jnp.exp(jnp.minimum(0, log_ratio(shaken(TINY.model, 7)))).mean()) < 0.7


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


def test_a_draft_without_beginning_learns_the_data_first():
    """Half of the steps are those of training, bit for bit; then the other objective begins."""
    both, data = from_target(RUN, teacher(), DIGITS, True), from_data(RUN, DIGITS)
    batch, states = both.batch(0), [init_state(RUN) for _ in range(4)]
    (one, _), (other, _) = (of.step(74, state, batch) for of, state in zip((both, data), states))
    assert jax.tree.all(jax.tree.map(np.array_equal, one.params, other.params))
    (one, _), (other, _) = (of.step(75, state, batch) for of, state in zip((both, data), states[2:]))
    assert not jax.tree.all(jax.tree.map(np.array_equal, one.params, other.params))


def test_what_a_draft_must_be_accepted_to_pay():
    draft, target = ({"w": np.zeros(size)} for size in (24, 100))
    assert worth(0.25, draft, target) == {}
    assert worth(0.004, draft, target)["note"].startswith(
        "the draft is accepted 0.4% of the time: it cannot save anything, as it costs 24% of the target"
    )


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
