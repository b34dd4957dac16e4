"""Speculation along denoising chains: exact, counted, frozen where finished, and noticed when it is wrong."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain_randomness import randomness
from gaussian_head import GaussianData
from golden_cases import fixture
from laws import FALSE_ALARM, ks_p_value
from scipy.special import gammainc, ndtr

from cspd_jax.coupling import log_acceptance_of_ratio, log_ratio
from cspd_jax.coupling.residual import ResidualTrip
from cspd_jax.diffusion.chain import Chains, path_log_density, sample_chain, sample_path
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import sampler
from cspd_jax.image.chain import speculation
from cspd_jax.image.chain.calibration import fit
from cspd_jax.image.chain.drafters import NoiseCorrected, frozen, own_window
from cspd_jax.image.chain.speculation import ChainRandomness, ChainSpeculation
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys
from cspd_jax.networks.mar import MARModel

HEAD = GaussianData("ddim100", 0.7, 0.09)
STEPS, DIM, ROWS = 100, 16, 4096


def setting(head=HEAD, rows=ROWS):
    schedule = head.schedule
    time = head.embed_time(None, jnp.asarray(schedule.timestep_map))
    return time, jnp.zeros((rows, 1)), coefficients(schedule)


def biased(head=HEAD, dim=DIM, by=0.4):
    """A bad drafter: its x_0-hat is off by `by`, its variances are too large."""
    steps = head.schedule.num_steps
    drafter = frozen(steps, dim)

    return _biased(by)(*drafter)


@functools.cache
def _biased(by):
    class Biased(NoiseCorrected):
        def distribution(self, c, guess, x):
            return super().distribution(c, guess._replace(x0=guess.x0 + by, v=guess.v + 0.5), x)

    return Biased


def biased_window(misreported=False, by=0.4):
    """The same mistakes in windows drawn at once; `misreported`: with distributions not drawn from."""

    class BiasedWindow(NoiseCorrected):
        def window(self, c, steps, guess, x, noise, log_scale):
            shifted = guess._replace(x0=guess.x0 + by, v=guess.v + 0.5)
            after, q = super().window(c, steps, shifted, x, noise, log_scale)
            if misreported:
                q = q._replace(log_var=q.log_var - 0.1)
            return after, q

    return BiasedWindow(*frozen(STEPS, DIM))


def speculate(head=HEAD, rows=ROWS, seed=0, drafter=None, windows=(16,), random=None, proposals=16,
              max_resamples=16384, afresh=False, **kwargs):  # fmt: skip
    """`afresh` compiles anew, as one must whose parts are replaced."""
    random = random or randomness(rows, head.schedule.num_steps, seed=seed)
    drafter = drafter or frozen(head.schedule.num_steps, DIM)
    way = ChainSpeculation(windows, proposals, max_resamples)
    run = _compiled.__wrapped__() if afresh else _compiled()
    return run(head, random, drafter, way, **kwargs)


@functools.cache
def _compiled():
    @functools.partial(jax.jit, static_argnums=(0, 3), static_argnames=("final_noise", "trajectory"))
    def run(head, random, drafter, way, active=None, trajectory=False, **of_chains):
        time, z, c = setting(head, random.noise.shape[1])
        chains = Chains(head, None, time, z, c, **of_chains)
        given = {"active": active, "trajectory": trajectory}
        return speculation.speculate_chain(chains, random, drafter, way, **given)

    return run


def p_values(x, **kwargs):
    """x [R, 16] against independent coordinates of the closed-form law: coordinates, and squared norms."""
    mean, variance = HEAD.marginal(**kwargs)
    whitened = (np.asarray(x, np.float64) - mean) / np.sqrt(variance)
    # Means of neighbouring coordinates are tested as well: a shift of all of them adds up.
    sums = whitened.sum(1) / 4
    return (
        ks_p_value(whitened, ndtr),
        ks_p_value(sums, ndtr),
        ks_p_value((whitened**2).sum(1), lambda s: gammainc(DIM / 2, s / 2)),
    )


@pytest.mark.parametrize(
    "windows, drafter, kwargs",
    [
        pytest.param((16,), frozen(STEPS, DIM), {"final_noise": True}, marks=pytest.mark.slow),
        pytest.param(
            (32, 32, 5),
            frozen(STEPS, DIM),
            {"final_noise": False, "temperature": 0.95},
            marks=pytest.mark.slow,
        ),
        pytest.param((8,), biased(), {"final_noise": True}, marks=pytest.mark.slow),
        ((8,), biased(), {"final_noise": True, "rows": 512}),
    ],
)
def test_the_closed_form_law(windows, drafter, kwargs):
    """4096 tokens of dimension 16 (65536 coordinates), T = 100, Gaussian data: by the plain and the
    speculative chain alike; false alarm of each of three tests 1e-4. The quick case has 512."""
    found = speculate(drafter=drafter, windows=windows, **kwargs)
    rows = kwargs.pop("rows", ROWS)
    assert min(p_values(found.x, **kwargs)) > FALSE_ALARM
    time, z, c = setting(rows=rows)
    plainly = sample_chain(Chains(HEAD, None, time, z, c, **kwargs), randomness(rows, seed=1).noise)
    assert min(p_values(plainly, **kwargs)) > FALSE_ALARM
    assert found.counts.calls < 0.6 * STEPS and found.counts.truncated == 0


def found_at_once(x):
    return ResidualTrip(x, jnp.bool_(True), jnp.bool_(True))


def fresh(key, p, q, trip, **_):
    """In place of the residual: a new draw from the target."""
    return found_at_once(p.mean + jnp.exp(0.5 * p.log_var) * jax.random.normal(key, p.mean.shape))


def swapped(key, p, q, trip, **kwargs):
    return RESIDUAL(key, q, p, trip, **kwargs)


RESIDUAL, RATIO = speculation.residual_trip, speculation.log_ratio


class Wrong:
    """Ways to get it wrong that look right."""

    def fresh_draw_from_the_target(patch):
        patch.setattr(speculation, "residual_trip", fresh)

    def residual_of_q_over_p(patch):
        patch.setattr(speculation, "residual_trip", swapped)

    def ratio_of_q_to_p(patch):
        patch.setattr(speculation, "log_ratio", lambda p, q, x: RATIO(q, p, x))

    def standard_deviation_taken_for_variance(patch):
        def halved(g):
            return g._replace(log_var=0.5 * g.log_var)

        patch.setattr(speculation, "log_ratio", lambda p, q, x: RATIO(halved(p), halved(q), x))

    def everything_accepted(patch):
        patch.setattr(speculation, "log_ratio", lambda p, q, x: jnp.zeros(x.shape[:-1]))


# The coupling's tests refute these, too.
SLOW = (
    "residual_of_q_over_p",
    "ratio_of_q_to_p",
    "standard_deviation_taken_for_variance",
    "everything_accepted",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in vars(Wrong) if not n.startswith("_")],
)
def test_negative_controls(name, monkeypatch):
    """The tests above refute each of these with the bad drafter, at the smaller sample size."""
    vars(Wrong)[name](monkeypatch)
    found = speculate(drafter=biased(), windows=(8,), final_noise=True, rows=512, afresh=True)
    assert min(p_values(found.x)) < FALSE_ALARM


def test_a_drafter_has_the_window_of_its_own_class_alone():
    assert own_window(frozen(STEPS, DIM)) is not None and own_window(biased_window()) is not None
    assert own_window(biased()) is None  # what it inherits knows nothing of its bias


def fresh_after_waiting(key, p, q, trip, **kwargs):
    found, anew = RESIDUAL(key, p, q, trip, **kwargs), fresh(key, p, q, trip)
    return jax.tree.map(lambda a, b: jnp.where(trip > 0, b, a), found, anew)


@pytest.mark.parametrize("wrong", [None, "misreported", "fresh after waiting"])
def test_windows_at_once_and_rows_that_wait(wrong, monkeypatch):
    """A bad drafter of windows, one proposal per head call so that rows wait: the closed-form law, unless the
    window tells another distribution than it drew from, or a row that waited draws from the target."""
    if wrong == "fresh after waiting":
        monkeypatch.setattr(speculation, "residual_trip", fresh_after_waiting)
    drafter = biased_window(misreported=wrong == "misreported")
    found = speculate(
        drafter=drafter, windows=(8,), final_noise=True, rows=512, proposals=1, afresh=wrong is not None
    )
    assert (min(p_values(found.x)) > FALSE_ALARM) == (wrong is None)


@pytest.mark.slow
def test_negative_control_the_drafts_noise_in_the_residual(monkeypatch):
    """The rejected draft's noise, under the target's mean and variance."""
    random = randomness(ROWS)
    monkeypatch.setattr(speculation, "residual_trip", lambda key, p, q, trip, **_: found_at_once(p.mean))
    original = speculation.commit

    def commit(problem, speculation, chain, draft, verdict):
        moved, counts = original(problem, speculation, chain, draft, verdict)
        lanes = jnp.arange(ROWS)
        at = jnp.minimum(verdict.n, draft.steps.shape[0] - 1)
        rejected = (chain.left > 0) & (verdict.n < jnp.minimum(draft.steps.shape[0], chain.left))
        p = jax.tree.map(lambda a: a[at, lanes], verdict.p)
        reused = p.mean + jnp.exp(0.5 * p.log_var) * problem.random.noise[draft.steps[at, lanes], lanes]
        return moved._replace(x=jnp.where(rejected[:, None], reused, moved.x)), counts

    monkeypatch.setattr(speculation, "commit", commit)
    found = speculate(drafter=biased(), windows=(8,), random=random, final_noise=True, afresh=True)
    assert min(p_values(found.x)) < FALSE_ALARM


BAD = {"drafter": biased(), "windows": (8,), "rows": 64, "trajectory": True}


@pytest.mark.parametrize(
    "final_noise, temperature", [pytest.param(True, 1.0, marks=pytest.mark.slow), (False, 0.9)]
)
def test_path_and_its_density(final_noise, temperature):
    """The density that comes out is that of the path that comes out."""
    kwargs = {"final_noise": final_noise, "temperature": temperature}
    random = randomness(64)
    found = speculate(**BAD, random=random, **kwargs)
    np.testing.assert_array_equal(found.path[0], found.x)
    path = jnp.concatenate([found.path, random.noise[-1:]])
    time, z, c = setting(rows=64)
    expected = path_log_density(Chains(HEAD, None, time, z, c, **kwargs), path)
    np.testing.assert_allclose(found.log_p, expected, rtol=1e-5)
    if not final_noise:  # the last state is the mean
        eps, _ = jnp.split(HEAD.denoise(None, path[1], jnp.zeros(64, jnp.int32)), 2, axis=-1)
        x0 = c.recip[0] * path[1] - c.recipm1[0] * eps
        np.testing.assert_allclose(found.x, c.mean_x0[0] * x0 + c.mean_x[0] * path[1], rtol=1e-5)


class StepByStep(NoiseCorrected):
    """Drafts in a loop, as every class does that has no `window` of its own."""


@pytest.mark.parametrize("kind", [NoiseCorrected, StepByStep])
def test_drafts_are_drawn_from_what_is_reported(kind):
    """At the temperature, each with the noise of its own step; the guess moves with what was drawn."""
    random, steps = randomness(8), jnp.arange(STEPS) / STEPS
    drafter = frozen(STEPS, DIM, limit=0.1)._replace(gain=steps, gain_f=1 - steps**2)
    drafter = kind(*drafter._replace(x0=jnp.full(DIM, 0.08), v=steps[:, None] * jnp.ones(DIM)))
    time, z, c = setting(rows=8)

    @jax.jit
    def drafted(random, drafter):
        problem, chain = speculation.begin(Chains(HEAD, None, time, z, c, 0.8), random, drafter)
        return speculation.draft_steps(problem, chain, 3)

    draft = drafted(random, drafter)
    x, x0, log_std = random.noise[-1], jnp.full((8, DIM), 0.08), np.log(0.8)
    for m, t in enumerate((STEPS - 1, STEPS - 2, STEPS - 3)):
        f, limited = (drafter.v[t] + 1) / 2, jnp.clip(x0, -0.1, 0.1)
        log_var = f * c.log_beta[t] + (1 - f) * c.log_posterior[t] + 2 * log_std
        mean, deviation = c.mean_x0[t] * limited + c.mean_x[t] * x, jnp.exp(0.5 * log_var) * random.noise[t]
        np.testing.assert_array_equal(draft.steps[m], t)
        np.testing.assert_allclose(draft.before[m], x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(draft.q.mean[m], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(draft.q.log_var[m], jnp.broadcast_to(log_var, x.shape), rtol=1e-5)
        np.testing.assert_allclose(draft.after[m], mean + deviation, rtol=1e-5, atol=1e-6)
        x, x0 = mean + deviation, x0 + (drafter.gain[t] + drafter.gain_f[t] * f) * deviation


def test_a_window_is_what_the_loop_draws():
    """From the first step to the last, with rows at different places and x_0-hat beyond its limit."""
    random, steps = randomness(4), jnp.arange(STEPS) / STEPS
    drafter = frozen(STEPS, DIM, limit=0.3)._replace(gain=0.3 * steps, gain_f=0.2 * steps)
    drafter = drafter._replace(v=jnp.sin(6 * steps)[:, None] * jnp.ones(DIM))
    time, z, c = setting(rows=4)

    @jax.jit
    def drafted(drafter):
        problem, chain = speculation.begin(Chains(HEAD, None, time, z, c, 0.9), random, drafter)
        chain = chain._replace(left=jnp.array([STEPS, STEPS // 2, 9, 2]))
        return speculation.draft_steps(problem, chain, STEPS)

    window, loop = drafted(drafter), drafted(StepByStep(*drafter))
    np.testing.assert_array_equal(window.valid, loop.valid)
    assert np.abs(np.asarray(window.after)).max() > 0.5
    for one, other in zip(jax.tree.leaves(window), jax.tree.leaves(loop)):
        shown = np.asarray(window.valid).reshape(*window.valid.shape, *[1] * (one.ndim - 2))
        np.testing.assert_allclose(np.where(shown, one, 0), np.where(shown, other, 0), rtol=1e-4, atol=1e-5)


def test_rows_that_wait_come_to_the_same():
    """The proposals of a rejected step are numbered: how many a head call has changes the calls alone."""
    some, one = (speculate(**BAD, final_noise=True, proposals=n) for n in (16, 1))
    np.testing.assert_allclose(one.path, some.path, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one.log_p, some.log_p, rtol=1e-5)
    for name in ("tested", "accepted"):
        assert getattr(one.counts, name) == getattr(some.counts, name)
    np.testing.assert_array_equal(one.counts.committed.sum(), some.counts.committed.sum())
    assert one.counts.row_calls > 1.2 * some.counts.row_calls
    assert not one.counts.truncated and not some.counts.truncated


def test_counts():
    final = {True: 64 * STEPS, False: 64 * (STEPS - 1)}
    for final_noise, transitions in final.items():
        counts = speculate(**BAD, final_noise=final_noise, temperature=1.0).counts
        assert counts.committed.sum() == 64 * STEPS and counts.tested == transitions
        assert 0 < counts.accepted < counts.tested
        assert counts.starts.sum() == counts.row_calls and counts.starts[STEPS - 1] == 64
        assert counts.rows == counts.calls * 8 * 64
        assert counts.row_calls / 64 <= counts.calls <= STEPS
        rejected = counts.tested - counts.accepted
        assert (
            counts.row_calls <= rejected + 64 * -(-STEPS // 8) + 64
        )  # each call ends by one or by its window


def test_a_perfect_guess_takes_the_fewest_calls():
    """Point masses: x_0-hat never moves. Everything is accepted: 2 calls of M = 2, and 96 / 24."""
    head = GaussianData("ddim100", 0.25, 0.0)
    exact = frozen(STEPS, DIM)._replace(x0=jnp.full(DIM, 0.25))
    index = jnp.arange(STEPS)
    out = head.denoise(None, jnp.zeros((STEPS, DIM)), index)
    exact = exact._replace(v=out[:, DIM:])
    counts = speculate(head, rows=8, drafter=exact, windows=(2, 2, 24)).counts
    assert counts.calls == 6 and counts.accepted == counts.tested
    assert counts.rows == 8 * (2 + 2 + 4 * 24)


def test_a_drafter_that_knows_the_slope_is_accepted():
    """Gaussian data: x_0-hat is linear in the state, so its guess is right behind the first head call."""
    abar = HEAD.schedule.alphas_cumprod[:-1]
    slope = np.sqrt(abar) * HEAD.variance / (abar * HEAD.variance + 1 - abar)
    out = HEAD.denoise(None, jnp.zeros((STEPS, DIM)), jnp.arange(STEPS))
    drafter = frozen(STEPS, DIM)._replace(gain=jnp.concatenate([jnp.zeros(1), slope]), v=out[:, DIM:])
    counts = speculate(rows=32, drafter=drafter, windows=(16,)).counts
    assert counts.calls <= 9 and counts.accepted > 0.99 * counts.tested


def test_inactive_rows_cost_no_call():
    some = {"rows": 8, "windows": (8,), "temperature": 1.0}
    counts = speculate(**some, active=jnp.arange(8) < 3).counts
    assert counts.committed.sum() == 3 * STEPS
    none = speculate(**some, active=jnp.zeros(8, bool)).counts
    assert none.calls == 0 and none.tested == 0


def test_truncation_is_reported():
    counts = speculate(drafter=biased(by=0.02), proposals=1, max_resamples=1, rows=256).counts
    assert counts.truncated > 0


def test_neighbours_do_not_matter():
    """Same shapes, another neighbour: bit for bit."""
    random, other = randomness(8), randomness(8, seed=5)
    mixed = ChainRandomness(
        noise=other.noise.at[:, 2].set(random.noise[:, 2]),
        uniforms=other.uniforms.at[:, 2].set(random.uniforms[:, 2]),
        residual=jnp.where(jnp.arange(8) == 2, random.residual, other.residual),
    )
    everyone = {"rows": 8, "windows": (8,), "temperature": 1.0, "active": jnp.ones(8, bool)}
    a, b = (speculate(**everyone, random=r) for r in (random, mixed))
    np.testing.assert_array_equal(a.x[2], b.x[2])
    assert np.abs(a.x - b.x).max() > 0.1


def test_the_last_window_finishes_the_rows():
    """Any windows, also longer than the chain: same law, and rows that are done stay as they are."""
    head = GaussianData("ddim8", 0.7, 0.09)
    for windows in ((1,), (50, 3)):
        found = speculate(head, rows=32, windows=windows)
        assert found.counts.committed.sum() == 32 * 8 and np.isfinite(found.x).all()
        assert found.counts.calls == 8 or windows != (1,)  # a window of one is the plain chain, step by step


# Networks


KEYS, LABELS = row_keys(jax.random.key(7), 4), jnp.array([3, 1, -1, 9])
FAST = Options(num_iter=6, respacing="ddim8", denoise=ChainSpeculation((3,)))


@pytest.mark.slow
def test_batch_shapes_agree_in_float64():
    """Alone or in a batch of four: equal up to float64 rounding, so every accept test came out the same."""
    f = fixture()
    with jax.enable_x64(True):
        params = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), f.params)
        model = MARModel(f.config, jnp.float64)
        options = dataclasses.replace(FAST, guided=True, cfg=2.5)
        run = functools.partial(sampler.sample, model, params, options=options)
        together, alone = run(KEYS, LABELS), run(KEYS[2:3], LABELS[2:3])
    assert together.tokens.dtype == jnp.float64
    np.testing.assert_allclose(alone.tokens[0], together.tokens[2], rtol=0, atol=1e-9)


@jax.jit
def one_call(random, z, chain):
    """The next chain; steps, margins (log acceptance - log u), whether they counted [M, R]; accepted [R]."""
    f = fixture()
    schedule = sampling_schedule("ddim8")
    time = f.model.embed_time(f.params, jnp.asarray(schedule.timestep_map))
    drafter = frozen(8, f.config.token_dim)
    chains = Chains(f.model, f.params, time, z, coefficients(schedule), final_noise=True)
    problem, start = speculation.begin(chains, random, drafter)
    chain = start if chain is None else chain
    draft = speculation.draft_steps(problem, chain, 3)
    verdict = speculation.verify_steps(problem, draft)
    log_a = log_acceptance_of_ratio(log_ratio(verdict.p, draft.q, draft.after))
    margin = log_a - jnp.log(random.uniforms[draft.steps, jnp.arange(z.shape[0])])
    counted = draft.valid & (jnp.arange(3)[:, None] <= verdict.n) & (chain.left > 0) & (chain.tries == 0)
    after, _ = speculation.commit(problem, ChainSpeculation((3,)), chain, draft, verdict)
    return after, draft.steps, margin, counted, verdict.n


def decisions(random, z):
    """{(row, step): (accepted, margin)} of the tests that counted, and x_0."""
    found, chain = {}, None
    while chain is None or np.any(chain.left > 0):
        chain, *seen = one_call(random, z, chain)
        steps, margin, counted, n = map(np.asarray, seen)
        for m, row in np.argwhere(counted):
            found[row, int(steps[m, row])] = (bool(m < n[row]), margin[m, row])
    return found, np.asarray(chain.x)


@pytest.mark.slow
def test_differences_across_batch_shapes_are_near_ties():
    """float32, 32 rows together and two by two: a row differs only behind a test that was nearly a tie. Ties
    are made on purpose, so that there are such rows: the uniform of one test is the acceptance itself."""
    f = fixture()
    random = randomness(32, steps=8, dim=f.config.token_dim)
    random = random._replace(uniforms=jnp.maximum(random.uniforms, 1e-3))
    z = jax.random.normal(jax.random.key(5), (32, f.config.decoder_width))
    first, _ = decisions(random, z)
    uniforms, tied = np.array(random.uniforms), {}
    for (row, step), (accepted, margin) in first.items():
        if row % 2 and row not in tied and accepted and 0 < margin < 2:
            tied[row] = step
            uniforms[step, row] *= np.exp(margin)
    random = random._replace(uniforms=jnp.asarray(uniforms))
    together, x = decisions(random, z)
    different = 0
    for pair in range(0, 32, 2):
        at = slice(pair, pair + 2)
        part = ChainRandomness(random.noise[:, at], random.uniforms[:, at], random.residual[at])
        apart, y = decisions(part, z[at])
        for row in (0, 1):
            for step in reversed(range(8)):
                one, other = together.get((pair + row, step)), apart.get((row, step))
                if (one and one[0]) != (other and other[0]):
                    different += 1
                    assert tied[pair + row] == step and abs(one[1]) < 1e-4
                    break
            else:
                np.testing.assert_allclose(y[row], x[pair + row], rtol=1e-4, atol=1e-3)
    assert len(tied) > 8 and different > 0


def test_groups_are_padded_with_rows_that_cost_nothing():
    f = fixture()
    made = sampler.sample(f.model, f.params, KEYS, LABELS, FAST)
    assert made.counts.committed.sum() == 4 * 16 * 8  # images x tokens x steps, whatever the padding
    chex.assert_tree_all_finite(made.tokens)


@pytest.mark.slow
def test_bfloat16_networks():
    f = fixture()
    model = MARModel(f.config, jnp.bfloat16)
    made = sampler.sample(model, f.params, KEYS, LABELS, FAST)
    assert made.tokens.dtype == jnp.float32 and np.isfinite(made.tokens).all()


# Calibration


def test_gains_of_a_linear_head_are_its_slope():
    """x_0-hat = J_t x + const: after a step the guess moves by J_{t-1} times the deviation."""
    schedule = HEAD.schedule
    time, z, c = setting(rows=512)
    noise = randomness(512).noise
    states = sample_path(Chains(HEAD, None, time, z, c, final_noise=True), noise).states
    x = jnp.concatenate([states, noise[-1:]])  # entry i is x_i
    index = jnp.broadcast_to(jnp.arange(STEPS)[:, None], (STEPS, 512)).reshape(-1)
    out = HEAD.denoise(None, x[1:].reshape(-1, DIM), index)
    eps, v = (a.reshape(STEPS, 512, DIM) for a in jnp.split(out, 2, axis=-1))
    x0 = c.recip[:, None, None] * x[1:] - c.recipm1[:, None, None] * eps
    mean = c.mean_x0[:, None, None] * x0 + c.mean_x[:, None, None] * x[1:]
    drafter = fit(x0, v, x[:-1] - mean, jnp.ones((512,)), jnp.float32(10.0))
    f = (v[:, 0, 0] + 1) / 2
    abar = schedule.alphas_cumprod[:-1]
    slope = np.sqrt(abar) * HEAD.variance / (abar * HEAD.variance + 1 - abar)  # at x_t of entry t
    total = np.asarray(drafter.gain + drafter.gain_f * f)[1:]
    np.testing.assert_allclose(total, slope, atol=0.02)
    np.testing.assert_allclose(drafter.v, v[:, 0], atol=1e-4)
