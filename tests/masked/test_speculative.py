"""Self-speculation of masked-diffusion models always writes what the stepwise reference
writes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models
from masked_models import CONFIGS, MASK, PLACES, V, canvas, reference, run

from cspd_jax.masked import Options, SelfSpeculation, generate, passes
from cspd_jax.masked.sets import prefixes
from cspd_jax.masked.speculative import Speculation
from cspd_jax.networks.lm import LM

pytestmark = pytest.mark.usefixtures("float64")

ROWS = 8
DREAM_RECIPE = {"temperature": 0.2, "top_p": 0.95, "confidence": "entropy"}
CUT = {"temperature": 0.8, "top_p": 0.9, "top_k": 4}
# A round can fill the whole window.
MANY = {"temperature": 0.8, "threshold": 0.05, "block": 8, "places": 30}
WAYS = {
    "llada": ("llada", {}),
    "llada, guided": ("llada", {"guidance": 0.7}),
    "llada, cut, places drawn": (
        "llada",
        {**CUT, "confidence": "probability", "place_temperature": 0.3},
    ),
    "llada, random places": ("llada", {"confidence": "random"}),
    "llada, two or more, sampled": (
        "llada",
        {"per_step": 2, "threshold": 0.4, "temperature": 0.8},
    ),
    "dream, sampled, one block": ("dream", {"temperature": 0.8, "block": PLACES}),
    "dream, recipe": ("dream", DREAM_RECIPE),
    "sdar, sampled": ("sdar", {"temperature": 0.8}),
    "sdar, guided": ("sdar", {"guidance": 0.7}),
    "sdar, dynamic, sampled": (
        "sdar",
        {**CUT, "confidence": "probability", "threshold": 0.4},
    ),
    "sdar, blocks of one": ("sdar", {"block": 1}),
    "sdar, sequential": ("sdar", {"confidence": "sequential", "per_step": 3}),
    "sdar, cut, margin": ("sdar", {**CUT, "confidence": "margin"}),
    "fast, threshold": ("fast", {"threshold": 0.3, "block": 2}),
    "fast, recipe": ("fast", {**DREAM_RECIPE, "block": 4}),
    "fast, many places per step": ("fast, blocks of 8", MANY),
}


def speculation(gamma):
    gamma = np.broadcast_to(gamma, ROWS)
    return Speculation(prefixes(int(gamma.max())), jnp.asarray(gamma, jnp.int32))


def calls(state):
    return sum(of.sequential for of in state.counts.calls.values())


@pytest.mark.quick("llada")
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
        assert np.all(np.asarray(found.text) < MASK)
        drafts = found.counts
        assert np.all(drafts.accepted <= drafts.tested)
        # A round takes one step more than it accepts drafts, unless the text ends.
        steps = 1 + np.max(found.steps, axis=1)
        without = np.asarray(drafts.rounds + drafts.accepted.sum(1)) - steps
        assert np.all(without >= 0) and (c.network.config.block or np.all(without <= 1))
        fewer += calls(expected) - calls(found)
        if c.keys is not None:
            other = dataclasses.replace(c, keys=jnp.roll(c.keys, 1))
            wrong = run(other, speculation(gamma))
            unlike += np.any(np.asarray(wrong.text) != expected.text)
            unlike += np.any(np.asarray(wrong.steps) != expected.steps)
    assert fewer > 0
    assert unlike > 0 or c.keys is None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ThePlaceAlone(Speculation):
    """A draft is accepted if the rule fills its places, with whatever tokens."""

    def agrees(self, texts, after):
        return super().agrees(texts == MASK, after == MASK)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TheTokenAlone(Speculation):
    """A draft is accepted if its tokens are right, wherever the rule would put them."""

    def agrees(self, texts, after):
        return super().agrees(jnp.sort(texts), jnp.sort(after))


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


def stores(variant):
    """A way to fill a canvas with another `passes.keep`, which `variant` makes."""
    right = passes.keep

    def filled(c, way):
        passes.keep = variant(right)
        try:
            return run.__wrapped__(c, way)
        finally:
            passes.keep = right

    return jax.jit(filled)


def stored_too_early(right):
    def keep(c, *rest):
        config = dataclasses.replace(c.network.config, shifted=False)
        network = dataclasses.replace(c.network, config=config)
        return right(dataclasses.replace(c, network=network), *rest)

    return keep


WRONG_STORES = {
    "a block that was not finished when it was read": (
        "sdar",
        {"temperature": 0.8},
        lambda right: (
            lambda c, window, stored, fresh, version, seen, text: right(
                c, window, stored, fresh, version, text, text
            )
        ),
    ),
    "the block of another text": (
        "sdar",
        {"temperature": 0.8},
        lambda right: (
            lambda c, window, stored, fresh, version, *texts: right(
                c, window, stored, fresh, 0 * version, *texts
            )
        ),
    ),
    "the block that predicts the next place": (
        "fast, blocks of 8",
        MANY,
        stored_too_early,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG_STORES)
def test_wrong_stores_differ_somewhere(wrong):
    family, options, variant = WRONG_STORES[wrong]
    way = stores(variant)
    differ = 0
    for seed in range(4):
        options = {**options, "per_step": 1 + seed % 2}
        found = way(canvas(family, seed, **options), speculation(3))
        differ += np.any(found.text != reference(family, seed, **options).text)
    assert differ


DECODED = {
    "llada": ("llada", {}),
    "sdar": ("sdar", {}),
    "sdar, two places": ("sdar", {"per_step": 2}),
    "sdar, sampled": ("sdar", {"temperature": 0.8}),
    "fast": ("fast", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("decoded", DECODED)
def test_least_passes(decoded, monkeypatch):
    """A network whose logits do not depend on the text has every draft accepted, with
    the noise of its own step, and also those that reach into the next block: the first
    round takes one step, and each later one gamma + 1, in a window with room for all
    drafts."""
    monkeypatch.setattr(Speculation, "width", lambda self, canvas: 48)
    family, how = DECODED[decoded]
    config = dataclasses.replace(CONFIGS[family], depth=1)
    lm = LM(config, jnp.float64)
    model = lm, text_models.with_distribution(lm, np.exp(np.arange(V)))
    for places, gamma in ((11, 3), (1, 2), (40, 4)):
        options = Options(max_new_tokens=places, block=4, **how)
        request = jax.random.key(0), model, [[1, 1]], SelfSpeculation(gamma), options
        _, info = generate(*request)
        steps = int(np.max(info.trace.steps)) + 1
        assert info.sequential == 1 + -(-(steps - 1) // (gamma + 1))
        assert info.acceptance == (None if places == 1 else 1)
