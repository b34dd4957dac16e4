"""Text from masked-diffusion models through the public functions, and what they refuse."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_models import CONFIGS, LLADA, MASK, V, params_of

from cspd_jax.errors import UserError
from cspd_jax.masked import Prompts, generate, least_passes
from cspd_jax.networks.lm import LM

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    "cached", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "cached"]
)
def test_least_passes(cached):
    """A network whose logits do not depend on the text has every draft accepted."""
    config = dataclasses.replace(LLADA, depth=1)
    params = jax.tree.map(jnp.zeros_like, params_of(config, 0))
    params["embed"]["embedding"] += 1.0
    params["head"]["kernel"] += np.arange(V) / V
    params["norm"]["scale"] += 1.0
    model = LM(config, jnp.float64), params
    cases = ((11, 4, 3), (1, 4, 2), (10, 10, 2), *[(9, 4, 1), (11, 2, 2)] * cached)
    for places, block, gamma in cases:
        options = {"max_new_tokens": places, "block": block, "gamma": gamma, "cached": cached}
        _, info = generate(None, model, [[1, 1]], **options)
        assert info.passes == least_passes(places, block, gamma, cached)
        assert info.acceptance == (None if places == 1 else 1)


@pytest.mark.parametrize("places, block, steps", [(8, 8, 4), (16, 8, 4), (11, 4, 3)])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_schedule_fills_every_place(family, places, block, steps):
    options = {"method": "schedule", "steps": steps, "max_new_tokens": places, "block": block}
    model = LM(CONFIGS[family], jnp.float64), params_of(CONFIGS[family], 0)
    tokens, info = generate(None, model, [[1, 2], [4]], **options)
    assert info.passes == steps and np.all(np.asarray(tokens) < MASK)


def test_inside_a_jitted_function():
    """With traced parameters, prompts and numbers; the text is that of stepwise decoding."""
    network, params = LM(LLADA, jnp.float64), params_of(LLADA, 0)
    options = {"max_new_tokens": 9, "block": 3}

    @jax.jit
    def run(key, params, prompts, gamma, temperature):
        model = network, params
        return generate(key, model, prompts, gamma=gamma, max_gamma=3, temperature=temperature, **options)

    prompts = Prompts(np.array([[1, 2, 3], [4, 0, 0]]), np.array([3, 1]))
    tokens, info = run(jax.random.key(1), params, prompts, 3, 0.7)
    expected, reference = generate(
        jax.random.key(1), (network, params), [[1, 2, 3], [4]], method="stepwise", temperature=0.7, **options
    )
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(info.steps, reference.steps)
    assert info.passes < reference.passes == 9


@pytest.mark.parametrize("cached, guidance", [(False, None), (True, 1.0)])
@pytest.mark.slow
def test_half_precision(cached, guidance):
    model = LM(LLADA, jnp.bfloat16), params_of(LLADA, 0)
    options = {"max_new_tokens": 6, "block": 3, "cached": cached, "guidance": guidance, "gamma": 2}
    tokens, _ = generate(None, model, [[1, 2, 3], [4]], **options)
    assert np.all(np.asarray(tokens) < MASK)


@pytest.mark.slow
def test_numbers_beyond_all_use():
    """Moves that cannot exist are not drafted, and noise that drowns the logits never chooses the mask."""
    model, prompts, many = (LM(LLADA, jnp.float32), params_of(LLADA, 0)), [[1, 1]] * 40, 3 * 10**9
    for options, drafted in (({}, 5), ({"cached": True, "block": 3}, 2), ({"max_gamma": 4 * 10**9}, 5)):
        options = {"max_new_tokens": 6, "gamma": many, "accept_top_k": many, **options}
        _, info = generate(None, model, prompts, **options)
        assert len(info.tested_at) == drafted
    tokens, _ = generate(jax.random.key(0), model, prompts, max_new_tokens=6, temperature=1e6)
    assert np.all(np.asarray(tokens) < MASK)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"gamma": 0}, "gamma is 0; it must be at least 1"),
        ({"gamma": 5, "max_gamma": 4}, "gamma is 5; it must be at most max_gamma, 4"),
        ({"block": 0}, "block is 0; it must be at least 1"),
        ({"temperature": 1.0}, "sampling needs a key"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e39, "key": 0}, "it must be 0 .greedy. to 1e.06"),
        ({"guidance": float("nan")}, "guidance is nan; it must be a finite number"),
        ({"method": "schedule", "steps": 65}, "at most one for each of 64 places"),
        ({"method": "schedule", "steps": 7}, "at least one for each of 8 blocks"),
        ({"method": "fast"}, "method is 'fast'; it must be one of ssd, stepwise, schedule"),
        ({"method": "schedule", "cached": True}, "has no cache"),
        ({"method": "stepwise", "accept_top_k": 3}, "accept_top_k is for method 'ssd'"),
        ({"accept_top_k": 0}, "accept_top_k is 0; it must be at least 1"),
        ({"steps": 3}, "steps is for method 'schedule'"),
        ({"prompts": [[V - 1]]}, "not one of the model's 11 ids"),
        ({"prompts": Prompts(np.ones((1, 1), int), [2])}, "longer than the 1 tokens given"),
    ],
)
def test_refused(options, sentence):
    options = {"key": None, "model": (LM(LLADA, jnp.float64), None), "prompts": [[1]]} | options
    with pytest.raises(UserError, match=sentence):
        generate(**options)
