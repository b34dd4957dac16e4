"""Chosen sets of moves: whatever the table, the text is that of stepwise decoding; how tables are fitted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from masked_models import LLADA, MASK, PLACES, make, params_of, reference, run

from cspd_jax import hub, masked
from cspd_jax.__main__ import main
from cspd_jax.check import UserError
from cspd_jax.masked import calibration
from cspd_jax.masked.sets import BEYOND, MoveSets, fit, prefixes
from cspd_jax.masked.speculative import Speculation
from cspd_jax.models import TextModel
from cspd_jax.networks.lm import LM, abstract_params


def table(seed, count=24, ranks=6, tokens=3):
    """A short chain and random texts, some of which may be reached in several orders."""
    random, texts = np.random.default_rng(seed), [*prefixes(2).texts]
    while len(texts) < count:
        before = dict(texts[random.integers(len(texts))])
        before[int(random.integers(1, ranks + 1))] = int(random.integers(tokens))
        text = tuple(sorted(before.items()))
        if text not in texts and any(
            set(text) - set(other) and len(text) == len(other) + 1 for other in texts
        ):
            parents = [tuple(m for m in text if m != move) for move in text]
            if set(parents) & set(texts):
                texts.append(text)
    return MoveSets(tuple(texts))


def test_where_a_text_leads():
    found = table(0)
    number = {text: i for i, text in enumerate(found.texts)}
    for i, text in enumerate(found.texts):
        assert found.sizes[i] == len(text) and found.members[i, 0] == 0
        for rank, which in itertools.product(range(1, found.ranks + 1), range(found.tokens)):
            longer = tuple(sorted({**dict(text), rank: which}.items()))
            expected = number.get(longer, -1) if rank not in dict(text) else -1
            assert found.after[i, rank, which] == expected
    assert (found.after[:, 0] == -1).all()  # the certain move is made
    assert prefixes(2).texts == ((), ((1, 0),), ((1, 0), (2, 0)))
    assert all(rank <= 3 for text in found.within(3).texts for rank, _ in text)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "family, block, cached, guided",
    [
        ("llada", 4, False, False),
        ("dream", 8, True, False),
        pytest.param("llada", PLACES, True, False, marks=pytest.mark.slow),
        pytest.param("llada", 1, False, True, marks=pytest.mark.slow),
        pytest.param("dream", PLACES, False, False, marks=pytest.mark.slow),
        pytest.param("dream", 4, False, True, marks=pytest.mark.slow),
    ],
)
def test_identical_to_stepwise(family, block, cached, guided):
    """Three models with 8 prompts each."""
    saved, tried = 0, table(1).within(max(1, (min(block, PLACES) if cached else PLACES) - 1))
    for seed in range(3):
        expected = reference(family, seed, block, cached, 0.0, guided)
        c = make(family, seed, block, cached, 0.0, guided)
        found = run(c, Speculation(tried, jnp.full(8, 99)))
        np.testing.assert_array_equal(found.text, expected.text)
        np.testing.assert_array_equal(found.order, expected.order)
        assert np.all(np.asarray(found.text) != MASK)
        drafts = found.info
        assert np.all(drafts.accepted <= drafts.tested)
        assert drafts.rounds.sum() + drafts.accepted.sum() == 8 * PLACES
        spent = [
            sum(int(calls.sequential) for calls in state.info.calls.values()) for state in (found, expected)
        ]
        saved += spent[1] - spent[0]
    assert saved > 0


def undecided():
    """A model in float32 in which other shapes of passes round otherwise, and ids 3 to 9 are near-ties."""
    config = dataclasses.replace(LLADA, width=512, mlp_width=640, heads=8, kv_heads=8, head_dim=64)
    params = jax.tree.map(np.float32, tiny.params(abstract_params(config), scale=0.05))
    head = params["head"]["kernel"]
    head[:, 3:10] = head[:, 2:3] * (1 + 1e-7 * np.arange(1, 8))
    return LM(config, jnp.float32), params


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "method", [masked.SelfSpeculation(3), masked.SelfSpeculation(texts=table(2, 12))], ids=["chain", "table"]
)
def test_the_same_bits_in_float32(method, cached):
    model, prompts = undecided(), [[1, 2, 3], [4], [5, 6]] * 4
    options = masked.Options(max_new_tokens=24, block=8, cached=cached)
    found, info = masked.generate(None, model, prompts, method, options)
    stepwise, spent = masked.generate(None, model, prompts, masked.Stepwise(method), options)
    np.testing.assert_array_equal(found, stepwise)
    np.testing.assert_array_equal(info.trace.steps, spent.trace.steps)
    assert spent.sequential == 24 and int(spent.accepted.sum()) == 0 < int(info.accepted.sum())


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_tables_find_what_chains_do_not():
    """Fitted to models whose second moves are other tokens or other places than drafted."""
    model = TextModel("tiny", LM(LLADA, jnp.float64), params_of(LLADA, 0))
    prompts = [[int(i) for i in row] for row in np.random.default_rng(0).integers(0, MASK, (16, 4))]
    options = masked.Options(max_new_tokens=PLACES, block=4)
    tables = calibration.fitted(model, prompts, options, (6,))
    assert len(tables[6].texts) == 6
    spent = {}
    for name, method in {
        "chain": masked.SelfSpeculation(5),
        "table": masked.SelfSpeculation(texts=tables[6]),
    }.items():
        tokens, info = masked.generate(None, model, prompts, method, options)
        spent[name] = np.mean(info.rounds)
        stepwise, _ = masked.generate(None, model, prompts, masked.Stepwise(), options)
        np.testing.assert_array_equal(tokens, stepwise)
    assert spent["table"] < spent["chain"]


def test_a_fit_counts_what_it_is_for():
    """Walks whose next moves are known: the commonest first, and no text without the one before it."""
    common, rare = [(2, 0), (1, 1)], [(1, 0), BEYOND]
    found = fit([[common, common, common, rare]], 4)
    assert found.texts == ((), ((2, 0),), ((1, 1), (2, 0)), ((1, 0),))
    assert fit([[rare]], 100).texts == ((), ((1, 0),))  # nothing more is to be had
    assert fit([[common, rare]], 1).texts == ((),)


def test_texts_in_which_no_move_follows_another():
    model = (LM(LLADA, jnp.float32), params_of(LLADA, 0))
    with pytest.raises(UserError, match="none of 0 moves that follow another"):
        calibration.fitted(model, [[1, 2]], masked.Options(max_new_tokens=1, block=1), (4,))


def test_texts_in_which_no_move_is_likely_before(monkeypatch):
    monkeypatch.setattr(calibration, "recorded", lambda *request: [[[BEYOND, (1, 0)], [BEYOND]]])
    with pytest.raises(UserError, match="none of 2 moves that follow another was among those"):
        calibration.fitted(None, [[1, 2]], masked.Options(max_new_tokens=3, block=3), (4,))


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    """Tables fitted by `calibrate` are kept beside the model, and used."""
    folder = tmp_path / "model"
    shutil.copytree(hub.shipped_folder("masked-default"), folder)
    (tmp_path / "prompts.txt").write_text("Return a list\nWrite to a file\n")
    small = ["--prompts", str(tmp_path / "prompts.txt"), "--new-tokens", "8", "--json"]
    assert main(["calibrate", str(folder), *small]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"out": str(folder / "moves.json"), "prompts": 2, "texts": list(calibration.COUNTS)}
    asked = ["masked", "--model", str(folder), "--prompt", "Return", "--new-tokens", "8", "--json"]
    assert main([*asked, "--texts", "8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lossless"] and report["compared_to_stepwise"]["identical_rows"] == 1
    rows = sum(calls["rows"] for calls in report["calls"].values())
    assert report["way"]["texts"] == 8 and rows % 8 == 1  # the first pass reads one text
    made = (folder / "moves.json").read_bytes()
    assert main(["calibrate", str(folder), *small[:2], "--new-tokens", "1"]) == 2
    assert "none of 0 moves" in capsys.readouterr().err
    assert (folder / "moves.json").read_bytes() == made
    assert main(["calibrate", str(folder), "--n", "1", "--new-tokens", "400"]) == 2
    assert "positions that the model was made for" in capsys.readouterr().err
    (folder / "moves.json").write_text("[]")
    for words, sentence in (
        (["--texts", "8"], "holds no tables of moves"),
        (["--texts", "8", "--temperature", "1"], "texts are for temperature 0"),
    ):
        assert main([*asked, *words]) == 2
        assert sentence in capsys.readouterr().err
