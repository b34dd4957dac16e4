"""Every row of the table of samplers goes through the same checks, whatever it makes.

A stream ends in what one call returns; a row does not depend on its neighbours; other
numbers compile nothing; a caller may jit it; the counts add up. In float64, because
different programs round differently.
"""

import dataclasses
import itertools

import chex
import jax
import numpy as np
import pytest
import samplers
from linear_tokens import LinearTokens
from masked_models import MASK, PLACES
from samplers import FIXED, MAX_GAMMA, ROWS, STEPS, ImageWay, TextWay, each

from cspd_jax import image
from cspd_jax.networks.lm import LM
from cspd_jax.text import ACCEPTED, BONUS, CORRECTED, PLAIN

pytestmark = pytest.mark.usefixtures("float64")
QUICK = ("plain, chains", "text, block, lookup")


def generate(way, seed):
    return way.family.generate(*way.request(seed))


def settled(way, state):
    """Which tokens of a stream will not change any more."""
    if isinstance(way, ImageWay):
        return np.any(state.tokens != 0, axis=-1)
    if isinstance(way, TextWay):
        return np.arange(state.tokens.shape[1]) < state.info.trace.lengths[:, None]
    return state.tokens != MASK


@each(quick=QUICK)
def test_a_stream_ends_in_what_one_call_returns(way):
    """And no settled token changes on the way."""
    whole = jax.device_get(generate(way, 0))
    states = jax.device_get(list(way.family.stream(*way.request(0))))
    if isinstance(way, ImageWay):
        chex.assert_trees_all_close(states[-1].tokens, whole.tokens, atol=1e-5)
        chex.assert_trees_all_equal(states[-1].info.made, whole.info.made)
    else:
        chex.assert_trees_all_equal(states[-1], whole)
    for before, after in itertools.pairwise(states):
        stay = settled(way, before)
        chex.assert_trees_all_equal(before.tokens[stay], after.tokens[stay])
        assert np.all(settled(way, after) >= stay)
    info = whole.info
    if isinstance(way, TextWay):
        assert len(states) == info.calls["target"].sequential == info.rounds.max()
    elif not isinstance(way, ImageWay):
        assert len(states) == info.sequential


@each(quick=QUICK)
def test_a_row_does_not_depend_on_its_neighbours(way):
    """Bit for bit in the same shape, with the per-row part of everything that is
    reported."""
    seen = []
    for seed in range(3):
        tokens, info = jax.device_get(generate(way, seed))
        # Calls are of the whole batch.
        seen.append((tokens, dataclasses.replace(info, calls={})))
        of_row = [jax.tree.map(lambda a: a[FIXED], made) for made in seen]
        chex.assert_trees_all_equal(of_row[-1], of_row[0])
    others = [np.delete(tokens, FIXED, axis=0) for tokens, _ in seen]
    assert np.any(others[0] != others[1])


def noting(function, calls):
    def noted(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    return noted


@each(quick=("text, block, lookup",))
def test_other_numbers_compile_nothing(way, monkeypatch):
    """Python runs a network while a program is compiled, and never again."""
    traced = []
    for network, name in ((LinearTokens, "embed_class"), (LM, "_run")):
        right = getattr(network, name)
        monkeypatch.setattr(network, name, noting(right, traced))
    jax.clear_caches()
    generate(way, 0)
    assert traced
    traced.clear()
    generate(way, 5)
    *arguments, options = way.request(6)
    if np.any(np.asarray(options.temperature) != 0):
        options = dataclasses.replace(options, temperature=0.9 * options.temperature)
    way.family.generate(*arguments, options)
    assert not traced


@each(samplers.TEXT | samplers.MASKED, quick=())
def test_inside_a_caller_s_jit(way):
    """With traced keys, parameters and prompts; the Info comes out as arrays."""
    key, model, prompts, how, options = way.request(0)

    @jax.jit
    def run(key, params, prompts):
        return way.family.generate(key, (model.network, params), prompts, how, options)

    found = run(key, model.params, prompts)
    whole = generate(way, 0)
    chex.assert_trees_all_equal(found.tokens, whole.tokens)
    chex.assert_trees_all_equal(found.info.made, whole.info.made)


@each(samplers.IMAGE, quick=())
def test_images_inside_a_caller_s_jit(way):
    """With guidance that is traced."""
    batch = image.prepare(*way.request(0))

    @jax.jit
    def run(keys, cfg):
        recipe = dataclasses.replace(batch.recipe, cfg=cfg)
        return dataclasses.replace(batch, keys=keys, recipe=recipe).generate().tokens

    found = run(batch.keys, batch.recipe.cfg)
    chex.assert_trees_all_close(found, generate(way, 0)[0], atol=1e-5)


@each(quick=("plain, chains", "masked, ssd"))
def test_counts_add_up(way):
    request = way.request(0)
    tokens, info = jax.device_get(generate(way, 0))
    check = {"image": check_image, "text": check_text, "masked": check_masked}
    check[way.family.__name__.split(".")[-1]](way, request, tokens, info)
    assert info.exact == way.exact


def check_image(way, request, tokens, info):
    _, model, _, method, options = request
    recipe = image.resolve(model, method, options, ROWS)
    marks = info.trace.marks
    chex.assert_shape(tokens, (ROWS, way.network.seq_len, 2))
    chex.assert_tree_all_finite(tokens)
    assert np.sum(info.tested) == np.sum(marks != 0)
    assert np.sum(info.accepted) == np.sum(marks > 0)
    assert (np.sum(info.tested) > 0) != (method.name == "plain")
    assert np.all(info.made == way.network.seq_len)
    assert np.all(info.trace.chain_accepted <= info.trace.chain_tested)
    assert np.any(info.trace.chain_tested > 0) == (recipe.chain is not None)
    assert np.all((info.rounds >= 1) & (info.rounds <= 2 * len(recipe.groups)))
    backbone = info.calls["backbone"]
    halves = 2 if recipe.guided else 1
    assert backbone.sequential >= 1
    assert backbone.rows >= halves * ROWS * backbone.sequential


def check_text(way, request, tokens, info):
    lengths = request[2].lengths
    marks = info.trace.marks
    count = lambda *kinds: np.count_nonzero(np.isin(marks, kinds), axis=1)
    assert np.all(info.made == info.trace.lengths - lengths)
    assert np.all(count(ACCEPTED) == info.accepted.sum(axis=1))
    assert np.all(count(CORRECTED) == np.sum(info.tested - info.accepted, axis=1))
    last = marks[np.arange(ROWS), info.trace.lengths - 1]
    stopped_in_draft = info.trace.stopped & (last == ACCEPTED)
    assert np.all(count(CORRECTED, BONUS, PLAIN) + stopped_in_draft == info.rounds)
    for row, n in enumerate(lengths):
        assert not marks[row, :n].any()
        assert marks[row, n : info.trace.lengths[row]].all()
    drafter = samplers.DRAFTERS.get(way.drafter)
    drafts = 0 if drafter is None else drafter.drafts
    (passes, rows) = info.calls["target"]
    (draft_passes, draft_rows) = info.calls["draft"]
    assert rows == ROWS * (drafts + 1) * passes
    if drafter is None:
        assert set(np.unique(marks)) == {0, PLAIN} and info.acceptance is None
        assert info.made.sum() == info.rounds.sum() and draft_passes == draft_rows == 0
        return
    assert np.all(info.trace.drafted >= info.tested.sum(axis=1))
    assert 0.1 < info.acceptance < 0.9
    assert info.tested[:, 0].sum() == info.rounds.sum() - count(PLAIN).sum()
    for flags in (info.tested, info.accepted):
        assert np.all(np.diff(flags.sum(axis=0)) <= 0)
    least, most = drafter.passes
    assert least * passes <= draft_passes <= most * passes
    assert draft_rows == ROWS * drafter.rows(passes, draft_passes)


def check_masked(way, request, tokens, info):
    assert np.all(tokens < MASK)
    rows = sum(of.rows for of in info.calls.values())
    if way.method == "schedule":
        assert info.sequential == STEPS and rows == ROWS * STEPS
    else:
        in_order = np.sort(info.trace.steps, axis=1)
        assert way.threshold or np.all(in_order == np.arange(PLACES))
    if way.method != "ssd":
        assert info.acceptance is None and rows == ROWS * info.sequential
        # As published, a pass that stores a block takes no step.
        assert np.all(info.trace.rounds >= info.trace.steps)
        return
    assert np.all(info.accepted <= info.tested)
    assert np.all(np.max(info.trace.rounds, axis=1) + 1 == info.rounds)
    halves = 1 if way.guidance is None else 2
    assert info.sequential <= PLACES
    # The first pass reads one text of each row.
    assert rows == halves * ROWS * (1 + (info.sequential - 1) * (MAX_GAMMA + 1))
