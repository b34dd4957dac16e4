"""Couplings of Gaussians: the output distribution is p and a draft is accepted with
probability min(1, p / q); a wrong coupling of each kind is noticed; small deviations,
and numbers that are none.

Fixed seeds; the false-alarm rate of every sampled test is at most 1e-4 (see `laws`).
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import two_sample_ks_p_value
from scipy.stats import chi2, norm

from cspd_jax.audit import FALSE_ALARM, ks_p_value, share_p_value
from cspd_jax.coupling.gaussian import couple_gaussians
from cspd_jax.coupling.residual import gaussian_residual, log_ratio
from cspd_jax.diffusion.gaussian import Gaussian, log_density

N = 10_000


def gaussian(mean, sigma):
    mean, sigma = np.broadcast_arrays(np.asarray(mean, float), np.asarray(sigma, float))
    return Gaussian(mean.copy(), 2 * np.log(sigma))


def wave(d, phase):
    return np.sin(np.arange(d) * 1.7 + phase)


SIGMA = np.exp(wave(16, 1))
PAIRS = {
    "equal, 16": (
        gaussian(wave(16, 0), SIGMA),
        gaussian(wave(16, 0) + 0.4 * wave(16, 2) * SIGMA, SIGMA),
    ),
    "unequal, 2": (
        gaussian([0.3, 1.0], [0.9, 0.1]),
        gaussian([-0.1, 1.05], [0.6, 0.13]),
    ),
    # So close that the residual is drawn under its envelope (see `coupling.residual`),
    # all parts of it.
    "close, 1": (gaussian([0.3], 0.7), gaussian([0.1], 0.8)),
    "close, 16": (
        gaussian(wave(16, 0), SIGMA),
        gaussian(
            wave(16, 0) + 0.16 * wave(16, 2) * SIGMA, SIGMA * np.exp(0.02 * wave(16, 3))
        ),
    ),
}


# Few proposals side by side: most lanes need one or two.
couple = jax.jit(
    jax.vmap(functools.partial(couple_gaussians, proposals=4), (0, None, None, 0))
)


def normals(d, seed, rows=N):
    return np.random.default_rng([seed, d]).normal(size=(rows, d))


def at(g, noise):
    return g.mean + np.exp(0.5 * g.log_var) * noise


def float64_log_ratio(p, q, x):
    p, q, x = jax.tree.map(lambda a: np.asarray(a, np.float64), (p, q, x))
    density = lambda g: norm(g.mean, np.exp(0.5 * g.log_var)).logpdf(x).sum(axis=-1)
    return density(p) - density(q)


def run(p, q, draft):
    keys = jax.random.split(jax.random.key(0), len(draft))
    return jax.device_get(couple(keys, *jax.tree.map(jnp.float32, (p, q, draft))))


def distribution_p_value(value, p, q):
    """Of `value` [N, d] against p: each coordinate, the squared radius, the coordinate
    along the difference of the means, and log p / q, on which any test of p against a
    mixture with q can be based."""
    d = value.shape[1]
    noise = (value - p.mean) * np.exp(-0.5 * p.log_var)
    delta = (p.mean - q.mean) * np.exp(-0.5 * p.log_var)
    found = [
        *(ks_p_value(noise[:, i], norm.cdf) for i in range(d)),
        ks_p_value(np.sum(noise**2, axis=1), chi2(d).cdf),
        ks_p_value(noise @ delta / np.linalg.norm(delta), norm.cdf),
        two_sample_ks_p_value(
            *(float64_log_ratio(p, q, x) for x in (value, at(p, normals(d, 99))))
        ),
    ]
    return min(1.0, len(found) * min(found))


@functools.cache
def drafted(pair):
    """Noise of the drafts, the drafts, and the probabilities at which they are
    accepted; and the coupling."""
    p, q = PAIRS[pair]
    noise = normals(len(q.mean), 1)
    draft = at(q, noise)
    chance = np.minimum(1, np.exp(float64_log_ratio(p, q, draft)))
    return noise, draft, chance, run(p, q, draft)


@pytest.mark.quick("close, 16", "unequal, 2")
@pytest.mark.parametrize("pair", PAIRS)
def test_output_distribution_and_acceptance(pair):
    """10 000 drafts from q."""
    p, q = PAIRS[pair]
    _, draft, chance, (value, accepted, info) = drafted(pair)
    assert distribution_p_value(value, p, q) > FALSE_ALARM
    assert 0.3 < chance.mean() < 0.9
    assert share_p_value(accepted.mean(), chance.mean(), N) > FALSE_ALARM
    chex.assert_trees_all_equal(value[accepted], draft[accepted].astype(np.float32))
    assert not info.truncated.any() and np.all((info.trips > 0) == ~accepted)
    chex.assert_trees_all_close(np.exp(info.log_accept), chance, rtol=2e-4, atol=1e-30)


@pytest.mark.quick("close, 16", "unequal, 2")
@pytest.mark.parametrize("pair", PAIRS)
def test_wrong_couplings_are_noticed(pair):
    """After a rejection a fresh draw from p, or p at the draft's own noise; p and q
    swapped; a standard deviation taken for a variance."""
    p, q = PAIRS[pair]
    noise, draft, chance, (value, accepted, _) = drafted(pair)
    narrow = run(*(g._replace(log_var=0.5 * g.log_var) for g in (p, q)), draft)
    fresh = [
        np.where(accepted[:, None], value, at(p, other))
        for other in (normals(len(p.mean), 2), noise)
    ]
    for wrong in (*fresh, run(q, p, draft).value, narrow.value):
        assert distribution_p_value(wrong, p, q) <= FALSE_ALARM
    assert share_p_value(narrow.accepted.mean(), chance.mean(), N) <= FALSE_ALARM


@pytest.mark.slow
def test_coordinates_have_variances_of_their_own():
    """N = 100 000. The first of two coordinates is wider in q. A coupling that swaps
    the variances of q is refuted."""
    p, q = gaussian([0.0, 0.0], 1.0), gaussian([0.0, 0.0], [1.6**0.5, 1.0])
    draft = at(q, normals(2, 7, rows=100_000))
    swapped = q._replace(log_var=q.log_var[::-1])
    for taken, right in ((q, True), (swapped, False)):
        value = run(p, taken, draft).value
        p_values = [ks_p_value(value[:, i], norm.cdf) for i in range(2)]
        assert (2 * min(p_values) > FALSE_ALARM) == right


def residual_cdf(distance, s):
    m = distance / 2
    below = norm.cdf(s) - norm.cdf(s + distance) - norm.cdf(-m) + norm.cdf(m)
    return np.where(s > -m, below / (norm.cdf(m) - norm.cdf(-m)), 0.0)


def narrow_cdf(s):
    """Of the density ~ (1 - s^2)_+ phi(s): the residual of p = N(0, 1) over a slightly
    wider q."""
    s = np.clip(s, -1, 1)
    return 0.5 * (s * norm.pdf(s) / norm.pdf(1) + 1)


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, None, None))
def residuals_one_by_one(key, p, q):
    return gaussian_residual(key, p, q, proposals=1)


@pytest.mark.quick("0.001")
@pytest.mark.parametrize("distance", [0.1, 1e-3, 1e-6])
def test_close_gaussians_take_as_few_proposals(distance):
    """Residuals of 10 000 lanes, proposals one by one: the line through the means (d =
    16) has the closed-form distribution, and so has a coordinate whose variance alone
    differs (d = 1); no more than 5 and 25 proposals on average. Controls: plain draws
    from p have neither of them."""
    draw = functools.partial(
        residuals_one_by_one, jax.random.split(jax.random.key(1), N)
    )
    p = gaussian(np.zeros(16), 1.0)
    direction = wave(16, 0) / np.linalg.norm(wave(16, 0))
    across = wave(16, 4) - (wave(16, 4) @ direction) * direction
    found = draw(p, gaussian(-distance * direction, 1.0))
    value = np.asarray(found.value, float)
    of_line = functools.partial(residual_cdf, distance)
    assert ks_p_value(value @ direction, of_line) > FALSE_ALARM
    assert ks_p_value(value @ across / np.linalg.norm(across), norm.cdf) > FALSE_ALARM
    assert not found.truncated.any() and found.trips.mean() < 5
    assert ks_p_value(normals(16, 5) @ direction, of_line) <= FALSE_ALARM
    if distance <= 1e-3:
        found = draw(gaussian([0.0], 1.0), gaussian([0.0], 1 + distance))
        assert ks_p_value(found.value, narrow_cdf) > FALSE_ALARM
        assert not found.truncated.any() and found.trips.mean() < 25
        assert ks_p_value(normals(1, 5), narrow_cdf) <= FALSE_ALARM


SMALL = gaussian(wave(64, 0), 0.004)
OTHERS = {
    "itself": SMALL,
    "close": gaussian(
        wave(64, 0) + 1e-4 * wave(64, 1), 0.004 * np.exp(0.002 * wave(64, 2))
    ),
    "apart": gaussian(
        wave(64, 0) + 0.002 * wave(64, 1), 0.004 * np.exp(0.2 * wave(64, 2))
    ),
    "disjoint": gaussian(wave(64, 0) + 3.0, 0.004),
}


@pytest.mark.parametrize("other", OTHERS)
def test_log_ratio_at_small_sigma_in_many_dimensions(other):
    """sigma 0.004, d = 64, against float64 at the same float32 numbers. Control: the
    difference of two float32 log densities, each a sum of 64 terms of size 10, is ten
    times worse where p and q are close."""
    x = at(SMALL, np.random.default_rng(0).normal(size=(200, 64)))
    given = jax.tree.map(np.float32, (SMALL, OTHERS[other], x))
    exact = float64_log_ratio(*given)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, None, 0))
    def both(p, q, x):
        return log_ratio(p, q, x), log_density(p, x) - log_density(q, x)

    ours, naive = both(*given)
    error = lambda found: np.abs(np.asarray(found, np.float64) - exact).max()
    assert error(ours) <= 1e-5 * np.abs(exact).max()
    if other == "close":
        assert 0.05 < exact.std() < 0.5 and error(naive) > 10 * error(ours)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extremes(dtype):
    """sigma 0.004 in 64 dimensions: p = q is always accepted without a trip, disjoint
    distributions never, after one trip; the result is float32 and near p."""
    q, far = jax.tree.map(lambda a: jnp.asarray(a, dtype), (SMALL, OTHERS["disjoint"]))
    noise = np.random.default_rng(0).normal(size=(64, 64))
    draft = jnp.asarray(at(SMALL, noise), dtype)
    keys = jax.random.split(jax.random.key(0), 64)
    value, accepted, info = couple(keys, q, q, draft)
    chex.assert_trees_all_equal(value, draft.astype(jnp.float32), strict=True)
    assert accepted.all() and not info.trips.any() and not info.log_accept.any()
    value, accepted, info = couple(keys, far, q, draft)
    assert value.dtype == jnp.float32
    assert not accepted.any()
    assert not info.truncated.any()
    assert (info.trips == 1).all()
    assert float(jnp.max(jnp.abs(value - far.mean[None]))) < 0.004 * 6


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_end_at_once_and_are_reported(bad):
    q = gaussian(np.zeros(2), 1.0)
    _, accepted, info = run(q._replace(mean=np.array([bad, 0.0])), q, np.zeros((3, 2)))
    assert not accepted.any() and info.truncated.all() and not info.trips.any()
