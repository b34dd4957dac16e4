"""Methods: which are exact, what they can be asked for, the fastest of them; and the
gains beside checkpoints or fitted in the call."""

import dataclasses
import re
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import tiny
from commands import printed

import cspd_jax
from cspd_jax import masked, text
from cspd_jax.image import calibration, generate, resolve
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.generation import as_labels
from cspd_jax.image.methods import (
    DraftSpeculation,
    Plain,
    Released,
    SelfSpeculation,
)
from cspd_jax.image.options import Options
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.language_models import as_prompts
from cspd_jax.models import ImageModel
from cspd_jax.networks.mar import MARModel
from cspd_jax.networks.sphere import SphereConfig, SphereModel

KEY = jax.random.key(3)
TOKENS = np.zeros((1, 4, 2))
PIXELS = np.zeros((1, 8, 8, 1), np.uint8)
FLOW = SphereConfig(16, 16, num_classes=5, patch_size=4, vae_stride=1)


def loaded(kind):
    return cspd_jax.load(f"{kind}-default")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def model(folder):
    return cspd_jax.load(folder / "target")


REFUSED = {
    "the method is 'plain'; write cspd_jax.image.Plain(...) or": "plain",
    "the method is <class 'cspd_jax.image.methods": SelfSpeculation,
    "the options are {'cfg': 2.0}; write cspd_jax.image.Options(...)": {"cfg": 2.0},
    "denoise is 'speculatve'": Options(denoise="speculatve"),
    "denoise is 4; it must be one of plain, spec": Options(denoise=4),
    "cfg is nan; it must be at least 0": Options(cfg=np.array([np.nan])),
    "cfg is '2'; it must be a number": Options(cfg="2"),
    "cfg is None; it must be a number": Options(cfg=None),
    "images take one for all": Options(temperature=[0.5, 1]),
    "the head of either flow or": (
        DraftSpeculation(ImageModel("flow", SphereModel(FLOW), None)),
        Options(respacing="5"),
    ),
    "final_noise is 'off'; it must be True": Options(final_noise="off"),
    "3 is no criterion; PathCriterion()": DraftSpeculation(None, 3),
    "criterion is a class; wr": DraftSpeculation(None, PaperCriterion),
    "known is 3; write cspd_jax.image.Known(...)": Options(known=3),
    "it must be from 1 to 65536": Options(num_iter=10**9),
    "window is 0; it must be at": Options(denoise=ChainSpeculation(0)),
    "temperature 0": Options(denoise=ChainSpeculation(4), temperature=0),
    "gamma is 128; it must be from 1 to 127": SelfSpeculation(128),
    "prefill is 2.0; it must be from 0": SelfSpeculation(prefill=2.0),
    "gamma is 2.5; it must be a whole number": SelfSpeculation(2.5),
    "anneal is '50:5'; write cspd_jax.image.Annealing(...)": Options(anneal="50:5"),
    "order is 'spread'; write cspd_jax.image.Spread(...) or": Options(order="spread"),
    "'words' is no ImageModel; cspd_jax.lo": DraftSpeculation("words"),
}


@pytest.mark.parametrize("said, asked", REFUSED.items())
def test_what_is_no_method_or_no_choice_is_named(model, said, asked):
    """Nor a number within the range of its field."""
    if isinstance(asked, Options | dict):
        asked = Plain(), asked
    elif not isinstance(asked, tuple):
        asked = (asked,)
    with pytest.raises(cspd_jax.UserError, match=re.escape(said)):
        cspd_jax.generate(KEY, model, [0], *asked)


@pytest.mark.parametrize(
    "family, method, options, said",
    [
        (text, "block", {}, "the method is 'block'"),
        (text, text.Plain(), {"top_p": np.array([0.5, 7])}, "top_p is 7.0; .* 0 to 1"),
        (text, text.Tree(None, (3, 0)), {}, "widths is 0; it must be at least 1"),
        (text, text.Speculation(None, rule="no"), {}, "rule is 'no'; .* google, deepm"),
        (masked, masked.Stepwise(), {"top_k": 0}, "top_k is 0; it must be at least 1"),
    ],
)
def test_texts_name_it_too(family, method, options, said):
    with pytest.raises(cspd_jax.UserError, match=said):
        family.generate(None, (None, None), [[1]], method, family.Options(**options))


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: text.generate(None, "text-default", [[1]]), "is no TextModel"),
        (lambda: as_prompts(["Return"]), "prompts are lists of ids"),
        (lambda: as_prompts([[1.5]]), "prompts are lists of ids"),
        (lambda: text.Speculation("lookup").drafting(), "'lookup' is no TextModel"),
        (lambda: cspd_jax.to_images("words", TOKENS), "'words' is no ImageModel"),
        (lambda: cspd_jax.picture(TOKENS), r"float64 \[1, 4, 2\], not uint8"),
        (lambda: cspd_jax.picture(PIXELS, "ab"), "2 labels for 1 images"),
        (lambda: cspd_jax.load("words", "int8"), "is int8; it must be a floating one"),
        (lambda: cspd_jax.citation("words"), "'words' is a name; load the model"),
        (lambda: text.Speculation(text.PromptLookup).drafting(), "is a class; write"),
        (lambda: cspd_jax.generate(KEY, "words", [0]), "'words' is no ImageModel"),
        (lambda: cspd_jax.fastest(KEY, "words", [0]), "'words' is no ImageModel"),
        (
            lambda: text.generate(
                None, loaded("text"), [[1]], options=text.Options(top_p=0.5)
            ),
            "at temperature 0 nothing is drawn that top_k",
        ),
        (
            lambda: masked.prepare(
                None, loaded("masked"), [[1]], options=masked.Options(top_k=3)
            ),
            "at temperature 0 top_k and top_p change nothing with confidence 'clean'",
        ),
    ],
)
def test_names_are_no_models_and_texts_no_ids(call, said):
    """Nor are tokens pictures."""
    with pytest.raises(cspd_jax.UserError, match=said):
        call()


def test_methods_and_tokens_are_of_the_model(model):
    with pytest.raises(cspd_jax.UserError, match=r"Plain.*; write a list of them"):
        cspd_jax.fastest(KEY, model, [0], Plain())
    with pytest.raises(
        cspd_jax.UserError, match=r"tokens are \[1, 4, 2\]; .* makes \[N"
    ):
        cspd_jax.to_images(model, TOKENS)


@pytest.mark.parametrize(
    "labels, prompts", [([1.5], None), (np.array([True]), None), ([0], ["bee"])]
)
def test_what_to_make_is_one_list_of_class_numbers(model, labels, prompts):
    with pytest.raises(cspd_jax.UserError, match=r"class number|exclude each other"):
        cspd_jax.generate(KEY, model, labels, prompts=prompts)


def test_names_of_classes_are_labels(model):
    names = np.array(model.class_names)[[2, 0]]
    assert as_labels(model, names).tolist() == [2, 0]
    with pytest.raises(
        cspd_jax.UserError,
        match=rf"no class is called nothing; the classes are {names[1]}",
    ):
        as_labels(model, ["nothing"])


@pytest.mark.parametrize("denoise", ["plain", ChainSpeculation(4)])
def test_what_is_exact(denoise):
    """Of the methods, however they denoise; and nothing of which draws were given
    up."""
    paper = lambda **options: DraftSpeculation(None, PaperCriterion(**options))
    exact = (
        Plain(),
        SelfSpeculation(),
        SelfSpeculation(draft_cost=0.1),
        DraftSpeculation(None),
    )
    exact += (paper(sigma=False),)
    widened = [
        paper(sigma=False, inner_temperature=temperature) for temperature in (42.0, 0.5)
    ]
    for method in (*exact, paper(), *widened, Released(None)):
        found = method.exactness(Options(denoise=denoise))
        assert found.exact == (method in exact) and found.with_truncated(0) == found
        given_up = found.with_truncated(1)
        assert not given_up.exact and (not found.exact or "1 draws" in given_up.why)


@pytest.mark.slow
def test_fastest_is_a_request_that_runs(model):
    each = Options(num_iter=2, cfg=np.array([1.0, 2.0, 3.0]))
    names = np.array(model.class_names)[:3]
    found = cspd_jax.fastest(KEY, model, names, options=each)
    tokens, info = generate(*found.request)
    chex.assert_shape(tokens, (3, 16, 16))
    assert info.exact and min(found.seconds.values()) > 0
    with pytest.raises(cspd_jax.UserError, match="draft gamma 8 is lossy"):
        lossy = DraftSpeculation(model, PaperCriterion())
        cspd_jax.fastest(KEY, model, [0], [lossy], Options(num_iter=2))
    alone = cspd_jax.fastest(
        KEY, model, [0], options=Options(num_iter=2, final_noise=False)
    )
    assert alone.request.method == Plain()


def test_the_same_options_have_one_distribution(folder, model):
    """Every method has noise in the last step, or says that it cannot do without (or
    with) it."""
    draft = cspd_jax.load(folder / "draft")
    for method in (Plain(), SelfSpeculation(), DraftSpeculation(draft)):
        assert resolve(model, method).final_noise is True
    assert resolve(model, Plain(), Options(final_noise=False)).final_noise is False
    with pytest.raises(ValueError, match="path needs noise in the last denoising step"):
        resolve(model, SelfSpeculation(), Options(final_noise=False))
    with pytest.raises(
        ValueError, match="cannot have noise in the last denoising step"
    ):
        resolve(model, Released(draft))
    small = dataclasses.replace(
        draft, network=MARModel(dataclasses.replace(tiny.PIXELS, num_classes=3))
    )
    with pytest.raises(ValueError, match="does not fit the target"):
        resolve(model, DraftSpeculation(small))


@pytest.mark.slow
def test_gains_are_fitted_once_or_read(folder, model, capsys):
    """Without a file they are fitted in the call, each setting its own; `calibrate`
    writes the same ones into the checkpoint, which stays one."""
    asked = Options(num_iter=16, respacing="ddim10", cfg=2.0)
    recipe = resolve(model, options=asked)
    first = calibration.drafter_for(model, recipe)
    assert calibration.drafter_for(model, recipe) is first
    cold = calibration.drafter_for(model, dataclasses.replace(recipe, temperature=0.9))
    assert np.any(cold.gain != first.gain)
    said = printed(capsys, f"calibrate {folder}/target --cfg 2")
    written = calibration.read(Path(said["out"]))
    chex.assert_trees_all_equal(written, first)
    chex.assert_trees_all_equal(
        calibration.drafter_for(cspd_jax.load(folder / "target"), recipe), written
    )
    assert [f.name for f in (folder / "target" / "gains").iterdir()] == [
        "ddim10-cfg2-linear-t1.npz"
    ]
