"""The plain sampler: keys, batches, groups, dtypes, compilation."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from golden_cases import fixture
from linear_tokens import LinearTokens

from cspd_jax.image import sampler
from cspd_jax.image.bound import BoundModel
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys

OPTIONS = Options(num_iter=6, respacing="ddim8", prefix_buckets=1, final_noise=False)
LABELS = jnp.array([3, 1, -1, 9])
KEYS = row_keys(jax.random.key(7), 4)


def draw(keys=KEYS, labels=LABELS, options=OPTIONS, model=None, **changed):
    f = fixture()
    options = dataclasses.replace(options, **changed)
    made = sampler.sample(model or f.model, f.params, keys, labels, options)
    return np.asarray(made.tokens)


@functools.cache
def base():
    return draw()


def test_encoder_sizes_do_not_change_the_result():
    found = draw(prefix_buckets=3)
    np.testing.assert_allclose(found, base(), atol=2e-4)


class FirstToken:
    """Its context is the first token."""

    seq_len, token_dim = 4, 1

    def context(self, params, tokens, reveal, n_known, class_embedding, rows, *, bucket):
        return jnp.broadcast_to(tokens[:, :1], (*rows.shape, 1))


def test_halves_of_guidance_have_first_tokens_of_their_own():
    """Where they are drawn apart: by keys of their own, and each half goes on from its own."""
    order = jnp.tile(jnp.arange(4), (4, 1))
    bound = BoundModel(
        FirstToken(), None, Options(guided=True), KEYS[:2], order, jnp.zeros((4, 1)), None, None
    )
    both = sampler.both_halves(bound)
    keys = np.asarray(jax.random.key_data(both.keys))
    assert len(np.unique(keys, axis=0)) == 4 and not both.options.guided
    np.testing.assert_array_equal(keys[:2], jax.random.key_data(KEYS[:2]))
    state = sampler.PlainState(jnp.full((2, 4, 1), 5.0), None, jnp.array([[7.0], [8.0]]))
    segment = sampler.Segment(4, 1, "ddim8")
    z = jax.jit(lambda first: sampler.group_context(bound, segment, state, first)[0])(jnp.int32(1))
    np.testing.assert_array_equal(np.ravel(z), [5, 5, 7, 8])


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
    arguments = (None, KEYS[:3], jnp.zeros(3, jnp.int32), options)
    expected = sampler.sample(LinearTokens(), *arguments).tokens
    found = sampler.sample(Cached(), *arguments).tokens
    chex.assert_trees_all_close(found, expected, atol=1e-5)
    *_, (_, out) = sampler.stream(Cached(), *arguments)
    chex.assert_trees_all_close(out.tokens, expected, atol=1e-5)
