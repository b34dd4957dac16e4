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


@functools.cache
def params():
    return text_models.params(TARGET, scale=0.5)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    path = tmp_path_factory.mktemp("answers") / "answers.npz"
    return answered((TARGET, params()), PROMPTS, LENGTH, 128, path, LAYERS)


@pytest.mark.slow
def test_answers_are_the_targets(answers):
    """Greedy rows are what `generate` makes, and what is kept gives the target's
    logits."""
    made = answers

    @jax.jit
    def known(tokens):
        at = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        cache = TARGET.empty_cache(len(tokens), LENGTH)
        logits, _, states = TARGET.apply(params(), tokens, at, cache, entering=LAYERS)
        return logits, states, TARGET.logits(params(), made.hidden.astype(jnp.float32))

    logits, entering, kept = known(np.maximum(made.tokens, 0))
    there = made.tokens >= 0
    chex.assert_trees_all_close(kept[there], logits[there], atol=0.05)  # bfloat16
    chex.assert_trees_all_close(
        made.states[there].astype(np.float32), entering[there], rtol=0.01, atol=0.01
    )
    total = np.log(np.exp(np.asarray(logits, np.float64)).sum(axis=-1))
    asked = there & (np.arange(LENGTH) >= made.given[:, None] - 1)
    chex.assert_trees_all_close(total[asked], made.total[asked], atol=1e-4)
    how = text.Options(max_new_tokens=LENGTH - 3)
    tokens, info = text.generate(None, (TARGET, params()), PROMPTS, options=how)
    greedy = {
        tuple(row[:n].tolist())
        for row, n in zip(np.asarray(tokens), info.trace.lengths)
    }
    rows = [tuple(row[row >= 0].tolist()) for row in made.tokens]
    assert sum(row in greedy for row in rows) == 64 and len(set(rows)) > 80
    assert any(2 in row for row in rows)  # some end


def learner(**changed):
    config = presets.preset("text-states")
    return dataclasses.replace(
        config,
        model=head_config(TARGET.config, OWN),
        data=Texts(LENGTH),
        dtype="float32",
        **changed,
    )


@functools.cache
def begun():
    ids = np.sort(np.random.default_rng(0).permutation(IDS)[:OWN])
    config = learner()
    network, own = text_models.head(TARGET, params(), ids, config.model.entering)
    return network, own, states.given_by(TARGET.config, params(), ids)


def test_a_turn_is_a_draft_after_right_drafts(answers):
    """What turn k says at place i is what a drafter says that was given states up to
    place i - k and drafted the k tokens that are there."""
    network, own, given = begun()
    rows = answers.rows(slice(2))
    count = 3
    learned = {name: part for name, part in own.items() if name != "ids"}
    by_turns = np.asarray(
        jax.jit(lambda: states.turns(network, learned, given, rows, count))()
    )
    whole = {**own, "embedding": given.embedding}
    following = jnp.maximum(jnp.roll(rows.tokens, -1, axis=1), 0)
    joined = network.joined(whole, rows.states.astype(jnp.float32))

    @jax.jit
    def drafted(known):
        """Logits [count, B, V] with states up to place `known`."""
        cache = network.empty_cache(2, LENGTH)
        at = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
        at = jnp.where(at <= known, at, LENGTH)
        state, cache = network.apply(whole, following, joined, at, cache)
        found = [network.logits(whole, state[:, known])]
        state = state[:, known]
        for k in range(1, count):
            place = jnp.full((2, 1), known + k)
            token = jnp.take_along_axis(following, place, axis=1)
            after, cache = network.apply(whole, token, state[:, None], place, cache)
            found = [*found, network.logits(whole, after[:, 0])]
            state = after[:, 0]
        return jnp.stack(found)

    for known in (0, 4, 11):
        for k, logits in enumerate(np.asarray(drafted(known))):
            chex.assert_trees_all_close(
                by_turns[k][:, known + k], logits, rtol=2e-4, atol=2e-4
            )
    assert np.abs(by_turns[0][:, 5] - by_turns[1][:, 5]).max() > 0.1


def test_what_is_wanted_is_the_target_s_token_after_the_next(answers):
    _, own, given = begun()
    rows = answers.rows(slice(8))
    log_p, there = map(np.asarray, jax.jit(states.wanted)(given, rows))
    logits = text_models.logits(TARGET, params(), rows.tokens).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    # Place i is about the token at i + 2, which the target's logits at i + 1 are about.
    whole = expected[:, 1:][..., own["ids"]]
    chex.assert_trees_all_close(
        log_p[:, :-1][there[:, :-1]], whole[there[:, :-1]], atol=0.1
    )
    for row, tokens in zip(there, rows.tokens):
        places = [
            i for i in range(LENGTH) if 3 <= i + 2 < LENGTH and tokens[i + 2] >= 0
        ]
        assert np.flatnonzero(row).tolist() == places


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return word_models.save(tmp_path_factory.mktemp("target"), params())


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
        assert prompt_ids(dataclasses.replace(model, folder=tmp_path), ["w7 w8"]) == [
            [1, 7, 8, 5]
        ]


@pytest.mark.slow
def test_the_command(target, prompts, tmp_path, monkeypatch, capsys):
    """A run that was stopped ends like one that was not; its head drafts for the
    target, and greedy text is that of plain decoding."""
    config = learner(steps=12, warmup=2, decay=10, log_every=1, checkpoint_every=6)
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
