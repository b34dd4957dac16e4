"""What drafters propose: copies found by brute force, and tokens from distributions of
an uncached model."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax import text
from cspd_jax.check import UserError
from cspd_jax.sampling import Sampling
from cspd_jax.text import DraftRequest, PromptLookup, Prompts

MAX_LEN = 24
MOST = 6


def request(tokens, length, count):
    """Greedy, with no stop ids."""
    return DraftRequest(
        tokens,
        length,
        count,
        keys=None,
        sampling=Sampling(),
        stop_ids=jnp.zeros(0, jnp.int32),
        confidence=None,
        max_gamma=MOST,
        num_ids=11,
        needs_log_q=False,
    )


def copied(text, longest, shortest, count):
    """By looking at every place, the longest match first and then the latest."""
    n = len(text)
    for size in range(longest, shortest - 1, -1):
        for start in range(n - size - 1, -1, -1):
            if np.array_equal(text[start : start + size], text[n - size :]):
                out = list(text)
                for _ in range(min(count, 2**size - 1)):
                    out.append(out[start + size + len(out) - n])
                return out[n:]
    return []


@pytest.mark.quick("1-1")
@pytest.mark.parametrize("longest, shortest", [(3, 1), (1, 1), (4, 2)])
def test_prompt_lookup(longest, shortest):
    """512 texts of 1 to 24 tokens over 2, 3 or 6 ids; what stands after a text must not
    matter."""
    random = np.random.default_rng(0)
    ids = np.array([2, 3, 6])[np.arange(512) % 3]
    tokens = random.integers(0, ids[:, None], (512, MAX_LEN))
    length = random.integers(1, MAX_LEN + 1, 512)
    count = random.integers(0, MOST + 1, 512)
    lookup = PromptLookup(longest, shortest)
    assert lookup.begin(None, Prompts(tokens, length), MAX_LEN, None) is None
    drafts, _ = jax.jit(lambda *given: lookup.draft(None, None, request(*given)))(
        tokens, length, count
    )
    assert drafts.tokens.shape == (512, MOST) and drafts.log_q is None
    without = 0
    for row in range(512):
        expected = copied(tokens[row, : length[row]], longest, shortest, count[row])
        assert drafts.count[row] == len(expected)
        assert drafts.tokens[row, : len(expected)].tolist() == expected
        without += count[row] > 0 and not expected
    assert 10 < without < 400


class OneShort(PromptLookup):
    """Returns one draft fewer than its counts say."""

    def draft(self, params, state, request):
        drafts, state = super().draft(params, state, request)
        return drafts._replace(tokens=drafts.tokens[:, 1:]), state


class Beyond(PromptLookup):
    """Every second draft is no id of the target."""

    def draft(self, params, state, request):
        drafts, state = super().draft(params, state, request)
        odd = jnp.arange(request.max_gamma) % 2 > 0
        return drafts._replace(tokens=drafts.tokens + odd * request.num_ids), state


@pytest.mark.parametrize("temperature", [0, 1])
def test_drafts_that_are_no_ids_end_a_draft(float64, temperature):
    """Sampled by the rule match, texts are the plain ones, too."""
    model = text_models.model()
    pair = model, text_models.params(model)
    method = text.Speculation(Beyond(shortest=1), rule="match")
    options = text.Options(temperature=temperature, max_new_tokens=24)
    wanted, found = (
        text.generate(jax.random.key(0), pair, [[3, 5, 3]], way, options)
        for way in (text.Plain(), method)
    )
    chex.assert_trees_all_equal(found.tokens, wanted.tokens)
    assert found.info.accepted[:, 1:].sum() == 0 < found.info.tested.sum()


class NoIntegers(PromptLookup):
    def draft(self, params, state, request):
        drafts, state = super().draft(params, state, request)
        return drafts._replace(tokens=drafts.tokens.astype(float)), state


@pytest.mark.parametrize(
    "drafter, said",
    [(OneShort, r"int32 tokens \[1, 3\]"), (NoIntegers, r"float64 tokens \[1, 4\]")],
)
def test_drafts_are_what_was_asked_for(float64, drafter, said):
    model = text_models.model()
    pair = model, text_models.params(model)
    with pytest.raises(UserError, match=f"{drafter.__name__} drafted {said}, not int"):
        text.generate(None, pair, [[3, 5, 7]], text.Speculation(drafter()))
