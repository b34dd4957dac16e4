"""Every way to generate images, through the same checks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_shape, assert_tree_all_finite
from linear_tokens import LinearTokens

import cspd_jax
from cspd_jax import (
    ChainSpeculation,
    DraftSpeculation,
    Options,
    PaperCriterion,
    Plain,
    SelfSpeculation,
    image,
)
from cspd_jax.image import ReleasedRunner, sampler
from cspd_jax.models import ImageModel

TRACES: list[int] = []
KEYS = cspd_jax.row_keys(jax.random.key(3), 3)
LABELS = [0, 1, -1]


@dataclasses.dataclass(frozen=True)
class Traced(LinearTokens):
    """Notes when Python runs it: then something is being compiled."""

    num_classes: int = 2
    respacing: str = "ddim10"

    def embed_class(self, *args):
        TRACES.append(1)
        return super().embed_class(*args)


MODEL = ImageModel("toy", Traced(), None)
DRAFT = ImageModel("near", Traced(pull=1.45, offset=0.42), None)
CHAINS = ChainSpeculation((4,))
WAYS = {
    "plain": (Plain(), "plain"),
    "plain, chains": (Plain(), CHAINS),
    "self": (SelfSpeculation(gamma=2), "plain"),
    "self, chains": (SelfSpeculation(gamma=2), CHAINS),
    "draft, path": (DraftSpeculation(DRAFT, gamma=2), "plain"),
    "draft, paper": (DraftSpeculation(DRAFT, PaperCriterion(sigma=False), gamma=2), "plain"),
    "released": (ReleasedRunner(DRAFT, gamma=2, inner_temperature=5.0), "plain"),
}


def settled(way, images=3, **options):
    method, denoise = WAYS[way]
    noise = way != "released"
    asked = Options(denoise=denoise, num_iter=4, cfg=1.5, final_noise=noise, **options)
    return method, image.resolve(MODEL, method, asked, images)


def sample(way, keys=KEYS, labels=LABELS, **options):
    method, asked = settled(way, len(labels))
    asked = dataclasses.replace(asked, **options)
    return image.sample(MODEL.network, None, keys, jnp.asarray(labels), asked, method)


# What is slow here runs the code of two others together, or is sampled in test_token_speculation.
SLOW = ("self, chains", "draft, path", "draft, paper")


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS])
def test_protocol(way):
    (method, options), (tokens, info) = settled(way), sample(way)
    assert_shape(tokens, (3, 6, 2))
    assert_tree_all_finite(tokens)

    # Other numbers of the same shapes compile nothing; a neighbour does not matter, to the bit.
    traced, marks = len(TRACES), np.asarray(info.trace.marks)
    others = cspd_jax.row_keys(jax.random.key(9), 3).at[1].set(KEYS[1])
    mixed, of_mixed = sample(way, others, [-1, 1, 0])
    warmer, _ = sample(way, cfg=2.0, temperature=0.9)
    assert len(TRACES) == traced
    np.testing.assert_array_equal(mixed[1], tokens[1])
    np.testing.assert_array_equal(of_mixed.trace.marks[1], marks[1])
    assert not np.allclose(mixed[0], tokens[0]) and not np.allclose(warmer, tokens)

    # The stream ends where one call does, and known tokens do not change on the way.
    before, known = np.zeros_like(tokens), 0
    for known, out in method.steps(MODEL.network, None, KEYS, jnp.asarray(LABELS), options):
        made = np.any(before != 0, axis=-1)
        if method.name == "plain":
            assert np.count_nonzero(np.any(np.asarray(out.tokens) != 0, axis=-1)) == 3 * known
            np.testing.assert_array_equal(np.asarray(out.tokens)[made], before[made])
        before = np.asarray(out.tokens)
    np.testing.assert_array_equal(known, 6)
    np.testing.assert_allclose(before, tokens, atol=1e-5)
    np.testing.assert_array_equal(out.marks, marks)

    # What is counted adds up.
    assert np.sum(info.tested) == np.sum(marks != 0) and np.sum(info.accepted) == np.sum(marks > 0)
    assert (np.sum(info.tested) > 0) == (method.name != "plain") and np.all(info.made == 6)
    assert np.all(info.trace.chain_accepted <= info.trace.chain_tested)
    assert np.any(info.trace.chain_tested > 0) == (options.chain is not None)
    assert np.all((info.rounds >= 1) & (info.rounds <= 12)) and info.calls["backbone"].sequential >= 1
    assert info.calls["backbone"].rows >= 2 * 3 * info.calls["backbone"].sequential  # guidance doubles rows
    assert info.exact == (way != "released") and f"{info.sequential} one after the other" in str(info)
    assert np.array_equal(np.sort(np.asarray(info.trace.steps), axis=1)[0], np.repeat(range(4), [1, 1, 2, 2]))


@pytest.mark.quick("plain, chains-True")
@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("way", ["plain, chains", "self", pytest.param("released", marks=pytest.mark.slow)])
def test_batches_are_the_same_images(way, progress, capsys):
    """Five images three by three; the last batch is filled up. In one call per batch, or in some where
    somebody watches."""
    labels, keys = [0, 1, 0, 1, 0], cspd_jax.row_keys(jax.random.key(3), 5)
    (first, of_first), (last, of_last) = (
        sample(way, keys[at], labels[at]) for at in (slice(0, 3), slice(2, 5))
    )
    method, options = settled(way, 5)
    given = jax.random.key(3), MODEL, labels, method, options
    batched, info = image.generate(*given, rows=3, progress=progress)
    np.testing.assert_allclose(batched, [*first, *last[1:]], atol=1e-5)
    for name in ("accepted", "tested", "rounds", "made"):
        one, other = getattr(of_first, name), getattr(of_last, name)
        np.testing.assert_array_equal(getattr(info, name), [*one, *other[1:]])
    assert ("8/8" in capsys.readouterr().err) == progress


@pytest.mark.parametrize(
    "way",
    [
        "plain, chains",
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in ("self", "self, chains", "draft, path", "plain", "released")
        ),
    ],
)
def test_guidance_of_each_image(way):
    """Inside a caller's own jit, with a scale for each image: as where all have its scale."""
    scales = jnp.array([1.2, 2.0, 3.0])
    run = jax.jit(lambda cfg: sample(way, cfg=cfg)[0])
    tokens = run(scales)
    for i in range(3):
        np.testing.assert_allclose(run(jnp.full(3, scales[i]))[i], tokens[i], atol=1e-5)
    assert not np.allclose(run(scales[::-1])[0], tokens[0], atol=1e-3)


class Cached(LinearTokens):
    """The same model with a cache: the sum of the tokens before each index of the reveal order. A cache that
    is not handed on from the first group makes the context NaN."""

    def init_cache(self, params, reveal, class_embedding):
        return jnp.full((len(reveal), self.seq_len + 1, self.token_dim), jnp.nan)

    def extend(self, params, cache, tokens, reveal, n_known, class_embedding, rows, *, bucket):
        sums = jnp.cumsum(tokens, axis=1)
        fresh = jnp.concatenate([jnp.zeros_like(sums[:, :1]), sums], axis=1)
        begun = (n_known == 0)[:, None, None] | ~jnp.isnan(cache[:, :1])
        index = jnp.arange(self.seq_len + 1)
        cache = jnp.where((index <= n_known[:, None])[..., None] & begun, fresh, cache)
        total = jnp.take_along_axis(cache, n_known[:, None, None], axis=1)[:, 0]
        z = class_embedding * (self.offset + self.pull * total / jnp.maximum(n_known, 1)[:, None])
        return jnp.broadcast_to(z[:, None], (*rows.shape, self.token_dim)), cache

    def context(self, *args, **kwargs):
        raise AssertionError("a model with a cache is asked through extend")


def test_a_model_with_a_cache_of_its_context():
    options = Options(num_iter=4, respacing="ddim10", guided=True, cfg=1.5, prefix_buckets=2)
    arguments = (None, KEYS, jnp.zeros(3, jnp.int32), options)
    expected = sampler.sample(LinearTokens(), *arguments).tokens
    found = sampler.sample(Cached(), *arguments).tokens
    np.testing.assert_allclose(found, expected, atol=1e-5)
    *_, (_, out) = sampler.stream(Cached(), *arguments)
    np.testing.assert_allclose(out.tokens, expected, atol=1e-5)
