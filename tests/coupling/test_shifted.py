"""Blocks of Gaussians that differ by a shift, in closed form: the law of the paths, how
many drafts are kept, the residual, and the mistakes that these refute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm
from test_block import LANES, P_VAR, M, law_of_fair_coins, law_of_paths, sampled

from cspd_jax.audit import FALSE_ALARM, ks_p_value, share_p_value
from cspd_jax.coupling.shifted import ClosedForm, verify_shifted_block
from cspd_jax.diffusion.gaussian import Gaussian

FORM = ClosedForm()


def q_of(x):
    """Drafts with the target's variances, whose shift depends on the state."""
    return Gaussian(0.5 * x - 0.5, jnp.broadcast_to(jnp.log(P_VAR), x.shape))


def residual(log_pi, r):
    """The density of the coordinate along the shift, and its mass, by quadrature."""
    density = lambda u: max(np.exp(log_pi) * norm.pdf(u) - norm.pdf(u + r), 0)
    start = max(-log_pi / r - r / 2, -12.0)
    mass = quad(density, start, start + 40, epsabs=1e-12, limit=200)[0]
    return density, start, mass


def law_of_residual():
    """The coordinate's distribution function, at 12,000 draws."""
    log_pi = -0.4
    r = 0.7
    c = FORM.threshold(log_pi, r)
    v = (jnp.arange(LANES) + jax.random.uniform(jax.random.key(0), (LANES,))) / LANES
    u = jax.vmap(lambda v: FORM.coordinate(*map(jnp.float32, (log_pi, r, c)), v))(v)
    density, start, mass = residual(log_pi, r)
    grid = np.linspace(start, start + 9, 2001)
    heights = np.array([density(x) for x in grid])
    steps = (heights[1:] + heights[:-1]) / 2 * np.diff(grid) / mass
    cdf = lambda x: np.interp(x, grid, np.append(0, np.cumsum(steps)))
    return ks_p_value(np.asarray(u), cdf), FALSE_ALARM


def paths(form=FORM):
    verify = functools.partial(verify_shifted_block, form=form)
    return law_of_paths(verify, q_of)


def coins(form=FORM):
    return law_of_fair_coins(functools.partial(verify_shifted_block, form=form))


LAWS = {"paths": paths, "coins": coins, "residual": law_of_residual}


@pytest.mark.parametrize("law", LAWS)
def test_the_law(law):
    """False alarm 1e-4."""
    p, limit = LAWS[law]()
    assert p > limit


class NotWhitened(ClosedForm):
    def shift(self, p, q):
        return p.mean - q.mean


class Backwards(ClosedForm):
    def shift(self, p, q):
        return -super().shift(p, q)


class ThresholdOfPi(ClosedForm):
    """c lacks its - r / 2."""

    def threshold(self, log_pi, r):
        return -log_pi / r


class TailOfP(ClosedForm):
    """The coordinate is drawn from p above c, without the part that q has there."""

    def coordinate(self, log_pi, r, c, v):
        return -jax.scipy.special.ndtri(v * jax.scipy.special.ndtr(-c))


@pytest.mark.quick("ThresholdOfPi", "TailOfP")
@pytest.mark.parametrize("wrong", [NotWhitened, Backwards, ThresholdOfPi, TailOfP])
def test_almost_right_forms_are_refuted(wrong):
    p, limit = paths(wrong())
    assert p <= limit


def test_how_many_drafts_are_kept():
    """E kept is the sum of E pi_i, as of any block."""
    _, kept, pi, _ = sampled(M, verify_shifted_block, q_of)
    assert kept.max() == M
    assert share_p_value(kept.mean() / M, pi.mean(), LANES) > FALSE_ALARM


@pytest.mark.parametrize("r", [1e-4, 0.05, 0.3, 2.0, 12.0])
@pytest.mark.parametrize("log_pi", [0.0, -1e-3, -0.7, -5.0])
def test_the_mass_of_the_residual(r, log_pi):
    """Beside quadrature in float64, for shifts of every size."""
    c = FORM.threshold(jnp.float32(log_pi), jnp.float32(r))
    found = FORM.mass(jnp.float32(log_pi), jnp.float32(r), jnp.clip(c, -1e3, 1e3))
    _, _, mass = residual(log_pi, r)
    np.testing.assert_allclose(found, mass, rtol=2e-3, atol=2e-7)


def test_numbers_that_are_not_finite_are_reported():
    p = Gaussian(jnp.zeros((2, 1)), jnp.zeros((2, 1)))
    bad = Gaussian(jnp.array([[0.0], [jnp.nan]]), jnp.zeros((2, 1)))
    found = verify_shifted_block(jax.random.key(0), p, bad, jnp.zeros((2, 1)))
    assert found.kept == 1 and found.truncated and found.value == 0
    same = verify_shifted_block(jax.random.key(0), p, p, jnp.zeros((2, 1)))
    assert same.kept == 2 and not same.truncated
