"""Masked-diffusion decoding: self-speculation writes what the stepwise reference writes, always."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_models import LLADA, MASK, PLACES, V, canvas, make, reference

from cspd_jax.masked import passes, stepwise
from cspd_jax.masked.canvas import window_at
from cspd_jax.masked.speculative import Speculation, begin, play, run, unfinished
from cspd_jax.networks.lm import LM

pytestmark = pytest.mark.usefixtures("float64")


def speculation(draft_len, rows=8, most=8, top_k=None):
    draft_len = jnp.broadcast_to(jnp.asarray(draft_len, jnp.int32), (rows,))
    return Speculation(most, draft_len, None if top_k is None else jnp.int32(top_k))


def agrees(family, seed, block, cached, temperature, guided, draft_len):
    c = make(family, seed, block, cached, temperature, guided)
    expected = reference(family, seed, block, cached, temperature, guided)
    found = run(c, speculation(draft_len))
    np.testing.assert_array_equal(found.text, expected.text)
    np.testing.assert_array_equal(found.order, expected.steps)
    assert np.all(np.asarray(found.text) != MASK) and np.all(np.asarray(found.text) < V - 1)
    assert np.all(found.step == PLACES)
    tested, accepted = int(found.counts.tested.sum()), int(found.counts.accepted.sum())
    assert 0 <= accepted <= tested
    assert int(found.counts.rounds.sum()) + accepted == 8 * PLACES  # one certain move in every round
    return found, expected


@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
@pytest.mark.parametrize(
    "family, block, temperature",
    [
        ("llada", 1, 0.0),
        ("llada", 4, 0.0),
        ("llada", 4, 0.8),
        ("llada", PLACES, 0.0),
        ("dream", 8, 0.0),
        ("dream", 8, 0.8),
        ("dream", PLACES, 0.8),
    ],
)
def test_identical_to_stepwise(family, block, cached, temperature):
    """Six models with 8 prompts each: draft lengths 1 to 8, also mixed in one batch."""
    fewer = 0
    for seed, draft_len in enumerate([1, 2, 3, 5, 8, np.arange(1, 9)]):
        found, expected = agrees(family, seed, block, cached, temperature, False, draft_len)
        passes_made = found.counts.passes + found.counts.block_passes
        fewer += int(expected.passes + expected.block_passes - passes_made)
        assert found.counts.passes <= expected.passes and fewer >= 0
    assert fewer > 0 or (block == 1 and cached)  # a cached block of one place leaves nothing to speculate on


@pytest.mark.parametrize("family, cached", [("llada", False), ("dream", True)])
def test_guidance(family, cached):
    found, _ = agrees(family, 1, 4, cached, 0.0, True, 4)
    plain = reference(family, 1, 4, cached, 0.0, False)
    assert np.any(np.asarray(found.text) != np.asarray(plain.text))


@pytest.mark.parametrize("top_k", [4, 100], ids=["top-k", "token alone"])
def test_lossy_acceptance_differs_somewhere(top_k):
    different = 0
    for seed in range(3):
        c = canvas(seed=seed, block=8)
        found = run(c, speculation(6, top_k=top_k))
        assert np.all(np.asarray(found.text) != MASK)
        different += np.any(np.asarray(found.text) != reference("llada", seed, 8, False, 0.0, False).text)
    assert different


def rounded_otherwise(a):
    return a * (1 + 1e-6 * np.random.default_rng(a.size).standard_normal(a.shape))


def test_differences_in_float32_are_near_ties():
    """A model with tokens that it can hardly tell apart, and the same with its weights rounded otherwise (two
    batch shapes rarely differ on a machine of this kind): where the texts part, both moves have the same log
    probability up to rounding. With the same weights, texts that differ at all do so there."""
    parted = 0
    for seed in range(4):
        c = canvas(seed=seed)
        head = np.array(c.params["head"]["kernel"])
        head[:, 3:6] = head[:, 2:3] * (1 + 1e-7 * np.arange(1, 4))
        exact = dataclasses.replace(c, params={**c.params, "head": {"kernel": head}})
        otherwise = jax.tree.map(rounded_otherwise, exact.params)
        rough, other = (
            dataclasses.replace(
                c, model=LM(LLADA, jnp.float32), params=jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), p)
            )
            for p in (exact.params, otherwise)
        )
        expected = stepwise.stepwise(rough)
        for found in (run(rough, speculation(5)), run(other, speculation(5))):
            parted += sum(parts_at_a_near_tie(exact, found, expected, row) for row in range(8))
    assert parted > 0  # else this shows nothing


def parts_at_a_near_tie(c, found, expected, row) -> bool:
    """Whether the texts of a row part; then both moves must be the best one up to 1e-5."""
    ours, theirs = (np.asarray(a)[row] for a in (found.order, expected.steps))
    text, reference = (np.asarray(a)[row] for a in (found.text, expected.text))
    moves = [
        (int(np.flatnonzero(order == step)[0]), int(t[order == step][0]))
        for step in range(PLACES)
        for order, t in ((ours, text), (theirs, reference))
    ]
    parting = [step for step in range(PLACES) if moves[2 * step] != moves[2 * step + 1]]
    if not parting:
        return False
    known = np.where(theirs < parting[0], reference, MASK)
    texts = jnp.tile(jnp.asarray(known, jnp.int32), (8, 1))
    window = window_at(c, texts, 4)
    logits = np.array(passes.whole(c, window, texts[:, None]))[row, 0]
    logits[:, [MASK, V - 1]] = -np.inf
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    first = int(window.places[row, 0])
    free = (known[first : first + 4] == MASK)[: PLACES - first]
    best = log_p[: len(free)][free].max()
    for place, token in moves[2 * parting[0] : 2 * parting[0] + 2]:
        assert abs(log_p[place - first, token] - best) < 1e-5
    return True


@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_rows_do_not_depend_on_their_neighbours(cached):
    c = canvas(temperature=0.9, cached=cached, seed=4)
    found = run(c, speculation(3))
    order = np.random.default_rng(0).permutation(8)
    order[5:] = order[0]  # other neighbours
    moved = dataclasses.replace(
        c, base=c.base[order], valid=c.valid[order], start=c.start[order], keys=c.keys[order]
    )
    again = run(moved, speculation(3))
    np.testing.assert_array_equal(again.text, np.asarray(found.text)[order])
    np.testing.assert_array_equal(again.order, np.asarray(found.order)[order])
    np.testing.assert_array_equal(again.counts.rounds, np.asarray(found.counts.rounds)[order])


def test_draft_length_does_not_recompile():
    c = canvas()
    run(c, speculation(1))
    before = run._cache_size()
    for draft_len in (2, 5, 8):
        run(c, speculation(draft_len))
    assert run._cache_size() == before


def test_streaming_rounds_are_the_loop():
    c, spec = canvas(block=8), speculation(3)
    step, state = jax.jit(play), jax.jit(begin)(c, spec)
    rounds = 0
    while np.any(unfinished(c, state)):
        state = step(c, spec, state)
        rounds += 1
    expected = run(c, spec)
    np.testing.assert_array_equal(state.text, expected.text)
    np.testing.assert_array_equal(state.rounds, expected.rounds)
    assert rounds == np.max(state.counts.rounds) == np.max(state.rounds) + 1
    assert int(state.counts.passes) <= 1 + rounds
