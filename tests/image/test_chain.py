"""Chains of denoising steps and of flows, step by step and speculated: their
closed-form law, the mistakes that it refutes, the density of their paths, and what they
cost."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_head import GaussianData, GaussianFlow, p_value
from test_block import SingleResidual

from cspd_jax.audit import FALSE_ALARM
from cspd_jax.coupling.block import verify_gaussian_block
from cspd_jax.diffusion.chain import (
    Chains,
    path_laws,
    sample_chain,
    sample_path,
)
from cspd_jax.diffusion.gaussian import coefficients, log_density, predicted_x0
from cspd_jax.image.calibration import fit
from cspd_jax.image.chain import ChainSpeculation, not_begun, speculate_path
from cspd_jax.image.chain_drafters import NoiseCorrected, at_steps, frozen

DIM = 16
HEADS = {
    "ddim100": GaussianData("ddim100", 0.7, 0.09),
    "flow25": GaussianFlow("flow25", 0.7, 0.09),
    # Each coordinate has a variance of its own.
    "uneven": GaussianData("ddim10", 0.7, np.geomspace(0.01, 1.0, DIM)),
}
HEAD = HEADS["ddim100"]
STEPS = 100
NOISY = {"final_noise": True}
WHOLE = 10**6  # rows of a call that is never compiled for fewer chains
COLD = {"final_noise": False, "temperature": 0.95}


def chains_of(spec, rows, **options):
    head = HEADS[spec]
    time = head.embed_time(None, jnp.asarray(head.schedule.timestep_map))
    c = coefficients(head.schedule)
    known = {"known_variance": spec.startswith("flow")}
    return Chains(head, None, time, jnp.zeros((rows, 1)), c, **known, **options)


def normals(*shape):
    return jax.random.normal(jax.random.key(3), shape)


def test_the_closed_form_is_the_law_of_the_data():
    """But for a start at t = 990 that is not quite noise; with more noise it would be
    another."""
    off = lambda **how: np.abs(np.array(HEAD.marginal(**how)) / (0.7, 0.09) - 1).max()
    start = 1.1 * np.sqrt(HEAD.schedule.alphas_cumprod[-1])
    assert off() < start < off(temperature=1.05)


@pytest.mark.parametrize(
    "spec, options", [("ddim100", NOISY), ("ddim100", COLD), ("flow25", {})]
)
def test_the_law_step_by_step(spec, options):
    """1024 tokens of dimension 16; false alarm 1e-4."""
    chains = chains_of(spec, 1024, **options)
    x = jax.jit(lambda noise: sample_chain(chains, noise))(
        normals(chains.steps + 1, 1024, DIM)
    )
    assert p_value(x, HEADS[spec], **options) > FALSE_ALARM
    if spec == "ddim100":
        wrong = options | {"temperature": 1.05 * options.get("temperature", 1)}
        assert p_value(x, HEADS[spec], **wrong) < FALSE_ALARM


class BiasedSteps(NoiseCorrected):
    """A bad drafter: its x_0-hat is off, its variances are too large."""

    def distribution(self, c, guess, x):
        return super().distribution(
            c, guess._replace(x0=guess.x0 + 0.4, v=guess.v + 0.5), x
        )


class Wider(NoiseCorrected):
    """Says that its drafts have larger variances than the step, also in a flow."""

    def distribution(self, c, guess, x):
        q = super().distribution(c, guess, x)
        return q._replace(log_var=q.log_var + 0.5)


class BiasedWindow(NoiseCorrected):
    """The same mistakes in windows that are drawn at once."""

    def window(self, c, steps, guess, x, noise, log_scale):
        shifted = guess._replace(x0=guess.x0 + 0.4, v=guess.v + 0.5)
        return super().window(c, steps, shifted, x, noise, log_scale)


class Misreported(BiasedWindow):
    """Says that its drafts were drawn from narrower distributions than they were."""

    def window(self, *given):
        after, q = super().window(*given)
        return after, q._replace(log_var=q.log_var - 0.1)


class OfTheMean(NoiseCorrected):
    """Draws all coordinates with the mean of the log variances that it reports."""

    def window(self, c, steps, guess, x, noise, log_scale):
        mean = jnp.mean(guess.v, axis=-1, keepdims=True)
        even = guess._replace(v=jnp.broadcast_to(mean, guess.v.shape))
        after, _ = super().window(c, steps, even, x, noise, log_scale)
        return after, super().window(c, steps, guess, x, noise, log_scale)[1]


class OffCentre(BiasedWindow):
    """Says that its drafts were drawn around other means than they were."""

    def window(self, *given):
        after, q = super().window(*given)
        return after, q._replace(mean=q.mean + 0.3 * jnp.exp(0.5 * q.log_var))


def speculated(spec, kind, how, rows, options, x=None, drafter=None, active=True):
    """Paths of chains and their counts. kind: a class of drafters. how: a
    `ChainSpeculation`, or the window of calls that leave nobody out. active: rows that
    are wanted."""
    steps = len(HEADS[spec].schedule.timestep_map)
    drafter = drafter or kind(*frozen(steps, DIM))
    how = ChainSpeculation(how, WHOLE) if isinstance(how, int) else how
    left = jnp.where(jnp.broadcast_to(active, rows), steps, 0)

    @jax.jit
    def run(x, keys):
        begun = not_begun(drafter, x, left)
        return speculate_path(
            chains_of(spec, rows, **options), keys, begun, drafter, how
        )

    keys = jax.random.split(jax.random.key(2), rows)
    return run(normals(rows, DIM) if x is None else x, keys)


LAWS = {
    "by steps": ("ddim100", BiasedSteps, 8, 512, {**NOISY, "temperature": 0.8}),
    "at once": ("ddim100", BiasedWindow, 8, 512, NOISY),
    "wide, cold": ("ddim100", NoiseCorrected, 32, 2048, COLD),
    "uneven": ("uneven", NoiseCorrected, 8, 2048, NOISY),
    "flow": ("flow25", NoiseCorrected, 8, 1024, {}),
    "flow, at once": ("flow25", BiasedWindow, 8, 2048, {}),
    "flow, wider drafts": ("flow25", Wider, 8, 1024, {}),
}


@pytest.mark.quick("by steps")
@pytest.mark.parametrize("name", LAWS)
def test_the_law_speculated(name):
    """False alarm 1e-4."""
    spec, *_, options = LAWS[name]
    path, counts = speculated(*LAWS[name])
    assert p_value(path.x, HEADS[spec], **options) > FALSE_ALARM
    assert counts.rounds.mean() < 0.7 * len(HEADS[spec].schedule.timestep_map)
    assert not counts.truncated.any()


def verified(change, window=8):
    """A block verified by `change` of the right verification and its arguments."""
    return ChainSpeculation(window, WHOLE, lambda *a: change(verify_gaussian_block, *a))


def fresh_draw(right, key, p, q, drafts, valid):
    found = right(key, p, q, drafts, valid)
    at = jnp.minimum(found.kept, len(drafts) - 1)
    noise = jax.random.normal(jax.random.fold_in(key, 7), p.mean[at].shape)
    return found._replace(value=p.mean[at] + jnp.exp(0.5 * p.log_var[at]) * noise)


def single_residual(right, *given):
    return right(*given, trials=SingleResidual(1, 4))


def untempered(right, key, p, *given):
    return right(key, p._replace(log_var=p.log_var - 2 * jnp.log(0.8)), *given)


def nearer(right, key, p, q, *given):
    return right(key, p, q._replace(mean=0.5 * (p.mean + q.mean)), *given)


class TheSameNumbers(ChainSpeculation):
    def call_keys(self, keys, left):
        return keys


def in_place_of(name, at, value):
    """The arguments of a law, with another value in one place."""
    return *LAWS[name][:at], value, *LAWS[name][at + 1 :]


def drafted(how):
    """The law "by steps", drafted and verified in another way."""
    return in_place_of("by steps", 2, how)


WRONG = {
    "a fresh draw from the target": drafted(verified(fresh_draw)),
    "the residual of the single transition": drafted(verified(single_residual)),
    "p and q swapped": drafted(
        verified(lambda right, key, p, q, *a: right(key, q, p, *a))
    ),
    "everything kept": drafted(
        verified(lambda right, key, p, q, *a: right(key, q, q, *a))
    ),
    "noise and coins of every call the same": drafted(TheSameNumbers(8, WHOLE)),
    "q nearer to p than what was drawn from": drafted(verified(nearer)),
    "p without the temperature": drafted(verified(untempered)),
    "another q than was drawn from": in_place_of("at once", 1, Misreported),
    "coordinates drawn from their mean": in_place_of("uneven", 1, OfTheMean),
    "another q than was drawn from, flow": in_place_of("flow, at once", 1, OffCentre),
}


@pytest.mark.quick("the residual of the single transition")
@pytest.mark.parametrize("name", WRONG)
def test_negative_controls(name):
    spec, *_, options = WRONG[name]
    path, _ = speculated(*WRONG[name])
    assert p_value(path.x, HEADS[spec], **options) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("options", [NOISY, COLD], ids=["noisy", "cold"])
def test_a_path_and_its_density(options):
    """A plain path is what its noise makes of it, in closed form; the density that
    comes out with a speculated path is that of this path."""
    final = options["final_noise"]
    chains = chains_of("ddim100", 64, **options)
    a, b, variance = (
        np.reshape(one, (-1, 1, 1)) for one in HEAD.transitions(**options)
    )
    noise = normals(STEPS + 1, 64, DIM)
    plain = sample_path(chains, noise)
    path = jnp.concatenate([plain.states, noise[-1:]])
    chex.assert_trees_all_equal(plain.states[0], plain.x)
    expected = a * path[1:] + b + np.sqrt(variance) * noise[:-1]
    chex.assert_trees_all_close(plain.states, expected, atol=1e-4)
    drawn = slice(0 if final else 1, None)  # without noise the last state is the mean
    terms = noise[:-1][drawn] ** 2 + np.log(2 * np.pi * variance[drawn])
    density = -0.5 * terms.sum((0, 2))
    of_laws = lambda laws, states: log_density(laws, states)[drawn].sum(axis=0)
    given = of_laws(path_laws(chains, path), plain.states)
    chex.assert_trees_all_close(given, density, rtol=2e-4)
    chex.assert_trees_all_close(of_laws(plain.laws, plain.states), density, rtol=1e-4)

    x_T = normals(64, DIM)
    found, _ = speculated("ddim100", BiasedSteps, 8, 64, options, x_T)
    chex.assert_trees_all_equal(found.states[0], found.x)
    path = jnp.concatenate([found.states, x_T[None]])
    chex.assert_trees_all_close(
        found.laws, path_laws(chains, path), rtol=1e-5, atol=1e-5
    )
    if not final:
        chex.assert_trees_all_close(
            found.x, a[0] * path[1] + b[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("final_noise", [True, False])
def test_counts(final_noise):
    """And rows that are not active cost nothing."""
    active = jnp.arange(64) < 48
    options = {"final_noise": final_noise}
    how = ChainSpeculation(8)
    _, counts = speculated("ddim100", BiasedSteps, how, 64, options, active=active)
    chex.assert_trees_all_equal(
        counts.tested, np.where(active, STEPS - (not final_noise), 0)
    )
    assert np.all((counts.accepted < counts.tested) == active)
    head = counts.calls["head"]
    assert head.rows < head.sequential * 8 * 64
    assert counts.rounds.max() == head.sequential <= STEPS
    assert not counts.rounds[48:].any()
    # Each call ends by a rejection or by its window.
    assert np.all(counts.rounds <= counts.tested - counts.accepted + -(-STEPS // 8) + 1)


@pytest.mark.slow
def test_finished_rows_that_are_left_out_change_nothing():
    def run(large):
        how = ChainSpeculation(8, large)
        active = jnp.arange(64) % 3 > 0
        path, counts = speculated("ddim100", BiasedSteps, how, 64, NOISY, active=active)
        head = counts.calls["head"]
        return path, head.sequential, counts._replace(calls={}), head.rows

    *packed, rows = run(100)
    *whole, all_rows = run(WHOLE)
    chex.assert_trees_all_close(packed, whole, rtol=1e-5, atol=1e-5)
    assert all_rows == whole[1] * 8 * 64 > 1.1 * rows


@pytest.mark.slow
def test_what_is_no_number_is_reported_and_stops_nobody():
    bad = np.arange(8) == 2
    x_T = normals(8, DIM).at[2].set(jnp.nan)
    path, counts = speculated("ddim100", NoiseCorrected, 16, 8, {}, x_T)
    assert np.all((counts.truncated > 0) == bad)
    assert np.all(np.isfinite(path.x).all(1) == ~bad)


def whether_there_or_not(right, key, p, q, drafts, valid):
    """Tests the step 0 that fills a window behind the end of a chain."""
    return right(key, p, q, drafts, jnp.ones_like(valid))


@pytest.mark.slow
def test_gains_of_a_linear_head_are_its_slope():
    """x_0-hat = J_t x + const: after a step the guess moves by J_{t-1} times the
    deviation; so drafts are right behind the first head call, and each step is tested
    once."""
    chains = chains_of("ddim100", 512, **NOISY)
    noise = normals(STEPS + 1, 512, DIM)
    states = jnp.concatenate([sample_path(chains, noise).states, noise[-1:]])
    out = jax.vmap(HEAD.denoise, (None, 0, 0))(
        None, states[1:], jnp.tile(jnp.arange(STEPS)[:, None], 512)
    )
    eps, v = jnp.split(out, 2, axis=-1)
    x0 = predicted_x0(at_steps(chains.c, jnp.arange(STEPS)[:, None]), states[1:], eps)
    deviation = np.sqrt(HEAD.transitions()[2])[:, None, None] * noise[:-1]
    drafter = fit(x0, v, deviation, jnp.ones((512,)), jnp.float32(10.0))
    abar = HEAD.schedule.alphas_cumprod[:-1]
    # At x_t of entry t.
    slope = np.sqrt(abar) * HEAD.variance / (abar * HEAD.variance + 1 - abar)
    total = drafter.gain + drafter.gain_f * (v[:, 0, 0] + 1) / 2
    chex.assert_trees_all_close(total[1:], slope, atol=0.02)
    chex.assert_trees_all_close(drafter.v, v[:, 0], atol=1e-4)
    all_tested = verified(whether_there_or_not, 16)
    for how, right in ((ChainSpeculation(16), True), (all_tested, False)):
        _, counts = speculated("ddim100", None, how, 32, NOISY, drafter=drafter)
        assert np.all(counts.tested == STEPS) == right
    _, counts = speculated("ddim100", None, 16, 32, NOISY, drafter=drafter)
    assert counts.calls["head"].sequential <= 9
    assert counts.accepted.sum() > 0.98 * counts.tested.sum()
