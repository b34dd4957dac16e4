"""A packed pass gives what a whole one gives for the tokens that are not padding, and
decoding with packed passes gives the texts of decoding without."""

import chex
import jax
import numpy as np
import pytest
import text_models

from cspd_jax import text
from cspd_jax.networks.lm import LM
from cspd_jax.sampling import Sampling
from cspd_jax.text import Options


class PackedLM(LM):
    """Packs, though its kernels are small."""

    packs = True


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.9, None, 0.95)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["lookup", "near"])
def test_texts(kind, rows, sampling):
    with jax.enable_x64(True):
        plain = text_models.model(padding=2)
        lm = PackedLM(plain.config, plain.dtype)
        params = text_models.params(plain)
        draft_model = (plain, text_models.near(params, scale=0.25))
        drafter = text.PromptLookup(shortest=1) if kind == "lookup" else draft_model
        gamma = np.arange(3, 3 + rows) % 8
        method = text.Speculation(drafter, gamma, max_gamma=7, confidence=0.3)
        options = Options(max_new_tokens=18, stop_ids=(), **sampling._asdict())
        asked = text_models.prompts(rows, 6), method, options
        (tokens, info), (expected, counts) = (
            text.generate(jax.random.key(3), (network, params), *asked)
            for network in (lm, plain)
        )
        chex.assert_trees_all_equal(tokens, expected)
        chex.assert_trees_all_equal(info.accepted, counts.accepted)
        assert info.accepted.sum() > 0
