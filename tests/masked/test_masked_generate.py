"""Text from masked-diffusion models through the public functions, and what they refuse."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_models import CONFIGS, DREAM, LLADA, MASK, V, params_of

from cspd_jax.masked import Options, Prompts, Schedule, SelfSpeculation, Stepwise, generate
from cspd_jax.masked.speculative import least_passes
from cspd_jax.networks.lm import LM
from cspd_jax.networks.lm_config import LMConfig

pytestmark = pytest.mark.usefixtures("float64")


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


CALLS: list[tuple[str, int]] = []


@dataclasses.dataclass(frozen=True)
class Told:
    """Notes every call. Its logits are of the column alone, later ones are surer, and without a prompt they
    are of one id less; `moving`: of how many ids are known too, so that no draft can be right."""

    config: LMConfig = LLADA
    moving: bool = False

    def logits(self, kind, tokens, columns, hidden):
        jax.debug.callback(lambda: CALLS.append((kind, len(tokens))))
        column = columns + self.moving * jnp.sum(tokens == MASK, axis=1)[:, None]
        one, other = ((jnp.arange(V) == ((column + by) % 9)[..., None]) * 1.0 for by in (0, 2))
        return (1 + columns[..., None] / 9) * jnp.where(hidden[:, None, None], 0.6 * one, one + 0.7 * other)

    def forward(self, params, tokens, mask=None, *, rows):
        return self.logits("whole", tokens, rows, tokens[:, 0] == MASK)

    def empty_cache(self, batch, max_len):
        return jnp.zeros((batch, 1))

    def apply(self, params, tokens, positions, cache, *, mask, rows):
        return self.forward(params, tokens, rows=rows + self.config.shifted), cache

    def beside(self, params, tokens, positions, cache, *, own, mask):
        rows, versions, width = tokens.shape
        columns, hidden = (
            jnp.repeat(a, versions, axis=0) for a in (positions, jnp.arange(rows) >= rows // 2)
        )
        logits = self.logits("block", tokens.reshape(-1, width), columns + self.config.shifted, hidden)
        return logits.reshape(rows, versions, width, V)


SSD = SelfSpeculation(np.array([1, 3]), 3)
WAYS = {
    "ssd": (SSD, False, Told()),
    "ssd, cached": (SSD, True, Told()),
    "ssd, Dream, cached": (SSD, True, Told(DREAM)),
    "ssd, nothing accepted": (SSD, False, Told(moving=True)),
    "stepwise": (Stepwise(), False, Told()),
    "stepwise, cached": (Stepwise(), True, Told()),
    "stepwise, Dream, cached": (Stepwise(), True, Told(DREAM)),
    "schedule": (Schedule(5), False, Told()),
}


@pytest.mark.parametrize("way", WAYS)
def test_calls_are_counted_as_they_are_made(way):
    """Two guided texts of different length, of which the network notes every call. With s in place of s + 1,
    or the halves exchanged, other ids would be the likeliest."""
    method, cached, network = WAYS[way]
    options = Options(max_new_tokens=9, block=4, cached=cached, guidance=1.5)
    CALLS.clear()
    tokens, info = generate(None, (network, None), [[1, 1, 1], [1]], method, options)
    jax.block_until_ready(tokens)
    jax.effects_barrier()
    whole, block = ([rows for kind, rows in CALLS if kind == of] for of in ("whole", "block"))
    assert info.calls["whole"].sequential == len(whole) and info.calls["block"].sequential == len(block)
    assert info.calls["whole"].rows == sum(whole) and info.calls["block"].rows == sum(block)
    assert info.sequential == len(CALLS) > 0
    assert bool(block) == cached
    if not network.moving:
        np.testing.assert_array_equal(tokens, (np.array([[3], [1]]) + np.arange(9) + 2) % 9)
        # The surest first; where a block begins, Dream's cache knows its first place alone.
        first = [0, 3, 2, 1] if network.config.shifted else [3, 2, 1, 0]
        if not isinstance(method, Schedule):
            np.testing.assert_array_equal(info.trace.steps, [[*first, *(4 + np.array(first)), 8]] * 2)
    if not info.tested.size:
        return
    rounds, places = np.asarray(info.rounds), np.array([9, 9])
    tested, accepted = np.asarray(info.tested), np.asarray(info.accepted)
    np.testing.assert_array_equal(rounds + accepted.sum(axis=1), places)
    if network.moving:
        assert not accepted.any() and not tested[:, 1:].any()
        np.testing.assert_array_equal(tested[:, 0], places - 1)  # behind the last there is none
        return
    assert not tested[0, 1:].any()  # its gamma is 1
    if not network.config.shifted:
        np.testing.assert_array_equal(tested, accepted)
        np.testing.assert_array_equal(rounds, [2 + 2 + 1, 1 + 1 + 1] if cached else [5, 3])


@pytest.mark.slow
@pytest.mark.parametrize("places, block, steps", [(8, 8, 4), (16, 8, 4), (11, 4, 3)])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_schedule_fills_every_place(family, places, block, steps):
    options = Options(max_new_tokens=places, block=block)
    model = LM(CONFIGS[family], jnp.float64), params_of(CONFIGS[family], 0)
    tokens, info = generate(None, model, [[1, 2], [4]], Schedule(steps), options)
    assert info.sequential == steps and np.all(np.asarray(tokens) < MASK)


@pytest.mark.slow
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
    np.testing.assert_array_equal(info.trace.steps, reference.trace.steps)
    assert info.sequential < reference.sequential == 9


@pytest.mark.parametrize("cached, guidance", [(False, None), (True, 1.0)])
@pytest.mark.slow
def test_half_precision(cached, guidance):
    model = LM(LLADA, jnp.bfloat16), params_of(LLADA, 0)
    options = Options(max_new_tokens=6, block=3, cached=cached, guidance=guidance)
    tokens, _ = generate(None, model, [[1, 2, 3], [4]], SelfSpeculation(2), options)
    assert np.all(np.asarray(tokens) < MASK)
