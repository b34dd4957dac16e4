"""What drafters propose: copies found by brute force, and tokens from distributions of an uncached model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax.sampling import Sampling, noise_at
from cspd_jax.text import DraftRequest, ModelDrafter, PromptLookup, Prompts

MAX_LEN, MOST = 24, 6


def request(tokens, length, count, **options):
    """Greedy, with no stop ids, unless options say otherwise."""
    given = {"keys": None, "sampling": Sampling(), "stop_ids": jnp.zeros(0, jnp.int32), "confidence": None}
    given |= {"max_gamma": MOST, "num_ids": 11, "needs_log_q": False} | options
    return DraftRequest(*(jnp.asarray(a, jnp.int32) for a in (tokens, length, count)), **given)


def copied(text, longest, shortest, count):
    """By looking at every place, the longest match first and then the latest."""
    n = len(text)
    for size in range(longest, shortest - 1, -1):
        for start in range(n - size - 1, -1, -1):
            if np.array_equal(text[start : start + size], text[n - size :]) and size <= n:
                out = list(text)
                for _ in range(min(count, 2**size - 1)):
                    out.append(out[start + size + len(out) - n])
                return out[n:]
    return []


@pytest.mark.quick("1-1")
@pytest.mark.parametrize("longest, shortest", [(3, 1), (1, 1), (4, 2)])
def test_prompt_lookup(longest, shortest):
    """512 texts of 1 to 24 tokens over 2, 3 or 6 ids; what stands after a text must not matter."""
    random = np.random.default_rng(0)
    ids = np.array([2, 3, 6])[np.arange(512) % 3]
    tokens = random.integers(0, ids[:, None], (512, MAX_LEN))
    length, count = random.integers(1, MAX_LEN + 1, 512), random.integers(0, MOST + 1, 512)
    lookup = PromptLookup(longest, shortest)
    assert lookup.begin(None, Prompts(tokens, length), MAX_LEN) is None
    drafts, _ = jax.jit(lambda *given: lookup.draft(None, None, request(*given)))(tokens, length, count)
    assert drafts.tokens.shape == (512, MOST) and drafts.log_q is None
    without = 0
    for row in range(512):
        expected = copied(tokens[row, : length[row]], longest, shortest, count[row])
        assert drafts.count[row] == len(expected)
        np.testing.assert_array_equal(drafts.tokens[row, : len(expected)], expected)
        without += count[row] > 0 and not expected
    assert 10 < without < 400


@pytest.mark.slow
def test_drafts_of_a_model_follow_its_distributions():
    """Sampled with the noise of each position, up to a stop id or where no token is probable."""
    lm = text_models.model(11, padding=3, dtype=jnp.float32)
    params, limit, stop = text_models.params(lm), 0.4, 4
    sampling = Sampling(jnp.float32(1.2), jnp.int32(9), None)
    prompts, length = text_models.prompts(32, 8)
    tokens = np.pad(prompts, ((0, 0), (0, MAX_LEN - 8)), constant_values=3)
    count, keys = np.arange(32) % (MOST + 1), jax.random.split(jax.random.key(0), 32)
    drafter = ModelDrafter(lm)

    @jax.jit
    def run(tokens, length, count, keys):
        cache = drafter.begin(params, Prompts(jnp.asarray(tokens[:, :8]), length), MAX_LEN)
        given = {"keys": keys, "sampling": sampling, "stop_ids": jnp.array([stop]), "confidence": limit}
        return drafter.draft(params, cache, request(tokens, length, count, needs_log_q=True, **given))[0]

    drafts = jax.tree.map(np.asarray, run(np.maximum(tokens, 0), length, count, keys))
    after = length[:, None] + np.arange(MOST)
    noise = np.asarray(noise_at(keys, jnp.asarray(after), 11, jnp.float32))
    rows = np.arange(32)
    texts = np.where(np.arange(MAX_LEN) < length[:, None], tokens, 0)
    texts[rows[:, None], after] = drafts.tokens
    logits = text_models.logits(lm, params, texts)[rows[:, None], after - 1]
    ended_early = 0
    for row in rows:
        for i in range(drafts.count[row]):
            probs = text_models.probabilities(logits[row, i], 1.2, 9)
            np.testing.assert_allclose(np.exp(drafts.log_q[row, i]), probs, atol=1e-5)
            drawn = drafts.tokens[row, i]
            with np.errstate(divide="ignore"):
                assert drawn == np.argmax(np.log(probs) + noise[row, i])
            assert probs.max() >= limit
            last = i + 1 == drafts.count[row]
            after = text_models.probabilities(logits[row, i + 1], 1.2, 9) if i + 1 < count[row] else probs
            assert last == (drawn == stop or after.max() < limit or i + 1 == count[row])
            ended_early += last and i + 1 < count[row]
        assert drafts.count[row] <= count[row] and not drafts.tokens[row, count[row] :].any()
    assert ended_early > 5 and np.any((drafts.count == count) & (count > 2))
    assert drafts.passes == drafts.count.max()
