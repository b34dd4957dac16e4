"""Speculation over AR steps: the joint law of all tokens, against closed forms; and what it reports."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import ahead
from laws import FALSE_ALARM, ks_p_value
from linear_tokens import LinearTokens
from scipy.stats import chi2, norm

from cspd_jax.image import rounds, sampler
from cspd_jax.image.chain.speculation import ChainSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.order import guidance_scale, random_order, reveal_groups
from cspd_jax.image.rounds import drafting, paper_criterion, path_criterion
from cspd_jax.image.rounds import loop as round_loop
from cspd_jax.image.rounds.paths import log_stds
from cspd_jax.image.rounds.state import PendingTokens, add_calls, backbone_calls, call_counts, head_calls
from cspd_jax.image.rounds.verification import drafted_groups
from cspd_jax.keys import Purpose, purpose_keys, row_keys

MODEL, IMAGES = LinearTokens(), 4000


def in_reveal_order(tokens, keys):
    reveal = jax.vmap(random_order, (0, None))(purpose_keys(keys, Purpose.ORDER), MODEL.seq_len)
    return np.take_along_axis(np.asarray(tokens), np.asarray(reveal)[:, :, None], axis=1)


def drafted_by(network):
    return None if network is None else rounds.Draft(network)


def noise_of(sampler, *, num_iter=6, cfg=1.0, temperature=1.0, images=IMAGES, seed=0, inside=None, **options):
    """The standardised noise of all tokens, [N, L, d]; and what the sampler returned."""
    how = Options(
        num_iter=num_iter,
        respacing=MODEL.spec,
        guided=cfg != 1,
        cfg=cfg,
        temperature=temperature,
        final_noise=True,
        prefix_buckets=1,
        denoise=inside or "plain",
    )
    keys = row_keys(jax.random.key(seed), images)
    labels = jnp.zeros(images, jnp.int32)
    if "draft" in options:
        options["draft"] = drafted_by(options["draft"])
    found = sampler(MODEL, None, keys, labels, how, **options)
    groups = reveal_groups(MODEL.seq_len, num_iter)
    scales = np.asarray(guidance_scale(groups, cfg, "linear"))
    tokens = in_reveal_order(found.tokens, keys)
    return MODEL.noise_of(tokens, groups, scales, temperature), found


def p_value(noise):
    """Of all coordinates, their sums over the image, differences of neighbours, and squared norms: those of
    independent standard normals. Every failure of the joint law is a failure of this independence."""
    count, length, dim = noise.shape
    flat = noise.reshape(count, -1)
    found = [ks_p_value(noise[:, i], norm.cdf) for i in range(length)]
    found += [ks_p_value(flat.sum(1) / np.sqrt(length * dim), norm.cdf)]
    found += [
        ks_p_value((noise[:, 1:] - noise[:, :-1])[:, i] / np.sqrt(2), norm.cdf) for i in range(length - 1)
    ]
    found += [ks_p_value((flat**2).sum(1), chi2(length * dim).cdf)]
    return min(1.0, len(found) * min(found))


NEAR, FAR = LinearTokens(pull=1.45, offset=0.42), LinearTokens(pull=0.5, offset=0.9, variance=0.16)
SIGMA_ONE = {"criterion": "paper", "sigma": False}

CASES = {
    "self": {"speculation": ahead(gamma=3)},
    "self, K = 2, cold": {"speculation": ahead(gamma=3, proposals=2), "temperature": 0.8},
    "self, groups": {"speculation": ahead(gamma=2, prefill=0.3), "num_iter": 3},
    "self, guided": {"speculation": ahead(gamma=8), "cfg": 1.5},
    "self, adaptive": {"speculation": ahead(gamma=4, draft_cost=0.2)},
    "self, both levels": {
        "speculation": ahead(gamma=3, proposals=4),
        "inside": ChainSpeculation((4,)),
        "images": 400,
    },
    "model, K = 1": {"speculation": ahead(gamma=3, proposals=1), "draft": NEAR},
    "model, bad, groups, guided": {
        "speculation": ahead(gamma=2, prefill=0.3),
        "draft": FAR,
        "num_iter": 3,
        "cfg": 1.5,
    },
    "model, adaptive, both levels": {
        "speculation": ahead(gamma=3, proposals=4, draft_cost=0.3),
        "draft": NEAR,
        "inside": ChainSpeculation((4,)),
        "images": 400,
    },
    "paper, Sigma = 1": {"speculation": ahead(gamma=3, **SIGMA_ONE), "draft": NEAR},
    "paper, Sigma = 1, groups, guided, own noise": {
        "speculation": ahead(gamma=2, align=False, prefill=0.3, **SIGMA_ONE),
        "draft": NEAR,
        "num_iter": 3,
        "cfg": 1.5,
    },
}


SLOW = (
    "self, both levels",
    "self, guided",
    "model, adaptive, both levels",
    "paper, Sigma = 1, groups, guided, own noise",
    "self",
    "self, groups",
    "self, adaptive",
    "model, bad, groups, guided",
)


@pytest.mark.parametrize(
    "options",
    [pytest.param(c, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, c in CASES.items()],
)
def test_joint_law(options):
    """4000 images of 6 tokens of dimension 2 (400 where both levels speculate): false alarm 1e-4. Rows
    advance at their own speed."""
    noise, found = noise_of(rounds.sample, **options)
    assert p_value(noise) > FALSE_ALARM
    counts = found.counts
    assert counts.truncated == 0
    if getattr(
        options["speculation"].criterion, "align", True
    ):  # without, the last transition alone is too narrow for drafts to pass
        assert len(np.unique(counts.rounds)) > 1
        assert 0.05 < counts.accepted.sum() / counts.tested.sum() < 0.97
    assert np.asarray(found.accepted).sum() == counts.accepted.sum()
    assert np.asarray(found.tested).sum() == counts.tested.sum()


def test_the_plain_sampler_has_the_same_law():
    noise, _ = noise_of(sampler.sample, cfg=1.5)
    assert p_value(noise) > FALSE_ALARM


def test_a_draft_like_the_target_is_always_accepted():
    _, found = noise_of(rounds.sample, speculation=ahead(gamma=3), draft=MODEL, images=200)
    assert found.counts.accepted.sum() == found.counts.tested.sum() > 0
    assert np.all(found.counts.rounds == 3)  # one token from the target, then 3 + 1 and 1


@pytest.mark.slow
def test_a_hopeless_draft_costs_nothing_but_time():
    noise, found = noise_of(rounds.sample, speculation=ahead(gamma=2), draft=LinearTokens(offset=9.0))
    assert found.counts.accepted.sum() == 0 and np.all(found.counts.rounds >= MODEL.seq_len)
    assert p_value(noise) > FALSE_ALARM


def is_refuted(**options):
    def afresh(*arguments, **options):
        return rounds.sample.__wrapped__(*arguments, **options)

    noise, _ = noise_of(jax.jit(afresh, static_argnums=0, static_argnames="speculation"), **options)
    return p_value(noise) <= FALSE_ALARM


WRONG = {
    "everything accepted": (path_criterion, "log_acceptance_of_ratio", jnp.zeros_like),
    "p and q swapped": (path_criterion, "log_acceptance_of_ratio", lambda r: jnp.minimum(-r, 0.0)),
    "a fresh draw in place of the residual": (path_criterion, "log_residual_acceptance", jnp.zeros_like),
    "the draft's noise in the residual": (
        path_criterion,
        "_proposal_keys",
        lambda inputs, assignment, undrafted: inputs.keys[assignment.image],
    ),
}


def pending_with_the_newest_q(**fields):
    return PendingTokens(**{**fields, "q_z": fields["z"], "q_scale": fields["scale"]})


WRONG["q at the newest z in the residual"] = (path_criterion, "PendingTokens", pending_with_the_newest_q)


SLOW_CONTROLS = (
    "everything accepted",
    "p and q swapped",
    "the draft's noise in the residual",
    "q at the newest z in the residual",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_CONTROLS)) for n in WRONG]
)
def test_negative_controls(name, monkeypatch):
    monkeypatch.setattr(*WRONG[name])
    assert is_refuted(speculation=ahead(gamma=3, max_resamples=64))


WRONG_WITH_A_DRAFT = {
    "path: everything accepted": (path_criterion, "log_acceptance_of_ratio", {}),
    "path: a fresh draw in place of the residual": (path_criterion, "log_residual_acceptance", {}),
    "paper: everything accepted": (paper_criterion, "log_acceptance_of_ratio", SIGMA_ONE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_WITH_A_DRAFT)
def test_negative_controls_with_a_draft(name, monkeypatch):
    """The same errors with another model's drafts. The paper's residual is tested with the couplings: it
    is of the last transition, a small part of a token's noise."""
    module, function, criterion = WRONG_WITH_A_DRAFT[name]
    monkeypatch.setattr(module, function, jnp.zeros_like)
    assert is_refuted(speculation=ahead(gamma=3, **criterion), draft=NEAR)


@pytest.mark.slow
def test_drafts_kept_behind_a_rejection_are_refuted(monkeypatch):
    """What passed behind a rejected token is taken as it is, though it was tested behind the rejected one."""

    def note_all(inputs, drafted, passed):
        return accepted_prefix(inputs, drafted, passed)._replace(kept=drafted.to_test & passed)

    def skip_what_is_noted(inputs, state, proposals, assignment):
        before = state.group
        state, info = resample(inputs, state, proposals, assignment)
        group = jnp.minimum(state.group, inputs.groups)
        place = jnp.minimum(inputs.start[group], inputs.length - 1)[:, None]
        noted = jnp.take_along_axis(state.accepted, place, 1)[:, 0]
        skip = (state.group > before) & (state.group < inputs.groups) & noted
        return state._replace(group=state.group + skip), info

    accepted_prefix, resample = path_criterion.accepted_prefix, path_criterion.resample_step
    monkeypatch.setattr(path_criterion, "accepted_prefix", note_all)
    monkeypatch.setattr(path_criterion, "resample_step", skip_what_is_noted)
    assert is_refuted(speculation=ahead(gamma=3), draft=LinearTokens(offset=0.8))


@pytest.mark.parametrize(
    "criterion, draft",
    [({"max_resamples": 1}, None), ({**SIGMA_ONE, "max_resamples": 1}, NEAR)],
    ids=["self", "paper"],
)
def test_a_limit_of_tries_is_counted(criterion, draft):
    options = ahead(gamma=3, proposals=1, **criterion)
    _, found = noise_of(rounds.sample, speculation=options, draft=draft, images=100)
    assert 0 < found.counts.truncated <= found.counts.tested.sum() - found.counts.accepted.sum()


@pytest.mark.parametrize("draft", [None, pytest.param(NEAR, marks=pytest.mark.slow)])
def test_an_image_that_diverges_stops_nobody(draft):
    """Its tokens are given up at once, not after 65536 tries."""
    how = Options(num_iter=6, respacing=MODEL.spec, final_noise=True)
    keys, labels = row_keys(jax.random.key(3), 2), jnp.zeros(2, jnp.int32)
    options = {"speculation": ahead(gamma=3), "draft": drafted_by(draft)}
    found = rounds.sample(LinearTokens(pull=1e38), None, keys, labels, how, **options)
    assert not np.isfinite(found.tokens).all() and found.counts.truncated > 0
    assert np.all(found.counts.rounds <= 2 * MODEL.seq_len)


LOSSY = {  # the paper's Sigma is lossy too, but here too little to be seen: close drafts alone are accepted
    "paper, inner temperature 42": ahead(gamma=3, **SIGMA_ONE, inner_temperature=42.0),
    "verified in one context": ahead(gamma=3, joint=True),
}


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.slow
def test_lossy_modes_are_told_apart(name):
    assert is_refuted(speculation=LOSSY[name], draft=NEAR)


@pytest.mark.slow
def test_adaptation_from_dropped_tests_is_refuted(monkeypatch):
    """Every test is noted, dropped or not, and a group whose dropped test failed is left to the target."""

    def note_all(inputs, drafted, passed):
        prefix = right(inputs, drafted, passed)
        return prefix._replace(tested=drafted.to_test, kept=drafted.to_test & passed)

    def adapt(inputs, state):
        group = jnp.minimum(state.group + 2, inputs.groups)
        place = jnp.minimum(inputs.start[group], inputs.length - 1)[:, None]
        tested, passed = (jnp.take_along_axis(a, place, 1)[:, 0] for a in (state.tested, state.accepted))
        return state._replace(num_drafts=jnp.where(tested & ~passed, 1, inputs.speculation.gamma))

    right = path_criterion.accepted_prefix
    monkeypatch.setattr(path_criterion, "accepted_prefix", note_all)
    monkeypatch.setattr(round_loop, "choose_num_drafts", adapt)
    assert is_refuted(speculation=ahead(gamma=4))


def test_an_image_drafts_by_its_own_acceptance():
    """8 of 10 to begin with, then its own counts; the two tokens of a group pass together."""
    tested = np.arange(6) < np.array([[0], [6], [6]])
    accepted = tested & [[False], [True], [False]]
    state = SimpleNamespace(tested=tested, accepted=accepted, _replace=lambda num_drafts: num_drafts)
    inputs = SimpleNamespace(speculation=ahead(gamma=8, draft_cost=0.1), length=6, groups=3)
    rates = np.array([8 / 10, 14 / 16, 8 / 16]) ** 2
    speedup = lambda gamma, a: (1 - a ** (gamma + 1)) / (1 - a) / (1 + 0.1 * gamma)
    best = [max(range(1, 9), key=lambda gamma, a=a: speedup(gamma, a)) for a in rates]
    assert len(set(best)) == 3
    np.testing.assert_array_equal(drafting.choose_num_drafts(inputs, state), best)
    inputs.speculation = ahead(gamma=8)
    assert drafting.choose_num_drafts(inputs, state) is state


def test_sigma_of_the_paper():
    """Its logarithm, for a draft with log variances lower by known amounts; the last one does not count."""
    narrow = LinearTokens(narrower=0.2)
    how = Options(num_iter=6, respacing=MODEL.spec, final_noise=True)
    keys, labels = row_keys(jax.random.key(3), 2), jnp.zeros(2, jnp.int32)
    paper = ahead(gamma=2, criterion="paper")
    inputs, state = rounds.begin(
        MODEL, None, keys, labels, how, speculation=paper, draft=rounds.Draft(narrow)
    )

    @jax.jit
    def log_sigmas(inputs, state):
        path, criterion = state.drafts, paper.criterion
        of_p, of_q = (
            log_stds(inputs, bound, path.states, path.z, path.scale)[0]
            for bound in (inputs.target, inputs.draft)
        )
        drafted, _ = drafted_groups(inputs, state, lookahead=1)
        own, _ = paper_criterion.aligned_chains(criterion, inputs, drafted)
        test, _ = paper_criterion.judge_last_transitions(criterion, inputs, path, drafted, own)
        return of_q - of_p, test.log_sigma

    c = inputs.target.chains(jnp.zeros((1, 2)), None).c
    lower = 0.5 * 0.2 * (c.log_beta - c.log_posterior)
    expected = -0.5 * MODEL.token_dim * np.sum(np.asarray(lower)[1:])
    for log_sigma in log_sigmas(inputs, state):
        np.testing.assert_allclose(log_sigma, np.broadcast_to(expected, log_sigma.shape), rtol=1e-4)


@pytest.mark.parametrize("criterion", ["self", "path", "paper"])
@pytest.mark.parametrize("inside", [None, ChainSpeculation((3,))])
def test_types_do_not_change_in_a_round(float64, criterion, inside):
    """Also where numbers are of 64 bits by default."""
    draft = None if criterion == "self" else NEAR
    options = ahead(gamma=2, criterion="path" if draft is None else criterion, draft_cost=0.2)
    how = Options(
        num_iter=4, respacing=MODEL.spec, guided=True, cfg=1.5, final_noise=True, denoise=inside or "plain"
    )
    keys, labels = row_keys(jax.random.key(3), 2), jnp.zeros(2, jnp.int32)
    inputs, state = rounds.begin(MODEL, None, keys, labels, how, speculation=options, draft=drafted_by(draft))
    after, _ = jax.eval_shape(rounds.run_round, inputs, state)
    of = lambda tree: jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree)
    assert of(after) == of(state)


def test_many_rows_are_counted():
    """More than a number of 32 bits holds."""
    inputs = SimpleNamespace(options=Options(guided=True))
    calls = call_counts()
    for _ in range(5):
        calls = add_calls(calls, head_calls(inputs, 7, 2**29 - 3), backbone_calls(inputs, 2**29 + 1))
    assert (rounds.total_rows(calls.head_rows), int(calls.head)) == (5 * 2 * (2**29 - 3), 35)
    assert (rounds.total_rows(calls.backbone_rows), int(calls.backbone)) == (5 * 2 * (2**29 + 1), 5)


@pytest.mark.parametrize("trips, truncated", [(1, True), pytest.param(1024, False, marks=pytest.mark.slow)])
def test_draws_truncated_in_the_chains_of_a_draft_are_counted(trips, truncated):
    """Such a draft does not have the law it is tested by; the target's chains have a count of their own."""
    keys, labels = row_keys(jax.random.key(3), 50), jnp.zeros(50, jnp.int32)
    inside = ChainSpeculation((4,), proposals=1, max_resamples=trips)
    how = Options(num_iter=6, respacing=MODEL.spec, final_noise=True, denoise=inside)
    options = {"speculation": ahead(gamma=2), "draft": rounds.Draft(NEAR)}
    found = rounds.sample(MODEL, None, keys, labels, how, **options)
    assert (int(found.counts.truncated) > 0) == truncated


def test_first_windows_end_with_the_chain():
    """However many of them are asked for."""
    chain = ChainSpeculation((2,) * 90 + (3,))
    how = Options(num_iter=1, respacing=MODEL.spec, final_noise=True, denoise=chain)
    keys, labels = row_keys(jax.random.key(3), 4), jnp.zeros(4, jnp.int32)
    made = sampler.sample(MODEL, None, keys, labels, how)
    assert 5 <= int(made.counts.calls[0]) <= 10  # T = 10
