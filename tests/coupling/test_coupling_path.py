"""The resampler, and couplings of whole paths, on a chain with a known result.

Fixed seeds; the false-alarm rate of every test is at most 1e-4 (see `laws`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import FALSE_ALARM, ks_p_value, share_p_value, two_sample_ks_p_value
from scipy.stats import norm

from cspd_jax.coupling.resample import couple_path, resample
from cspd_jax.diffusion.gaussian import Gaussian, log_density

LANES, STEPS = 20_000, 3


class Chain(NamedTuple):
    """x_3 ~ N(0, 1), x_{t-1} ~ N(shift + slope x_t, sigma^2): all distributions are normal."""

    shift: float
    slope: float
    sigma: float

    def path(self, noise):
        x = [noise[0]]
        for eps in noise[1:]:
            x.append(self.shift + self.slope * x[-1] + self.sigma * eps)
        return jnp.stack(x)

    def log_density(self, path):
        distribution = Gaussian(
            self.shift + self.slope * path[:-1], jnp.full(STEPS, 2 * jnp.log(self.sigma), path.dtype)
        )
        return log_density(distribution, path[1:])

    def end(self):
        mean, variance = 0.0, 1.0
        for _ in range(STEPS):
            mean, variance = self.shift + self.slope * mean, self.slope**2 * variance + self.sigma**2
        return norm(mean, np.sqrt(variance))


P, Q = Chain(0.3, 0.8, 0.5), Chain(0.1, 0.9, 0.6)


class Verdict(NamedTuple):
    """A lane: x_0 and log p / q of the path put out; what `couple_path` said; the draft's noise."""

    end: jax.Array
    log_ratio: jax.Array
    accepted: jax.Array
    log_accept: jax.Array
    trips: jax.Array
    truncated: jax.Array
    noise: jax.Array


@jax.jit
def verdicts(key, p, q):
    """Drafts of Q, coupled as if p were the target and q the drafter."""

    def proposed(key):
        path = p.path(jax.random.normal(key, (STEPS + 1,)))
        return {"end": path[-1], "path": path}, p.log_density(path) - q.log_density(path)

    def one(key):
        for_draft, key = jax.random.split(key)
        noise = jax.random.normal(for_draft, (STEPS + 1,))
        path = Q.path(noise)
        ratio = p.log_density(path) - q.log_density(path)
        value, accepted, info = couple_path(
            key, ratio, {"end": path[-1], "path": path}, proposed, proposals=4
        )
        ratio = P.log_density(value["path"]) - Q.log_density(value["path"])
        return Verdict(value["end"], ratio, accepted, *info, noise)

    return jax.vmap(one)(jax.random.split(key, LANES))


@jax.jit
@jax.vmap
def target(noise):
    """x_0 and log p / q of the target's path."""
    path = P.path(noise)
    return path[-1], P.log_density(path) - Q.log_density(path)


def distribution_p_value(end, log_ratio):
    """x_0 against its closed form, and log p / q against that of fresh target paths."""
    _, fresh = target(jax.random.normal(jax.random.key(5), (LANES, STEPS + 1)))
    return min(1.0, 2 * min(ks_p_value(end, P.end().cdf), two_sample_ks_p_value(log_ratio, fresh)))


@pytest.mark.slow
def test_distribution_of_coupled_paths():
    """N = 20 000. The acceptance probability is compared with the mean of min(1, q / p) over target paths,
    which is 1 - TV as well, and estimated from as many (allowance: 5 standard errors)."""
    found = verdicts(jax.random.key(0), P, Q)
    assert distribution_p_value(found.end, found.log_ratio) > FALSE_ALARM
    _, ratios = target(jax.random.normal(jax.random.key(6), (LANES, STEPS + 1)))
    overlap = np.minimum(1, np.exp(-np.asarray(ratios, float)))
    assert 0.5 < overlap.mean() < 0.8
    gap = abs(float(found.accepted.mean()) - overlap.mean()) - 5 * overlap.std() / np.sqrt(LANES)
    assert share_p_value(max(gap, 0), 0, LANES) > FALSE_ALARM
    np.testing.assert_array_equal(found.trips > 0, ~found.accepted)
    assert not found.truncated.any()


@pytest.mark.slow
def test_wrong_couplings_of_paths_are_noticed():
    """Negative controls, N as above: after a rejection a fresh target path, or the target's path along the
    draft's noise; p and q swapped; standard deviations of root size; acceptance off by 2 %."""
    found = verdicts(jax.random.key(0), P, Q)
    for noise in (jax.random.normal(jax.random.key(7), found.noise.shape), found.noise):
        end, ratio = target(noise)
        end, ratio = (
            jnp.where(found.accepted, a, b) for a, b in ((found.end, end), (found.log_ratio, ratio))
        )
        assert distribution_p_value(end, ratio) <= FALSE_ALARM
    narrower = [chain._replace(sigma=chain.sigma**0.5) for chain in (P, Q)]
    for pair in ((Q, P), narrower):
        wrong = verdicts(jax.random.key(0), *pair)
        assert distribution_p_value(wrong.end, wrong.log_ratio) <= FALSE_ALARM
    assert share_p_value(0.02, 0, LANES) <= FALSE_ALARM


def draw(key):
    """A weakly typed value in a tree, accepted with probability 1 / 20."""
    return {"x": jax.random.normal(key, (2,)), "n": jax.random.randint(key, (), 0, 100) * 1.0}


@functools.partial(jax.jit, static_argnames="proposals")
def search(keys, log_accept=-2.995732, needed=True, *, proposals, max_trips):
    def one(key, needed):
        return resample(
            key, draw, lambda value: log_accept, proposals=proposals, max_trips=max_trips, needed=needed
        )

    return jax.vmap(one)(keys, jnp.broadcast_to(needed, len(keys)))


KEYS = jax.random.split(jax.random.key(0), 200)


def test_the_result_does_not_depend_on_how_many_are_proposed_at_once():
    """K = 1, 8, 32 for 200 keys: the same proposal wins, bit for bit; mean number of proposals 20 (5 standard
    errors). Different keys give different values."""
    one, some, many = (search(KEYS, proposals=k, max_trips=1000) for k in (1, 8, 32))
    for found in (one, some, many):
        assert not found.truncated.any()
        jax.tree.map(np.testing.assert_array_equal, found.value, one.value)
    np.testing.assert_array_equal(some.trips, -(-one.trips // 8))
    np.testing.assert_array_equal(many.trips, -(-one.trips // 32))
    assert abs(float(one.trips.mean()) - 20) < 5 * 20 / np.sqrt(200)
    assert len(np.unique(one.value["x"])) == 400


@pytest.mark.slow
def test_lanes_without_need_make_no_trip():
    """Also when nothing would ever be accepted, and whatever the other lanes do."""
    needed = jnp.arange(200) % 2 == 0
    found = search(KEYS, needed=needed, proposals=8, max_trips=1000)
    np.testing.assert_array_equal(found.trips > 0, needed)
    assert not found.truncated.any()
    jax.tree.map(lambda a: np.testing.assert_array_equal(a[1::2], 0), found.value)
    everyone = search(KEYS, proposals=8, max_trips=1000)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[::2], b[::2]), found.value, everyone.value)
    none = search(KEYS, -np.inf, needed=jnp.zeros(200, bool), proposals=8, max_trips=2**27)
    assert not none.trips.any() and not none.truncated.any()


def test_a_path_that_the_target_likes_better_is_accepted_for_certain():
    """The probability that is reported is one, whatever the ratio above it."""
    couple = jax.jit(
        lambda ratio: couple_path(KEYS[0], ratio, jnp.float32(3), lambda key: (jnp.float32(4), 0.0))
    )
    for ratio, log_accept in ((2.5, 0.0), (0.0, 0.0), (-0.5, -0.5), (-np.inf, -np.inf)):
        found = couple(jnp.float32(ratio))
        assert found.info.log_accept == log_accept
        assert found.accepted == (ratio >= 0) or log_accept == -0.5


def test_the_trip_limit_is_reported():
    """The last proposal is returned, and said not to be accepted; log probability 0 takes one trip."""
    found = search(KEYS, -np.inf, proposals=8, max_trips=4)
    assert found.truncated.all() and (found.trips == 4).all()
    last = jax.vmap(lambda key: draw(jax.random.split(jax.random.fold_in(key, 31))[0]))(KEYS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), found.value, last)
    found = search(KEYS, 0.0, proposals=8, max_trips=4)
    assert not found.truncated.any() and (found.trips == 1).all()
    few = search(KEYS, proposals=1, max_trips=1)
    assert 0 < few.truncated.sum() < 200
