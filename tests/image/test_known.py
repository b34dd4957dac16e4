"""Tokens that are known: they stay bit for bit, and the rest has its law given them."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from linear_tokens import LinearTokens
from samplers import IMAGE, each, some_known
from test_token_speculation import law_of

import cspd_jax
from cspd_jax import Known, Options, UserError
from cspd_jax.audit import FALSE_ALARM
from cspd_jax.image import Plain, generate, prepare, stream
from cspd_jax.models import ImageModel

MODEL = ImageModel("linear", LinearTokens(), None)
ON_ITS_WAY = {name: way for name, way in IMAGE.items() if "checkerboard" not in name}


@each(
    {name: way for name, way in ON_ITS_WAY.items() if way.exact},
    quick=("plain, groups, guided, cold",),
)
def test_the_rest_has_its_law_given_what_is_known(way):
    """Tokens of 4000 images (400 where both levels speculate), of which any number and
    any set are known; false alarm 1e-4."""
    assert law_of(way, some_known(way.images, way.network.seq_len))[0] > FALSE_ALARM


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AsDrawn(Known):
    """The order does not begin with what is known: other tokens are kept in its
    place."""

    def move_to_front(self, order):
        return order


class Unseen(LinearTokens):
    """What is known stays, but no context shows it."""

    def context(self, params, tokens, *arguments, **options):
        return super().context(params, 0 * tokens, *arguments, **options)


@pytest.mark.parametrize("kind, network", [(AsDrawn, LinearTokens), (Known, Unseen)])
def test_negative_controls(kind, network):
    way = dataclasses.replace(IMAGE["plain"], network=network())
    known = some_known(way.images)
    assert law_of(way, kind(known.tokens, known.mask))[0] <= FALSE_ALARM


@each(ON_ITS_WAY, quick=("plain",))
def test_known_tokens_stay_bit_for_bit(way):
    """Without a mask an image is what it was but for rounding; an image does not depend
    on what its neighbours know; half of an image takes fewer calls; a known one takes
    none."""
    network = way.network
    (keys, model, labels, method, options) = way.request(0)
    tokens = some_known(6, network.seq_len).tokens
    half = np.arange(network.seq_len) % 2 == 0

    def run(*masks):
        mask = np.stack([*masks, *[half] * (6 - len(masks))])
        known = dataclasses.replace(options, known=Known(tokens, mask))
        made, info = jax.device_get(generate(keys, model, labels, method, known))
        assert (made[mask] == tokens[mask]).all()
        assert not info.trace.marks[mask].any()
        return made, info

    made, of_half = run()
    assert (made[:, ~half] != tokens[:, ~half]).all()
    all_ = np.ones_like(half)
    none = np.zeros_like(half)
    beside, _ = run(half, all_, half, none)
    chex.assert_trees_all_equal(beside[[0, 2]], made[[0, 2]])
    whole, of_whole = generate(keys, model, labels, method, options)
    nothing, of_nothing = run(*[none] * 6)
    chex.assert_trees_all_close(nothing, np.asarray(whole), atol=1e-3)
    chex.assert_trees_all_equal(of_nothing.calls, of_whole.calls)
    _, of_all = run(*[all_] * 6)
    assert 0 == of_all.sequential < of_half.sequential < of_whole.sequential


@pytest.mark.slow
def test_batches_and_streams():
    """Images one after the other know what those side by side know, and each step shows
    it."""
    known = some_known(3)
    asked = jax.random.key(0), MODEL, [0, 1, 1]
    options = Options(known=known, num_iter=4)
    together, _ = generate(*asked, options=options)
    apart, info = generate(*asked, options=options, rows=2)
    chex.assert_trees_all_close(np.asarray(apart), np.asarray(together), atol=1e-4)
    assert np.all(info.made == 6 - known.mask.sum(axis=1))
    for method in (Plain(), IMAGE["self"].asked()):
        for tokens, info in jax.device_get(list(stream(*asked, method, options))):
            there = np.any(tokens != 0, axis=2)
            assert (tokens[known.mask] == known.tokens[known.mask]).all()
            assert np.all(info.made == there.sum(axis=1) - known.mask.sum(axis=1))


def test_one_program_for_all_masks():
    options = Options(known=some_known(3), num_iter=3)
    batch = prepare(jax.random.key(0), MODEL, [0, 1, 0], options=options)

    @jax.jit
    @chex.assert_max_traces(1)
    def run(tokens, mask):
        recipe = dataclasses.replace(batch.recipe, known=Known(tokens, mask))
        return dataclasses.replace(batch, recipe=recipe).generate().tokens

    known = some_known(3)
    for mask in (known.mask, ~known.mask, np.ones_like(known.mask)):
        assert (np.asarray(run(known.tokens, mask))[mask] == known.tokens[mask]).all()


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_a_causal_model_keeps_a_prefix(cfg):
    """What it made of whole images, from their first 40 and 60 tokens on; without
    guidance, for with it SphereAR's unconditional half has a first token of its own,
    which is not known."""
    model = cspd_jax.load("default-causal")
    mask = np.arange(64) < np.array([[40], [60]])
    options = Options(respacing="flow4", cfg=cfg)

    def run(known=None):
        how = dataclasses.replace(options, known=known)
        made = generate(jax.random.key(0), model, [0, 1], options=how)
        return jax.device_get(made)

    whole, _ = run()
    rest, info = run(Known(whole, mask))
    assert (rest[mask] == whole[mask]).all()
    assert info.calls["backbone"].sequential == 1 + 24
    assert info.calls["head"].sequential == 24 * 5
    if cfg == 1:
        chex.assert_trees_all_close(rest, whole, atol=1e-4)
    same, _ = run(Known(whole, mask * [[False], [True]]))
    # What the unconditional half sees is decided by what its own image knows.
    chex.assert_trees_all_close(same[1], rest[1], atol=1e-4)
    with pytest.raises(UserError, match="only the first tokens of an image"):
        run(Known(whole, ~mask))
