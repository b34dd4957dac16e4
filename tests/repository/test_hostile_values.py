"""Every field of what callers configure, given values of every kind: taken, or one sentence says why not."""

import dataclasses
import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models
import tiny
from masked_models import LLADA, params_of

import cspd_jax
from cspd_jax import ChainSpeculation, DraftSpeculation, Options, SelfSpeculation, UserError, masked, text
from cspd_jax.apps.evaluation.classifier import ClassifierConfig
from cspd_jax.image import PaperCriterion, ReleasedRunner, plan
from cspd_jax.image.lossy.shortcuts import Annealing, Checkerboard
from cspd_jax.masked.generation import prepare as prepare_masked
from cspd_jax.networks.lm import LM
from cspd_jax.text.generation import prepare as prepare_text
from cspd_jax.training.presets import PRESETS
from cspd_jax.training.text.presets import TEXT_PRESETS

KEY = jax.random.key(0)
VALUES = (
    None, True, 0, 1, -1, 2, 2.5, -0.0, 1e-40, 1e39, 10**9, 2**31, 2**63, 10**400, float("nan"), float("inf"),
    1j, "", "1", "self", "\0", b"1", [], [1], [1, [2]], ["x"], (), (1,), ("x",), (None,), {}, {"a": 1}, set(),
    object, object(), len, range(3), iter([1]), np.zeros(0), np.zeros(2), np.ones((2, 2)), np.float64(1.5),
    np.int64(2), np.bool_(True), np.array("x"), np.array(None), jnp.int32(1), jnp.ones(2),
    fractions.Fraction(3, 2), PRESETS["words"], PRESETS["words"].data, Options(),
)  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    image = cspd_jax.load(tiny.save_mar(tmp_path_factory.mktemp("m") / "model", tiny.PIXELS))
    lm = text_models.model()
    return image, (lm, text_models.params(lm)), (LM(LLADA, np.float32), params_of(LLADA, 0))


def of_images(given, value):
    plan.check(given[0], [0], options=value)


def of_methods(given, value):
    plan.check(given[0], [0], value)


def of_chains(given, value):
    plan.check(given[0], [0], options=Options(denoise=value))


def of_shortcuts(given, value):
    name = "order" if isinstance(value, Checkerboard) else "anneal"
    plan.check(given[0], [0], options=Options(**{name: value}))


def of_criteria(given, value):
    plan.check(given[0], [0], DraftSpeculation(given[0], value))


def of_texts(given, value):
    prepare_text(KEY, given[1], [[1, 2], [3]], text.PromptLookup(), value)


def of_masked(given, value):
    prepare_masked(KEY, given[2], [[1, 2], [3]], options=value)


def of_masked_methods(given, value):
    prepare_masked(KEY, given[2], [[1, 2], [3]], value, masked.Options(max_new_tokens=4))


def of_settings(given, value):
    pass  # they check themselves


CASES = [
    (Options(), of_images),
    (SelfSpeculation(), of_methods),
    (DraftSpeculation(None), of_methods),
    (ReleasedRunner(None), of_methods),
    (ChainSpeculation(), of_chains),
    (PaperCriterion(), of_criteria),
    (Annealing(5, 2), of_shortcuts),
    (Checkerboard(), of_shortcuts),
    (text.Options(max_new_tokens=4, temperature=1.0), of_texts),
    (masked.Options(max_new_tokens=4), of_masked),
    (masked.SelfSpeculation(), of_masked_methods),
    (masked.Schedule(), of_masked_methods),
    (PRESETS["words"], of_settings),
    (PRESETS["words-causal"], of_settings),
    (TEXT_PRESETS["text-draft"], of_settings),
    (PRESETS["words"].data, of_settings),
    (PRESETS["glyphs"].data, of_settings),
    (PRESETS["digits"].data, of_settings),
    (PRESETS["mar-base"].data, of_settings),
    (PRESETS["words"].model, of_settings),
    (PRESETS["words-causal"].model, of_settings),
    (TEXT_PRESETS["text-draft"].model, of_settings),
    (ClassifierConfig(), of_settings),
]


@pytest.mark.parametrize("usual, use", CASES, ids=lambda case: getattr(case, "__name__", type(case).__name__))
def test_every_field_takes_it_or_says_why_not(given, usual, use):
    if hasattr(usual, "draft"):
        usual = dataclasses.replace(usual, draft=given[0])
    taken = 0
    for field in dataclasses.fields(usual):
        for value in VALUES:
            try:
                use(given, dataclasses.replace(usual, **{field.name: value}))
                taken += 1
            except UserError as error:
                assert "\n" not in str(error) and len(str(error)) < 400
            except Exception as error:
                pytest.fail(
                    f"{type(usual).__name__}({field.name}={value!r:.60}): {type(error).__name__}: {error}"
                )
    assert taken >= len(dataclasses.fields(usual))  # each takes something, at least its own
