"""Whole images of real (small, fitted) networks: speculation over AR steps against the plain sampler.

The recorded target and its near draft, T = 8: 16 tokens of dimension 16. 400 images of each method, or
800, tested by the largest standardised difference of first and second moments, an energy test, and a
classifier of the means over the tokens; each at a false alarm of 1e-4 / 3.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import ahead
from laws import FALSE_ALARM, classifier_p_value, energy_p_value
from recorded import GOLDEN, network

from cspd_jax.image import rounds, sampler
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys

NEAR = "cspd_draft_near"


def images(sampler, seed, *, count=400, cfg=1.0, num_iter=16, draft=None, **options):
    """Tokens [N, L, d], and what the sampler returned."""
    target = network(GOLDEN, "cspd_target")
    if draft:
        small = network(GOLDEN, draft, target)
        options["draft"] = rounds.Draft(small.model, small.params)
    how = Options(num_iter=num_iter, respacing="ddim8", guided=cfg != 1, cfg=cfg, final_noise=True)
    keys, labels = row_keys(jax.random.key(seed), count), jnp.zeros(count, jnp.int32)
    found = sampler(target.model, target.params, keys, labels, how, **options)
    return np.asarray(found.tokens, np.float64), found


@functools.cache
def reference(count, cfg, num_iter):
    return images(sampler.sample, 0, count=count, cfg=cfg, num_iter=num_iter)[0]


def p_value(x, y):
    a, b = (t.reshape(len(t), -1) for t in (x, y))
    middle = np.concatenate([a, b]).mean(0)
    first, second = (np.concatenate([t, (t - middle) ** 2], axis=1) for t in (a, b))
    spread = np.sqrt((first.var(0) + second.var(0)) / len(first))
    z = np.max(np.abs(first.mean(0) - second.mean(0)) / spread)
    moments = 2 * a.shape[1] * math.erfc(z / math.sqrt(2))
    energy = energy_p_value(a, b, permutations=29999)
    return min(1.0, 3 * min(moments, energy, classifier_p_value(x.mean(1), y.mean(1))))


DRAFTERS = {
    "self": {"speculation": ahead(gamma=4)},
    "model": {"speculation": ahead(gamma=3), "draft": NEAR},
}


def check(drafter, cfg, num_iter, count):
    tokens, found = images(rounds.sample, 1, count=count, cfg=cfg, num_iter=num_iter, **DRAFTERS[drafter])
    assert p_value(tokens, reference(count, cfg, num_iter)) > FALSE_ALARM
    assert not np.any(found.counts.target.truncated) and np.any(found.marks > 0) and np.any(found.marks < 0)


@pytest.mark.slow
def test_images():
    """Guided, and four tokens per AR step."""
    check("self", 3.0, 4, 400)


@pytest.mark.slow
@pytest.mark.parametrize("drafter, cfg, num_iter", [("self", 3.0, 16), ("model", 1.0, 4)])
def test_many_images(drafter, cfg, num_iter):
    check(drafter, cfg, num_iter, 800)


WRONG = {
    "paper, inner temperature 1000": {
        "speculation": ahead(gamma=3, criterion="paper", inner_temperature=1000.0),
        "draft": "cspd_draft",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_lossy_images_are_told_apart(name):
    tokens, _ = images(rounds.sample, 1, **WRONG[name])
    assert p_value(tokens, reference(400, 1.0, 16)) <= FALSE_ALARM
