"""Chains of denoising steps and of flows, step by step and speculated: their
closed-form law, the mistakes that it refutes, the density of their paths, and what they
cost."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian_head import GaussianData, GaussianFlow, p_value
from laws import FALSE_ALARM
from test_block import single_residual

from cspd_jax.coupling import block
from cspd_jax.diffusion.chain import (
    Chains,
    path_laws,
    path_log_density,
    sample_chain,
    sample_path,
)
from cspd_jax.diffusion.gaussian import coefficients, predicted_x0
from cspd_jax.image import chain
from cspd_jax.image.calibration import fit
from cspd_jax.image.chain import ChainRandomness, ChainSpeculation
from cspd_jax.image.chain_drafters import NoiseCorrected, at_steps, frozen

HEADS = {
    "ddim100": GaussianData("ddim100", 0.7, 0.09),
    "flow25": GaussianFlow("flow25", 0.7, 0.09),
}
HEAD = HEADS["ddim100"]
STEPS = 100
DIM = 16
NOISY = {"final_noise": True}
COLD = {"final_noise": False, "temperature": 0.95}


def chains_of(spec, rows, **options):
    head = HEADS[spec]
    time = head.embed_time(None, jnp.asarray(head.schedule.timestep_map))
    return Chains(
        head, None, time, jnp.zeros((rows, 1)), coefficients(head.schedule), **options
    )


def normals(*shape):
    return jax.random.normal(jax.random.key(3), shape)


def randomness(rows):
    return ChainRandomness(
        normals(rows, DIM), jax.random.split(jax.random.key(2), rows)
    )


@pytest.mark.parametrize("spec", ["ddim100", "ddim25"])
def test_the_closed_form_is_the_law_of_the_data(spec):
    """But for a start at t = 990 or 960 that is not quite noise; with more noise it
    would be another."""
    head = GaussianData(spec, 0.7, 0.09)
    off = lambda **how: np.abs(np.array(head.marginal(**how)) / (0.7, 0.09) - 1).max()
    assert (
        off() < 1.1 * np.sqrt(head.schedule.alphas_cumprod[-1]) < off(temperature=1.05)
    )


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


def speculated(spec, kind, window, rows, options, random=None, drafter=None, **how):
    """Compiles anew, as one must whose parts are replaced. kind: a class of
    drafters."""
    drafter = drafter or kind(*frozen(len(HEADS[spec].schedule.timestep_map), DIM))

    def run(random):
        speculation = ChainSpeculation(window)
        return chain.speculate_chain(
            chains_of(spec, rows, **options), random, drafter, speculation, **how
        )

    return jax.jit(run)(random or randomness(rows))


LAWS = {
    "by steps": (
        "ddim100",
        BiasedSteps,
        8,
        512,
        {"final_noise": True, "temperature": 0.8},
    ),
    "at once": ("ddim100", BiasedWindow, 8, 512, NOISY),
    "wide, cold": ("ddim100", NoiseCorrected, 32, 2048, COLD),
    "flow": ("flow25", NoiseCorrected, 8, 1024, {}),
    "flow, at once": ("flow25", BiasedWindow, 8, 2048, {}),
}


@pytest.mark.quick("by steps")
@pytest.mark.parametrize("name", LAWS)
def test_the_law_speculated(name):
    """False alarm 1e-4."""
    spec, *_, options = LAWS[name]
    found = speculated(*LAWS[name])
    assert p_value(found.x, HEADS[spec], **options) > FALSE_ALARM
    assert found.counts.rounds.mean() < 0.7 * len(HEADS[spec].schedule.timestep_map)
    assert not found.counts.truncated.any()


VERIFY = block.verify_gaussian_block
DRAFT_STEPS = chain.draft_steps
VERIFY_STEPS = chain.verify_steps


def verified(change):
    return lambda patch: patch.setattr(chain, "verify_gaussian_block", change)


def fresh_draw(key, p, q, drafts, valid):
    found = VERIFY(key, p, q, drafts, valid)
    at = jnp.minimum(found.kept, len(drafts) - 1)
    noise = jax.random.normal(jax.random.fold_in(key, 7), p.mean[at].shape)
    return found._replace(value=p.mean[at] + jnp.exp(0.5 * p.log_var[at]) * noise)


def the_same_numbers(patch):
    draft = lambda inputs, state, keys, length: DRAFT_STEPS(
        inputs, state, inputs.keys, length
    )
    patch.setattr(chain, "draft_steps", draft)
    patch.setattr(
        chain,
        "verify_steps",
        lambda inputs, draft, keys: VERIFY_STEPS(inputs, draft, inputs.keys),
    )


def untempered(patch):
    cold = lambda inputs: inputs._replace(log_scale=jnp.zeros_like(inputs.log_scale))
    patch.setattr(
        chain,
        "verify_steps",
        lambda inputs, *others: VERIFY_STEPS(cold(inputs), *others),
    )


def misreported(name):
    return lambda patch: patch.setitem(
        LAWS, name, (LAWS[name][0], Misreported, *LAWS[name][2:])
    )


# What is wrong, and by which of the laws it is refuted.
WRONG = {
    "a fresh draw from the target": (verified(fresh_draw), "by steps"),
    "the residual of the single transition": (single_residual, "by steps"),
    "p and q swapped": (
        verified(lambda key, p, q, *a: VERIFY(key, q, p, *a)),
        "by steps",
    ),
    "everything kept": (
        verified(lambda key, p, q, *a: VERIFY(key, q, q, *a)),
        "by steps",
    ),
    "noise and coins of every call the same": (the_same_numbers, "by steps"),
    "q nearer to p than what was drawn from": (
        verified(
            lambda key, p, q, *a: VERIFY(
                key, p, q._replace(mean=0.5 * (p.mean + q.mean)), *a
            )
        ),
        "by steps",
    ),
    "p without the temperature": (untempered, "by steps"),
    "another q than was drawn from": (misreported("at once"), "at once"),
    "another q than was drawn from, flow": (
        misreported("flow, at once"),
        "flow, at once",
    ),
}


@pytest.mark.quick(
    "the residual of the single transition", "noise and coins of every call the same"
)
@pytest.mark.parametrize("name", WRONG)
def test_negative_controls(name, monkeypatch):
    wrong, law = WRONG[name]
    wrong(monkeypatch)
    spec, *_, options = LAWS[law]
    assert p_value(speculated(*LAWS[law]).x, HEADS[spec], **options) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("options", [NOISY, COLD], ids=["noisy", "cold"])
def test_a_path_and_its_density(options):
    """A plain path is what its noise makes of it, in closed form; the density that
    comes out with a speculated path is that of this path."""
    final = options["final_noise"]
    chains = chains_of("ddim100", 64, **options)
    random = randomness(64)
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
    chex.assert_trees_all_close(path_log_density(chains, path), density, rtol=2e-4)
    chex.assert_trees_all_close(plain.log_density(final), density, rtol=1e-4)

    found = speculated("ddim100", BiasedSteps, 8, 64, options, random, trajectory=True)
    chex.assert_trees_all_equal(found.path.states[0], found.x)
    path = jnp.concatenate([found.path.states, random.x[None]])
    chex.assert_trees_all_close(
        found.path.laws, path_laws(chains, path), rtol=1e-5, atol=1e-5
    )
    chex.assert_trees_all_close(
        found.path.log_density(final), path_log_density(chains, path), rtol=1e-5
    )
    if not final:
        chex.assert_trees_all_close(
            found.x, a[0] * path[1] + b[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("final_noise", [True, False])
def test_counts(final_noise):
    """And rows that are not active cost nothing."""
    active = jnp.arange(64) < 48
    options = {"final_noise": final_noise}
    counts = speculated("ddim100", BiasedSteps, 8, 64, options, active=active).counts
    chex.assert_trees_all_equal(
        counts.tested, np.where(active, STEPS - (not final_noise), 0)
    )
    assert np.all((counts.accepted < counts.tested) == active)
    head = counts.calls["head"]
    assert head.rows < head.sequential * 8 * 64
    assert (
        counts.rounds.max() == head.sequential <= STEPS and not counts.rounds[48:].any()
    )
    # Each call ends by a rejection or by its window.
    assert np.all(counts.rounds <= counts.tested - counts.accepted + -(-STEPS // 8) + 1)


@pytest.mark.slow
def test_finished_rows_that_are_left_out_change_nothing(monkeypatch):
    def run(large):
        monkeypatch.setattr(chain, "_LARGE", large)
        found = speculated(
            "ddim100",
            BiasedSteps,
            8,
            64,
            NOISY,
            active=jnp.arange(64) % 3 > 0,
            trajectory=True,
        )
        head = found.counts.calls["head"]
        counts = found.counts._replace(calls={})
        return found.x, found.path, head.sequential, counts, head.rows

    *packed, rows = run(100)
    *whole, all_rows = run(10**6)
    chex.assert_trees_all_close(packed, whole, rtol=1e-5, atol=1e-5)
    assert all_rows == whole[2] * 8 * 64 > 1.1 * rows


@pytest.mark.slow
def test_what_is_no_number_is_reported_and_stops_nobody():
    random = randomness(8)
    bad = np.arange(8) == 2
    random = random._replace(x=random.x.at[2].set(jnp.nan))
    found = speculated("ddim100", NoiseCorrected, 16, 8, {}, random)
    assert np.all((found.counts.truncated > 0) == bad) and np.all(
        np.isfinite(found.x).all(1) == ~bad
    )


@pytest.mark.slow
def test_gains_of_a_linear_head_are_its_slope():
    """x_0-hat = J_t x + const: after a step the guess moves by J_{t-1} times the
    deviation; so drafts are right behind the first head call."""
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
    counts = speculated("ddim100", None, 16, 32, NOISY, drafter=drafter).counts
    assert (
        counts.calls["head"].sequential <= 9
        and counts.accepted.sum() > 0.98 * counts.tested.sum()
    )
