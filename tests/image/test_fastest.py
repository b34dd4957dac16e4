"""The measured choice for text and masked text; that of images is in test_methods."""

import chex
import jax
import numpy as np
import pytest
import text_models
from commands import run
from masked_models import LLADA, params_of

from cspd_jax import comparison, fastest, masked, text
from cspd_jax.keys import independent_key, row_keys
from cspd_jax.networks.lm import LM

KEY = jax.random.key(5)
PROMPTS = [[1, 2, 3], [4, 5]]
GAMMA_2 = "speculation gamma 2 block ModelDrafter"
GAMMA_3 = "speculation gamma 3 block ModelDrafter"


def text_request(key=None, temperature=0.0):
    lm = text_models.model()
    params = text_models.params(lm)
    near = (lm, text_models.near(params))
    methods = [text.Speculation(near, gamma) for gamma in (2, 3)]
    options = text.Options(temperature=temperature, max_new_tokens=12, stop_ids=())
    return key, (lm, params), PROMPTS, methods, options


def masked_request(key=None, temperature=0.0):
    model = (LM(LLADA, np.float64), params_of(LLADA, 0))
    methods = [masked.SelfSpeculation(4)]
    options = masked.Options(temperature=temperature, max_new_tokens=8, block=4)
    return key, model, PROMPTS, methods, options


def chooses(monkeypatch, best, tokens, others=True):
    """The measurement without a clock: every way is run (or that alone), `best` is
    fastest."""
    seen = {}

    def measured(runs, longest):
        seen.update(
            {name: run() for name, run in runs.items() if others or name == best}
        )
        return {name: 0.5 if name == best else 1.0 for name in runs}

    monkeypatch.setattr(comparison, "median_seconds", measured)
    monkeypatch.setattr(comparison, "FIRST_TOKENS", tokens)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("best", ["plain", GAMMA_2, GAMMA_3])
def test_text_is_the_same_whatever_is_chosen(float64, monkeypatch, best):
    seen = chooses(monkeypatch, best, tokens=5)
    request = text_request()
    choice = fastest(*request)
    assert choice.way == best
    assert seen.keys() == choice.seconds.keys() == {"plain", GAMMA_2, GAMMA_3}
    assert isinstance(choice.request.method, text.Plain) == (best == "plain")
    # Each made the first five tokens, in the shapes of the whole request.
    for output in seen.values():
        assert output.tokens.shape == (2, 15)
        assert output.info.trace.lengths.tolist() == [8, 7]
    expected = text.generate(*request[:3], text.Plain(), request[4]).tokens
    chex.assert_trees_all_equal(text.generate(*choice.request).tokens, expected)


@pytest.mark.slow
@pytest.mark.parametrize("best", ["stepwise", "ssd gamma 4"])
def test_masked_text_is_the_same_whatever_is_chosen(float64, monkeypatch, best):
    seen = chooses(monkeypatch, best, tokens=5)
    request = masked_request()
    choice = fastest(*request)
    assert choice.way == best and seen.keys() == {"stepwise", "ssd gamma 4"}
    assert all(output.tokens.shape == (2, 4) for output in seen.values())  # one block
    expected = masked.generate(*request[:3], masked.Stepwise(), request[4]).tokens
    chex.assert_trees_all_equal(masked.generate(*choice.request).tokens, expected)


@pytest.mark.slow
def test_the_measurement_has_random_numbers_of_its_own(float64, monkeypatch):
    """Or the ways would be chosen by the very numbers that decide what comes out."""
    for family, best, tokens, request in (
        (text, "plain", 12, text_request),
        (masked, "stepwise", 8, masked_request),
    ):
        seen = chooses(monkeypatch, best, tokens, others=False)
        choice = fastest(*request(KEY, 1.0))
        assert np.any(seen[best].tokens != family.generate(*choice.request).tokens)
    keys = row_keys(KEY, 3)
    several = [
        jax.random.key_data(k)
        for k in (*independent_key(keys), *keys, independent_key(KEY))
    ]
    assert len({np.asarray(k).tobytes() for k in several}) == 7


@pytest.mark.slow
@pytest.mark.parametrize("command", ["text", "masked"])
def test_the_commands_choose(command, capsys):
    assert run(f"{command} --method auto --new-tokens 16 --prompt Return --json") == 0
    out, err = capsys.readouterr()
    assert '"text"' in out and err.count("gamma") > 1
