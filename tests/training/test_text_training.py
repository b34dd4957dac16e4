"""Training of language models: objectives by enumeration, held-out bits in closed form,
exact resumption."""

import dataclasses
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models
from commands import printed
from scipy.special import beta

from cspd_jax import hub, models, weights
from cspd_jax.audit import FALSE_ALARM, counts_p_value
from cspd_jax.check import UserError
from cspd_jax.networks.lm import LM, abstract_params, init_params
from cspd_jax.tokenizers import END_OF_TEXT
from cspd_jax.training import presets
from cspd_jax.training.config import RunConfig
from cspd_jax.training.data.text import Document, Texts
from cspd_jax.training.recipes import init_state, initial_params
from cspd_jax.training.run import run
from cspd_jax.training.text import objective
from cspd_jax.training.text.objective import cross_entropy, mask_rates, masked_view
from cspd_jax.training.text.rows import PROMPT, continuations

CORPUS = tuple(
    Document(name, f"{name}: {'abcab ' * 40}") for name in ("tempfile", "b", "c")
)


def small(preset, **more):
    sizes = {"width": 8, "depth": 1, "heads": 1, "kv_heads": 1}
    sizes |= {"head_dim": 8, "mlp_width": 8}
    return dataclasses.replace(presets.preset(preset).model, **sizes, **more)


TINY = RunConfig(
    model=small("text-target"),
    data=Texts(16),
    steps=80,
    batch=4,
    learning_rate=1e-2,
    warmup=2,
    decay=30,
    log_every=1,
    checkpoint_every=40,
)
MASKED = dataclasses.replace(TINY, model=small("masked-text", max_positions=1024))
TEXTS = TINY.data


@pytest.fixture(scope="module", autouse=True)
def corpus():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cspd_jax.training.data.text.documents", lambda: CORPUS)
        yield


init = jax.jit(init_params, static_argnums=0)


def trained(config, out, target=None):
    """The final state of a run in the folder `out`."""
    return run(config, out, init_state(config), objective.learning(config, target))


def unigram(lm):
    """Parameters that ignore the context, and log p of every id."""
    numbers = np.random.default_rng(0).normal(scale=3, size=lm.config.vocab_size)
    logs = np.asarray(jax.nn.log_softmax(numbers))
    return text_models.with_distribution(lm, np.exp(logs)), logs


def bits_of(lm, params):
    return objective.measure(TEXTS, lm, params)["held_out_bits_per_byte"]


def untied(config):
    return LM(dataclasses.replace(config.model, tie_embeddings=False))


both = pytest.mark.parametrize("config", [TINY, MASKED], ids=["causal", "masked"])


@both
def test_bits_of_a_known_model(config, monkeypatch):
    """A model that ignores its context: the mean of -log2 p, whatever the rows and
    masks."""
    lm = untied(config)
    params, logs = unigram(lm)
    stream = np.tile(TEXTS.streams["train"], 200)[: 16 * 16 * 200]
    monkeypatch.setitem(TEXTS.streams, "held-out", stream)
    wanted = -logs[stream].mean() / math.log(2)
    found = bits_of(lm, params)
    # 4 standard deviations of the masks
    assert found == pytest.approx(wanted, rel=0.04)


def test_masked_objective_against_enumeration():
    """Its mean over masks is the integral over t of the sum over all masks, for a row
    of three ids."""
    lm = text_models.model(dtype=jnp.float32, causal=False, mask_ids=(10,))
    params = text_models.params(lm, scale=0.5)
    row = np.array([3, 1, 4])
    masks = np.array(list(itertools.product([0, 1], repeat=3)))
    logits = lm.forward(params, jnp.where(masks, 10, row))
    logs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    of_mask = -(masks * logs[:, range(3), row]).sum(axis=1)
    k = masks.sum(axis=1)
    # int_0^1 t^(k - 1) (1 - t)^(3 - k) dt; without a mask there is no loss
    exact = (beta(np.maximum(k, 1), 4 - k) * of_mask).sum() / 3 / math.log(2)

    def one(key):
        rates, hide = jax.random.split(key)
        rows = jnp.broadcast_to(jnp.asarray(row), (64, 3))
        view = masked_view(rows, mask_rates(rates, 64), hide, 10)
        return cross_entropy(view, lm.forward(params, view.seen))

    keys = jax.random.split(jax.random.key(0), 400)
    losses = np.asarray(jax.jit(jax.vmap(one))(keys), np.float64)
    error = losses.std() / math.sqrt(len(losses))
    assert abs(losses.mean() - exact) < 4.5 * error < 0.05 * exact
    # Negative control: without the 1/t.
    unweighted = (beta(k + 1, 4 - k) * of_mask).sum() / 3 / math.log(2)
    assert abs(unweighted - exact) > 10 * error


@pytest.mark.slow
@both
def test_the_objective_is_learnt(config, tmp_path):
    before = init(config.model, jax.random.key(0))
    after = trained(config, tmp_path).params
    lm = LM(config.model)
    assert bits_of(lm, after) < bits_of(lm, before) - 2


def target(seed=3, config=TINY):
    params = init(config.model, jax.random.key(seed))
    return LM(config.model), jax.tree.map(lambda x: 8 * x, params)


@pytest.mark.slow
@both
def test_distilling_brings_the_draft_closer(tmp_path, config, monkeypatch):
    stream = np.tile(TEXTS.streams["held-out"], 20)
    monkeypatch.setitem(TEXTS.streams, "held-out", stream)
    lm, params = target(config=config)
    before = init(config.model, jax.random.key(0))
    state = trained(config, tmp_path, target=(lm, params))
    measure = lambda own: objective.measure(TEXTS, lm, own, lm, params)
    first, last, itself = (measure(own) for own in (before, state.params, params))
    assert last["divergence"] < first["divergence"] / 2
    assert last["acceptance"] > first["acceptance"] + 0.1
    same = {"acceptance": 1, "greedy": 1, "divergence": 0}
    assert {name: itself[name] for name in same} == pytest.approx(same, abs=1e-4)


def test_rows_of_the_target_itself(tmp_path):
    """They begin as the data does, follow the target's distribution, and are made
    once."""
    texts = Texts(PROMPT + 32)
    lm = untied(TINY)
    params, logs = unigram(lm)
    path = tmp_path / "samples.npz"
    made = continuations((lm, params), texts, 128, path, 0)
    begun = np.concatenate([texts.batch(i, 64)[:, :PROMPT] for i in range(2)])
    chex.assert_trees_all_equal(made[:, :PROMPT], begun)
    counts = np.bincount(made[:, PROMPT:].ravel(), minlength=len(logs))
    assert counts_p_value(counts, np.exp(logs)) > FALSE_ALARM
    chex.assert_trees_all_equal(continuations(target(), texts, 128, path, 0), made)
    with pytest.raises(UserError, match="leave out --from"):
        continuations((LM(MASKED.model), {}), texts, 128, tmp_path / "masked.npz", 0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_masked_model_begins_with_a_causal_one(tied):
    """A text of one token looks the same to both, so the old ids have the same logits
    there."""
    causal = dataclasses.replace(TINY.model, tie_embeddings=tied)
    masked = dataclasses.replace(MASKED.model, tie_embeddings=tied, max_positions=99)
    model = models.TextModel("x", LM(causal), init(causal, jax.random.key(1)), {})
    params = initial_params(model, masked)
    chex.assert_trees_all_equal_shapes(params, abstract_params(masked))
    tokens = np.array([[7], [END_OF_TEXT]])
    logits = LM(masked).forward(params, tokens)
    before = model.network.forward(model.params, tokens)
    chex.assert_trees_all_close(logits[..., : causal.vocab_size], before, atol=1e-6)
    chex.assert_trees_all_close(logits[..., -1], logits[..., :-1].mean(-1), atol=1e-5)
    chex.assert_trees_all_equal(initial_params(model, causal), model.params)


@pytest.mark.slow
def test_the_commands(tmp_path, capsys, monkeypatch):
    """Train a target, distil a draft of it from its own samples and the data."""
    config = dataclasses.replace(TINY, steps=12, decay=4, data=Texts(PROMPT + 8))
    monkeypatch.setitem(presets.PRESETS, "tiny", config)
    target = tmp_path / "target"
    draft = tmp_path / "draft"
    report = printed(capsys, f"train --preset tiny --out {target}")
    assert report["steps"] == 12 and 0 < report["held_out_bits_per_byte"] < 9
    model = hub.load(target / "model")
    assert model.config == config.model and model.metadata["extra"]["corpus"]["python"]
    line = f"distill --preset tiny --out {draft} --from both --samples 64"
    told = printed(capsys, f"{line} --target {target}/model --init {target}/model")
    assert told["divergence"] < 0.1
    assert told["acceptance"] > 0.9 and told["greedy"] > 0.5
    assert weights.load(told["model"]).metadata["source"] == "cspd-jax distill"
