"""Tokens that are known: they stay bit for bit, and the rest has its law given them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from ahead import ahead
from laws import FALSE_ALARM, ks_p_value
from linear_tokens import LinearTokens
from scipy.stats import norm

import cspd_jax
from cspd_jax import DraftSpeculation, Known, Options, Plain, SelfSpeculation, UserError, generate
from cspd_jax.image import PaperCriterion, ReleasedRunner, bound, resolve, rounds, sampler
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.order import guidance_scale, random_order, reveal_groups
from cspd_jax.keys import Purpose, purpose_keys, row_keys

MODEL, IMAGES, LENGTH = LinearTokens(), 4000, 16
KEY, EVERY = jax.random.key(0), np.ones(LENGTH, bool)
NEAR = LinearTokens(pull=1.2, offset=0.3)


def given(images, length, dim, seed=3):
    """Each image knows another set of tokens, from none of them to all, which are no draws of any model."""
    random = np.random.default_rng(seed)
    many = random.integers(0, length + 1, images)
    ranks = random.random((images, length)).argsort(axis=1)
    return Known(random.normal(0.7, 0.5, (images, length, dim)).astype(np.float32), ranks < many[:, None])


def noise_given(known, sample, *, num_iter=6, cfg=1.0, inside=None, **options):
    """The standardised noise of all tokens that were made, each given those before its group and what is
    known."""
    how = Options(
        num_iter=num_iter, respacing="ddim10", guided=cfg != 1, cfg=cfg, final_noise=True, known=known,
        prefix_buckets=1, **({} if inside is None else {"denoise": inside}),
    )  # fmt: skip
    keys, images = row_keys(jax.random.key(1), len(known.mask)), len(known.mask)
    found = sample(MODEL, None, keys, jnp.zeros(images, jnp.int32), how, **options)
    tokens = np.asarray(found.tokens, np.float64)
    assert (np.asarray(found.tokens)[known.mask] == known.tokens[known.mask]).all()

    drawn = jax.vmap(random_order, (0, None))(purpose_keys(keys, Purpose.ORDER), MODEL.seq_len)
    rank = np.argsort(np.asarray(drawn), axis=1)  # of each position
    order = np.argsort(np.where(known.mask, rank - MODEL.seq_len, rank), axis=1)
    tokens = np.take_along_axis(tokens, order[..., None], axis=1)
    kappa, variance = MODEL.head(1.0).marginal(final_noise=True, temperature=1.0)
    groups, noise = reveal_groups(MODEL.seq_len, num_iter), np.full(tokens.shape, np.nan)
    sums = np.cumsum(tokens, axis=1)
    for group, scale in zip(groups, np.asarray(guidance_scale(groups, cfg, "linear"))):
        seen = np.maximum(group.start, known.count)[:, None]
        mean = (
            np.take_along_axis(sums, np.maximum(seen - 1, 0)[..., None], axis=1)
            / np.maximum(seen, 1)[..., None]
        )
        z = MODEL.offset + MODEL.pull * np.where(seen[..., None] > 0, mean, 0)
        members = np.arange(group.start, group.start + group.size)
        made = (members >= known.count[:, None])[..., None]
        noise[:, members] = np.where(
            made, (tokens[:, members] - kappa * scale * z) / np.sqrt(variance), np.nan
        )
    return noise


def p_value(noise):
    """Noise [N, L, d] that is not NaN: each token's, and the sums over the images, are those of independent
    standard normals. What is known of an image leaves none."""
    each = [noise[:, i][~np.isnan(noise[:, i])] for i in range(noise.shape[1])]
    made = (~np.isnan(noise)).sum(axis=(1, 2))
    sums = np.nansum(noise, axis=(1, 2))[made > 0] / np.sqrt(made[made > 0])
    found = [ks_p_value(one, norm.cdf) for one in (*each, sums)]
    return min(1.0, len(found) * min(found))


WAYS = {
    "plain": (sampler.sample, {}),
    "plain, groups, guided": (sampler.sample, {"num_iter": 3, "cfg": 1.5}),
    "chains": (sampler.sample, {"inside": ChainSpeculation((4,)), "num_iter": 4}),
    "self": (rounds.sample, {"speculation": ahead(gamma=3)}),
    "self, groups, guided": (rounds.sample, {"speculation": ahead(gamma=3), "num_iter": 3, "cfg": 1.5}),
    "self, both levels": (rounds.sample, {"speculation": ahead(gamma=3), "inside": ChainSpeculation((4,))}),
    "model": (rounds.sample, {"speculation": ahead(gamma=2), "draft": rounds.Draft(NEAR), "num_iter": 4}),
    "paper, Sigma = 1": (
        rounds.sample,
        {"speculation": ahead(gamma=3, criterion="paper", sigma=False), "draft": rounds.Draft(NEAR)},
    ),
}


def some_slow(names, quick):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names]


@pytest.mark.parametrize("name", some_slow(WAYS, ("plain, groups, guided", "self, groups, guided")))
def test_the_rest_has_its_law_given_what_is_known(name):
    """Tokens of 4000 images (400 where both levels speculate), of which any number and any set are known;
    false alarm 1e-4."""
    sample, options = WAYS[name]
    images = 400 if "both" in name else IMAGES
    assert p_value(noise_given(given(images, 6, 2), sample, **options)) > FALSE_ALARM


def as_drawn(monkeypatch):
    """The order does not begin with what is known: other tokens are kept in its place."""
    monkeypatch.setattr(bound, "known_first", lambda order, mask: order)


def unseen(monkeypatch):
    """What is known stays, but no context shows it."""
    right = LinearTokens.context

    def context(self, params, tokens, reveal, n_known, embedding, rows, *, bucket):
        return right(self, params, 0 * tokens, reveal, n_known, embedding, rows, bucket=bucket)

    monkeypatch.setattr(LinearTokens, "context", context)


@pytest.mark.parametrize("wrong", [as_drawn, unseen])
def test_negative_controls(wrong, monkeypatch):
    wrong(monkeypatch)

    def afresh(*arguments, **options):
        return sampler.sample.__wrapped__(*arguments, **options)

    known = given(IMAGES, 6, 2)
    if wrong is as_drawn:  # the tokens that were to stay do not, which is seen at once
        with pytest.raises(AssertionError):
            noise_given(known, jax.jit(afresh, static_argnums=0))
        return
    assert p_value(noise_given(known, jax.jit(afresh, static_argnums=0))) <= FALSE_ALARM


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [cspd_jax.load(tiny.save_mar(folder / str(seed), seed=seed)) for seed in (0, 1)]


def masks():
    """Half of the tokens, six of them here and there, all of them."""
    mask = np.zeros((3, LENGTH), bool)
    mask[0, :8], mask[1, [1, 5, 7, 9, 10, 12]], mask[2] = True, True, True
    return mask


METHODS = {
    "plain": lambda draft: (Plain(), {}),
    "chains": lambda draft: (Plain(), {"denoise": "speculative", "num_iter": 5}),
    "self": lambda draft: (SelfSpeculation(3), {"num_iter": 5, "cfg": 2.0}),
    "self, both levels": lambda draft: (SelfSpeculation(3), {"denoise": "speculative"}),
    "draft": lambda draft: (DraftSpeculation(draft, gamma=3), {}),
    "paper": lambda draft: (DraftSpeculation(draft, PaperCriterion(), gamma=3), {"num_iter": 5}),
    "released runner": lambda draft: (ReleasedRunner(draft, gamma=2), {"final_noise": False}),
}


@pytest.mark.quick("plain")
@pytest.mark.parametrize("name", some_slow(METHODS, ("plain", "self")))
def test_known_tokens_stay_bit_for_bit(models, name):
    """And without a mask a whole image is what it was but for rounding; an image does not depend on what its
    neighbours know; half of an image takes about half the calls; a known one takes none."""
    model, draft = models
    method, options = METHODS[name](draft)
    tokens, mask, keys = given(3, LENGTH, 16).tokens, masks(), cspd_jax.row_keys(KEY, 3)

    def run(mask):
        known, images = Known(tokens[: len(mask)], mask), len(mask)
        made, info = generate(
            keys[:images], model, list(range(images)), method, Options(known=known, **options)
        )
        return np.asarray(made), info

    made, info = run(mask)
    assert (made[mask] == tokens[mask]).all() and (made[~mask] != tokens[~mask]).all()
    assert not np.asarray(info.trace.marks)[mask].any()
    np.testing.assert_allclose(run(mask[:1])[0], made[:1], atol=1e-3)
    whole, of_whole = generate(KEY, model, [0, 1, 2], method, Options(**options))
    nothing, of_nothing = run(np.zeros_like(mask))
    np.testing.assert_allclose(nothing, whole, atol=1e-3)
    assert of_nothing.calls == of_whole.calls
    of_half = run(np.tile(mask[:1], (3, 1)))[1]
    share = 0.5 if name == "plain" else 0.7  # rounds of speculation depend on chance
    assert of_half.sequential <= share * of_whole.sequential
    known, of_known = run(np.ones_like(mask))
    assert (known == tokens).all() and of_known.sequential == 0


@pytest.mark.slow
def test_batches_and_streams(models):
    """Images one after the other know what those side by side know, and each step shows it."""
    options = Options(known=Known(given(3, LENGTH, 16).tokens, masks()), num_iter=4)
    together, _ = generate(KEY, models[0], [0, 1, 2], options=options)
    apart, info = generate(KEY, models[0], [0, 1, 2], options=options, rows=2)
    np.testing.assert_allclose(apart, together, atol=1e-4)
    np.testing.assert_array_equal(info.rounds, [2, 2, 0])
    np.testing.assert_array_equal(info.made, LENGTH - masks().sum(axis=1))
    assert info.calls["backbone"].sequential == 2 + 0
    for method in (Plain(), SelfSpeculation(2)):
        for known, tokens in cspd_jax.image.stream(KEY, models[0], [0, 1, 2], method, options):
            assert (np.asarray(tokens)[masks()] == options.known.tokens[masks()]).all()
            assert known == np.any(np.asarray(tokens) != 0, axis=2).sum() / 3


def test_one_program_for_all_masks(models):
    options = Options(known=Known(np.zeros((LENGTH, 16)), masks()), num_iter=3)
    model, keys, labels = models[0], cspd_jax.row_keys(KEY, 3), jnp.arange(3)
    settled = resolve(model, options=options, images=3)

    @jax.jit
    def sample(tokens, mask):
        own = dataclasses.replace(settled, known=Known(tokens, mask))
        return cspd_jax.image.sample(model.network, model.params, keys, labels, own)[0]

    tokens = given(3, LENGTH, 16).tokens
    for mask in (masks(), ~masks(), np.ones((3, LENGTH), bool)):
        assert (np.asarray(sample(tokens, mask))[mask] == tokens[mask]).all()
    assert sample._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [1.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_causal_model_keeps_a_prefix(cfg):
    """What it made of whole images, from their first 40 and 63 tokens on; without guidance, for with it
    SphereAR's unconditional half has a first token of its own, which is not known."""
    model, mask = cspd_jax.load("default-causal"), np.arange(64) < np.array([[40], [63]])
    options = Options(respacing="flow4", cfg=cfg)
    whole = np.asarray(generate(KEY, model, [0, 1], options=options)[0])
    known = dataclasses.replace(options, known=Known(whole, mask))
    rest, info = generate(KEY, model, [0, 1], options=known)
    assert (np.asarray(rest)[mask] == whole[mask]).all()
    assert info.calls["backbone"].sequential == 1 + 24 and info.calls["head"].sequential == 24 * 5
    if cfg == 1:
        np.testing.assert_allclose(rest, whole, atol=1e-4)
    wrong = mask.copy()
    wrong[0, 50] = True
    with pytest.raises(UserError, match="only the first tokens of an image can be kept"):
        generate(KEY, model, [0, 1], options=dataclasses.replace(options, known=Known(whole, wrong)))
