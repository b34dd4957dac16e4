"""Text from masked-diffusion models as users ask for it: whole, streamed, scheduled; and what is refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_models import CONFIGS, LLADA, MASK, V, params_of

from cspd_jax.errors import UserError
from cspd_jax.masked import generate, least_passes, stream
from cspd_jax.networks.lm import LM

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_least_passes(cached):
    """A network whose logits do not depend on the text has every draft accepted."""
    config = dataclasses.replace(LLADA, depth=1)
    params = jax.tree.map(jnp.zeros_like, params_of(config, 0))
    params["embed"]["embedding"] += 1.0
    params["head"]["kernel"] += np.arange(V) / V
    params["norm"]["scale"] += 1.0
    prompts, lengths = np.ones((1, 2), int), np.array([2])
    for places, block, draft_len in ((11, 4, 3), (9, 4, 1), (1, 4, 2), (10, 10, 2)):
        options = {"new_tokens": places, "block": block, "draft_len": draft_len, "cached": cached}
        found = generate(LM(config, jnp.float64), params, prompts, lengths, **options)
        assert found.passes + found.block_passes == least_passes(places, block, draft_len, cached)
        assert found.accepted.sum() == found.tested.sum()


def test_generate_and_stream():
    model, params = LM(LLADA, jnp.float64), params_of(LLADA, 0)
    prompts, lengths = np.array([[1, 2, 3], [4, 0, 0]]), np.array([3, 1])
    options = {"new_tokens": 9, "block": 3, "temperature": 0.7, "keys": jax.random.key(1)}
    found = generate(model, params, prompts, lengths, **options)
    reference = generate(model, params, prompts, lengths, method="stepwise", **options)
    *_, last = stream(model, params, prompts, lengths, **options)
    np.testing.assert_array_equal(found.text, reference.text)
    np.testing.assert_array_equal(found.text, last.text)
    assert (last.passes, last.rows) == (found.passes, found.rows) and found.passes < reference.passes == 9
    several = generate(model, params, prompts, lengths, method="schedule", steps=3, **options)
    assert several.passes == 3


@pytest.mark.parametrize("places, block, steps", [(8, 8, 4), (16, 8, 4), (11, 4, 3)])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_schedule_fills_every_place(family, places, block, steps):
    options = {"method": "schedule", "steps": steps, "new_tokens": places, "block": block}
    model, params = LM(CONFIGS[family], jnp.float64), params_of(CONFIGS[family], 0)
    found = generate(model, params, np.array([[1, 2], [4, 0]]), np.array([2, 1]), **options)
    assert found.passes == steps and np.all(np.asarray(found.text) < MASK)


@pytest.mark.parametrize("guidance", [None, 1.0])
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_half_precision(cached, guidance):
    model, params = LM(LLADA, jnp.bfloat16), params_of(LLADA, 0)
    options = {"new_tokens": 6, "block": 3, "cached": cached, "guidance": guidance, "draft_len": 2}
    found = generate(model, params, np.array([[1, 2, 3], [4, 0, 0]]), np.array([3, 1]), **options)
    assert np.all(np.asarray(found.text) < MASK)


def test_numbers_beyond_all_use():
    """Moves that there cannot be are not drafted; noise that drowns the logits chooses no mask."""
    model, params = LM(LLADA, jnp.float32), params_of(LLADA, 0)
    prompts, lengths, most = np.ones((40, 2), int), np.full(40, 2), 3 * 10**9
    for options, drafted in (({}, 5), ({"cached": True, "block": 3}, 2), ({"max_draft_len": 4 * 10**9}, 5)):
        options = {"new_tokens": 6, "draft_len": most, "top_k": most, **options}
        found = generate(model, params, prompts, lengths, **options)
        assert len(found.tested) == drafted
    hot = {"new_tokens": 6, "temperature": 1e6, "keys": jax.random.key(0)}
    found = generate(model, params, prompts, lengths, **hot)
    assert np.all(np.asarray(found.text) < MASK)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"draft_len": 0}, "draft_len is 0; it must be at least 1"),
        ({"draft_len": 5, "max_draft_len": 4}, "it must be at most max_draft_len, 4"),
        ({"block": 0}, "block is 0; it must be at least 1"),
        ({"temperature": 1.0}, "sampling needs keys"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e39, "keys": 0}, "it must be 0 .greedy. to 1e.06"),
        ({"guidance": float("nan")}, "guidance is nan; it must be a number"),
        ({"method": "schedule", "steps": 65}, "at most one for each of 64 places"),
        ({"method": "schedule", "steps": 7}, "at least one for each of 8 blocks"),
        ({"method": "fast"}, "method is 'fast'; it must be one of ssd, stepwise, schedule"),
        ({"method": "schedule", "cached": True}, "without a cache"),
        ({"prompts": [[V - 1]]}, "none of the model's 11 ids"),
        ({"lengths": [2]}, "a prompt has not 0 to 1 tokens"),
    ],
)
def test_refused(options, sentence):
    prompts = np.array(options.pop("prompts", [[1]]))
    lengths = options.pop("lengths", [1])
    with pytest.raises(UserError, match=sentence):
        generate(LM(LLADA, jnp.float64), None, prompts, lengths, **options)
