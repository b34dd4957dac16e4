"""The plain sampler: sizes of the encoder, halves of guidance, models with a cache."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of
from golden_cases import fixture
from linear_tokens import LinearTokens

from cspd_jax.check import UserError
from cspd_jax.image import sampler
from cspd_jax.image.bound import bind
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys

KEYS = row_keys(jax.random.key(7), 4)


@pytest.mark.slow
def test_encoder_sizes_do_not_change_the_result():
    f = fixture()
    labels = jnp.array([3, 1, -1, 9])
    options = lambda sizes: Options(
        num_iter=6, respacing="ddim8", final_noise=False, prefix_buckets=sizes
    )
    one, three = (
        batch_of(f.model, f.params, KEYS, labels, options(sizes)).generate().tokens
        for sizes in (1, 3)
    )
    chex.assert_trees_all_close(three, one, atol=2e-4)


def test_halves_of_guidance_that_are_drawn_apart_have_keys_of_their_own():
    guided = batch_of(LinearTokens(), None, KEYS, jnp.zeros(4), Options(cfg=2.0))
    both = sampler.both_halves(bind(guided))
    keys = np.asarray(jax.random.key_data(both.keys))
    assert len(np.unique(keys, axis=0)) == 8 and not both.recipe.guided
    chex.assert_trees_all_equal(both.keys[:4], KEYS)


class Cached(LinearTokens):
    """The same model with a cache: the sum of the tokens before each index of the
    reveal order. A cache that is not handed on from the first group makes the context
    NaN."""

    def init_cache(self, params, order, class_embedding):
        return jnp.full((len(order), self.seq_len + 1, self.token_dim), jnp.nan)

    def extend(
        self, params, cache, tokens, order, n_known, class_embedding, rows, *, bucket
    ):
        sums = jnp.cumsum(tokens, axis=1)
        fresh = jnp.concatenate([jnp.zeros_like(sums[:, :1]), sums], axis=1)
        begun = (n_known == 0)[:, None, None] | ~jnp.isnan(cache[:, :1])
        index = jnp.arange(self.seq_len + 1)
        cache = jnp.where((index <= n_known[:, None])[..., None] & begun, fresh, cache)
        total = jnp.take_along_axis(cache, n_known[:, None, None], axis=1)[:, 0]
        mean = total / jnp.maximum(n_known, 1)[:, None]
        z = class_embedding * (self.offset + self.pull * mean)
        return jnp.broadcast_to(z[:, None], (*rows.shape, self.token_dim)), cache

    def context(self, *args, **kwargs):
        raise AssertionError("a model with a cache is asked through extend")


@pytest.mark.parametrize(
    "function, said",
    [
        ("denoise", r"denoise returned \[2, 3\] for 2 rows of 2 numbers"),
        ("context", r"context returned \[2, 2\]; .* \[2, 1\]"),
    ],
)
def test_a_model_that_breaks_its_contract_is_told(function, said):
    right = getattr(LinearTokens, function)
    cut = {
        "denoise": lambda *args: right(*args)[:, :3],
        "context": lambda *args, **named: right(*args, **named)[:, 0],
    }
    broken = type("Broken", (LinearTokens,), {function: cut[function]})()
    batch = batch_of(broken, None, KEYS[:2], jnp.zeros(2, jnp.int32), Options())
    with pytest.raises(UserError, match=said):
        jax.eval_shape(batch.generate)


@pytest.mark.slow
def test_a_model_with_a_cache_of_its_context():
    options = Options(num_iter=4, respacing="ddim10", cfg=1.5, prefix_buckets=2)
    arguments = (None, KEYS[:3], jnp.zeros(3, jnp.int32), options)
    expected = batch_of(LinearTokens(), *arguments).generate().tokens
    cached = batch_of(Cached(), *arguments)
    *_, last = cached.stream()
    for found in (cached.generate(), last):
        chex.assert_trees_all_close(found.tokens, expected, atol=1e-5)
