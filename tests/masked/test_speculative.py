"""Self-speculation of masked-diffusion models always writes what the stepwise reference
writes."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_models import LLADA, MASK, PLACES, V, canvas, params_of, reference, run

from cspd_jax.masked import Options, SelfSpeculation, generate
from cspd_jax.masked.sets import prefixes
from cspd_jax.masked.speculative import Speculation
from cspd_jax.networks.lm import LM

pytestmark = pytest.mark.usefixtures("float64")

ROWS = 8
DREAM_RECIPE = {"temperature": 0.2, "top_p": 0.95, "confidence": "entropy"}
CUT = {"temperature": 0.8, "top_p": 0.9, "top_k": 4}
WAYS = {
    "llada": ("llada", {}),
    "llada, cached, sampled": ("llada", {"cached": True, "temperature": 0.8}),
    "llada, cached, one block": ("llada", {"cached": True, "block": PLACES}),
    "llada, cached, blocks of one": ("llada", {"cached": True, "block": 1}),
    "llada, guided": ("llada", {"guidance": 0.7}),
    "llada, cut, places drawn": (
        "llada",
        {**CUT, "confidence": "probability", "place_temperature": 0.3},
    ),
    "llada, cut, cached, margin": (
        "llada",
        {**CUT, "cached": True, "confidence": "margin"},
    ),
    "llada, random places": ("llada", {"confidence": "random"}),
    "dream, cached, guided": ("dream", {"cached": True, "block": 8, "guidance": 0.7}),
    "dream, sampled, one block": ("dream", {"temperature": 0.8, "block": PLACES}),
    "dream, recipe": ("dream", DREAM_RECIPE),
    "dream, recipe, cached": ("dream", {**DREAM_RECIPE, "cached": True}),
}


def speculation(gamma):
    return Speculation(
        prefixes(8), jnp.broadcast_to(jnp.asarray(gamma, jnp.int32), (ROWS,))
    )


def passes(state):
    return sum(calls.sequential for calls in state.counts.calls.values())


@pytest.mark.quick("llada", "llada, cached, sampled")
@pytest.mark.parametrize("way", WAYS)
def test_identical_to_stepwise(way):
    """Every text and every order of filling; four models with 8 prompts each: gamma
    from 1 to 8, also mixed in one batch. With the noise of another row they are others.
    """
    family, options = WAYS[way]
    fewer = unlike = 0
    for seed, gamma in enumerate([1, 3, 8, np.arange(1, 9)]):
        c = canvas(family, seed, **options)
        expected = reference(family, seed, **options)
        found = run(c, speculation(gamma))
        chex.assert_trees_all_equal(
            (found.text, found.steps), (expected.text, expected.steps)
        )
        assert np.all(np.asarray(found.text) != MASK) and np.all(
            np.asarray(found.text) < V - 1
        )
        drafts = found.counts
        assert np.all(drafts.accepted <= drafts.tested)
        # One certain move in every round.
        assert drafts.rounds.sum() + drafts.accepted.sum() == ROWS * PLACES
        assert (
            drafts.calls["whole"].sequential
            <= expected.counts.calls["whole"].sequential
        )
        fewer += passes(expected) - passes(found)
        if c.keys is not None:
            wrong = run(
                dataclasses.replace(c, keys=jnp.roll(c.keys, 1)), speculation(gamma)
            )
            unlike += np.any(np.asarray(wrong.text) != expected.text)
            unlike += np.any(np.asarray(wrong.steps) != expected.steps)
    # A cached block of one leaves nothing to speculate on.
    assert fewer > 0 or options.get("block") == 1
    assert unlike > 0 or c.keys is None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ThePlaceAlone(Speculation):
    """A move is accepted if the rule takes its place, with whatever token."""

    def after(self, window, moves, choice):
        place = jnp.take_along_axis(window.places, choice.index, axis=1)
        rank = jnp.argmax(moves.place[:, None] == place[..., None], axis=-1)
        token = jnp.take_along_axis(moves.tokens[..., 0], rank, axis=1)
        return super().after(window, moves, choice._replace(token=token))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TheTokenAlone(Speculation):
    """The next move of the chain is accepted if its token is right, wherever the rule
    would put it."""

    def after(self, window, moves, choice):
        right = (moves.tokens[:, 1:, 0] == choice.token[:, :-1]) & moves.exists[:, 1:]
        next_text = jnp.arange(1, right.shape[1] + 1, dtype=jnp.int32)
        last = lambda a: jnp.pad(a, ((0, 0), (0, 1)), constant_values=-1)
        return last(moves.place[:, 1:]), last(jnp.where(right, next_text, -1))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [ThePlaceAlone, TheTokenAlone])
def test_what_is_not_exact_differs_somewhere(wrong):
    way = speculation(6)
    way = wrong(way.sets, way.gamma)
    texts = [np.asarray(run(canvas(seed=seed), way).text) for seed in range(3)]
    assert np.all(np.array(texts) != MASK)
    assert any(
        np.any(text != reference(seed=seed).text) for seed, text in enumerate(texts)
    )


def least_passes(places: int, block: int, gamma: int, cached: bool) -> int:
    """A round fills gamma + 1 places; the last one (with a cache, of each block) needs
    no pass."""
    sizes = (
        [min(block, places - i) for i in range(0, places, block)]
        if cached
        else [places]
    )
    return sum(1 + -(-(size - 1) // (gamma + 1)) for size in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_least_passes(cached):
    """A network whose logits do not depend on the text has every draft accepted."""
    config = dataclasses.replace(LLADA, depth=1)
    params = jax.tree.map(jnp.zeros_like, params_of(config, 0))
    params["embed"]["embedding"] += 1.0
    params["head"]["kernel"] += np.arange(V) / V
    params["norm"]["scale"] += 1.0
    for places, block, gamma in (
        (11, 4, 3),
        (1, 4, 2),
        (10, 10, 2),
        *[(11, 2, 2)] * cached,
    ):
        options = Options(max_new_tokens=places, block=block, cached=cached)
        model = LM(config, jnp.float64), params
        _, info = generate(None, model, [[1, 1]], SelfSpeculation(gamma), options)
        assert info.sequential == least_passes(places, block, gamma, cached)
        assert info.acceptance == (None if places == 1 else 1)
