"""`cspd_jax.audit` acquits right rules, among them the library's, and refutes the
mistakes that projects have had."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cspd_jax import audit
from cspd_jax.check import UserError
from cspd_jax.coupling.block import verify_gaussian_block
from cspd_jax.coupling.categorical import verify_block
from cspd_jax.coupling.siblings import couple_siblings
from cspd_jax.diffusion.gaussian import Gaussian


def draw(random, weights):
    return random.choice(len(weights), p=weights / weights.sum())


def residual(p, q):
    return np.maximum(p - q, 0)


def token_by_token(
    seed, p, q, drafts, *, kept=lambda p, q, x: min(1, p[x] / q[x]), rest=residual
):
    """Keeps each draft with its probability, and replaces the first that is not kept by
    a draw from what rests."""
    random = np.random.default_rng(seed)
    for i, x in enumerate(drafts):
        if random.random() >= kept(p[i], q[i], x):
            return i, draw(random, rest(p[i], q[i]))
    return len(drafts), draw(random, p[-1])


@jax.jit
def _block(key, p, q, drafts):
    return verify_block(key, jnp.log(p), jnp.log(q), drafts)


def block(seed, p, q, drafts):
    """Block verification, as the library does it."""
    found = _block(jax.random.key(seed), p, q, drafts)
    return found.tau, found.token


def clamped_products(seed, p, q, drafts):
    """Cumulative products of clamped ratios beside cumulative products of uniforms
    (vllm-ascend #7807)."""
    random = np.random.default_rng(seed)
    ratio = bound = 1.0
    for i, x in enumerate(drafts):
        ratio *= min(1, p[i][x] / q[i][x])
        bound *= random.random()
        if bound >= ratio:
            rest = residual(p[i], q[i])
            return i, draw(random, rest if rest.sum() else p[i])
    return len(drafts), draw(random, p[-1])


def of_another_draft(seed, p, q, drafts):
    """Drafts that were drawn at temperature 1 are tested with the q of temperature 0.7
    (DeepSpec #31)."""
    colder = q ** (1 / 0.7)
    return token_by_token(seed, p, colder / colder.sum(-1, keepdims=True), drafts)


def bonus_of_the_draft(seed, p, q, drafts):
    """The token after the last draft comes from the drafter."""
    return token_by_token(seed, np.append(p[:-1], q[-1:], axis=0), q, drafts)


WRONG_RULES = {
    "clamped products": clamped_products,
    "q of another temperature": of_another_draft,
    "bonus of the draft": bonus_of_the_draft,
    "the difference without its sign": functools.partial(
        token_by_token, rest=lambda p, q: np.abs(p - q) + 1e-12
    ),
    "p in place of the residual": functools.partial(
        token_by_token, rest=lambda p, q: p
    ),
    # Equality of the most probable token, at temperature above 0 (dflash #74).
    "kept where the argmax agrees": functools.partial(
        token_by_token, kept=lambda p, q, x: p.argmax() == x, rest=lambda p, q: p
    ),
}


@pytest.mark.quick("token_by_token")
@pytest.mark.parametrize("verify", [token_by_token, block])
def test_right_rules_are_acquitted(verify):
    found = audit.rule(verify, draws=2_000)
    assert found and found.p_value > audit.FALSE_ALARM, found.sentence


@pytest.mark.quick("clamped products", "bonus of the draft")
@pytest.mark.parametrize("name", WRONG_RULES)
def test_mistakes_of_rules_are_refuted(name):
    found = audit.rule(WRONG_RULES[name], draws=2_000)
    assert not found and "refuted by" in found.sentence


@functools.partial(jax.jit, static_argnames="swapped")
def _steps(key, p, q, drafts, swapped):
    p, q = (Gaussian(mean, 2 * jnp.log(spread)) for mean, spread in (p, q))
    if swapped:  # the residual that is drawn from is not p's
        p = Gaussian(p.mean, q.log_var)
    found = verify_gaussian_block(key, p, q, drafts)
    return found.kept, found.value


def steps(seed, p, q, drafts, swapped=False):
    p, q, drafts = jax.tree.map(jnp.float32, (p, q, drafts))
    return jax.device_get(_steps(jax.random.key(seed), p, q, drafts, swapped))


def test_steps_of_gaussians():
    assert audit.transitions(steps, dims=(4,), draws=500)
    wrong = functools.partial(steps, swapped=True)
    assert not audit.transitions(wrong, dims=(4,), draws=500)


P = np.array([0.4, 0.4, 0.2])
Q = np.array([0.05, 0.15, 0.8])
LAW = np.log(P[:, None] * P)


def siblings(seed, count, reduced=True):
    """Two tokens, each the first accepted of two siblings. If q is not reduced, the
    second sibling is tested with the q from which the first was drawn."""
    random = np.random.default_rng(seed)

    def one():
        drafts = random.choice(3, 2, replace=False, p=Q)
        p, q = P, Q
        for x in drafts:
            if random.random() < min(1, p[x] / q[x]):
                return x
            p = residual(p, q) / residual(p, q).sum()
            if reduced:
                q = np.where(np.arange(3) == x, 0, q) / (1 - q[x])
        return draw(random, p)

    return np.array([[one(), one()] for _ in range(count)])


@functools.partial(jax.jit, static_argnames="count")
def _of_the_library(key, count):
    def one(key):
        for_drafts, for_coupling = jax.random.split(key)
        noise = jax.random.gumbel(for_drafts, (3,))
        drafts = jnp.argsort(-(jnp.log(Q) + noise))[:2]
        return couple_siblings(for_coupling, jnp.log(P), jnp.log(Q), drafts).value

    return jax.vmap(jax.vmap(one))(jax.random.split(key, (count, 2)))


def of_the_library(seed, count):
    return _of_the_library(jax.random.key(seed), count)


def one_noise(seed, count):
    """Both tokens are drawn with the same number."""
    u = np.random.default_rng(seed).random(count)
    token = np.searchsorted(np.cumsum(P), u)
    return np.stack([token, token], axis=1)


def test_sequences():
    assert audit.sequences(siblings, LAW, draws=4_000)
    assert audit.sequences(of_the_library, LAW)
    not_reduced = functools.partial(siblings, reduced=False)
    assert not audit.sequences(not_reduced, LAW, draws=4_000)
    assert not audit.sequences(one_noise, LAW, draws=1_000)


def test_greedy_texts():
    plain = [[1, 2, 3], [4, 5, 6], [7, 8]]
    fast = [[1, 2, 3], [4, 0, 6], [7, 8, 9]]
    margins = {(1, 1): 1e-6, (2, 2): 0.5}
    found = audit.greedy(plain, fast, lambda row, place: margins[row, place])
    assert not found and "text 2 at token 2 (margin 0.5)" in found.sentence
    found = audit.greedy(plain[:2], fast[:2], lambda row, place: margins[row, place])
    assert found and found.sentence.startswith("1 of 2 texts part, none")
    assert not audit.greedy([[1]], [[2]], lambda row, place: -1.0)
    with pytest.raises(UserError, match="no tokens that could be compared"):
        audit.greedy([[]], [[]], lambda row, place: 0.0)
    with pytest.raises(TypeError, match="as an integer"):
        audit.greedy([[1.2]], [[1.4]], lambda row, place: 0.0)


def test_what_cannot_be_judged_is_said():
    with pytest.raises(UserError, match="sum to"):
        audit.sequences(siblings, LAW + 0.1)
    with pytest.raises(UserError, match="too few"):
        audit.sequences(siblings, LAW, draws=20)
    with pytest.raises(UserError, match="a token came out as 3"):
        audit.sequences(lambda seed, count: np.full((count, 2), 3), LAW)
    for told, answer in (
        ("drafts kept came out as 3", (3, 0)),
        ("drafts kept came out as 1.5", (1.5, 0)),
        ("a token came out as None", (1, None)),
    ):
        with pytest.raises(UserError, match=told):
            audit.rule(lambda *_, answer=answer: answer)
    assert not audit.transitions(lambda seed, p, q, drafts: (0, np.nan), dims=[1])


def test_the_first_step_of_a_chain_is_looked_at():
    """A rule that keeps nothing is acquitted if it draws from p, and refuted if it goes
    0.9 of the way in place of 0.8."""

    def off(seed, p, q, drafts, by):
        mean, deviation = (of[0] for of in p)
        return 0, by * mean + deviation * np.random.default_rng(seed).normal(size=64)

    for by, right in ((1.0, True), (0.9 / 0.8, False)):
        rule = functools.partial(off, by=by)
        assert bool(audit.transitions(rule, dims=[64], drafts=1)) == right


def test_what_is_visible_is_seen():
    """A probability that is off by `visible` is refuted."""
    visible = audit.sequences(siblings, LAW, draws=4_000).visible
    law = np.exp(LAW)
    law[0, 0] += visible
    law[1:, 1:] -= visible / 4
    cells = np.arange(9)

    def off(seed, count):
        drawn = np.random.default_rng(seed).choice(cells, count, p=law.ravel())
        return np.stack(np.unravel_index(drawn, (3, 3)), axis=1)

    refuted = [not audit.sequences(off, LAW, 4_000, seed) for seed in range(50)]
    assert all(refuted)
