"""The joint distribution of whole texts from speculative sampling, by exact enumeration
of a tiny target: rules for a chain of drafts and for trees of them, and mistakes that
are noticed.

N = 20 000 rows with one prompt, four tokens each: 256 texts, fewer with a stop id.
Fixed seeds; the false-alarm rate of every sampled test is at most 1e-4 (see `laws`).
"""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax import text
from cspd_jax.audit import FALSE_ALARM, counts_p_value
from cspd_jax.coupling.acceptance import uniform
from cspd_jax.coupling.categorical import gumbel, gumbel_max, residual_logits
from cspd_jax.coupling.siblings import accept_sibling
from cspd_jax.keys import purpose_keys
from cspd_jax.sampling import NO_TOKEN, Purpose, Sampling, round_keys
from cspd_jax.text import Drafting, ModelDrafter, Options, Prompts, rules
from cspd_jax.text.drafters import Drafter, Drafts
from cspd_jax.text.rules import RULES, Verdict
from cspd_jax.text.trees.rounds import TREE_RULES

ROWS = 20_000
V = 4
NEW = 4
STOP = 3
PROMPT = np.array([2, 2, 0, 2, 1])
SAMPLED = Sampling(temperature=1.3, top_k=3, top_p=0.9)
OPEN = Sampling(temperature=1.0)
TEXTS = np.array(list(itertools.product(range(V), repeat=NEW)))


@functools.cache
def target():
    """Padded by one id, which a draft of the same model may draw; no other id of it is
    missing."""
    lm = text_models.model(V, padding=1, dtype=jnp.float32)
    return lm, text_models.params(lm, seed=3, scale=0.6)


def drafter(kind):
    lm, params = target()
    if kind == "lookup":
        return text.PromptLookup(shortest=1)
    if kind == "head":
        return text.draft_from_states(
            text_models.head(lm, params, np.array([3, 0, 2])), (lm, params)
        )
    if kind == "stranger":
        return Stranger()
    if kind == "fewer ids":
        lm = text_models.model(V - 1, padding=3, dtype=jnp.float32)
        return lm, text_models.params(lm, seed=5, scale=0.6)
    assert kind == "near"
    return lm, text_models.near(params, scale=0.35)


@functools.cache
def distribution_of_texts(sampling, stop=None):
    """The target's probabilities of TEXTS [256].

    Texts that agree up to a stop id count as the one with zeros after it.
    """
    rows = np.concatenate([np.tile(PROMPT, (len(TEXTS), 1)), TEXTS], axis=1)
    logits = text_models.logits(*target(), rows)[:, len(PROMPT) - 1 : -1]
    steps = np.apply_along_axis(text_models.probabilities, -1, logits, *sampling)
    probs = np.take_along_axis(steps, TEXTS[:, :, None], axis=2).prod(axis=(1, 2))
    return np.bincount(index(until(TEXTS, stop)), probs, len(TEXTS))


def until(texts, stop):
    before = np.cumsum(texts == stop, axis=1) - (texts == stop)
    return np.where(before > 0, 0, texts)


def index(texts):
    return texts @ V ** np.arange(NEW)[::-1]


PROMPTS = Prompts(np.tile(PROMPT, (ROWS, 1)), np.full(ROWS, len(PROMPT)))


@dataclasses.dataclass(frozen=True)
class Stranger(Drafter):
    """Draws one id after the other from one distribution, which has an id that the
    target has not."""

    probabilities: tuple[float, ...] = (0.15, 0.15, 0.2, 0.1, 0.4)

    def draft(self, params, state, request):
        log_q = jnp.log(jnp.array(self.probabilities))
        shape = (request.max_gamma,)
        draw = lambda key: jax.random.categorical(key, log_q, shape=shape)
        tokens = jax.vmap(draw)(request.keys)
        log_q = jnp.broadcast_to(log_q[:V], (*tokens.shape, V))
        none = jnp.int32(0)
        return Drafts(tokens, request.count, log_q, none, none), state


def speculation(rule, kind="near", **how):
    return text.Speculation(drafter(kind), **{"gamma": 3, "rule": rule} | how)


def tree(*widths, kind="near", rule="tree"):
    return text.Tree(drafter(kind), widths, rule)


def generate(method, sampling, **options):
    options = Options(max_new_tokens=NEW, **sampling._asdict(), **options)
    return text.generate(jax.random.key(0), target(), PROMPTS, method, options)


def p_value(tokens, sampling, stop=None):
    texts = np.asarray(tokens)[:, len(PROMPT) :]
    counts = np.bincount(index(texts), minlength=len(TEXTS))
    return counts_p_value(counts, distribution_of_texts(sampling, stop=stop))


STOPS = {"stop_ids": (STOP,)}
MIXED = {
    "gamma": np.arange(ROWS) % 3 + 1,
    "max_gamma": 3,
    "draft_cost": 0.3,
    "confidence": 0.5,
}
WAYS = {
    "google": (speculation("google"), SAMPLED, {}),
    "deepmind": (speculation("deepmind"), SAMPLED, {}),
    "block": (speculation("block"), SAMPLED, {}),
    "match": (speculation("match"), SAMPLED, {}),
    "google, lookup, stop": (speculation("google", "lookup"), SAMPLED, STOPS),
    "block, fewer ids, adapted": (
        speculation("block", "fewer ids", draft_cost=0.3),
        SAMPLED,
        {},
    ),
    "block, mixed": (speculation("block", **MIXED), OPEN, STOPS),
    "google, head, mixed": (speculation("google", "head", **MIXED), OPEN, STOPS),
    "google, strange ids": (speculation("google", "stranger"), OPEN, {}),
    "block, strange ids": (speculation("block", "stranger"), OPEN, {}),
    "tree, stop": (tree(3, 2), OPEN, STOPS),
    "tree, wider than what is left of q": (tree(4, 1), SAMPLED, {}),
    "tree, a chain": (tree(1, 1, 1), OPEN, {}),
    "tree, fewer ids": (tree(3, 2, kind="fewer ids"), OPEN, {}),
    # Nodes are given what it made of their parents; it lacks an id.
    "tree, head": (tree(3, 1, kind="head"), SAMPLED, {}),
}


@pytest.mark.quick("block, mixed", "tree, stop")
@pytest.mark.parametrize("way", WAYS)
def test_texts_have_the_target_s_distribution(way):
    method, sampling, options = WAYS[way]
    tokens, info = generate(method, sampling, **options)
    assert p_value(tokens, sampling, *options.get("stop_ids", ())) > FALSE_ALARM
    assert 0.1 < info.acceptance < 1 and not info.truncated.any()


def draw(logits, keys, length):
    noise = gumbel(round_keys(keys, Purpose.RESIDUAL, length), V, logits.dtype)
    return gumbel_max(logits, noise)


def of_drafts(log_p, drafts):
    """What stands at the ids of the drafts [B, G]."""
    return jnp.take_along_axis(log_p, drafts.tokens[:, :, None], axis=2)[..., 0]


def clamped_products(keys, length, log_p, drafts):
    """Products of clamped ratios, each against a uniform of its own; the last success
    counts."""
    most = drafts.tokens.shape[1]
    ratio = of_drafts(log_p[:, :most], drafts) - of_drafts(drafts.log_q, drafts)
    chance = jnp.cumprod(jnp.minimum(1, jnp.exp(ratio)), axis=1)
    u = jax.vmap(lambda key: uniform(key, (most,)))(
        round_keys(keys, Purpose.TEST, length)
    )
    place = 1 + jnp.arange(most)
    tau = jnp.max(
        jnp.where((u <= chance) & (place <= drafts.count[:, None]), place, 0), axis=1
    )
    p = log_p[jnp.arange(len(tau)), tau]
    q = drafts.log_q[jnp.arange(len(tau)), jnp.minimum(tau, most - 1)]
    rest = residual_logits(p, jnp.where((tau < drafts.count)[:, None], q, -jnp.inf))
    rest = jnp.where(jnp.all(rest == -jnp.inf, axis=1, keepdims=True), p, rest)
    token = draw(rest, keys, length)
    return Verdict(tau.astype(jnp.int32), token, jnp.zeros(tau.shape, bool))


def fresh_draw(keys, length, log_p, drafts):
    """Tested one by one, but a rejected draft is replaced by a draw from p, not from
    the residual."""
    verdict = RULES["google"](keys, length, log_p, drafts)
    p = log_p[jnp.arange(len(length)), verdict.tau]
    return verdict._replace(token=draw(p, keys, length))


def p_and_q_swapped(keys, length, log_p, drafts):
    most = drafts.tokens.shape[1]
    p_as_q = drafts._replace(log_q=log_p[:, :most])
    return RULES["google"](keys, length, log_p.at[:, :most].set(drafts.log_q), p_as_q)


def one_too_many(keys, length, log_p, drafts):
    """The first draft that is rejected is kept, and what follows it is drawn from p."""
    tau = jnp.minimum(
        RULES["google"](keys, length, log_p, drafts).tau + 1, drafts.count
    )
    token = draw(log_p[jnp.arange(len(tau)), tau], keys, length)
    return Verdict(tau, token, jnp.zeros(tau.shape, bool))


def residual_of_the_first_draft(keys, length, log_p, drafts):
    verdict = RULES["google"](keys, length, log_p, drafts)
    rest = residual_logits(log_p[:, 0], drafts.log_q[:, 0])
    token = draw(rest, keys, length)
    rejected = verdict.tau < drafts.count
    return verdict._replace(token=jnp.where(rejected, token, verdict.token))


def one_number_for_all_tests(keys, length, log_p, drafts):
    with pytest.MonkeyPatch.context() as patch:
        first = lambda key, shape, dtype: jnp.broadcast_to(
            uniform(key, (), dtype), shape
        )
        patch.setattr(rules, "uniform", first)
        return RULES["google"](keys, length, log_p, drafts)


WRONG = (
    clamped_products,
    fresh_draw,
    p_and_q_swapped,
    one_too_many,
    residual_of_the_first_draft,
    one_number_for_all_tests,
)


@pytest.mark.quick("fresh_draw")
@pytest.mark.parametrize("rule", WRONG)
def test_almost_right_rules_are_noticed(rule, monkeypatch):
    monkeypatch.setitem(RULES, rule.__name__, rule)
    tokens, _ = generate(speculation(rule.__name__), OPEN)
    assert p_value(tokens, OPEN) <= FALSE_ALARM


def with_replacement(u, log_p, log_q, drafts):
    """Tests every draft against the residual of the one before, but with q itself, as
    if drawn anew."""
    index, _ = accept_sibling(u[:1], log_p, log_q, drafts[:1])
    for i in range(1, len(drafts)):
        rest = residual_logits(log_p, log_q)
        log_p = jnp.where(jnp.all(rest == -jnp.inf), log_p, jax.nn.log_softmax(rest))
        one, found = accept_sibling(u[i : i + 1], log_p, log_q, drafts[i : i + 1])
        index = jnp.where((index == i) & (one > 0), i + 1, index)
    return index, found._replace(empty=jnp.zeros(len(drafts), bool))


def fresh_draw_after_all(u, log_p, log_q, drafts):
    """If no draft is accepted, a draw from p itself."""
    index, found = accept_sibling(u, log_p, log_q, drafts)
    return index, found._replace(log_next=log_p)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [with_replacement, fresh_draw_after_all])
def test_almost_right_trees_are_noticed(rule, monkeypatch):
    monkeypatch.setitem(TREE_RULES, rule.__name__, rule)
    tokens, _ = generate(tree(3, 2, rule=rule.__name__), OPEN, **STOPS)
    assert p_value(tokens, OPEN, STOP) <= FALSE_ALARM


class Discarding(ModelDrafter):
    """Holds back a token that it has drawn, if it is improbable."""

    def draft(self, params, cache, request):
        drafts, cache = super().draft(params, cache, request)
        probability = jnp.exp(of_drafts(drafts.log_q, drafts))
        position = jnp.arange(request.max_gamma)
        low = (probability < 0.5) & (position < drafts.count[:, None])
        count = jnp.min(jnp.where(low, position, drafts.count[:, None]), axis=1)
        return drafts._replace(count=count.astype(jnp.int32)), cache


@pytest.mark.parametrize("rule", ["google", "block"])
@pytest.mark.slow
def test_a_draft_that_is_held_back_biases_the_text(rule):
    network, params = drafter("near")
    discarding = Drafting(Discarding(network), params)
    tokens, _ = generate(text.Speculation(discarding, 3, rule), OPEN)
    assert p_value(tokens, OPEN) <= FALSE_ALARM


class Stale(ModelDrafter):
    """Draws a position with the same noise in every round. Parameters: (those of the
    model, keys [B])."""

    def begin(self, params, *more):
        return super().begin(params[0], *more)

    def draft(self, params, cache, request):
        request = request._replace(keys=purpose_keys(params[1], Purpose.DRAFT))
        return super().draft(params[0], cache, request)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["google", "block"])
def test_a_drafter_that_is_lost_ends_the_text(rule):
    lost = Stranger((0.3, 0.4, np.nan, 0.3))
    tokens, _ = generate(text.Speculation(lost, 3, rule), OPEN)
    assert (tokens[:, len(PROMPT)] == NO_TOKEN).all()


def test_no_draft_matches_a_target_that_is_lost():
    """The rule match ends a text where the log probabilities are NaN, whatever id a
    NaN is the maximum of."""
    log_p = jnp.log(jnp.full((1, 3, 2), 0.5)).at[0, 1].set(jnp.nan)
    keys = jax.random.split(jax.random.key(0), 1)
    found = []
    for pair in itertools.product(range(2), repeat=2):
        drafts = Drafts(jnp.array([pair]), jnp.array([2]), None, 0, 0)
        verdict = rules.match(keys, jnp.array([5]), log_p, drafts)
        found.append((int(verdict.tau[0]), int(verdict.token[0])))
    # Two of the four pairs begin with the target's own token.
    assert found.count((1, NO_TOKEN)) == 2 and {tau for tau, _ in found} == {0, 1}


def test_a_draft_that_is_certain_is_accepted_by_every_number(monkeypatch):
    """The largest is 1, whose logarithm is not below that of a probability of 1."""
    monkeypatch.setattr(
        rules, "uniform", lambda key, shape, dtype: jnp.ones(shape, dtype)
    )
    log_p = jnp.log(jnp.array([[[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]]))
    drafts = Drafts(jnp.array([[1, 0]]), jnp.array([2]), log_p[:, :2], 0, 0)
    verdict = jax.jit(RULES["google"])(
        jax.random.split(jax.random.key(0), 1), jnp.array([4]), log_p, drafts
    )
    assert verdict.tau == 2 and not verdict.truncated


@pytest.mark.slow
def test_block_verification_needs_fresh_noise_every_round():
    """What it accepts depends on the drafts that it drops; tests one by one do not look
    that far.

    The distribution of the second token, where no token depends on those before it.
    """
    lm = text_models.model(V, dtype=jnp.float32)
    probs = [0.5, 0.3, 0.15, 0.05]
    model = lm, text_models.with_distribution(lm, probs)
    draft_params = text_models.with_distribution(lm, [0.25] * V)
    stale = Drafting(
        Stale(lm), (draft_params, jax.random.split(jax.random.key(1), ROWS))
    )
    for rule, right in (("google", True), ("block", False)):
        options = Options(temperature=1.0, max_new_tokens=3)
        method = text.Speculation(stale, 2, rule)
        tokens, _ = text.generate(jax.random.key(0), model, PROMPTS, method, options)
        second = np.bincount(tokens[:, len(PROMPT) + 1], minlength=V)
        assert (counts_p_value(second, probs) > FALSE_ALARM) == right


@pytest.mark.slow
def test_a_tree_of_one_child_each_is_the_chain(float64):
    """The same drafts, accepted as often; and wider ones give the target's text in
    fewer rounds."""
    lm = text_models.model(depth=2)
    params = text_models.params(lm)
    target = (lm, params)
    head = text_models.head(lm, params, [9, 3, 5, 1, 7, 2, 10, 0], (0, 1, 2))
    prompts = [[1, 5, 7], [4, 9, 8, 2, 6], [6, 7]]
    drafter = text.draft_from_states(head, target, confidence=0)
    options = text.Options(max_new_tokens=24, stop_ids=())
    chain, narrow, wide = (
        text.generate(None, target, prompts, method, options)
        for method in (
            text.Speculation(drafter, gamma=3),
            text.Tree(drafter, (1, 1, 1)),
            text.Tree(drafter, (4, 2, 1)),
        )
    )
    chex.assert_trees_all_equal(narrow.tokens, chain.tokens)
    chex.assert_trees_all_equal(narrow.info.accepted, chain.info.accepted)
    chex.assert_trees_all_equal(wide.tokens, chain.tokens)
    assert wide.info.accepted.sum() > narrow.info.accepted.sum()
