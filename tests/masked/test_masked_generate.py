"""Text from masked-diffusion models through the public functions, and what they refuse."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_models import CONFIGS, LLADA, MASK, V, params_of

from cspd_jax.errors import UserError
from cspd_jax.masked import Options, Prompts, Schedule, SelfSpeculation, Stepwise, generate
from cspd_jax.masked.speculative import least_passes
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
        options = Options(max_new_tokens=places, block=block, cached=cached)
        _, info = generate(None, model, [[1, 1]], SelfSpeculation(gamma), options)
        assert info.passes == least_passes(places, block, gamma, cached)
        assert info.acceptance == (None if places == 1 else 1)


@pytest.mark.parametrize("places, block, steps", [(8, 8, 4), (16, 8, 4), (11, 4, 3)])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_schedule_fills_every_place(family, places, block, steps):
    options = Options(max_new_tokens=places, block=block)
    model = LM(CONFIGS[family], jnp.float64), params_of(CONFIGS[family], 0)
    tokens, info = generate(None, model, [[1, 2], [4]], Schedule(steps), options)
    assert info.passes == steps and np.all(np.asarray(tokens) < MASK)


def test_inside_a_jitted_function():
    """With traced parameters, prompts and numbers; the text is that of stepwise decoding."""
    network, params = LM(LLADA, jnp.float64), params_of(LLADA, 0)

    @jax.jit
    def run(key, params, prompts, gamma, temperature):
        model = network, params
        options = Options(max_new_tokens=9, block=3, temperature=temperature)
        return generate(key, model, prompts, SelfSpeculation(gamma, max_gamma=3), options)

    prompts = Prompts(np.array([[1, 2, 3], [4, 0, 0]]), np.array([3, 1]))
    tokens, info = run(jax.random.key(1), params, prompts, 3, 0.7)
    expected, reference = generate(
        jax.random.key(1), (network, params), [[1, 2, 3], [4]], Stepwise(),
        Options(max_new_tokens=9, block=3, temperature=0.7),
    )  # fmt: skip
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(info.steps, reference.steps)
    assert info.passes < reference.passes == 9


@pytest.mark.parametrize("cached, guidance", [(False, None), (True, 1.0)])
@pytest.mark.slow
def test_half_precision(cached, guidance):
    model = LM(LLADA, jnp.bfloat16), params_of(LLADA, 0)
    options = Options(max_new_tokens=6, block=3, cached=cached, guidance=guidance)
    tokens, _ = generate(None, model, [[1, 2, 3], [4]], SelfSpeculation(2), options)
    assert np.all(np.asarray(tokens) < MASK)


@pytest.mark.slow
def test_numbers_beyond_all_use():
    """Moves that cannot exist are not drafted, and noise that drowns the logits never chooses the mask."""
    model, prompts, many = (LM(LLADA, jnp.float32), params_of(LLADA, 0)), [[1, 1]] * 40, 3 * 10**9
    for options, max_gamma, drafted in (
        ({}, None, 5),
        ({"cached": True, "block": 3}, None, 2),
        ({}, 4 * 10**9, 5),
    ):
        method = SelfSpeculation(many, max_gamma, many)
        _, info = generate(None, model, prompts, method, Options(max_new_tokens=6, **options))
        assert len(info.tested_at) == drafted
    tokens, _ = generate(
        jax.random.key(0), model, prompts, options=Options(max_new_tokens=6, temperature=1e6)
    )
    assert np.all(np.asarray(tokens) < MASK)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"method": SelfSpeculation(0)}, "gamma is 0; it must be at least 1"),
        ({"method": SelfSpeculation(5, 4)}, "gamma is 5; it must be at most max_gamma, 4"),
        ({"block": 0}, "block is 0; it must be at least 1"),
        ({"temperature": 1.0}, "sampling needs a key"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e39, "key": 0}, "it must be 0 .greedy. to 1e.06"),
        ({"guidance": float("nan")}, "guidance is nan; it must be a finite number"),
        ({"method": Schedule(65)}, "at most one for each of 64 places"),
        ({"method": Schedule(7)}, "at least one for each of 8 blocks"),
        ({"method": "fast"}, "method is 'fast'; it must be SelfSpeculation"),
        ({"method": Schedule(), "cached": True}, "has no cache"),
        ({"method": SelfSpeculation(accept_top_k=0)}, "accept_top_k is 0; it must be at least 1"),
        ({"method": Schedule(0)}, "steps is 0; it must be at least 1"),
        ({"prompts": [[V - 1]]}, "not one of the model's 11 ids"),
        ({"prompts": Prompts(np.ones((1, 1), int), [2])}, "longer than the 1 tokens given"),
    ],
)
def test_refused(options, sentence):
    options = {"key": None, "prompts": [[1]], "method": SelfSpeculation()} | options
    key, prompts, method = (options.pop(name) for name in ("key", "prompts", "method"))
    with pytest.raises(UserError, match=sentence):
        generate(key, (LM(LLADA, jnp.float64), None), prompts, method, Options(**options))
