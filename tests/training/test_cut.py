"""Drafts cut from a language model: their parameters and loss, the target's answers, and the command."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax import text, weights
from cspd_jax.apps.cli import main
from cspd_jax.errors import UserError
from cspd_jax.networks.lm import LM
from cspd_jax.training import presets
from cspd_jax.training.data.prompts import chat_template, prompt_ids, read_lines
from cspd_jax.training.data.text import TextConfig
from cspd_jax.training.text.cached_teacher import Answers, answered, taught_agreement, taught_view
from cspd_jax.training.text.cut import cut, cut_config
from cspd_jax.training.text.objective import causal_view, divergence, divergence_from, within
from cspd_jax.training.text.trainer import TextTeacher, check_vocabulary
from cspd_jax.weights import models

IDS = 64
TARGET = text_models.model(
    IDS, dtype=jnp.float32, depth=3, bos_ids=(1,), eos_ids=(2,), tie_embeddings=True, max_positions=256
)
LENGTH = 24
PROMPTS = [[1, 3 + i % 40, 5] for i in range(32)]


@functools.cache
def params():
    return text_models.params(TARGET, scale=0.5)


def teacher():
    return TextTeacher(TARGET.config, params())


@pytest.mark.parametrize("tied", [True, False])
def test_of_all_layers_it_is_the_target_on_fewer_ids(tied):
    lm = dataclasses.replace(TARGET, config=dataclasses.replace(TARGET.config, tie_embeddings=tied))
    whole, tokens = text_models.params(lm, scale=0.5), np.arange(20).reshape(2, 10)
    logits = lm.forward(whole, tokens)
    draft = LM(cut_config(lm.config, (0, 1, 2), 40))
    made = cut(lm.config, whole, (0, 1, 2), 40)
    np.testing.assert_allclose(draft.forward(made, tokens), logits[..., :40], rtol=1e-5, atol=1e-5)
    fewer = cut(lm.config, whole, (0, 2), 40)
    np.testing.assert_array_equal(
        fewer["layers_1"]["mlp"]["up"]["kernel"], whole["layers_2"]["mlp"]["up"]["kernel"]
    )
    assert jax.tree.map(np.shape, fewer) == jax.tree.map(
        lambda s: s.shape, text_models.abstract_params(cut_config(lm.config, (0, 2), 40))
    )


@pytest.mark.parametrize(
    "layers,ids,match",
    [
        ((0, 3), 40, "no layer 3; its layers are 0 to 2"),
        ((), 40, "different ones, in their order"),
        ((1, 0), 40, "different ones, in their order"),
        ((0, 0), 40, "different ones, in their order"),
        ((0,), 65, "cannot have 65 ids; the target has 64"),
        ((0,), 2, "at least 3 ids"),
    ],
)
def test_what_cannot_be_cut(layers, ids, match):
    with pytest.raises(UserError, match=match):
        cut_config(TARGET.config, layers, ids)


def test_divergence_on_some_ids():
    """It is 0 at the best draft, and its gradient is that of the sum of p log(p / q) over those ids."""
    view = causal_view(jnp.arange(10).reshape(2, 5))
    p, q = jax.random.normal(jax.random.key(0), (2, 5, 12)), jax.random.normal(jax.random.key(1), (2, 5, 7))
    log_p = jax.nn.log_softmax(p)[..., :7]

    def plain(q):
        terms = jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(q)), axis=-1)
        return jnp.sum(view.weight * terms) / 2 / jnp.log(2.0)

    found, gradient = jax.value_and_grad(lambda q: divergence(view, p, q))(q)
    assert float(divergence_from(view, log_p, log_p)) == pytest.approx(0, abs=1e-6) and float(found) > 0.1
    assert float(found) != pytest.approx(float(plain(q)), rel=0.05)
    np.testing.assert_allclose(gradient, jax.grad(plain)(q), atol=1e-6)


def test_ids_that_a_draft_lacks_are_read_as_its_last_one():
    known = within(causal_view(jnp.array([[3, 9, 4, 7]])), 7)
    assert known.seen.tolist() == [[3, 6, 4, 6]]
    assert (known.weight > 0).tolist() == [[False, True, False, False]]
    draft = cut_config(TARGET.config, (0,), 40)
    check_vocabulary(draft, TARGET.config)
    with pytest.raises(UserError, match="eos_ids"):
        check_vocabulary(dataclasses.replace(draft, eos_ids=(3,)), TARGET.config)
    with pytest.raises(UserError, match="vocab_size is 64, the target's is 40"):
        check_vocabulary(TARGET.config, draft)


def test_only_a_cut_draft_may_have_far_fewer_ids():
    config = dataclasses.replace(TARGET.config, vocab_size=4096, known_ids=4096)
    whole = models.TextModel("whole", LM(config), None)
    small = models.TextModel("small", LM(cut_config(config, (0,), 512)), None, {"extra": {"corpus": {}}})
    with pytest.raises(UserError, match="the vocabularies differ: whole has 4096 ids and small 512"):
        models.check_vocabularies(whole, small)
    for ids, fits in ((4096, True), (8192, False), ("4096", False)):
        of = dataclasses.replace(small, metadata={"extra": {"cut": {"from_ids": ids}}})
        if fits:
            models.check_vocabularies(whole, of)
        else:
            with pytest.raises(UserError, match="the vocabularies differ"):
                models.check_vocabularies(whole, of)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return Answers(teacher(), PROMPTS, LENGTH, 128, tmp_path_factory.mktemp("answers"))


def test_answers_are_the_targets(answers):
    """Greedy rows are what `generate` makes, and the kept hidden states give the target's logits."""
    made = answers.batch(0, 120)
    logits = TARGET.forward(params(), np.maximum(made.tokens, 0))
    there = made.tokens >= 0
    np.testing.assert_allclose(TARGET.logits(params(), made.hidden)[there], logits[there], atol=1e-4)
    np.testing.assert_allclose(jax.nn.logsumexp(logits, axis=-1)[there], made.total[there], atol=1e-4)
    tokens, info = text.generate(
        None, (TARGET, params()), PROMPTS, options=text.Options(max_new_tokens=LENGTH - 3)
    )
    greedy = {
        tuple(row[:length]) for row, length in zip(np.asarray(tokens).tolist(), np.asarray(info.lengths))
    }
    rows = [tuple(row[row >= 0].tolist()) for row in made.tokens]
    assert sum(row in greedy for row in rows) == 60 and len(set(rows)) > 80
    ended = np.array([(row == 2).any() for row in made.tokens])
    assert ended.any() and ((made.tokens == -1).any(axis=1) <= ended).all()
    assert answers.coverage(IDS) == 1 and 0.2 < answers.coverage(32) < 0.9


def test_answers_to_some_prompts_are_held_out(answers):
    held_out, trained = answers.held_out(999).tokens, answers.batch(0, 120).tokens
    questions = [{tuple(row[:3].tolist()) for row in rows} for rows in (held_out, trained)]
    assert len(held_out) == 8 and questions[0] == {(1, 3, 5), (1, 19, 5)}
    assert not questions[0] & questions[1] and len(questions[1]) == 30
    assert answers.describe()["held_out_ids"] == (held_out >= 0).sum()


def test_answers_are_made_once(answers, tmp_path):
    made = Answers(teacher(), PROMPTS, LENGTH, 64, tmp_path)
    (file,) = tmp_path.iterdir()
    stamp = file.stat().st_mtime_ns
    again = Answers(teacher(), PROMPTS, LENGTH, 64, tmp_path)
    assert file.stat().st_mtime_ns == stamp
    np.testing.assert_array_equal(made.batch(3, 8).tokens, again.batch(3, 8).tokens)
    with pytest.raises(UserError, match="another target or seed"):
        Answers(teacher(), PROMPTS[1:], LENGTH, 64, tmp_path)


def test_answers_are_drawn_at_temperature_one():
    """The first id after one prompt, of many rows: within 4.5 deviations of its probability."""
    count = 4096
    rows = np.tile(np.array([1, 7, 0], np.int32), (count, 1))
    given, greedy = np.full(count, 2, np.int32), np.zeros(count, bool)
    drawn = np.asarray(answered(TARGET, params(), jax.random.key(0), rows, given, greedy).tokens)[:, 2]
    chance = np.asarray(jax.nn.softmax(TARGET.forward(params(), rows[:1])[0, 1]), np.float64)
    for x in np.argsort(-chance)[:10]:
        assert abs((drawn == x).mean() - chance[x]) < 4.5 * np.sqrt(chance[x] * (1 - chance[x]) / count)
    assert 0.02 < chance.max() < 0.9


def test_the_agreement_of_the_whole_target_is_full(answers):
    rows = answers.held_out(8)
    itself = taught_agreement(*teacher(), TARGET, params(), rows)
    np.testing.assert_allclose(itself, (1, 1, 0), atol=1e-4)
    # Of a draft with p given that the id is one of its 40, just the probability of that is accepted.
    tokens = jnp.clip(rows.tokens, 0, 39)
    places = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    hidden, _ = TARGET.hidden(params(), tokens, places, TARGET.empty_cache(len(tokens), LENGTH))
    rows = rows._replace(tokens=tokens, hidden=hidden)
    small = LM(cut_config(TARGET.config, (0, 1, 2), 40))
    found = taught_agreement(*teacher(), small, cut(TARGET.config, params(), (0, 1, 2), 40), rows)
    known = jax.nn.softmax(TARGET.forward(params(), tokens))[:, :-1, :40].sum(-1).mean()
    assert found.acceptance == pytest.approx(float(known), abs=1e-4) and 0.1 < known < 0.95
    assert found.divergence == pytest.approx(0, abs=1e-4)


def tokenizer(begins=False):
    """Of words w0 to w63; with `begins` it puts w1 before each text."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(IDS)}, "w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if begins:
        made.post_processor = tokenizers.processors.TemplateProcessing("w1 $A", None, [("w1", 1)])
    return made.to_str()


TEMPLATE = (
    "w1 {% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w5{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    (folder / "tokenizer.json").write_text(tokenizer())
    files = {"tokenizer/tokenizer.json": folder / "tokenizer.json"}
    weights.save(folder / "model", "lm", TARGET.config, params(), companions=files)
    return folder / "model"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n\n".join(f"w1 w{3 + i}" for i in range(20)))
    return path


def test_prompts_are_put_into_the_chat_template(target, tmp_path):
    pytest.importorskip("jinja2")
    model = models.load_text(target)
    assert prompt_ids(model, ["w7 w8"]) == [[7, 8]]
    for name, template in (("good", TEMPLATE), ("bad", "{{ nothing.there }}")):
        (tmp_path / name).mkdir()
        settings = {"chat_template": template, "bos_token": {"content": "w1"}}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat_template(tmp_path / "good")("w7 w8") == "w1 w7 w8 w5"
    for begins in (True, False):  # a beginning that template and tokenizer both write counts once
        (tmp_path / "good" / "tokenizer.json").write_text(tokenizer(begins))
        chat = dataclasses.replace(model, folder=tmp_path / "good")
        assert prompt_ids(chat, ["w7 w8"]) == [[1, 7, 8, 5]]
    with pytest.raises(UserError, match="cannot be filled in"):
        chat_template(tmp_path / "bad")("w7")
    assert chat_template(None) is None


def test_the_command(target, prompts, tmp_path, monkeypatch, capsys):
    """A run that was stopped ends like one that was not; its draft goes with the target, and greedy text is
    that of plain decoding."""
    config = dataclasses.replace(
        presets.preset("text-cut"), data=TextConfig(LENGTH), steps=12, warmup=2, decay=10
    )
    config = dataclasses.replace(config, log_every=1, sample_every=6)
    monkeypatch.setitem(presets.TEXT_PRESETS, "text-cut", config)
    flags = ["--target", str(target), "--cut", "0,2", "--ids", "48", "--prompts", str(prompts)]
    flags += ["--samples", "64", "--json"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["distill", *flags, "--out", str(first)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["acceptance"] < 1 and 0 < report["coverage"] < 1
    assert len((first / "held_out.jsonl").read_text().splitlines()) == 2
    draft, whole = models.load_text(report["model"]), models.load_text(target)
    assert (draft.config.depth, draft.config.vocab_size) == (2, 48)
    assert draft.metadata["extra"]["cut"] == {"layers": [0, 2], "from_ids": IDS}

    questions = prompt_ids(whole, read_lines(prompts))
    kept = Answers(TextTeacher(whole.config, whole.params), questions, LENGTH, 64, first / "answers")
    view = taught_view(jnp.asarray(kept.batch(0, 4).tokens))
    known, begun = within(view, 48), cut(whole.config, whole.params, (0, 2), 48)
    loss = divergence(
        view, whole.network.forward(whole.params, view.seen), draft.network.forward(begun, known.seen)
    )
    logged = json.loads((first / "metrics.jsonl").read_text().splitlines()[0])
    assert logged["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert main(["distill", *flags, "--out", str(second), "--stop-at", "5"]) == 0
    assert main(["distill", "--resume", "--out", str(second), "--json"]) == 0
    a, b = (weights.load(out / "model").params for out in (first, second))
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), a, b))
    capsys.readouterr()
    asked = ["text", "--target", str(target), "--draft", report["model"], "--prompt", "w1 w9", "--compare"]
    assert main([*asked, "--new-tokens", "16", "--no-stop", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compared_to_plain"]["identical_rows"] == 1


@pytest.mark.parametrize(
    "change,match",
    [
        ({"--cut": "0,3"}, "no layer 3"),
        ({"--cut": "0,x"}, "not a list of layers"),
        ({"--ids": "65"}, "the target has 64"),
        ({"--ids": None}, "--ids is missing"),
        ({"--prompts": "none.txt"}, "cannot be read as text"),
        ({"--prompts": "empty.txt"}, "is empty; it should hold one prompt per line"),
        ({"--prompts": "few.txt"}, "at least 16 are needed"),
        ({"--prompts": "long.txt"}, "prompt 16 has 300 ids"),
        ({"--target": None}, "name it with --target"),
        ({"--from": "data"}, "--from is for drafts that are not cut"),
        ({"--samples": "63"}, "ask for at least 64"),
        ({"--preset": "glyphs"}, "a preset for images"),
    ],
)
def test_bad_requests_end_with_a_sentence(target, prompts, tmp_path, monkeypatch, capsys, change, match):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "few.txt").write_text("w1\nw2\n")
    (tmp_path / "long.txt").write_text("w1\n" * 15 + "w1 " * 300)
    asked = {"--target": target, "--cut": "0,2", "--ids": "48", "--prompts": prompts, "--samples": "64"}
    asked |= change
    flags = [str(part) for name, value in asked.items() if value is not None for part in (name, value)]
    assert main(["distill", *flags, "--out", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert match in message and message.count("\n") == 1
    assert not (tmp_path / "run").exists()
