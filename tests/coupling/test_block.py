"""Block verification of Gaussian paths against a closed form, and a wrong variant that the same test refutes.

Fixed seeds; the false-alarm rate of every sampled test is at most 1e-4 (see `laws`).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import FALSE_ALARM, ks_p_value, share_p_value

from cspd_jax.coupling import block
from cspd_jax.coupling.acceptance import unit_interval
from cspd_jax.coupling.block import verify_gaussian_block
from cspd_jax.coupling.gaussian import couple_gaussians
from cspd_jax.diffusion.gaussian import Gaussian, log_density

LANES, M, D = 12_000, 3, 2
P_FACTOR, Q_FACTOR = 0.8, 0.7
P_SHIFT, Q_SHIFT = 0.3, 0.1
P_VAR, Q_VAR = np.array([0.5, 0.9]), np.array([0.7, 0.8])


def p_of(x):
    return Gaussian(P_FACTOR * x + P_SHIFT, jnp.broadcast_to(jnp.log(P_VAR), x.shape))


def q_of(x):
    """The drafter's mean and variances differ, and how much its mean does depends on the state."""
    return Gaussian(Q_FACTOR * x + Q_SHIFT, jnp.broadcast_to(jnp.log(Q_VAR), x.shape))


def normal_cdf(mean, variance):
    scale = math.sqrt(2 * variance)
    return np.vectorize(lambda x: 0.5 * (1 + math.erf((x - mean) / scale)))


def step(g, key):
    return g.mean + jnp.exp(0.5 * g.log_var) * jax.random.normal(key, g.mean.shape)


def path(key, law, x, steps=M):
    states = [x]
    for k in jax.random.split(key, steps):
        states.append(step(law(states[-1]), k))
    return jnp.stack(states)


def one_by_one(key, p, q, drafts, count):
    """What block verification is not: each draft tested alone. Exact as well, and keeps fewer."""
    coupled = jax.vmap(couple_gaussians)(jax.random.split(key, M), p, q, drafts)
    kept = jnp.min(jnp.where(coupled.accepted, M, jnp.arange(M)))
    return kept, coupled.value[jnp.minimum(kept, M - 1)]


def as_block(key, p, q, drafts, count):
    verified = verify_gaussian_block(key, p, q, drafts, jnp.arange(M) < count)
    return jnp.minimum(verified.kept, count), verified.value


def tokenwise_residual(key, p, q, drafts, count):
    """Wrong: a block's number of drafts, but the residual of a single transition after them."""
    verified = verify_gaussian_block(key, p, q, drafts, jnp.arange(M) < count)
    keys = jax.random.split(jax.random.fold_in(key, 1), M)
    far = Gaussian(q.mean + 100, q.log_var)  # every draft is rejected, so that each value is a draw from p
    other = jax.vmap(couple_gaussians)(keys, p, far, drafts + 100)
    return jnp.minimum(verified.kept, count), other.value[jnp.minimum(verified.kept, M - 1)]


@functools.cache
def sampled(verify, count):
    """LANES paths [LANES, M + 1, D] by a way to verify, finished by p; how many of `count` drafts each kept;
    the sum of their pi."""
    return jax.tree.map(np.asarray, _sampled(verify, jax.random.key(0), count))


@functools.partial(jax.jit, static_argnums=0)
def _sampled(verify, key, count):

    def lane(key):
        keys = jax.random.split(key, 5)
        start = jnp.array([1.0, -1.0])
        drafted = path(keys[0], q_of, start)
        p, q = p_of(drafted[:-1]), q_of(drafted[:-1])
        kept, value = verify(keys[1], p, q, drafted[1:], count)
        x = jnp.where((jnp.arange(M + 1) <= kept)[:, None], drafted, 0)
        x = jnp.where((jnp.arange(M + 1) == kept + 1)[:, None] & (kept < count), value, x)
        known = jnp.where(kept < count, kept + 1, kept)
        for i, k in zip(range(1, M + 1), jax.random.split(keys[2], M)):
            x = x.at[i].set(jnp.where(i > known, step(p_of(x[i - 1]), k), x[i]))
        ratios = log_density(p, drafted[1:]) - log_density(q, drafted[1:])
        log_pi, total = 0.0, 0.0
        for i in range(M):
            log_pi = jnp.minimum(0.0, log_pi + ratios[i])
            total += jnp.where(i < count, jnp.exp(log_pi), 0)
        return x, kept, total

    return jax.vmap(lane)(jax.random.split(key, LANES))


def worst_p_value(states):
    """Of every coordinate of every state, and of the last minus the first drawn, under p's closed form."""
    found = []
    for d in range(D):
        mean, variance = [1.0, -1.0][d], 0.0
        for i in range(1, M + 1):
            mean, variance = P_FACTOR * mean + P_SHIFT, P_FACTOR**2 * variance + P_VAR[d]
            found.append(ks_p_value(states[:, i, d], normal_cdf(mean, variance)))
        first = P_FACTOR * [1.0, -1.0][d] + P_SHIFT
        factor = P_FACTOR ** (M - 1) - 1
        moved = variance - P_FACTOR ** (2 * M - 2) * P_VAR[d] + factor**2 * P_VAR[d]
        found.append(ks_p_value(states[:, M, d] - states[:, 1, d], normal_cdf(mean - first, moved)))
    return min(found) * len(found)


@pytest.mark.quick("as_block")
@pytest.mark.parametrize("verify", [as_block, one_by_one])
def test_paths_have_the_targets_distribution(verify):
    states, _, _ = sampled(verify, M)
    assert worst_p_value(states) > FALSE_ALARM


@pytest.mark.slow
def test_a_wrong_residual_is_refuted():
    states, _, _ = sampled(tokenwise_residual, M)
    assert worst_p_value(states) <= FALSE_ALARM


def of_ratios(wrong):
    """pi of the prefixes, made from the ratios in another way."""

    def patched(patch):
        patch.setattr(block, "prefix_log_pi", lambda ratios: jnp.append(0.0, wrong(ratios)))

    return patched


def heads_as_if_pi_were_one(patch):
    right = block._gives_up
    patch.setattr(block, "_gives_up", lambda u, weight, log_pi: right(u, weight, 0 * log_pi))


def one_number_for_all_coins(patch):
    def first(bits, dtype):
        u = unit_interval(bits, dtype)
        return jnp.broadcast_to(u[0], u.shape) if u.ndim else u

    patch.setattr(block, "unit_interval", first)


def one_trial_for_all_coins(patch):
    right = block._bits
    patch.setattr(block, "_bits", lambda key, dim, coin, trial: right(key, dim, 0 * coin, trial))


WRONG = {
    "pi is not limited": (of_ratios(jnp.cumsum), "paths"),
    "pi is limited at its end alone": (of_ratios(lambda r: jnp.minimum(0, jnp.cumsum(r))), "paths"),
    "pi begins anew with each transition": (of_ratios(lambda r: jnp.minimum(0, r)), "paths"),
    "a proposal weighs as if pi were 1": (heads_as_if_pi_were_one, "coins"),
    "one number for all coins": (one_number_for_all_coins, "coins"),
    "the trials of all coins are the same": (one_trial_for_all_coins, "trials"),
}


QUICK = (
    "pi begins anew with each transition",
    "a proposal weighs as if pi were 1",
    "one number for all coins",
    "the trials of all coins are the same",
)


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", WRONG)
def test_almost_right_blocks_are_refuted(name, monkeypatch):
    """By the law of whole paths, by that of independent fair coins, or by that of their trials."""
    wrong, law = WRONG[name]
    wrong(monkeypatch)
    if law == "paths":
        run = jax.jit(lambda key: _sampled.__wrapped__(as_block, key, M))
        states, _, _ = jax.tree.map(np.asarray, run(jax.random.key(0)))
        assert worst_p_value(states) <= FALSE_ALARM
    else:
        least, limit = LAWS[law](jax.jit(lambda *given: tossed.__wrapped__(*given)))
        assert least <= limit


@pytest.mark.slow
@pytest.mark.parametrize("count", [M, 2])
def test_how_many_drafts_are_kept(count):
    """E kept is the sum of E pi_i; and more than one by one, where P(at least i) = E prod min(1, p / q)."""
    _, kept, total = sampled(as_block, count)
    assert kept.max() == count
    assert share_p_value(kept.mean() / count, total.mean() / count, LANES) > FALSE_ALARM
    if count == M:
        _, alone, _ = sampled(one_by_one, M)
        assert kept.mean() > alone.mean() + 0.02


# What a trip tries on a CPU and on an accelerator; a block has few coins here.
TOGETHER = {"one coin": block.Together(1, 4), "many coins": block.Together(3, 8)}


@functools.partial(jax.jit, static_argnums=5)
def tossed(p, q, drafts, valid, seed, together=None):
    """LANES verdicts about the same three drafts [3, 1]."""
    keys = jax.random.split(jax.random.key(seed), LANES)
    return jax.vmap(lambda key: verify_gaussian_block(key, p, q, drafts, valid, together=together))(keys)


ALL = jnp.ones(3, bool)


def law_of_fair_coins(toss):
    """pi is 1/2 after each of three drafts, and p and q of the last two are far apart: each coin is fair.
    Returns the least p-value of the shares, and the limit at which it refutes them."""
    half = math.sqrt(2 * math.log(2))
    p, q = (Gaussian(jnp.array(mean)[:, None], jnp.zeros((3, 1))) for mean in ([0.0] * 3, [half, 50.0, 50.0]))
    kept = np.asarray(toss(p, q, jnp.array([[half], [25.0], [25.0]]), ALL, 6).kept)
    shares = ((3, 0.5), (2, 0.25), (1, 0.125), (0, 0.125))
    return min(share_p_value(float((kept == n).mean()), share, LANES) for n, share in shares), FALSE_ALARM / 4


def law_of_trials(toss):
    """pi is 1/2 after each of three drafts. The coins after one and two of them have the same p and q, whose
    proposals are taken now and then, and fall independently. Returns as `law_of_fair_coins` does."""
    half, mean, variance = math.sqrt(2 * math.log(2)), 1.5, 2.0
    density = lambda x, mean, var: np.exp(-((x - mean) ** 2) / (2 * var)) / np.sqrt(2 * np.pi * var)
    equal = -mean + math.sqrt(variance * mean**2 + variance * math.log(variance))  # where p is q
    assert abs(density(equal, 0, 1) - density(equal, mean, variance)) < 1e-9
    p = Gaussian(jnp.zeros((3, 1)), jnp.zeros((3, 1)))
    q = Gaussian(jnp.array([[half], [mean], [mean]]), jnp.log(jnp.array([[1.0], [variance], [variance]])))
    kept = np.asarray(toss(p, q, jnp.array([[half], [equal], [equal]]), ALL, 8).kept)
    x = np.linspace(-12, 12, 200_001)
    mass = np.sum(np.maximum(density(x, 0, 1) / 2 - density(x, mean, variance), 0)) * (x[1] - x[0])
    heads = mass / (mass + 0.5)
    shares = ((3, 0.5), (2, heads / 2), (1, heads * (1 - heads) / 2), (0, (1 - heads) ** 2 / 2))
    return min(share_p_value(float((kept == n).mean()), share, LANES) for n, share in shares), 1e-7


LAWS = {"coins": law_of_fair_coins, "trials": law_of_trials}


@pytest.mark.parametrize("together", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("name", LAWS)
def test_coins_are_tossed_for_themselves(name, together):
    least, limit = LAWS[name](functools.partial(tossed, together=together))
    assert least > limit


verify = jax.jit(verify_gaussian_block, static_argnames="max_trials")


def test_what_is_not_there_counts_as_kept():
    """Rows of a block without a draft, with laws of any kind: they decide nothing."""
    far = Gaussian(jnp.array([[0.0], [50.0], [0.0], [jnp.nan]]), jnp.zeros((4, 1)))
    near, drafts = Gaussian(jnp.zeros((4, 1)), jnp.zeros((4, 1))), jnp.zeros((4, 1))
    there = jnp.array([True, False, True, False])
    verified = verify(jax.random.key(0), far, near, drafts, there)
    assert int(verified.kept) == 4 and int(verified.trips) == 0
    verified = verify(jax.random.key(0), far, near, drafts, there | jnp.array([False, True, False, False]))
    assert int(verified.kept) == 1 and abs(verified.value - 50) < 6
    half = math.sqrt(2 * math.log(2))  # where p / q is 1/2
    q, drafts = near._replace(mean=near.mean.at[0].set(half)), drafts.at[0].set(half)
    keys = jax.random.split(jax.random.key(1), 64)
    kept = jax.jit(jax.vmap(lambda key: verify_gaussian_block(key, far, q, drafts, there).kept))(keys)
    assert set(np.unique(kept)) == {0, 4}


def test_a_block_that_cannot_be_decided_says_so():
    """A number that is not finite: no coin ever falls."""
    p = Gaussian(jnp.zeros((1, D)), jnp.zeros((1, D)))
    q = Gaussian(jnp.full((1, D), jnp.nan), jnp.zeros((1, D)))
    verified = verify(jax.random.key(0), p, q, jnp.zeros((1, D)), max_trials=3)
    assert bool(verified.truncated) and int(verified.kept) == 0 and int(verified.trips) == 1
