"""Whole images of real (small, fitted) networks: speculation over AR steps and along
chains against the plain sampler.

The recorded target and its near draft, T = 8: 16 tokens of dimension 16. 400 images of
each method, or 800, tested by the largest standardised difference of first and second
moments, an energy test, and a classifier of the means over the tokens; each at a false
alarm of 1e-4 / 3.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of
from equality import FALSE_ALARM, by_moments, classifier_p_value, energy_p_value
from recorded import GOLDEN, network

from cspd_jax import shell
from cspd_jax.image import rounds, sampler
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.criterion import PathCriterion
from cspd_jax.image.options import Options
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.image.recipe import Draft
from cspd_jax.keys import row_keys


def images(seed, count=400, cfg=1.0, num_iter=16, ahead=None, draft=None, **options):
    """Tokens [N, L, d], and what happened."""
    target = network(GOLDEN, "cspd_target")
    if draft:
        small = network(GOLDEN, draft, target)
        draft = Draft(small.model, small.params)
    how = Options(
        num_iter=num_iter, respacing="ddim8", cfg=cfg, final_noise=True, **options
    )
    keys = row_keys(jax.random.key(seed), count)
    labels = jnp.zeros(count, jnp.int32)
    batch = batch_of(target.model, target.params, keys, labels, how, draft)
    if ahead is None:
        tokens, info = sampler.generate(batch)
    else:
        tokens, info = shell.run(rounds.bound_rounds(batch, *ahead))
    return np.asarray(tokens, np.float64), info


@functools.cache
def reference(count, cfg, num_iter):
    return images(0, count, cfg, num_iter)[0]


def p_value(x, y):
    a, b = (t.reshape(len(t), -1) for t in (x, y))
    found = by_moments(a, b, None), energy_p_value(a, b, permutations=29999)
    return min(1.0, 3 * min(*found, classifier_p_value(x.mean(1), y.mean(1))))


CHAINS = {"denoise": ChainSpeculation(4)}
WAYS = {
    "self, groups, guided": (400, 3.0, 4, {"ahead": (PathCriterion(), 4)}),
    "self, guided": (800, 3.0, 16, {"ahead": (PathCriterion(), 4)}),
    "draft, groups": (
        800,
        1.0,
        4,
        {
            "ahead": (PathCriterion(), 3),
            "draft": "cspd_draft_near",
        },
    ),
    "chains": (400, 1.0, 16, CHAINS),
}
WRONG = {
    "the paper's test at inner temperature 1000": {
        "ahead": (PaperCriterion(inner_temperature=1000.0), 3),
        "draft": "cspd_draft",
    },
    "chains at temperature 0.9": CHAINS | {"temperature": 0.9},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_images(name):
    count, cfg, num_iter, how = WAYS[name]
    tokens, info = images(1, count, cfg, num_iter, **how)
    assert p_value(tokens, reference(count, cfg, num_iter)) > FALSE_ALARM
    assert not np.any(info.truncated)
    if "ahead" in how:
        assert np.any(info.trace.marks > 0) and np.any(info.trace.marks < 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_lossy_images_are_told_apart(name):
    assert p_value(images(1, **WRONG[name])[0], reference(400, 1.0, 16)) <= FALSE_ALARM
