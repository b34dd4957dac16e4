"""Text from masked-diffusion models through the public functions, and what they refuse."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_models import LLADA, V, params_of

from cspd_jax.masked import Options, SelfSpeculation, generate
from cspd_jax.networks.lm import LM

pytestmark = pytest.mark.usefixtures("float64")


def least_passes(places: int, block: int, gamma: int, cached: bool) -> int:
    """A round fills gamma + 1 places; the last one (with a cache, of each block) needs no pass."""
    sizes = [min(block, places - i) for i in range(0, places, block)] if cached else [places]
    return sum(1 + -(-(size - 1) // (gamma + 1)) for size in sizes)


@pytest.mark.slow
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
        assert info.sequential == least_passes(places, block, gamma, cached)
        assert info.acceptance == (None if places == 1 else 1)
