"""Speculation along denoising chains: exact, counted, frozen where finished, and noticed when it is wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain_randomness import chain_noise, randomness
from gaussian_head import GaussianData, p_values
from laws import FALSE_ALARM

from cspd_jax.coupling import block
from cspd_jax.diffusion.chain import Chains, path_laws, path_log_density, sample_chain, sample_path
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.image import chain as speculation
from cspd_jax.image.calibration import fit
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.drafters import NoiseCorrected, frozen

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
    assert min(p_values(found.x, HEAD, **kwargs)) > FALSE_ALARM
    time, z, c = setting(rows=rows)
    plainly = sample_chain(Chains(HEAD, None, time, z, c, **kwargs), chain_noise(rows))
    assert min(p_values(plainly, HEAD, **kwargs)) > FALSE_ALARM
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
    assert min(p_values(found.x, HEAD, **temperature)) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("misreported", [False, True])
def test_windows_at_once(misreported):
    """A bad drafter of windows: the closed-form law, unless it reports another q than it drew from."""
    found = speculate(drafter=biased_window(misreported), windows=(8,), final_noise=True, rows=512)
    assert (min(p_values(found.x, HEAD)) > FALSE_ALARM) != misreported


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


def test_counts():
    final = {True: 64 * STEPS, False: 64 * (STEPS - 1)}
    for final_noise, transitions in final.items():
        counts = speculate(**BAD, final_noise=final_noise, temperature=1.0).counts
        assert counts.tested.sum() == transitions and np.all(counts.accepted < counts.tested)
        assert counts.head.rows == counts.head.sequential * 8 * 64
        assert counts.calls.max() == counts.head.sequential <= STEPS
        # Each call ends by a rejection or by its window.
        assert np.all(counts.calls <= counts.tested - counts.accepted + -(-STEPS // 8) + 1)


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
