"""The parts of a round of speculation over AR steps, on tables that are written by
hand."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of
from linear_tokens import LinearTokens
from samplers import CHAINS

from cspd_jax.coupling.block import VerifiedBlock
from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image.bound import bind
from cspd_jax.image.criterion import (
    PathCriterion,
    accept,
    choose_num_drafts,
    cut,
)
from cspd_jax.image.options import Options
from cspd_jax.image.paths import Partial, Paths, complete, laws
from cspd_jax.image.rounds import bound_rounds
from cspd_jax.image.state import Drafted
from cspd_jax.keys import row_keys

STEPS = 3
TOKENS = 4
DIM = 2
FROM_RESIDUAL = -1.0


def by_hand(kept):
    """What is left of the tokens of a block of which `kept` transitions are kept, and
    which of them stay: walks the transitions one by one."""
    left = []
    stayed = []
    for token in range(TOKENS):
        own = range(token * STEPS, (token + 1) * STEPS)
        stayed.append(own[-1] < kept)
        reached = kept >= own[0]  # the transition that was replaced may be its first
        left.append(0 if stayed[-1] else own[-1] - kept if reached else STEPS)
    return np.array(left), np.array(stayed)


def cut_of(kept, by_token):
    """Paths of images [B] of two groups of two tokens, as one block or as one for each
    token. Their states are the steps that they are of."""
    images = len(kept)
    shape = (images, 2, 2)
    at = jnp.arange(STEPS + 1.0)[:, None]
    states = jnp.broadcast_to(at, (*shape, STEPS + 1, DIM))
    zeros = jnp.zeros((*shape, STEPS, DIM))
    if by_token:
        kept = np.clip(kept[:, None] - STEPS * np.arange(TOKENS), 0, STEPS).reshape(-1)
    value = jnp.full((len(kept), DIM), FROM_RESIDUAL)
    block = VerifiedBlock(jnp.asarray(kept), value, jnp.zeros(len(kept), bool))
    partial, stayed = cut(Paths(states, Gaussian(zeros, zeros)), block, jnp.ones(shape))
    flat = lambda a: np.asarray(a).reshape(images, TOKENS, *a.shape[3:])
    return flat(partial.left), flat(stayed), flat(partial.states)[..., 0]


@pytest.mark.parametrize("wrong", [None, "whole if nothing is left", "one more"])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_block_may_end_at_every_transition(by_token, wrong):
    """Also at the last transition of a token: nothing is left of it then, but it does
    not stay."""
    kept = np.arange(TOKENS * STEPS + 1)
    left, stayed, states = cut_of(kept, by_token)
    if wrong == "one more":
        left, stayed, _ = cut_of(np.minimum(kept + 1, kept[-1]), by_token)
    if wrong == "whole if nothing is left":
        stayed = left == 0
    expected, whole = map(np.array, zip(*(by_hand(k) for k in kept)))
    if by_token:  # a token behind the first that ends is rejected at once
        expected = np.where(expected == STEPS, STEPS - 1, expected)
    right = np.array_equal(left, expected) and np.array_equal(stayed, whole)
    assert right == (wrong is None)
    if wrong is None:
        ended = ~stayed & (left < STEPS)
        at = np.arange(STEPS + 1)
        replaced = ended[..., None] & (at == left[..., None])
        np.testing.assert_array_equal(states, np.where(replaced, FROM_RESIDUAL, at))


def batch(images=2, tokens=TOKENS, **options):
    network = LinearTokens(seq_len=tokens, spec=f"ddim{STEPS}")
    options = Options(respacing=STEPS, num_iter=tokens, final_noise=True, **options)
    keys = row_keys(jax.random.key(0), images)
    return batch_of(network, None, keys, np.zeros(images, int), options)


def test_what_lies_behind_the_first_rejection_counts_for_nothing():
    """Four groups of a token each, of which the second does not stay: neither the
    marks nor the number of drafts depend on the two behind it, which may stay, as
    coupled drafts do."""
    rounds = bound_rounds(batch(tokens=9), PathCriterion(), gamma=4, draft_cost=0.2)
    state = rounds.begin()
    groups = jnp.tile(jnp.arange(4), (2, 1))
    everywhere = jnp.ones((2, 4, 1), bool)
    drafted = Drafted(groups, everywhere, jnp.zeros(0))
    stayed = jnp.array([[True, False, True, True], [True, False, False, False]])
    moved = accept(rounds.inputs, state, drafted, stayed[..., None], everywhere)
    np.testing.assert_array_equal(moved.group, [1, 1])
    np.testing.assert_array_equal(moved.marks[:, :4], [[1, -2, 0, 0]] * 2)
    one, other = choose_num_drafts(rounds.inputs, moved).num_drafts
    assert one == other
    behind = moved._replace(marks=jnp.array([[1, -2, 3, 4], [1, -2, -3, -4]], jnp.int8))
    one, other = choose_num_drafts(rounds.inputs, behind).num_drafts
    assert one != other


@pytest.mark.quick("False")
@pytest.mark.parametrize("along_chains", [False, True])
def test_entries_that_mean_nothing_are_not_read(along_chains):
    """Paths of which 0 to T steps are left, with NaN where a state is to be drawn: they
    come out whole, what was there stays, and a path that had not begun is at its own
    x_T."""
    asked = batch(STEPS + 1, **(CHAINS if along_chains else {}))
    bound = bind(asked)
    left = jnp.arange(STEPS + 1)[:, None, None]
    positions = jnp.zeros(left.shape, int)
    z = jnp.full((*left.shape, 1, DIM), 0.3)
    scale = jnp.ones(left.shape)
    there = (jnp.arange(STEPS + 1) >= left[..., None]) & (left[..., None] < STEPS)
    shape = (*there.shape, DIM)
    begun = jax.random.normal(jax.random.key(5), shape)
    states = jnp.where(there[..., None], begun, jnp.nan)
    of_p, _ = laws(bound, begun, z, scale)
    of_p = jax.tree.map(lambda a: jnp.where(there[..., :-1, None], a, jnp.nan), of_p)
    paths, _ = complete(bound, Partial(states, of_p, left), positions, z, scale)
    assert np.isfinite(paths.states).all() and np.isfinite(paths.laws.mean).all()
    np.testing.assert_array_equal(
        np.asarray(paths.states)[there], np.asarray(begun)[there]
    )
    found, _ = laws(bound, paths.states, z, scale)
    chex.assert_trees_all_close(paths.laws, found, rtol=1e-4, atol=1e-5)
    at = positions[..., 0]
    own = bound.initial_noise(at) if along_chains else bound.chain_noise(at)[-1]
    chex.assert_trees_all_close(paths.states[-1, 0, 0, -1], own[-1])
    other = dataclasses.replace(bound, keys=row_keys(jax.random.key(1), STEPS + 1))
    again, _ = complete(other, Partial(states, of_p, left), positions, z, scale)
    assert not np.allclose(again.states[-1, 0, 0, -1], own[-1])
