"""Distillation: the draft approaches the target's path distribution, and acceptance is
measured right."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_run import TINY

from cspd_jax.models import ImageModel
from cspd_jax.networks.mar import MARModel, init_params
from cspd_jax.training.image import distillation
from cspd_jax.training.recipes import data_first, init_state
from cspd_jax.training.run import Learning

RUN = dataclasses.replace(TINY, steps=150, decay=50, batch=16, learning_rate=1e-2)
MODEL = MARModel(TINY.model)


def shaken(seed):
    """Fresh parameters with noise on top: MAR's initial head is zero, and all fresh
    models alike."""
    params = jax.jit(init_params, static_argnums=0)(TINY.model, jax.random.key(seed))
    random = np.random.default_rng(seed + 1)
    return jax.tree.map(
        lambda p: p + 0.09 * random.standard_normal(p.shape, np.float32), params
    )


copied = functools.partial(jax.tree.map, jnp.copy)  # what a step was given is gone
target = functools.cache(lambda: shaken(0))


@pytest.mark.slow
def test_the_target_accepts_itself():
    """But for rounding; and another model less often."""
    model = ImageModel("target", MODEL, target())
    itself, another = (
        distillation.measure(model, TINY, own)["acceptance"]
        for own in (target(), shaken(7))
    )
    assert itself > 0.95 and another < 0.8


@pytest.mark.slow
def test_distilling_brings_the_draft_closer():
    """The loss on fresh batches falls to less than a third; without learning it does
    not."""
    learning = distillation.learning(RUN, (MODEL, target()))
    state = init_state(RUN)
    fresh = init_state(RUN)
    found = []
    for step in range(RUN.steps):
        state, loss = learning.step(step, state, learning.batch(step))
        found.append(float(loss))
    first = np.mean(found[:5])
    assert np.mean(found[-20:]) < first / 3
    idle = [
        float(learning.step(step, copied(fresh), learning.batch(step))[1])
        for step in range(RUN.steps - 20, RUN.steps)
    ]
    assert np.mean(idle) > first / 2


def test_a_draft_without_beginning_learns_the_data_first():
    before, then = (
        Learning(lambda step: step, lambda *_, told=told: told)
        for told in ("data", "target")
    )
    learning = data_first(RUN, before, then)
    told = [learning.step(number, None, None) for number in (0, 74, 75)]
    assert told == ["data", "data", "target"]
