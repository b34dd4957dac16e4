"""Every way to generate images, through the same checks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_tree_all_finite
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
from cspd_jax.image.bound import Batch
from cspd_jax.weights.models import ImageModel

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


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan_of(way, labels=LABELS, batch=None):
    method, denoise = WAYS[way]
    return image.resolve(MODEL, labels, method, Options(denoise=denoise, num_iter=4, cfg=1.5), batch)


# What is slow here runs the code of two others together, or is sampled in test_token_speculation.
SLOW = ("self, chains", "draft, path", "draft, paper")


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS])
def test_protocol(way):
    plan = plan_of(way)
    tokens, info = image.run(KEYS, plan)
    assert tokens.shape == (3, 6, 2)
    assert_tree_all_finite(tokens)

    # Other numbers of the same shapes compile nothing; a neighbour does not matter, to the bit.
    traced = len(TRACES)
    others = cspd_jax.row_keys(jax.random.key(9), 3).at[1].set(KEYS[1])
    mixed, of_mixed = image.run(others, dataclasses.replace(plan, labels=np.array([-1, 1, 0], np.int32)))
    warmer = plan.sample(KEYS, jnp.asarray(LABELS), cfg=2.0, temperature=0.9)
    assert len(TRACES) == traced
    np.testing.assert_array_equal(mixed[1], tokens[1])
    np.testing.assert_array_equal(of_mixed.accepted[1], info.accepted[1])
    assert not np.allclose(mixed[0], tokens[0]) and not np.allclose(warmer.tokens, tokens)

    # The stream ends where one call does, and known tokens do not change on the way.
    before = np.zeros_like(tokens)
    steps = list(plan.method.steps(plan.batch_of(KEYS, plan.labels)))
    for known, out in steps:
        settled = np.any(before != 0, axis=-1)
        if plan.method.name == "plain":
            assert np.count_nonzero(np.any(np.asarray(out.tokens) != 0, axis=-1)) == 3 * known
            np.testing.assert_array_equal(np.asarray(out.tokens)[settled], before[settled])
        before = np.asarray(out.tokens)
    assert steps[-1][0] == 6
    np.testing.assert_allclose(before, tokens, atol=1e-5)
    np.testing.assert_array_equal(steps[-1][1].accepted, info.accepted)

    # What is counted adds up.
    assert not (info.accepted & ~info.tested).any()
    if info.verified is None:
        assert not info.tested.any()
    else:
        assert info.verified.tested.sum() == info.tested.sum() > 0
        assert info.verified.accepted.sum() == info.accepted.sum()
    if info.chains is not None:
        assert info.chains.accepted <= info.chains.tested
        assert plan.method.name == "self" or info.chains.committed.sum() % 10 == 0  # self has parts of chains
    assert 1 <= info.rounds <= 12 and info.sequential.target_backbone >= 1
    assert info.total.target_backbone >= 2 * 3 * info.sequential.target_backbone > 0  # guidance doubles rows
    assert info.exactness.lossless == (way != "released")


@pytest.mark.quick("plain, chains-2")
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("way", ["plain, chains", "self", pytest.param("released", marks=pytest.mark.slow)])
def test_batches_are_the_same_images(way, pieces):
    """Five images three by three; the one that fills the last batch is in no count. In one call per batch, or
    in some where somebody watches."""
    labels, keys = [0, 1, 0, 1, 0], cspd_jax.row_keys(jax.random.key(3), 5)
    (first, of_first), (last, of_last) = (
        image.run(keys[at], plan_of(way, labels[at])) for at in (slice(0, 3), slice(2, 5))
    )
    told: list[int] = []
    batched, info = image.generate_batches(jax.random.key(3), plan_of(way, labels, 3), told.append, pieces)
    np.testing.assert_allclose(batched, [*first, *last[1:]], atol=1e-5)
    np.testing.assert_array_equal(info.accepted, [*of_first.accepted, *of_last.accepted[1:]])
    assert sum(told) == 2 * 4 and info.batch == 3
    if info.chains is not None:
        assert info.chains.committed.sum() == 5 / 3 * of_first.chains.committed.sum()


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
    plan, scales = plan_of(way), jnp.array([1.2, 2.0, 3.0])
    sample = jax.jit(lambda cfg: plan.sample(KEYS, jnp.asarray(LABELS), cfg=cfg).tokens)
    tokens = sample(scales)
    for i in range(3):
        np.testing.assert_allclose(sample(jnp.full(3, scales[i]))[i], tokens[i], atol=1e-5)
    assert not np.allclose(sample(scales[::-1])[0], tokens[0], atol=1e-3)


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
    *_, (_, out) = sampler.stream(Batch(Cached(), *arguments))
    np.testing.assert_allclose(out.tokens, expected, atol=1e-5)
