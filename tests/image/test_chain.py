"""Speculation along denoising chains: exact, counted, frozen where finished, and noticed when it is wrong."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain_randomness import chain_noise, randomness
from gaussian_head import GaussianData
from golden_cases import fixture
from laws import FALSE_ALARM, ks_p_value
from scipy.special import gammainc, ndtr

from cspd_jax.coupling import block
from cspd_jax.diffusion.chain import Chains, Start, path_laws, path_log_density, sample_chain, sample_path
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.image import chain as speculation
from cspd_jax.image import sampler
from cspd_jax.image.calibration import fit
from cspd_jax.image.chain import ChainRandomness, ChainSpeculation
from cspd_jax.image.drafters import NoiseCorrected, Prediction, frozen
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


def speculate(head=HEAD, rows=ROWS, seed=0, drafter=None, windows=(16,), random=None, afresh=False, **kwargs):
    """`afresh` compiles anew, as one must whose parts are replaced."""
    random = random or randomness(rows, seed=seed)
    drafter = drafter or frozen(head.schedule.num_steps, DIM)
    way = ChainSpeculation(windows)
    run = _compiled.__wrapped__() if afresh else _compiled()
    return run(head, random, drafter, way, **kwargs)


@functools.cache
def _compiled():
    @functools.partial(jax.jit, static_argnums=(0, 3), static_argnames=("final_noise", "trajectory"))
    def run(head, random, drafter, way, active=None, begun=None, trajectory=False, **of_chains):
        time, z, c = setting(head, len(random.x))
        chains = Chains(head, None, time, z, c, **of_chains)
        given = {"active": active, "begun": begun, "trajectory": trajectory}
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
        ((8,), biased(), {"final_noise": True, "rows": 512}),
        pytest.param(
            (32, 32, 5),
            frozen(STEPS, DIM),
            {"final_noise": False, "temperature": 0.95, "rows": 2048},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_closed_form_law(windows, drafter, kwargs):
    """2048 tokens of dimension 16 (32768 coordinates), T = 100, Gaussian data: by the plain and the
    speculative chain alike; false alarm of each of three tests 1e-4. The quick case has 512."""
    found = speculate(drafter=drafter, windows=windows, **kwargs)
    rows = kwargs.pop("rows")
    assert min(p_values(found.x, **kwargs)) > FALSE_ALARM
    time, z, c = setting(rows=rows)
    plainly = sample_chain(Chains(HEAD, None, time, z, c, **kwargs), chain_noise(rows))
    assert min(p_values(plainly, **kwargs)) > FALSE_ALARM
    assert found.counts.head.sequential < 0.6 * STEPS and not found.counts.truncated.any()


VERIFY, VERIFY_STEPS = block.verify_gaussian_block, speculation.verify_steps


class Wrong:
    """Ways to get it wrong that look right."""

    def a_fresh_draw_from_the_target(patch):
        """In place of the residual."""

        def fresh(key, p, q, drafts, valid):
            found = VERIFY(key, p, q, drafts, valid)
            at = jnp.minimum(found.kept, len(drafts) - 1)
            noise = jax.random.normal(jax.random.fold_in(key, 7), p.mean[at].shape)
            return found._replace(value=p.mean[at] + jnp.exp(0.5 * p.log_var[at]) * noise)

        patch.setattr(speculation, "verify_gaussian_block", fresh)

    def the_residual_of_the_single_transition(patch):
        right = block._trials
        patch.setattr(block, "_trials", lambda *a: right(*a[:-1], jnp.zeros_like(a[-1])))

    def p_and_q_swapped(patch):
        patch.setattr(speculation, "verify_gaussian_block", lambda key, p, q, *a: VERIFY(key, q, p, *a))

    def everything_kept(patch):
        patch.setattr(speculation, "verify_gaussian_block", lambda key, p, q, *a: VERIFY(key, q, q, *a))

    def noise_and_coins_of_every_call_the_same(patch):
        patch.setattr(
            speculation,
            "speculate_once",
            lambda inputs, chain, n: once(inputs, chain, n, jnp.zeros_like(chain.left)),
        )

    def the_last_states_prediction_for_another_draft(patch):
        """q is said to be what the head predicts, which the draft was not drawn from."""
        patch.setattr(
            speculation,
            "verify_gaussian_block",
            lambda key, p, q, *a: VERIFY(key, p, q._replace(mean=0.5 * (p.mean + q.mean)), *a),
        )

    def p_without_the_temperature(patch):
        def untempered(inputs, draft, keys):
            return VERIFY_STEPS(inputs._replace(log_scale=jnp.zeros_like(inputs.log_scale)), draft, keys)

        patch.setattr(speculation, "verify_steps", untempered)


def once(inputs, chain, length, left):
    keys = jax.vmap(jax.random.fold_in)(inputs.keys, left)
    draft = speculation.draft_steps(inputs, chain, keys, length)
    return speculation.commit(inputs, chain, draft, speculation.verify_steps(inputs, draft, keys))


QUICK = ("the_residual_of_the_single_transition", "noise_and_coins_of_every_call_the_same")


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", [name for name in vars(Wrong) if name[0] != "_"])
def test_negative_controls(name, monkeypatch):
    """The tests above refute each of these with the bad drafter, at the smaller sample size."""
    vars(Wrong)[name](monkeypatch)
    temperature = {"temperature": 0.8} if "temperature" in name else {}
    found = speculate(drafter=biased(), windows=(8,), final_noise=True, rows=512, afresh=True, **temperature)
    assert min(p_values(found.x, **temperature)) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("misreported", [False, True])
def test_windows_at_once(misreported):
    """A bad drafter of windows: the closed-form law, unless it reports another q than it drew from."""
    found = speculate(drafter=biased_window(misreported), windows=(8,), final_noise=True, rows=512)
    assert (min(p_values(found.x)) > FALSE_ALARM) != misreported


BAD = {"drafter": biased(), "windows": (8,), "rows": 64, "trajectory": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "final_noise, temperature", [pytest.param(True, 1.0, marks=pytest.mark.slow), (False, 0.9)]
)
def test_path_and_its_density(final_noise, temperature):
    """The density that comes out is that of the path that comes out."""
    kwargs = {"final_noise": final_noise, "temperature": temperature}
    random = randomness(64)
    found = speculate(**BAD, random=random, **kwargs)
    np.testing.assert_array_equal(found.path.states[0], found.x)
    path = jnp.concatenate([found.path.states, random.x[None]])
    time, z, c = setting(rows=64)
    chains = Chains(HEAD, None, time, z, c, **kwargs)
    expected = path_log_density(chains, path)
    np.testing.assert_allclose(found.path.log_density(final_noise), expected, rtol=1e-5)
    for one, other in zip(found.path.laws, path_laws(chains, path)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    if not final_noise:  # the last state is the mean
        eps, _ = jnp.split(HEAD.denoise(None, path[1], jnp.zeros(64, jnp.int32)), 2, axis=-1)
        x0 = c.recip[0] * path[1] - c.recipm1[0] * eps
        np.testing.assert_allclose(found.x, c.mean_x0[0] * x0 + c.mean_x[0] * path[1], rtol=1e-5)


class StepByStep(NoiseCorrected):
    """Drafts in a loop, as every class does that has no `window` of its own."""


def drafted_by(drafter, random, chain_of, length, temperature):
    time, z, c = setting(rows=len(random.x))

    @jax.jit
    def run(random, drafter):
        problem, chain = speculation.begin(Chains(HEAD, None, time, z, c, temperature), random, drafter)
        return speculation.draft_steps(problem, chain_of(chain), random.keys, length)

    return run(random, drafter)


@pytest.mark.parametrize("kind", [NoiseCorrected, StepByStep])
def test_drafts_are_drawn_from_what_is_reported(kind):
    """At the temperature, with standard normal noise; the guess moves with what was drawn."""
    random, steps = randomness(512), jnp.arange(STEPS) / STEPS
    drafter = frozen(STEPS, DIM, limit=0.1)._replace(gain=steps, gain_f=1 - steps**2)
    drafter = kind(*drafter._replace(x0=jnp.full(DIM, 0.08), v=steps[:, None] * jnp.ones(DIM)))
    c = setting(rows=8)[2]
    draft = drafted_by(drafter, random, lambda chain: chain, 3, 0.8)
    x, x0, log_std = random.x, jnp.full((512, DIM), 0.08), np.log(0.8)
    for m, t in enumerate((STEPS - 1, STEPS - 2, STEPS - 3)):
        f, limited = (drafter.v[t] + 1) / 2, jnp.clip(x0, -0.1, 0.1)
        log_var = f * c.log_beta[t] + (1 - f) * c.log_posterior[t] + 2 * log_std
        mean = c.mean_x0[t] * limited + c.mean_x[t] * x
        np.testing.assert_array_equal(draft.steps[m], t)
        np.testing.assert_allclose(draft.before[m], x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(draft.q.mean[m], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(draft.q.log_var[m], jnp.broadcast_to(log_var, x.shape), rtol=1e-5)
        deviation = draft.after[m] - draft.q.mean[m]
        assert ks_p_value(deviation * jnp.exp(-0.5 * draft.q.log_var[m]), ndtr) > FALSE_ALARM
        x, x0 = draft.after[m], x0 + (drafter.gain[t] + drafter.gain_f[t] * f) * deviation


def test_a_window_is_what_the_loop_draws():
    """From the first step to the last, with rows at different places and x_0-hat beyond its limit."""
    random, steps = randomness(4), jnp.arange(STEPS) / STEPS
    drafter = frozen(STEPS, DIM, limit=0.3)._replace(gain=0.3 * steps, gain_f=0.2 * steps)
    drafter = drafter._replace(v=jnp.sin(6 * steps)[:, None] * jnp.ones(DIM))
    at = lambda chain: chain._replace(left=jnp.array([STEPS, STEPS // 2, 9, 2]))
    window, loop = (
        drafted_by(kind(*drafter), random, at, STEPS, 0.9) for kind in (NoiseCorrected, StepByStep)
    )
    np.testing.assert_array_equal(window.valid, loop.valid)
    assert np.abs(np.asarray(window.after)).max() > 0.5
    for one, other in zip(jax.tree.leaves(window), jax.tree.leaves(loop)):
        shown = np.asarray(window.valid).reshape(*window.valid.shape, *[1] * (one.ndim - 2))
        np.testing.assert_allclose(np.where(shown, one, 0), np.where(shown, other, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_that_are_on_their_way():
    """A row that enters at x_i with a guess goes on from there: the law of what is left of the chain."""
    entered = jnp.full((ROWS // 4, DIM), 0.3)
    left = jnp.full(ROWS // 4, 40)
    begun = Start(left, entered), Prediction(jnp.full_like(entered, 0.5), jnp.zeros_like(entered))
    found = speculate(rows=ROWS // 4, begun=begun, final_noise=True)
    assert found.counts.head.sequential <= 40
    mean, variance = 0.3, 0.0
    for a, b, v in list(zip(*HEAD.transitions()))[39::-1]:
        mean, variance = a * mean + b, a**2 * variance + v
    whitened = (np.asarray(found.x, np.float64) - mean) / np.sqrt(variance)
    assert ks_p_value(whitened, ndtr) > FALSE_ALARM
    assert ks_p_value((whitened**2).sum(1), lambda s: gammainc(DIM / 2, s / 2)) > FALSE_ALARM


def test_counts():
    final = {True: 64 * STEPS, False: 64 * (STEPS - 1)}
    for final_noise, transitions in final.items():
        counts = speculate(**BAD, final_noise=final_noise, temperature=1.0).counts
        assert counts.tested.sum() == transitions and np.all(counts.accepted < counts.tested)
        assert counts.head.rows == counts.head.sequential * 8 * 64
        assert counts.calls.max() == counts.head.sequential <= STEPS
        # Each call ends by a rejection or by its window.
        assert np.all(counts.calls <= counts.tested - counts.accepted + -(-STEPS // 8) + 1)


@pytest.mark.slow
def test_a_perfect_guess_takes_the_fewest_calls():
    """Point masses: x_0-hat never moves. Everything is accepted: 2 calls of M = 2, and 96 / 24."""
    head = GaussianData("ddim100", 0.25, 0.0)
    exact = frozen(STEPS, DIM)._replace(x0=jnp.full(DIM, 0.25))
    index = jnp.arange(STEPS)
    out = head.denoise(None, jnp.zeros((STEPS, DIM)), index)
    exact = exact._replace(v=out[:, DIM:])
    counts = speculate(head, rows=8, drafter=exact, windows=(2, 2, 24)).counts
    np.testing.assert_array_equal(counts.accepted, counts.tested)
    assert counts.head == (6, 8 * (2 + 2 + 4 * 24))


def test_a_drafter_that_knows_the_slope_is_accepted():
    """Gaussian data: x_0-hat is linear in the state, so its guess is right behind the first head call."""
    abar = HEAD.schedule.alphas_cumprod[:-1]
    slope = np.sqrt(abar) * HEAD.variance / (abar * HEAD.variance + 1 - abar)
    out = HEAD.denoise(None, jnp.zeros((STEPS, DIM)), jnp.arange(STEPS))
    drafter = frozen(STEPS, DIM)._replace(gain=jnp.concatenate([jnp.zeros(1), slope]), v=out[:, DIM:])
    counts = speculate(rows=32, drafter=drafter, windows=(16,)).counts
    assert counts.head.sequential <= 9 and counts.accepted.sum() > 0.99 * counts.tested.sum()


def test_inactive_rows_cost_no_call():
    some = {"rows": 8, "windows": (8,), "temperature": 1.0}
    counts = speculate(**some, active=jnp.arange(8) < 3).counts
    np.testing.assert_array_equal(counts.calls > 0, np.arange(8) < 3)
    none = speculate(**some, active=jnp.zeros(8, bool)).counts
    assert none.head.sequential == 0 and not none.tested.any()


@pytest.mark.slow
def test_what_is_no_number_is_reported_and_stops_nobody():
    random = randomness(8)
    found = speculate(rows=8, random=random._replace(x=random.x.at[2].set(jnp.nan)))
    np.testing.assert_array_equal(found.counts.truncated > 0, np.arange(8) == 2)
    np.testing.assert_array_equal(np.isfinite(found.x).all(axis=1), np.arange(8) != 2)


@pytest.mark.slow
def test_neighbours_do_not_matter():
    """Same shapes, another neighbour: bit for bit."""
    random, other = randomness(8), randomness(8, seed=5)
    mixed = ChainRandomness(
        other.x.at[2].set(random.x[2]), jnp.where(jnp.arange(8) == 2, random.keys, other.keys)
    )
    everyone = {"rows": 8, "windows": (8,), "temperature": 1.0, "active": jnp.ones(8, bool)}
    a, b = (speculate(**everyone, random=r) for r in (random, mixed))
    np.testing.assert_array_equal(a.x[2], b.x[2])
    assert np.abs(a.x - b.x).max() > 0.1


@pytest.mark.slow
def test_the_last_window_finishes_the_rows():
    """Any windows, also longer than the chain: same law, and rows that are done stay as they are."""
    head = GaussianData("ddim8", 0.7, 0.09)
    for windows in ((1,), (50, 3)):
        found = speculate(head, rows=32, windows=windows)
        assert np.isfinite(found.x).all()
        assert found.counts.head.sequential == 8 or windows != (
            1,
        )  # a window of one is the plain chain, step by step


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


# Calibration


@pytest.mark.slow
def test_gains_of_a_linear_head_are_its_slope():
    """x_0-hat = J_t x + const: after a step the guess moves by J_{t-1} times the deviation."""
    schedule = HEAD.schedule
    time, z, c = setting(rows=512)
    noise = chain_noise(512)
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
