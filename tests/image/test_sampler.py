"""The plain sampler: keys, batches, groups, dtypes, compilation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from golden_cases import fixture

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
