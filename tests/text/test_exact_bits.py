"""exact_bits: texts with drafts are plain decoding's in float32, too, where they would
part at near-ties."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax import text

GAMMA = 4
NEW = 40
ROWS = 12


@functools.cache
def undecided():
    """A model in float32, wide enough that the number of rows of a product changes its
    rounding, whose ids 3 to 10 are all but equally probable; and one near it."""
    lm = text_models.model(
        dtype=jnp.float32, width=512, mlp_width=640, heads=8, head_dim=64
    )
    params = text_models.params(lm, scale=0.05)
    head = params["head"]["kernel"]
    head[:, 3:] = head[:, 2:3] * (1 + 1e-7 * np.arange(1, head.shape[1] - 2))
    return (lm, params), (lm, text_models.near(params, scale=0.002))


def texts(model, exact_bits, draft, rule="block", **options):
    bits = GAMMA if exact_bits else None
    options = text.Options(max_new_tokens=NEW, exact_bits=bits, **options)
    key = jax.random.key(1) if options.temperature else None
    method = text.Plain()
    if draft is not None:
        method = text.Speculation(draft, GAMMA, rule)
    prompts = text_models.prompts(ROWS, 6)
    tokens, info = text.generate(key, model, prompts, method, options)
    return np.asarray(tokens), info


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, {"temperature": 1.0, "rule": "match"}], ids=["greedy", "match"]
)
def test_the_same_texts(how):
    model, draft = undecided()
    head = text_models.head(*model, np.arange(2, 11), seed=0, scale=0.05)
    for drafter in (
        text.PromptLookup(),
        draft,
        text.draft_from_states(head, model, confidence=0),
    ):
        drafted, info = texts(model, True, drafter, **how)
        plain, _ = texts(model, True, None, **how)
        chex.assert_trees_all_equal(drafted, plain)
        assert int(info.accepted.sum()) > 0


def test_texts_part_without_it():
    """The control: this model's texts do depend on how many tokens a pass reads."""
    model, draft = undecided()
    drafted, _ = texts(model, False, draft)
    plain, _ = texts(model, False, None)
    assert (drafted != plain).any()
