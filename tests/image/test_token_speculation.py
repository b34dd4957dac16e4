"""The joint law of all tokens of an image, by every exact way to generate it, against a
closed form; and the mistakes that this law refutes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of
from laws import FALSE_ALARM, normals_p_value
from linear_tokens import LinearTokens, noise_of
from samplers import IMAGE, TARGET, each
from test_block import single_residual

from cspd_jax import image
from cspd_jax.coupling import block
from cspd_jax.image import paper, rounds
from cspd_jax.image.methods import DraftSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.image.recipe import Draft
from cspd_jax.image.rounds import drafted_groups, laws
from cspd_jax.image.state import Speculation, scales
from cspd_jax.keys import Purpose, row_keys
from cspd_jax.models import ImageModel

EXACT = {name: way for name, way in IMAGE.items() if way.exact}
LOSSY = {
    name: way
    for name, way in IMAGE.items()
    if name.startswith("paper") and not way.exact
}


def law_of(way, known=None, **variant):
    """Returns the p-value of the images' joint law, given what is known, and what the
    sampler told."""
    network = dataclasses.replace(way.network, **variant)
    noise, info = noise_of(
        way.asked(), network, way.settled(way.images, known=known), way.images
    )
    return normals_p_value(noise), info


@each(EXACT, quick=("self, few steps", "self, guided"))
def test_joint_law(way):
    """4000 images of 6 tokens of dimension 2 (400 where both levels speculate): false
    alarm 1e-4. Rows advance at their own speed."""
    p, info = law_of(way)
    assert p > FALSE_ALARM and not info.truncated.any()
    shared = getattr(getattr(way.asked(), "criterion", None), "align", True)
    if info.acceptance is not None and "denoise" not in way.options and shared:
        # Of chains without shared noise the last transitions are too narrow for drafts
        # to pass.
        assert len(np.unique(info.rounds)) > 1 and 0.05 < info.acceptance < 0.97


@each(LOSSY)
def test_lossy_ways_are_told_apart(way):
    """The paper's Sigma is lossy too, but here too little to be seen: close drafts
    alone are accepted."""
    assert law_of(way)[0] <= FALSE_ALARM


def test_a_draft_like_the_target_is_always_accepted():
    way = dataclasses.replace(IMAGE["draft"], draft=TARGET, images=200)
    marks = np.asarray(law_of(way)[1].trace.marks)
    assert np.all(marks >= 0) and np.any(marks > 0)


VERIFY = block.verify_gaussian_block


def verified(change):
    """`verify_gaussian_block` with other arguments p, q, or another result."""

    def patch(monkeypatch):
        monkeypatch.setattr(rounds, "verify_gaussian_block", change)

    return patch


def one_more(key, p, q, drafts, valid):
    found = VERIFY(key, p, q, drafts, valid)
    last = len(drafts) - 1
    return found._replace(
        value=jnp.where(
            found.kept <= last, drafts[jnp.minimum(found.kept, last)], found.value
        )
    )


def begun_anew(key, p, q, drafts, valid, steps=10):
    """pi is 1 again at each token, but the residual is that of one block."""
    log_pi = block.prefix_log_pi

    def by_token(ratios):
        of_tokens = jax.vmap(log_pi)(ratios.reshape(-1, steps))
        return jnp.append(of_tokens[:, :-1].reshape(-1), of_tokens[-1, -1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "prefix_log_pi", by_token)
        return VERIFY(key, p, q, drafts, valid)


def softened(monkeypatch):
    """A criterion that is kinder to drafts: (p / q)^0.3 in place of p / q."""
    right = block.prefix_log_pi
    monkeypatch.setattr(block, "prefix_log_pi", lambda ratios: right(0.3 * ratios))


def the_drafts_context(monkeypatch):
    """The token in which the block ended goes on in the context that shows its dropped
    draft."""
    right = rounds.window

    def window(inputs, state, drafted, kept, n, *others):
        held, request = right(inputs, state, drafted, kept, n, *others)
        shown = n + jnp.any(held.left[:, 0] < inputs.steps, axis=1)
        z = drafted.z[
            jnp.arange(inputs.images), jnp.minimum(shown, inputs.speculation.gamma), 0
        ]
        return held, request._replace(z=request.z.at[:, 0].set(z))

    monkeypatch.setattr(rounds, "window", window)


def the_first_context(monkeypatch):
    """All groups are verified in the context of the first, which shows none of the
    drafts before them."""
    right = rounds.drafted_groups

    def drafted_groups(inputs, state, lookahead):
        gamma = inputs.speculation.gamma
        drafted, work = right(inputs, state, max(lookahead, gamma + 1))
        z = drafted.z.at[:, :, 0].set(drafted.z[:, 0, : gamma + 1])
        return drafted._replace(z=z[:, :, :lookahead]), work

    monkeypatch.setattr(rounds, "drafted_groups", drafted_groups)


def unguided_q(monkeypatch):
    right = rounds.draw_paths

    def draw_paths(inputs, bound, request):
        paths, *counts = right(inputs, bound, request)
        unguided, _ = laws(
            inputs, bound, paths.states, request.z, jnp.ones_like(request.scale)
        )
        return paths._replace(laws=unguided), *counts

    monkeypatch.setattr(rounds, "draw_paths", draw_paths)


def reused(purpose):
    """Random numbers of this purpose are the same in every round."""

    def patch(monkeypatch):
        right = rounds.round_keys
        monkeypatch.setattr(
            rounds,
            "round_keys",
            lambda inputs, group, of: right(inputs, group * (of != purpose), of),
        )

    return patch


def of_the_first(monkeypatch):
    """All images are guided as the first one is, in what is drafted and in what is
    verified."""
    monkeypatch.setattr(
        rounds, "scales", lambda *a: jnp.broadcast_to(scales(*a)[:1], scales(*a).shape)
    )


def all_accepted(monkeypatch):
    """By the paper's test. Its residual, of the last transition, is a small part of a
    token: see the couplings."""
    monkeypatch.setattr(paper, "log_acceptance_of_ratio", jnp.zeros_like)


GUIDED = dataclasses.replace(IMAGE["self, guided"], options={"cfg": 1.5})
WRONG = {
    "everything kept": (
        verified(lambda key, p, q, drafts, valid: VERIFY(key, q, q, drafts, valid)),
        GUIDED,
    ),
    "p and q swapped": (
        verified(lambda key, p, q, drafts, valid: VERIFY(key, q, p, drafts, valid)),
        GUIDED,
    ),
    "the prefix one too long": (verified(one_more), GUIDED),
    "pi begun anew at each token": (verified(begun_anew), GUIDED),
    "kept with min(1, (p / q)^0.3)": (softened, GUIDED),
    "the residual of the single transition": (single_residual, GUIDED),
    "continued in the draft's context": (the_drafts_context, GUIDED),
    "verified in the context of the first group": (the_first_context, GUIDED),
    "q without its guidance scale": (unguided_q, GUIDED),
    "noise used again after a drop": (reused(Purpose.PASS), GUIDED),
    "coins used again after a drop": (reused(Purpose.TEST), IMAGE["self, few steps"]),
    "the guidance of the first image for all": (of_the_first, IMAGE["self, guided"]),
    "everything accepted by the paper's test": (
        all_accepted,
        IMAGE["paper, Sigma = 1"],
    ),
}


@pytest.mark.quick(
    "the residual of the single transition", "coins used again after a drop"
)
@pytest.mark.parametrize("name", WRONG)
def test_negative_controls(name, monkeypatch):
    wrong, way = WRONG[name]
    wrong(monkeypatch)
    assert law_of(way, variant=name)[0] <= FALSE_ALARM


def test_a_limit_of_tries_is_counted():
    criterion = PaperCriterion(sigma=False, proposals=1, max_resamples=1)
    way = dataclasses.replace(
        IMAGE["draft"],
        method=lambda draft: DraftSpeculation(draft, criterion, 3),
        images=100,
    )
    info = law_of(way)[1]
    assert 0 < info.truncated.sum() <= np.sum(info.trace.marks < 0) and not info.exact


@pytest.mark.slow
def test_an_image_that_diverges_stops_nobody():
    """What is not a number is given up at once, and counted."""
    network = LinearTokens(pull=1e38)
    tokens, info = image.generate(
        jax.random.key(3),
        ImageModel("far", network, None),
        [0, 0],
        IMAGE["self"].asked(),
    )
    assert not np.isfinite(tokens).all() and info.truncated.sum() > 0
    assert np.all(info.rounds <= network.seq_len)


def test_sigma_of_the_paper():
    """Its logarithm, for a draft with log variances lower by known amounts; the last
    one does not count."""
    narrow = LinearTokens(narrower=0.2)
    how = Options(num_iter=6, respacing=TARGET.spec, final_noise=True)
    keys = row_keys(jax.random.key(3), 2)
    labels = jnp.zeros(2, jnp.int32)
    printed = Speculation(PaperCriterion(), 2, None, 0.0)
    batch = batch_of(TARGET, None, keys, labels, how, Draft(narrow))
    begun = rounds.bound_rounds(batch, printed)
    inputs = begun.inputs
    state = begun.begin()

    @jax.jit
    def log_sigma(inputs, state):
        drafted, _ = drafted_groups(inputs, state, lookahead=1)
        own, _ = paper.aligned_chains(printed.criterion, inputs, drafted)
        state, _ = rounds.draft_step(inputs, state)
        return paper.judge_last_transitions(
            printed.criterion, inputs, state.drafts, drafted, own
        )

    c = inputs.target.chains(jnp.zeros((1, 2)), None).c
    lower = 0.5 * 0.2 * (c.log_beta - c.log_posterior)
    expected = -0.5 * TARGET.token_dim * np.sum(np.asarray(lower)[1:])
    found = log_sigma(inputs, state).log_sigma
    chex.assert_trees_all_close(
        found, np.broadcast_to(expected, found.shape).astype(found.dtype), rtol=1e-4
    )
