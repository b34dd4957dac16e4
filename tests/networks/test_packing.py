"""A packed pass gives what a whole one gives for the tokens that are not padding, and
decoding with packed passes gives the texts of decoding without."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax import text
from cspd_jax.networks.lm import LM
from cspd_jax.sampling import Sampling
from cspd_jax.text import Options

ROOM = 24


class PackedLM(LM):
    """Packs, though its kernels are small."""

    packs = True


@functools.cache
def pair():
    """The same model that packs and that does not, in float64."""
    lm = text_models.model(11, padding=2, dtype=jnp.float64)
    return PackedLM(lm.config, lm.dtype), lm, text_models.params(lm)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.9, None, 0.95)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["lookup", "near"])
def test_texts(kind, rows, sampling):
    with jax.enable_x64(True):
        lm, plain, params = pair()
        draft_model = (plain, text_models.near(params, scale=0.25))
        drafter = text.PromptLookup(shortest=1) if kind == "lookup" else draft_model
        gamma = np.arange(3, 3 + rows) % 8
        method = text.Speculation(drafter, gamma, max_gamma=7, confidence=0.3)
        options = Options(
            max_new_tokens=ROOM - 6,
            stop_ids=(),
            **sampling._asdict(),
        )
        key = jax.random.key(3)
        prompts = text_models.prompts(rows, 6)
        tokens, info = text.generate(key, (lm, params), prompts, method, options)
        expected, counts = text.generate(key, (plain, params), prompts, method, options)
        chex.assert_trees_all_equal(tokens, expected)
        chex.assert_trees_all_equal(info.accepted, counts.accepted)
        assert info.accepted.sum() > 0
