"""What a caller in Python gets wrong: taken as it is meant where that is clear, else one sentence."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models
import tiny
from masked_models import LLADA, params_of

import cspd_jax
from cspd_jax import (
    ChainSpeculation,
    DraftSpeculation,
    Options,
    Plain,
    SelfSpeculation,
    UserError,
    generate,
    masked,
    text,
)
from cspd_jax.image import plan
from cspd_jax.networks.lm import LM

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cspd_jax.load(tiny.save_mar(tmp_path_factory.mktemp("m") / "model", tiny.PIXELS))


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"key": 3}, "key is 3; it must be made by jax.random.key"),
        ({"key": np.int64(3)}, "it must be made by jax.random.key"),
        ({"key": "3"}, "key is '3'"),
        ({"key": None}, "key is None"),
        ({"model": "default"}, "model is 'default'; load it first, with cspd_jax.load"),
        ({"model": {"backbone": {}}}, "model is of type dict; it must be an ImageModel"),
        ({"cfg": "3"}, "cfg is '3'; it must be a finite number"),
        ({"cfg": [1.0, 2.0]}, "cfg is [1.0, 2.0]"),
        ({"temperature": None}, "temperature is None"),
        ({"method": "self"}, "method is 'self'; it must be a method object"),
        ({"method": SelfSpeculation}, "it must be a method object"),
        ({"method": SelfSpeculation(gamma="2")}, "gamma is '2'; it must be a whole number"),
        ({"method": DraftSpeculation("default-draft")}, "draft is 'default-draft'; load it first"),
        ({"method": DraftSpeculation(3)}, "draft is of type int; it must be an ImageModel"),
        ({"denoise": ChainSpeculation}, "or a ChainSpeculation"),
        ({"denoise": ChainSpeculation(0)}, "a draft length (window) is 0"),
        ({"labels": 3}, "labels must be a list"),
        ({"labels": "3"}, "labels must be a list"),
    ],
)
def test_images(model, change, sentence):
    arguments = {"key": KEY, "model": model, "labels": [0], "method": Plain(), **change}
    first = [arguments.pop(name) for name in ("key", "model", "labels", "method")]
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        generate(*first, Options(num_iter=1, **arguments))
    assert len(str(error.value)) < 300


def test_what_is_meant_is_clear(model):
    def asked(labels=(0,), **options):
        return plan.check(model, labels, options=Options(**options)).options

    options = asked(np.array([0]), cfg=jnp.array(2.0), temperature=np.float32(0.5))
    assert options == asked(cfg=2, temperature=0.5)
    assert options.guided and type(options.cfg) is float
    assert asked(denoise=ChainSpeculation(3)).chain == asked(denoise=ChainSpeculation((3,))).chain


def test_traced_numbers_go_to_the_plan(model):
    with pytest.raises(UserError, match="cfg is traced; give it to the `sample` of a plan"):
        jax.jit(lambda cfg: generate(KEY, model, [0], options=Options(cfg=cfg))[0])(2.0)


@pytest.mark.parametrize("shape", [(3, 5), (1, 10, 16), (1, 4, 3), (4, 16)])
def test_tokens_of_another_shape(model, shape):
    for look in (cspd_jax.to_images, cspd_jax.image.to_latents):
        with pytest.raises(UserError, match=r"the tokens have shape .*; .* makes \[N, "):
            look(model, np.zeros(shape))


def test_plans_and_names(model):
    with pytest.raises(UserError, match="batch is 0; it must be at least 1"):
        cspd_jax.fastest(KEY, model, [0], batch=0)
    for load in (cspd_jax.load, cspd_jax.load_text, cspd_jax.load_vae):
        with pytest.raises(UserError, match="a model is named by a string or a path, not by 3"):
            load(3)
    with pytest.raises(UserError, match="key is 3"):
        cspd_jax.row_keys(3, 2)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"model": "text-default"}, "a model must be a TextModel or a pair (network, params), not str"),
        ({"prompts": "hello"}, "prompts must be a list of lists of ids"),
        ({"prompts": ["hello"]}, "prompts must be a list of lists of ids"),
        ({"prompts": None}, "prompts must be a list of lists of ids"),
        ({"prompts": ([[1]],)}, "prompts must be a list of lists of ids"),
        ({"gamma": "4"}, "gamma is '4'; it must be a"),
        ({"gamma": 2.5}, "gamma is 2.5; it must be a whole number"),
        ({"max_new_tokens": "2"}, "max_new_tokens is '2'; it must be a"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be a whole number"),
        ({"max_gamma": 1.5}, "max_gamma is 1.5; it must be a whole number"),
    ],
)
@pytest.mark.parametrize("family", ["text", "masked"])
def test_texts(family, change, sentence):
    lm = text_models.model()
    models = {
        "text": (lm, text_models.params(lm)),
        "masked": (LM(LLADA, np.float32), params_of(LLADA, 0)),
    }
    arguments = {"key": KEY, "model": models[family], "prompts": [[1, 2]], "max_new_tokens": 2, **change}
    given = [arguments.pop(name) for name in ("key", "model", "prompts")]
    with pytest.raises(UserError, match=re.escape(sentence)):
        if family == "text":
            text.generate(*given, text.PromptLookup(), text.Options(**arguments))
        else:
            bounds = {name: arguments.pop(name) for name in ("gamma", "max_gamma") if name in arguments}
            masked.generate(*given, masked.SelfSpeculation(**bounds), masked.Options(**arguments))


def test_numbers_of_sampling():
    lm = text_models.model()
    model = lm, text_models.params(lm)
    for options, sentence in (
        (0.7, r"options is 0.7; it must be an Options\(...\)"),
        (text.Options(temperature="1"), "temperature is '1'; it must be a number"),
        (text.Options(temperature=1.0, top_k=2.5), "top_k is 2.5; it must be a whole number"),
    ):
        with pytest.raises(UserError, match=sentence):
            text.generate(KEY, model, [[1]], options=options)
    with pytest.raises(UserError, match="temperature is '1'; it must be a number"):
        filler = LM(LLADA, np.float32), params_of(LLADA, 0)
        masked.generate(KEY, filler, [[1]], options=masked.Options(temperature="1"))
    with pytest.raises(UserError, match="key is 3; it must be made by"):
        text.generate(3, model, [[1]], options=text.Options(temperature=1.0))
