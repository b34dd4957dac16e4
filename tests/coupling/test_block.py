"""Block verification of Gaussian paths against closed forms, and wrong variants that
the same tests refute.

Fixed seeds; the false-alarm rate of every sampled test is at most 1e-4 (see `laws`).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cspd_jax.audit import FALSE_ALARM, normals_p_value, share_p_value
from cspd_jax.coupling.block import Trials, verify_gaussian_block
from cspd_jax.coupling.residual import log_ratio
from cspd_jax.diffusion.gaussian import Gaussian

LANES = 12_000
M = 3
D = 2
P_VAR = np.array([0.5, 0.9])
Q_VAR = np.array([0.7, 0.8])


def p_of(x):
    return Gaussian(0.8 * x + 0.3, jnp.broadcast_to(jnp.log(P_VAR), x.shape))


def q_of(x):
    """The drafter's mean and variances differ, and how much its mean does depends on
    the state."""
    return Gaussian(0.7 * x + 0.1, jnp.broadcast_to(jnp.log(Q_VAR), x.shape))


def step(law, x, noise):
    return law(x).mean + jnp.exp(0.5 * law(x).log_var) * noise


def sampled(count=M, verify=verify_gaussian_block, q_of=q_of):
    """LANES paths [LANES, M + 1, D], of which the first `count` states were drafted,
    finished by p; how many drafts each kept; min(1, p / q) of every prefix as a block,
    and one by one [LANES, count]."""

    def lane(key):
        for_block, *keys = jax.random.split(key, 2 * M + 1)
        noise = jax.vmap(lambda key: jax.random.normal(key, (D,)))(jnp.stack(keys))
        drafted = [jnp.array([1.0, -1.0])]
        for i in range(M):
            drafted.append(step(q_of, drafted[-1], noise[i]))
        drafted = jnp.stack(drafted)
        p = p_of(drafted[:-1])
        q = q_of(drafted[:-1])
        verified = verify(for_block, p, q, drafted[1:], jnp.arange(M) < count)
        kept = jnp.minimum(verified.kept, count)
        x = drafted
        for i in range(1, M + 1):
            fresh = jnp.where(
                (i == kept + 1) & (kept < count),
                verified.value,
                step(p_of, x[i - 1], noise[-i]),
            )
            x = x.at[i].set(jnp.where(i <= kept, drafted[i], fresh))
        ratios = log_ratio(p, q, drafted[1:])[:count]
        log_pi = [0.0]
        for ratio in ratios:
            log_pi.append(jnp.minimum(0.0, log_pi[-1] + ratio))
        alone = jnp.cumsum(jnp.minimum(0.0, ratios))
        return x, kept, jnp.exp(jnp.stack(log_pi[1:])), jnp.exp(alone)

    keys = jax.random.split(jax.random.key(0), LANES)
    return jax.device_get(jax.jit(jax.vmap(lane))(keys))


def law_of_paths(verify=verify_gaussian_block, q_of=q_of):
    """Returns the p-value of the paths' law under p, whose steps are independent
    normals; and the limit at which it refutes them."""
    states = sampled(M, verify, q_of)[0].astype(np.float64)
    noise = (states[:, 1:] - 0.8 * states[:, :-1] - 0.3) / np.sqrt(P_VAR)
    return normals_p_value(noise), FALSE_ALARM


def column(numbers):
    return jnp.array(numbers)[:, None]


def beside_normal(means, variances):
    """p = N(0, 1) for each draft, and q with these means and variances."""
    q = Gaussian(column(means), jnp.log(column(variances)))
    return jax.tree.map(jnp.zeros_like, q), q


def toss(means, variances, drafts, seed, verify):
    """How many are kept of the same drafts of these normals, LANES times."""
    given = *beside_normal(means, variances), column(drafts)
    kept = jax.vmap(lambda key: verify(key, *given).kept)
    return np.asarray(jax.jit(kept)(jax.random.split(jax.random.key(seed), LANES)))


# Where the density of N(0, 1) is half of that of N(HALF, 1).
HALF = math.sqrt(2 * math.log(2))


def least(kept, shares):
    return min(
        share_p_value(float((kept == n).mean()), share, LANES)
        for n, share in enumerate(shares)
    )


def law_of_fair_coins(verify=verify_gaussian_block):
    """pi is 1/2 after each of three drafts, and p and q of the last two are far apart:
    each coin is fair."""
    kept = toss([HALF, 50.0, 50.0], [1.0] * 3, [HALF, 25.0, 25.0], 6, verify)
    return least(kept, (0.125, 0.125, 0.25, 0.5)), FALSE_ALARM / 4


def heads_of(mean, variance):
    """The chance of heads where pi is 1/2 before a step from p = N(0, 1) and q =
    N(mean, variance), and stays so; by quadrature."""
    density = lambda x, mean, var: (
        np.exp(-((x - mean) ** 2) / (2 * var)) / np.sqrt(2 * np.pi * var)
    )
    x = np.linspace(-12, 12, 200_001)
    rest = np.maximum(density(x, 0, 1) / 2 - density(x, mean, variance), 0)
    mass = np.sum(rest) * (x[1] - x[0])
    return mass / (mass + 0.5)


def law_of_trials(verify=verify_gaussian_block):
    """pi is 1/2 after each of three drafts. The coins after one and two of them have
    the same p and q, whose proposals are taken now and then, and fall independently."""
    mean = 1.5
    variance = 2.0
    # Where p is q.
    equal = -mean + math.sqrt(variance * mean**2 + variance * math.log(variance))
    drafts = [HALF, equal, equal]
    kept = toss([HALF, mean, mean], [1, variance, variance], drafts, 8, verify)
    heads = heads_of(mean, variance)
    shares = (1 - heads) ** 2 / 2, heads * (1 - heads) / 2, heads / 2, 0.5
    return least(kept, shares), 1e-7


def law_of_tails(verify=verify_gaussian_block):
    """pi is 1/2 after each of two drafts, and the proposals of the second coin are
    taken now and then: whether a trial goes on after one that was not taken is a
    number of its own."""
    equal = math.sqrt(2 * math.log(5) / 0.96)  # where the densities are
    kept = toss([HALF, 0.0], [1.0, 25.0], [HALF, equal], 9, verify)
    heads = heads_of(0, 25)  # .284
    return least(kept, ((1 - heads) / 2, heads / 2, 0.5)), FALSE_ALARM / 3


# What a trip tries on an accelerator; on a CPU it is one.
many_coins = functools.partial(verify_gaussian_block, trials=Trials(3, 8))
LAWS = {
    "paths": law_of_paths,
    "coins": law_of_fair_coins,
    "coins, many": functools.partial(law_of_fair_coins, many_coins),
    "trials": law_of_trials,
    "tails": law_of_tails,
    "trials, many": functools.partial(law_of_trials, many_coins),
}


@pytest.mark.quick("paths", "coins", "trials", "tails")
@pytest.mark.parametrize("law", LAWS)
def test_the_law(law):
    p, limit = LAWS[law]()
    assert p > limit


class Unlimited(Trials):
    def log_pi(self, log_ratios):
        return jnp.append(0.0, jnp.cumsum(log_ratios))


class LimitedAtItsEnd(Trials):
    def log_pi(self, log_ratios):
        return jnp.append(0.0, jnp.minimum(0, jnp.cumsum(log_ratios)))


class BegunAnew(Trials):
    def log_pi(self, log_ratios):
        return jnp.append(0.0, jnp.minimum(0, log_ratios))


class SingleResidual(Trials):
    def of_a_coin(self, *given):
        return super().of_a_coin(*given[:-1], jnp.zeros_like(given[-1]))


class HeadsAsIfPiWereOne(Trials):
    def gives_up(self, u, weight, log_pi):
        return super().gives_up(u, weight, 0 * log_pi)


class OneNumberForAllCoins(Trials):
    def uniforms(self, *given):
        u = super().uniforms(*given)
        return jnp.broadcast_to(u[0], u.shape)


class OneTrialForAllCoins(Trials):
    def bits(self, key, dim, coin, trial):
        return super().bits(key, dim, 0 * coin, trial)


class TailsOfTheTest(Trials):
    """Whether a trial says tails is decided by the number that tested its proposal."""

    def bits(self, *given):
        own = super().bits(*given)
        return own.at[-1].set(own[-2])


# What is wrong, and by which of the laws it is refuted.
WRONG = {
    "pi is not limited": (Unlimited, "paths"),
    "pi is limited at its end alone": (LimitedAtItsEnd, "paths"),
    "pi begins anew with each transition": (BegunAnew, "paths"),
    "the residual of the single transition": (SingleResidual, "paths"),
    "a proposal weighs as if pi were 1": (HeadsAsIfPiWereOne, "coins"),
    "one number for all coins": (OneNumberForAllCoins, "coins"),
    "tails by the number of the rejected proposal": (TailsOfTheTest, "tails"),
    "the trials of all coins are the same": (OneTrialForAllCoins, "trials"),
}


@pytest.mark.quick(*{law: name for name, (_, law) in WRONG.items()}.values())
@pytest.mark.parametrize("name", WRONG)
def test_almost_right_blocks_are_refuted(name):
    wrong, law = WRONG[name]
    p, limit = LAWS[law](functools.partial(verify_gaussian_block, trials=wrong(1, 4)))
    assert p <= limit


@pytest.mark.quick(str(M))
@pytest.mark.parametrize("count", [M, 2])
def test_how_many_drafts_are_kept(count):
    """E kept is the sum of E pi_i: more than one by one, where it is of products of
    min(1, p / q)."""
    _, kept, pi, alone = sampled(count)
    assert kept.max() == count
    assert share_p_value(kept.mean() / count, pi.mean(), LANES) > FALSE_ALARM
    assert kept.mean() / count > alone.mean() + 0.005


verify = jax.jit(verify_gaussian_block, static_argnames="trials")


def test_what_is_not_there_counts_as_kept():
    """Rows of a block without a draft, with laws of any kind: they decide nothing."""
    near, far = beside_normal([0.0, 50.0, 0.0, jnp.nan], [1.0] * 4)
    drafts = jnp.zeros((4, 1))
    there = jnp.array([True, False, True, False])
    verified = verify(jax.random.key(0), far, near, drafts, there)
    assert int(verified.kept) == 4
    verified = verify(jax.random.key(0), far, near, drafts, there.at[1].set(True))
    assert int(verified.kept) == 1 and abs(verified.value - 50) < 6
    q = near._replace(mean=near.mean.at[0].set(HALF))
    drafts = drafts.at[0].set(HALF)
    keys = jax.random.split(jax.random.key(1), 64)
    kept = jax.jit(
        jax.vmap(lambda key: verify_gaussian_block(key, far, q, drafts, there).kept)
    )(keys)
    assert set(np.unique(kept)) == {0, 4}


def test_a_block_that_cannot_be_decided_says_so():
    """A number that is not finite: no coin ever falls."""
    p, q = beside_normal([jnp.nan], [1.0])
    trials = Trials(1, 3, most=3)
    verified = verify(jax.random.key(0), p, q, column([0.0]), trials=trials)
    assert bool(verified.truncated) and int(verified.kept) == 0


def test_a_coin_that_is_given_up_is_reported():
    """One trial of the only coin: a proposal that is not taken, and no tails either,
    ends in what the residual did not draw."""
    one = Trials(1, 1, most=1)
    p, q = beside_normal([HALF, 0.0], [1.0, 25.0])
    drafts = column([HALF, 30.0])  # the second is not kept
    block = lambda key: verify_gaussian_block(key, p, q, drafts, trials=one)
    found = jax.jit(jax.vmap(block))(jax.random.split(jax.random.key(3), 2000))
    assert 0.1 < found.truncated.mean() < 0.6
    assert np.all(np.asarray(found.kept)[np.asarray(found.truncated)] < 2)
