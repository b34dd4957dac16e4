"""The joint law of all tokens of an image, by every exact way to generate it, against a
closed form; and the mistakes that this law refutes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of
from linear_tokens import LinearTokens, noise_of
from samplers import IMAGE, TARGET, each
from test_block import SingleResidual

from cspd_jax import image
from cspd_jax.audit import FALSE_ALARM, normals_p_value
from cspd_jax.coupling.block import Trials, verify_gaussian_block
from cspd_jax.image import rounds
from cspd_jax.image.criterion import Criterion, PathCriterion
from cspd_jax.image.methods import DraftSpeculation, Plain, SelfSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.image.paths import laws
from cspd_jax.image.recipe import Draft
from cspd_jax.image.state import scales
from cspd_jax.keys import Purpose, row_keys
from cspd_jax.models import ImageModel

EXACT = {name: way for name, way in IMAGE.items() if way.exact}
LOSSY = {
    name: way
    for name, way in IMAGE.items()
    if name.startswith("paper") and not way.exact
}


def law_of(way, known=None):
    """Returns the p-value of the images' joint law, given what is known, and the
    sampler's report."""
    noise, info = noise_of(
        way.asked(), way.network, way.settled(way.images, known=known), way.images
    )
    return normals_p_value(noise), info


@each(EXACT, quick=("self, few steps",))
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


def marks_of_equals(row, **more):
    """What becomes of drafts of a draft model that is the target itself."""
    way = dataclasses.replace(IMAGE[row], draft=TARGET, images=200, **more)
    return np.asarray(law_of(way)[1].trace.marks)


@pytest.mark.slow
def test_a_draft_like_the_target_is_always_accepted():
    marks = marks_of_equals("draft")
    assert np.all(marks >= 0) and np.any(marks > 0)


class OneNoise(PaperCriterion):
    """Draft and target share what is random after x_T, whose use depends on steps that
    come later."""

    def unaligned_keys(self, inputs):
        return inputs.keys


@pytest.mark.slow
@pytest.mark.parametrize("criterion", [PaperCriterion, OneNoise])
def test_speculated_chains_of_the_paper_share_x_T_alone(criterion):
    """Chains that shared all of their noise would end in the same token, and no draft
    be rejected."""
    method = lambda draft: DraftSpeculation(draft, criterion(sigma=False), 3)
    marks = marks_of_equals("paper, Sigma = 1, both levels", method=method)
    assert np.any(marks < 0) == (criterion is PaperCriterion)


@dataclasses.dataclass(frozen=True)
class ByAnother(SelfSpeculation):
    """Self-speculation by another criterion."""

    how: Criterion = PathCriterion()
    criterion = property(lambda self: self.how)


def by(criterion, row="self, guided", gamma=3, **more):
    """A row of the table by another criterion."""
    method = lambda draft: ByAnother(gamma, how=criterion)
    return dataclasses.replace(IMAGE[row], method=method, **more)


def verified(change):
    """Blocks verified by `change` of the right verification and its arguments."""
    return PathCriterion(lambda *a: change(verify_gaussian_block, *a))


def one_more(right, key, p, q, drafts, valid):
    found = right(key, p, q, drafts, valid)
    last = len(drafts) - 1
    draft = drafts[jnp.minimum(found.kept, last)]
    return found._replace(value=jnp.where(found.kept <= last, draft, found.value))


class BegunAnew(Trials):
    """pi is 1 again at each token of ten steps, but the residual is of one block."""

    def log_pi(self, log_ratios):
        of_tokens = jax.vmap(super().log_pi)(log_ratios.reshape(-1, 10))
        return jnp.append(of_tokens[:, :-1].reshape(-1), of_tokens[-1, -1])


class Softened(Trials):
    """Kinder to drafts: (p / q)^0.3 in place of p / q."""

    def log_pi(self, log_ratios):
        return super().log_pi(0.3 * log_ratios)


def tried(trials):
    return PathCriterion(functools.partial(verify_gaussian_block, trials=trials(1, 4)))


class TheDraftsContext(PathCriterion):
    """The token in which the block ended goes on in the context that shows its dropped
    draft."""

    def shift(self, inputs, state, drafted, *others):
        moved, partial, z = super().shift(inputs, state, drafted, *others)
        n = moved.group - state.group
        shown = n + jnp.any(partial.left[:, 0] < inputs.steps, axis=1)
        shown = jnp.minimum(shown, inputs.gamma)
        own = drafted.z[jnp.arange(inputs.images), shown, 0]
        return moved, partial, z.at[:, 0].set(own)


class TheFirstContext(PathCriterion):
    """All groups are verified in the context of the first, which shows none of the
    drafts before them."""

    def read(self, inputs, state):
        drafted, counts = super().read(inputs, state)
        z = drafted.z.at[:, :, 0].set(drafted.z[:, 0])
        return drafted._replace(z=z), counts


class UnguidedQ(PathCriterion):
    def complete(self, inputs, bound, groups, partial, z):
        paths, counts = super().complete(inputs, bound, groups, partial, z)
        ones = jnp.ones_like(scales(inputs, groups))
        return paths._replace(laws=laws(bound, paths.states, z, ones)[0]), counts


def reused(of, criterion=PathCriterion):
    """Random numbers of this purpose are the same in every round."""

    class Reused(criterion):
        def keys(self, inputs, state, purpose):
            again = state._replace(group=state.group * (purpose != of))
            return super().keys(inputs, again, purpose)

    return Reused()


def as_the_first(inputs):
    scale = jnp.broadcast_to(inputs.scale[:, :1], inputs.scale.shape)
    return dataclasses.replace(inputs, scale=scale)


class OfTheFirst(PathCriterion):
    """All images are guided as the first one is, in what is drafted and in what is
    verified."""

    def verify(self, inputs, *others):
        return super().verify(as_the_first(inputs), *others)

    def complete(self, inputs, *others):
        return super().complete(as_the_first(inputs), *others)


class AllAccepted(PaperCriterion):
    """By the paper's test. Its residual, of the last transition, is a small part of a
    token: see the couplings."""

    def log_acceptance(self, log_ratio):
        return jnp.zeros_like(log_ratio)


class TheFirstScale(Plain):
    """Speculation along the chains takes the guidance scale of the first image."""

    def generate(self, batch):
        cfg = jnp.full_like(batch.recipe.cfg, batch.recipe.cfg[0])
        recipe = dataclasses.replace(batch.recipe, cfg=cfg)
        return super().generate(dataclasses.replace(batch, recipe=recipe))


class AnotherHalf(LinearTokens):
    """The unconditional half of an image is its neighbour's."""

    def context(self, *given, **options):
        own, half = jnp.split(super().context(*given, **options), 2)
        return jnp.concatenate([own, jnp.roll(half, 1, axis=0)])


guided = functools.partial(by, options={"cfg": 1.5})
along_chains = functools.partial(dataclasses.replace, IMAGE["plain, chains, guided"])
WRONG = {
    "everything kept": guided(
        verified(lambda right, key, p, q, *others: right(key, q, q, *others))
    ),
    "p and q swapped": guided(
        verified(lambda right, key, p, q, *others: right(key, q, p, *others))
    ),
    "the prefix one too long": guided(verified(one_more)),
    "pi begun anew at each token": guided(tried(BegunAnew)),
    "kept with min(1, (p / q)^0.3)": guided(tried(Softened)),
    "the residual of the single transition": guided(tried(SingleResidual)),
    "continued in the draft's context": guided(TheDraftsContext()),
    "verified in the context of the first group": guided(TheFirstContext()),
    "q without its guidance scale": guided(UnguidedQ()),
    "noise used again after a drop": guided(reused(Purpose.PASS)),
    "coins used again after a drop": by(
        reused(Purpose.TEST), "self, few steps", gamma=1
    ),
    "the guidance of the first image for all": by(OfTheFirst()),
    "the guidance of the first chain for all": along_chains(
        method=lambda draft: TheFirstScale()
    ),
    "a neighbour's unconditional half": along_chains(
        network=AnotherHalf(unconditional=0.5)
    ),
    "everything accepted by the paper's test": dataclasses.replace(
        IMAGE["paper, Sigma = 1"],
        method=lambda draft: DraftSpeculation(draft, AllAccepted(sigma=False), 3),
    ),
}


@pytest.mark.quick("the residual of the single transition")
@pytest.mark.parametrize("name", WRONG)
def test_negative_controls(name):
    assert law_of(WRONG[name])[0] <= FALSE_ALARM


@pytest.mark.slow
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
    """What is not finite is given up at once, and counted. Nor is it exact by the plain
    sampler."""
    network = LinearTokens(pull=1e38)
    far = ImageModel("far", network, None)
    for method in (IMAGE["self"].asked(), Plain()):
        tokens, info = image.generate(jax.random.key(3), far, [0, 0], method)
        assert not np.isfinite(tokens).all()
        assert info.truncated.sum() > 0 and not info.exact
        assert np.all(info.rounds <= network.seq_len)


@pytest.mark.slow
def test_sigma_of_the_paper():
    """Its logarithm, for a draft with log variances lower by known amounts; the last
    one does not count."""
    narrow = LinearTokens(narrower=0.2)
    how = Options(num_iter=6, respacing=TARGET.spec, final_noise=True)
    keys = row_keys(jax.random.key(3), 2)
    criterion = PaperCriterion()
    batch = batch_of(TARGET, None, keys, np.zeros(2, int), how, Draft(narrow))
    begun = rounds.bound_rounds(batch, criterion, gamma=2)
    inputs = begun.inputs
    state = begun.begin()

    @jax.jit
    def log_sigma(inputs, state):
        state = rounds.draft_step(criterion, inputs, state)
        drafted, _ = criterion.read(inputs, state)
        own, _ = criterion.aligned_chains(inputs, drafted)
        return criterion.judge(inputs, state.drafts, drafted, own).log_sigma

    c = inputs.target.chains(jnp.zeros((1, 2)), None).c
    lower = 0.5 * 0.2 * (c.log_beta - c.log_posterior)
    expected = -0.5 * TARGET.token_dim * np.sum(np.asarray(lower)[1:])
    found = log_sigma(inputs, state)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
