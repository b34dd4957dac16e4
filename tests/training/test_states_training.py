"""Heads that draft from their target's states: the answers they learn from, what a turn
is, the command."""

import dataclasses
import functools
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models
import word_models
from commands import printed
from word_models import IDS, TARGET, TEMPLATE, tokenizer

from cspd_jax import hub, text, weights
from cspd_jax.training import presets
from cspd_jax.training.data.text import Texts, prompt_ids
from cspd_jax.training.text import states
from cspd_jax.training.text.rows import answers as answered
from cspd_jax.training.text.states import head_config

LENGTH = 24
OWN = 40
LAYERS = (0, 1, 2)
PROMPTS = [[1, 3 + i % 40, 5] for i in range(32)]


PARAMS = text_models.params(TARGET, scale=0.5)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    path = tmp_path_factory.mktemp("answers") / "answers.npz"
    return answered((TARGET, PARAMS), PROMPTS, LENGTH, 128, path, LAYERS)


@pytest.mark.slow
def test_answers_are_the_targets(answers):
    """Greedy rows are what `generate` makes, and what is kept gives the target's
    logits."""

    @jax.jit
    def known(tokens, hidden):
        at = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        cache = TARGET.empty_cache(len(tokens), LENGTH)
        logits, _, states = TARGET.apply(PARAMS, tokens, at, cache, entering=LAYERS)
        return logits, states, TARGET.logits(PARAMS, hidden)

    tokens = np.maximum(answers.tokens, 0)
    logits, entering, kept = known(tokens, answers.hidden.astype(np.float32))
    there = answers.tokens >= 0
    chex.assert_trees_all_close(kept[there], logits[there], atol=0.05)  # bfloat16
    found = answers.states[there].astype(np.float32)
    chex.assert_trees_all_close(found, entering[there], rtol=0.01, atol=0.01)
    total = np.log(np.exp(np.asarray(logits, np.float64)).sum(axis=-1))
    asked = there & (np.arange(LENGTH) >= answers.given[:, None] - 1)
    chex.assert_trees_all_close(total[asked], answers.total[asked], atol=1e-4)
    how = text.Options(max_new_tokens=LENGTH - 3)
    tokens, info = text.generate(None, (TARGET, PARAMS), PROMPTS, options=how)
    ended = zip(np.asarray(tokens), info.trace.lengths)
    greedy = {tuple(row[:n].tolist()) for row, n in ended}
    rows = [tuple(row[row >= 0].tolist()) for row in answers.tokens]
    assert sum(row in greedy for row in rows) == 64 and len(set(rows)) > 80
    assert any(2 in row for row in rows)  # some end


HEAD = head_config(TARGET.config, OWN)


@functools.cache
def begun():
    ids = np.sort(np.random.default_rng(0).permutation(IDS)[:OWN])
    network, own = text_models.head(TARGET, PARAMS, ids, HEAD.entering)
    return network, own, states.given_by(TARGET.config, PARAMS, ids)


def test_a_turn_is_a_draft_after_right_drafts(answers):
    """What turn k says at place i is what a drafter says that was given states up to
    place i - k and drafted the k tokens that are there."""
    network, own, given = begun()
    rows = answers.rows(slice(2))
    count = 3
    learned = {name: part for name, part in own.items() if name != "ids"}
    turns = jax.jit(lambda: states.turns(network, learned, given, rows, count))
    by_turns = np.asarray(turns())
    whole = {**own, "embedding": given.embedding}
    following = jnp.maximum(jnp.roll(rows.tokens, -1, axis=1), 0)
    joined = network.joined(whole, rows.states.astype(jnp.float32))

    @jax.jit
    def drafted(known):
        """Logits [B, count, V] with states up to place `known`."""
        cache = network.empty_cache(2, LENGTH)
        at = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
        at = jnp.where(at <= known, at, LENGTH)
        state, cache = network.apply(whole, following, joined, at, cache)
        state = state[:, known, None]
        found = [network.logits(whole, state)]
        for k in range(1, count):
            place = jnp.full((2, 1), known + k)
            token = jnp.take_along_axis(following, place, axis=1)
            state, cache = network.apply(whole, token, state, place, cache)
            found.append(network.logits(whole, state))
        return jnp.concatenate(found, axis=1)

    for known in (0, 4, 11):
        turn = np.arange(count)
        found = by_turns[turn, :, known + turn].swapaxes(0, 1)
        chex.assert_trees_all_close(found, drafted(known), rtol=2e-4, atol=2e-4)
    assert np.abs(by_turns[0][:, 5] - by_turns[1][:, 5]).max() > 0.1


def test_what_is_wanted_is_the_target_s_token_after_the_next(answers):
    _, own, given = begun()
    rows = answers.rows(slice(8))
    log_p, there = map(np.asarray, jax.jit(states.wanted)(given, rows))
    logits = text_models.logits(TARGET, PARAMS, rows.tokens).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    # Place i is about the token at i + 2, which the target's logits at i + 1 are about.
    whole = np.roll(expected, -1, axis=1)[..., own["ids"]]
    chex.assert_trees_all_close(log_p[there], whole[there], atol=0.1)
    places = np.arange(LENGTH - 2)
    chex.assert_trees_all_equal(
        there[:, :-2], (places >= 1) & (rows.tokens[:, 2:] >= 0)
    )
    assert not there[:, -2:].any()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return word_models.save(tmp_path_factory.mktemp("target"), PARAMS)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n\n".join(f"w1 w{3 + i}" for i in range(20)))
    return path


def test_prompts_are_put_into_the_chat_template(target, tmp_path):
    """Without what the tokenizer puts around a text: the template has its own."""
    pytest.importorskip("jinja2")
    model = hub.load(target)
    assert prompt_ids(model, ["w7 w8"]) == [[7, 8]]
    settings = {"chat_template": TEMPLATE, "bos_token": {"content": "w1"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for around in ("", "w1 $A", "$A w2", "w1 $A w2"):
        (tmp_path / "tokenizer.json").write_text(tokenizer(around))
        asked = dataclasses.replace(model, folder=tmp_path), ["w7 w8"]
        assert prompt_ids(*asked) == [[1, 7, 8, 5]]


@pytest.mark.slow
def test_the_command(target, prompts, tmp_path, monkeypatch, capsys):
    """A run that was stopped ends like one that was not; its head drafts for the
    target, and greedy text is that of plain decoding."""
    config = dataclasses.replace(
        presets.preset("text-states"),
        model=HEAD,
        data=Texts(LENGTH),
        dtype="float32",
        steps=12,
        warmup=2,
        decay=10,
        log_every=1,
        checkpoint_every=6,
    )
    monkeypatch.setitem(presets.PRESETS, "text-states", config)
    line = f"distill --states --target {target} --ids {OWN} --prompts {prompts}"
    line += " --samples 64 --out "
    first = tmp_path / "first"
    second = tmp_path / "second"
    report = printed(capsys, f"{line} {first}")
    assert 0 < report["acceptance"] < 1 and 0 < report["coverage"] <= 1
    # As if it had been stopped.
    shutil.copytree(first, second, ignore=shutil.ignore_patterns("model", "12"))
    printed(capsys, f"{line} {second}")
    a, b = (weights.load(out / "model").params for out in (first, second))
    chex.assert_trees_all_equal(a, b)
    line = f"text --target {target} --draft {report['model']} --prompt 'w1 w9'"
    found = printed(capsys, line + " --compare --new-tokens 16 --no-stop")
    assert found["compared_to_plain"]["identical_rows"] == 1
