"""Self-speculation of masked-diffusion models always writes what the stepwise reference writes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_models import MASK, PLACES, V, canvas, make, reference, run

from cspd_jax.masked import speculative
from cspd_jax.masked.sets import prefixes
from cspd_jax.masked.speculative import Speculation

pytestmark = pytest.mark.usefixtures("float64")


def speculation(gamma, rows=8, max_gamma=8):
    gamma = jnp.broadcast_to(jnp.asarray(gamma, jnp.int32), (rows,))
    return Speculation(prefixes(max_gamma), gamma)


def agrees(family, seed, block, cached, temperature, guided, gamma):
    c = make(family, seed, block, cached, temperature, guided)
    expected = reference(family, seed, block, cached, temperature, guided)
    found = run(c, speculation(gamma))
    np.testing.assert_array_equal(found.text, expected.text)
    np.testing.assert_array_equal(found.order, expected.order)
    assert np.all(np.asarray(found.text) != MASK) and np.all(np.asarray(found.text) < V - 1)
    assert np.all(found.step == PLACES)
    drafts = found.info
    assert np.all(drafts.accepted <= drafts.tested)
    assert drafts.rounds.sum() + drafts.accepted.sum() == 8 * PLACES  # one certain move in every round
    return found, expected


@pytest.mark.quick("llada-4-0.0-False", "llada-4-0.8-True")
@pytest.mark.parametrize(
    "family, block, temperature, cached",
    [
        ("llada", 1, 0.0, True),
        ("llada", 4, 0.0, False),
        ("llada", 4, 0.8, True),
        ("dream", 8, 0.0, True),
        ("dream", PLACES, 0.8, False),
        pytest.param("llada", PLACES, 0.0, True, marks=pytest.mark.slow),
        pytest.param("dream", 8, 0.8, True, marks=pytest.mark.slow),
    ],
)
def test_identical_to_stepwise(family, block, temperature, cached):
    """Six models with 8 prompts each: gamma from 1 to 8, also mixed in one batch."""
    fewer = 0
    for seed, gamma in enumerate([1, 2, 3, 5, 8, np.arange(1, 9)]):
        found, expected = agrees(family, seed, block, cached, temperature, False, gamma)
        whole, in_block = (found.info.calls[name].sequential for name in ("whole", "block"))
        reference_whole, reference_in_block = (
            expected.info.calls[name].sequential for name in ("whole", "block")
        )
        fewer += int(reference_whole + reference_in_block - whole - in_block)
        assert whole <= reference_whole and fewer >= 0
    assert fewer > 0 or (block == 1 and cached)  # a cached block of one place leaves nothing to speculate on


@pytest.mark.slow
@pytest.mark.parametrize("family, block, cached", [("llada", 4, False), ("dream", 8, True)])
def test_guidance(family, block, cached):
    found, _ = agrees(family, 1, block, cached, 0.0, True, 4)
    plain = reference(family, 1, block, cached, 0.0, False)
    assert np.any(np.asarray(found.text) != np.asarray(plain.text))


def the_place_alone(speculation, window, moves, choice):
    """A move is accepted if the rule takes its place, with whatever token."""
    place = jnp.take_along_axis(window.places, choice.index, axis=1)
    rank = jnp.argmax(moves.place[:, None] == place[..., None], axis=-1)
    token = jnp.take_along_axis(moves.tokens[..., 0], rank, axis=1)
    return AFTER(speculation, window, moves, choice._replace(token=token))


def the_token_alone(speculation, window, moves, choice):
    """The next move of the chain is accepted if its token is right, wherever the rule would put it."""
    right = (moves.tokens[:, 1:, 0] == choice.token[:, :-1]) & moves.exists[:, 1:]
    longer = jnp.where(right, jnp.arange(1, right.shape[1] + 1, dtype=jnp.int32), -1)
    last = lambda a: jnp.pad(a, ((0, 0), (0, 1)), constant_values=-1)
    return last(moves.place[:, 1:]), last(longer)


AFTER = speculative._after


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [the_place_alone, the_token_alone])
def test_what_is_not_exact_differs_somewhere(wrong, monkeypatch):
    monkeypatch.setattr(speculative, "_after", wrong)
    wrongly = jax.jit(lambda canvas, way: run.__wrapped__(canvas, way))
    different = 0
    for seed in range(3):
        found = wrongly(canvas(seed=seed), speculation(6))
        assert np.all(np.asarray(found.text) != MASK)
        different += np.any(np.asarray(found.text) != reference("llada", seed, 4, False, 0.0, False).text)
    assert different
