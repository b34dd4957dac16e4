"""What a caller in Python gets wrong: taken as it is meant where that is clear, else one sentence."""

import dataclasses
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
from cspd_jax.apps import bulk
from cspd_jax.apps.evaluation.classifier import ClassifierConfig
from cspd_jax.apps.evaluation.words import Reader
from cspd_jax.apps.service.config import ServiceConfig
from cspd_jax.image import PaperCriterion, ReleasedRunner, comparison, generation, plan
from cspd_jax.image.chain.drafters import frozen
from cspd_jax.image.lossy.shortcuts import Annealing
from cspd_jax.networks.lm import LM
from cspd_jax.networks.mar import MARModel
from cspd_jax.parallel import even, make_mesh, parse_mesh, place, replicate
from cspd_jax.text.continuous.scheduler import DraftScheduler
from cspd_jax.text.prompts import as_prompts
from cspd_jax.training.config import TrainConfig, with_settings
from cspd_jax.training.data.words import Words, WordsConfig, letters
from cspd_jax.training.presets import preset
from cspd_jax.weights.models import TextModel
from cspd_jax.weights.tokenizers import ByteTokenizer, load_tokenizer

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
        ({"cfg": [1.0, 2.0]}, "cfg has 2 numbers for 1 images"),
        ({"cfg": [[1.0, 2.0]]}, "cfg is [[1.0, 2.0]]"),
        ({"cfg": 1j}, "cfg is 1j; it must be a finite number"),
        ({"temperature": 10**400}, "it must be a finite number"),
        ({"temperature": np.ones((2, 1))}, "temperature has shape (2, 1); it must be one number"),
        ({"labels": [[0], [1, 2]]}, "labels must be a list"),
        ({"key": jnp.zeros(4, jnp.uint32)}, "key is uint32 [4]"),
        ({"temperature": None}, "temperature is None"),
        ({"method": "self"}, "method is 'self'; it must be a method object"),
        ({"method": SelfSpeculation}, "it must be a method object"),
        ({"method": DraftSpeculation("default-draft")}, "draft is 'default-draft'; load it first"),
        ({"method": DraftSpeculation(3)}, "draft is of type int; it must be an ImageModel"),
        ({"denoise": ChainSpeculation}, "or a ChainSpeculation"),
        ({"denoise": ChainSpeculation(0)}, "a draft length (window) is 0"),
        ({"labels": 3}, "labels must be a list"),
        ({"labels": "3"}, "labels must be a list"),
        ({"labels": range(10**8)}, "there are 100000000 labels; ask for at most"),
    ],
)
def test_images(model, change, sentence):
    arguments = {"key": KEY, "model": model, "labels": [0], "method": Plain(), **change}
    first = [arguments.pop(name) for name in ("key", "model", "labels", "method")]
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        generate(*first, Options(num_iter=1, **arguments))
    assert len(str(error.value)) < 300


def test_a_drafter_of_denoising_steps_for_other_tokens(model):
    size, steps = model.config.token_dim, 100
    for other in (size - 1, size + 1):
        options = Options(denoise=ChainSpeculation(4), chain_drafter=frozen(steps, other))
        with pytest.raises(UserError, match=f"the chain_drafter does not fit tokens of dimension {size}"):
            generate(KEY, model, [0], options=options)


def test_a_bar_is_shown_or_not(model):
    lm = LM(LLADA, jnp.float32), params_of(LLADA, 0)
    for shows in (generate, text.generate, masked.generate):
        with pytest.raises(UserError, match="progress is 'yes'; it must be True or False"):
            shows(KEY, model if shows is generate else lm, [[1]], progress="yes")


def test_a_prompt_of_masks():
    with pytest.raises(UserError, match=f"id {LLADA.mask_ids[0]} in a prompt is the mask's"):
        masked.generate(None, (LM(LLADA, jnp.float32), params_of(LLADA, 0)), [[1, LLADA.mask_ids[0]]])


@pytest.mark.parametrize(
    "gamma, sentence",
    [("2", "gamma is '2'; it must be a whole number"), (2.5, "gamma is 2.5"), (0, "gamma is 0")],
)
def test_a_method_that_cannot_be_is_not_built(gamma, sentence):
    with pytest.raises(UserError, match=sentence):
        SelfSpeculation(gamma)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"labels": [[0], [1, 2]]}, "labels must be a list"),
        ({"labels": ["0", "1"]}, "labels must be a list"),
        ({"labels": np.array([0, 1]).astype("timedelta64[s]")}, "labels must be a list"),
        ({"temperature": [1.0, [2]]}, "temperature is [1.0, [2]]; it must be a number"),
        ({"temperature": 1e-60}, "temperature is 0"),
        ({"cfg": -1.0}, "cfg is -1.0; it must be from 0 to "),
        ({"cfg": [1.0, np.inf]}, "it must be from 0 to "),
        ({"active": [0.5, 2]}, "active is [0.5, 2]; it must be true or false for every image"),
        ({"active": [[True], [True, False]]}, "it must be true or false for every image"),
        ({"params": {"head": jnp.zeros(3, int)}}, "the parameters are of type int32"),
    ],
)
def test_what_a_plan_samples(model, change, sentence):
    drawn = plan.resolve(model, [0, 1], options=Options(num_iter=1, respacing="ddim3", cfg=2.0))
    given = {"labels": jnp.array([0, 1]), **change}
    with pytest.raises(UserError, match=re.escape(sentence)):
        drawn.sample(cspd_jax.row_keys(KEY, 2), given.pop("labels"), **given)


@pytest.mark.parametrize(
    "images, more, sentence",
    [
        ([np.zeros((8, 8, 1), np.uint8), np.zeros((4, 8, 1), np.uint8)], {}, "are of several sizes"),
        (np.zeros((2, 8, 8, 1), np.uint8), {"labels": [["a"], "b"]}, "give a text or whole number for each"),
        (np.zeros((2, 8, 8, 1), np.uint8), {"labels": [10**5000, 1]}, "give a text or whole number for each"),
        (np.zeros((2, 8, 8, 1), np.uint8), {"labels": [None, 1.5]}, "give a text or whole number for each"),
    ],
)
def test_pictures(images, more, sentence):
    with pytest.raises(UserError, match=sentence):
        cspd_jax.picture(images, **more)


def test_a_small_number_of_columns():
    assert cspd_jax.picture(np.zeros((2, 8, 8, 1), np.uint8), columns=np.int8(1)).height > 100


def test_keys_are_no_tokens(model):
    with pytest.raises(UserError, match="tokens"):
        cspd_jax.to_images(model, jax.random.split(KEY, 2))


def test_guidance_of_each_image(model):
    """Each as where all have its number; the report says all of them."""
    how = Options(num_iter=1, respacing="ddim3")
    of = lambda cfg: generate(KEY, model, [0, 1], options=dataclasses.replace(how, cfg=cfg))
    tokens, info = of([2.0, 3.0])
    np.testing.assert_array_equal(tokens, [of([2.0, 2.0])[0][0], of([3.0, 3.0])[0][1]])
    assert info.plan.report()["cfg"] == [2.0, 3.0]


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (lambda params: {}, "do not fit the network: missing "),
        (lambda params: None, "are of type NoneType"),
        (lambda params: jax.tree.map(lambda a: a[:1], params), r"is \[1, "),
        (lambda params: _deleted(params), "have been deleted or donated"),
        (
            lambda params: jax.tree.map(lambda a: a.astype(jnp.int32), params),
            "are of type int32; they must be",
        ),
    ],
)
def test_parameters_that_are_not_the_models(model, damage, sentence):
    damaged = dataclasses.replace(model, params=damage(model.params))
    with pytest.raises(UserError, match=sentence):
        generate(KEY, damaged, [0], options=Options(num_iter=1))


def _deleted(params):
    copy = jax.tree.map(jnp.copy, params)
    for leaf in jax.tree.leaves(copy):
        leaf.delete()
    return copy


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", np.longdouble, "float64", "int8"])
def test_types_that_no_model_runs_in(model, dtype):
    for load in (cspd_jax.load, cspd_jax.load_text):
        with pytest.raises(UserError, match=r"dtype (float8_e4m3fn|float128|float64|int8) (is none|needs)"):
            load("default" if load is cspd_jax.load else "text-default", dtype)


def test_what_is_printed_of_a_model_is_short(model):
    assert len(repr(model)) < 1000 and len(repr(cspd_jax.load_text("text-default"))) < 1000


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


def test_inside_a_transformation(model):
    """What is counted needs a plan."""
    scaled = lambda scale: Options(cfg=[scale, 1.0])
    how = Options(num_iter=1, respacing="ddim3")
    with pytest.raises(UserError, match="make a plan outside"):
        jax.jit(lambda key: generate(key, model, [0], Plain(), how)[0])(KEY)
    with pytest.raises(UserError, match="make a plan outside"):
        jax.jit(lambda labels: generate(KEY, model, labels, Plain(), how)[0])(jnp.array([0]))
    for made in (lambda x: plan.resolve(model, [x]), lambda x: plan.resolve(model, [0], options=scaled(x))):
        with pytest.raises(UserError, match="resolve was called with traced values, inside jit"):
            jax.jit(made)(1)
    with pytest.raises(UserError, match=r"keys have shape \(1, 1\)"):
        cspd_jax.fastest(jax.random.split(KEY, (1, 1)), model, [0], how)


def test_models_of_another_kind(model):
    lm = text_models.model()
    params = text_models.params(lm)
    how = text.Options(max_new_tokens=1)
    for given, drafter, sentence in (
        (model, None, "must be a language model's"),
        ((lm,), None, "or a pair"),
        ((params, lm), None, "must be a language model's, not a dict"),
        ((lm, None), None, "are of type NoneType"),
        ((lm, {}), None, "do not fit the network: missing"),
        ((lm, params), model, "must be a language model's"),
        ((cspd_jax.load_text("text-default-draft"), params), None, "a pair begins with a network"),
        ((lm, params), text.PromptLookup, "the drafter is the class PromptLookup"),
        ((lm, params), (lm, {}), "do not fit the network: missing"),
    ):
        with pytest.raises(UserError, match=sentence):
            text.generate(None, given, [[1]], drafter, how)
    with pytest.raises(UserError, match=r"mesh is 3; make one with cspd_jax\.parallel\.make_mesh"):
        cspd_jax.load("default", mesh=3)


def test_keys_labels_and_pictures(model):
    sample = plan.resolve(model, [0], options=Options(num_iter=1)).sample
    keys = cspd_jax.row_keys(KEY, 1)
    image = np.zeros((1, 4, 4, 1), np.uint8)
    for call, sentence in (
        (lambda: sample(KEY, jnp.array([0])), "give one of each for every image"),
        (lambda: sample(keys, jnp.array([0, 1])), "give one of each for every image"),
        (lambda: sample(keys, jnp.array([0.5])), "labels must be a list"),
        (lambda: sample(keys, jnp.array([0]), params={}), "do not fit the network"),
        (lambda: sample(None, jnp.array([0])), "key is None"),
        (lambda: sample(keys, jnp.array([0]), temperature="1"), "temperature is '1'; it must be a number"),
        (lambda: sample(keys, jnp.array([0]), temperature=jnp.ones(2)), "temperature has shape"),
        (lambda: jax.jit(cspd_jax.picture)(image), "the images are traced"),
        (lambda: cspd_jax.picture(np.broadcast_to(np.uint8(0), (1, 10**5, 10**5, 1))), "show fewer images"),
        (lambda: cspd_jax.row_keys(KEY, "2"), "count is '2'"),
        (lambda: cspd_jax.row_keys(KEY, 2, first=2**33), "first is 8589934592"),
        (lambda: cspd_jax.row_keys(keys, 2), "derived from one key"),
        (lambda: cspd_jax.picture(image, columns="2"), "columns is '2'"),
        (lambda: cspd_jax.picture(image, labels=3), "labels 3; give a text or whole number"),
    ):
        with pytest.raises(UserError, match=sentence):
            call()


@pytest.mark.parametrize(
    "own, sentence",
    [
        ("cfg", "sampling is 'cfg' there; it must be an object with some of cfg, cfg_schedule"),
        ({"num_iter": 4}, "it must be an object with some of cfg"),
        ({"cfg": "2"}, "cfg is '2'; it must be a finite number"),
        ({"cfg": -1}, "cfg is -1.0; guidance must be 0 or more"),
        ({"cfg_schedule": ["linear"]}, "guidance schedule ['linear'] is unknown"),
    ],
)
def test_what_a_checkpoint_says_of_sampling(model, own, sentence):
    damaged = dataclasses.replace(model, metadata={"extra": {"sampling": own}})
    with pytest.raises(UserError, match=re.escape(sentence)):
        Options(**damaged.sampling).checked()


@pytest.mark.parametrize("given", [None, {}, {"cfg": 2, "cfg_schedule": "constant", "temperature": 0.9}])
def test_sampling_that_can_be(model, given):
    own = dataclasses.replace(model, metadata={"extra": {"sampling": given}}).sampling
    assert own == (given or {}) and Options(**own).checked()


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"prefix_buckets": "4"}, "prefix_buckets is '4'; it must be a whole number"),
        ({"prefix_buckets": -1}, "prefix_buckets is -1; it must be at least 1"),
        ({"anneal": Annealing(2, 5)}, "annealing rises from 2 to 5 denoising steps; it must fall"),
        ({"guided": False, "cfg": 3.0}, "guided=False switches guidance off; leave one out"),
        ({"anneal": Annealing(5, 2, ["x"])}, "the shape ['x'] is unknown"),
        ({"denoise": ChainSpeculation(10**9)}, "a draft length (window) is 1000000000; it must be at most"),
        ({"temperature": 5e-324}, "temperature is 5e-324; it must be above 0, also as a float32"),
        ({"cfg": 1e39}, "cfg is 1e+39; it must be at most 3e+38"),
        ({"prefix_buckets": 2.5}, "prefix_buckets is 2.5; it must be a whole number"),
        ({"final_noise": "yes"}, "final_noise is 'yes'; it must be True or False"),
        ({"guided": 2}, "guided is 2; it must be True or False"),
        (
            {"denoise": "speculative", "chain_drafter": "gains"},
            "chain_drafter is 'gains'; it must be a drafter",
        ),
        ({"denoise": "speculative", "draft_drafter": 3}, "draft_drafter is 3; it must be a drafter"),
        ({"denoise": ChainSpeculation({1: 2})}, "draft_lengths is {1: 2}; it must hold at least one number"),
        ({"denoise": ChainSpeculation(np.array([]))}, "draft_lengths is array"),
        ({"denoise": ChainSpeculation(iter([2]))}, "it must hold at least one number of steps"),
    ],
)
def test_options_of_another_kind(model, options, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        cspd_jax.generate(KEY, model, [0], options=Options(**options))


def test_lists_of_draft_lengths_are_taken(model):
    for lengths in ([2, 3], np.array([2, 3]), (2, 3)):
        made = plan.check(model, [0], options=Options(denoise=ChainSpeculation(lengths)))
        assert made.options.denoise.draft_lengths == (2, 3)


def test_methods_of_another_kind(model):
    draft = lambda **kind: DraftSpeculation(model, PaperCriterion(**kind))
    for method, sentence in (
        (SelfSpeculation(2, joint=[1]), "joint is [1]; it must be True or False"),
        (draft(align="x"), "align is 'x'; it must be True or False"),
        (draft(sigma=None), "sigma is None; it must be True or False"),
        (draft(inner_temperature="1"), "inner_temperature is '1'; it must be a finite number"),
        (draft(inner_temperature=1e39), "inner_temperature is 1e+39; it must be at most 3e+38"),
        (ReleasedRunner(None), "draft is of type NoneType; it must be an ImageModel"),
        (draft(max_resamples=10**12), "max_resamples is 1000000000000; it must be at most"),
        (ReleasedRunner(model, max_resamples=10**12), "max_resamples is 1000000000000; it must be at most"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            plan.check(model, [0], method)


def test_what_is_no_image(model):
    tokens = np.zeros((1, model.network.seq_len, model.network.token_dim))
    assert cspd_jax.to_images(model, tokens.tolist()).shape[0] == 1
    image = np.zeros((1, 4, 4, 1), np.uint8)
    assert cspd_jax.picture(image, ["x" * 10**7]).size == cspd_jax.picture(image, ["x"]).size
    latents = dataclasses.replace(model, network=MARModel(dataclasses.replace(model.config, vae_stride=16)))
    for call, sentence in (
        (lambda: cspd_jax.to_images(model, [[1], [1, 2]]), "the tokens have shape ()"),
        (lambda: cspd_jax.to_images(model, tokens[:0]), "N at least 1"),
        (
            lambda: cspd_jax.to_images(model, np.broadcast_to(tokens, (10**8, *tokens.shape[1:]))),
            "at most 41",
        ),
        (lambda: cspd_jax.to_images(model, tokens.astype("V4")), "the tokens have shape"),
        (lambda: jax.jit(lambda t: cspd_jax.to_images(model, t))(tokens), "the tokens are traced"),
        (lambda: cspd_jax.to_images(model, tokens.astype(str)), "the tokens have shape"),
        (lambda: cspd_jax.to_images(latents, tokens, "kl16"), "vae is of type str; it must be a VAE"),
        (lambda: cspd_jax.picture(image[:, :0]), "a picture is made of uint8 images"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            call()


def test_what_is_no_plan(model):
    made = plan.resolve(model, [0])
    keys, labels = cspd_jax.row_keys(KEY, 1), jnp.array([0])
    for call, sentence in (
        (lambda: cspd_jax.image.run(KEY, None), "plan is of type NoneType; it must be a Plan"),
        (
            lambda: cspd_jax.image.generate_batches(KEY, model),
            "plan is of type ImageModel; it must be a Plan",
        ),
        (lambda: cspd_jax.image.generate_batches(KEY, made, pieces="x"), "pieces is 'x'"),
        (lambda: cspd_jax.image.generate_batches(KEY, made, 3), "on_step is 3; it must be a function"),
        (lambda: made.sample(keys, labels, active="yes"), "active is 'yes'; it must be true or false"),
        (lambda: cspd_jax.image.compare(KEY, model, [0], repeats=0), "repeats is 0; it must be at least 1"),
        (
            lambda: cspd_jax.image.compare(KEY, model, [0], cspd_jax.Plain()),
            "nothing to compare: this is the",
        ),
        (lambda: cspd_jax.image.compare(KEY, model, [0], repeats=10**12), "it must be at most 10000"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            call()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"batch": 0}, "batch is 0; it must be at least 1"),
        ({"batch": 1.5}, "batch is 1.5; it must be a whole number"),
        ({"method": None}, "method is None; it must be a method object"),
        ({"labels": [0.5]}, "labels must be a list of at least one class number"),
        ({"labels": np.array([77])}, "label 77 is out of range"),
        ({"options": None}, "the options of a plan are None"),
        ({"options": Options()}, "they must be settled, as cspd_jax.image.resolve does"),
        ({"scales": np.ones(3)}, "there must be one for each label"),
        ({"scales": [2.0]}, "the plan was made without guidance"),
        ({"scales": ["x"]}, "cfg is 'x'; it must be a finite number"),
        ({"method": SelfSpeculation(2)}, "needs noise in the last denoising step"),
        ({"model": None}, "model is of type NoneType"),
    ],
)
def test_a_plan_that_was_edited(model, change, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        dataclasses.replace(plan.resolve(model, [0]), **change)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"cfg": 3.0}, "guided=False switches guidance off"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be above 0"),
        ({"guided": "no"}, "guided is 'no'"),
        ({"num_iter": "2"}, "num_iter is '2'"),
        ({"order": "x"}, "order is 'x'"),
        ({"known": "a"}, "known is 'a'; it must be a Known"),
        ({"known": cspd_jax.Known(np.zeros((3, 3)), np.ones(3, bool))}, "the mask of known tokens is"),
        ({"order": cspd_jax.image.order.Raster()}, "the options of a plan are not those of"),
        ({"denoise": "auto"}, "a plan that can be run is made by cspd_jax.image.resolve"),
        ({"denoise": ChainSpeculation((2,))}, "without a drafter"),
    ],
)
def test_a_plan_whose_options_were_edited(model, change, sentence):
    made = plan.resolve(model, [0])
    with pytest.raises(UserError, match=re.escape(sentence)):
        edited = dataclasses.replace(made, options=dataclasses.replace(made.options, **change))
        cspd_jax.image.run(KEY, edited)


def test_a_comparison_keeps_the_guidance_of_each_image(model):
    made = plan.resolve(model, [0, 1], options=Options(cfg=[1.5, 3.0]))
    assert comparison.plain_plan(made).scales.tolist() == [1.5, 3.0]


@pytest.mark.parametrize("of_bytes", [bytes, bytearray, lambda v: memoryview(bytes(v)), np.ma.masked_array])
def test_what_numpy_takes_for_numbers(model, of_bytes):
    with pytest.raises(UserError, match="labels must be a list"):
        plan.resolve(model, of_bytes([0, 1]))
    with pytest.raises(UserError, match="prompts must be a list of lists of ids"):
        text.pad_prompts([of_bytes([0, 1])])
    with pytest.raises(UserError, match="prompts must be a list of lists of ids"):
        as_prompts((of_bytes([0, 1]), [2]))


def deleted(*shape):
    array = jnp.ones(shape)
    array.delete()
    return array


@pytest.mark.parametrize("value", [KEY, deleted(1), deleted()])
def test_keys_and_deleted_arrays_are_no_numbers(model, value):
    known = np.ones((16, 16), np.float32)
    made = cspd_jax.image.regions.keep
    for call in (
        lambda: generate(KEY, model, [0], options=Options(temperature=value)),
        lambda: generate(KEY, model, [0], options=Options(cfg=[value, value])),
        lambda: generate(KEY, model, value),
        lambda: generate(KEY, model, [0], options=Options(known=cspd_jax.Known(value, known[0] > 0))),
        lambda: generate(KEY, model, [0], options=Options(known=cspd_jax.Known(known, value))),
        lambda: generate(jax.eval_shape(lambda: KEY), model, [0]),
        lambda: cspd_jax.to_images(model, value),
        lambda: cspd_jax.image.to_tokens(model, value),
        lambda: made(value, model),
        lambda: made("50%", model, value),
        lambda: cspd_jax.picture(value),
        lambda: cspd_jax.picture(np.zeros((1, 4, 4, 1), np.uint8), [value]),
        lambda: text.pad_prompts([value]),
        lambda: text.pad_prompts([1] for _ in iter(int, 1)),
    ):
        with pytest.raises(UserError):
            call()


@pytest.mark.parametrize("labels", [{"a": 1}, {5: 1}, {"a"}, [[[1], [1, 2]]], [None]])
def test_labels_of_a_picture(labels):
    with pytest.raises(UserError, match="there are 1 images and labels"):
        cspd_jax.picture(np.zeros((1, 4, 4, 1), np.uint8), labels)


def test_traced_arrays_that_do_not_fit(model):
    """Shapes and types are known of them, too."""
    tokens, mask = np.ones((2, 16, 16), np.float32), np.arange(16) < np.array([[8], [4]])
    made = plan.resolve(model, [0, 1], options=Options(num_iter=1, known=cspd_jax.Known(tokens, mask)))
    keys, labels = cspd_jax.row_keys(KEY, 2), jnp.arange(2)
    for wrong_tokens, wrong_mask in (
        (tokens[:, :3], mask), (tokens[..., :1], mask), (tokens[:1], mask), (tokens.astype(complex), mask),
        (tokens, mask[:1]), (tokens, mask[:, :15]), (tokens, mask * 1.0), (tokens[0], mask[0]),
    ):  # fmt: skip
        sample = lambda t, m: made.sample(keys, labels, known=cspd_jax.Known(t, m)).tokens
        with pytest.raises(UserError, match="traced, they must be numbers"):
            jax.eval_shape(sample, wrong_tokens, wrong_mask)
    with pytest.raises(UserError, match=r"it must be a Known\(tokens, mask\)"):
        made.sample(keys, labels, known=(tokens, mask))
    with pytest.raises(UserError, match=r"active is .*; it must be true or false for every image"):
        jax.eval_shape(lambda a: made.sample(keys, labels, active=a).tokens, jnp.ones(3, bool))
    for call in (cspd_jax.image.compare, cspd_jax.fastest):
        with pytest.raises(UserError, match=r"outside jit|make a plan outside"):
            jax.eval_shape(lambda key: call(key, model, [0]) and key, KEY)  # noqa: B023


def test_whole_numbers_of_any_width(model):
    for labels in (np.uint8([1]), jnp.array([1], jnp.int4), jnp.array([1])):
        assert plan.resolve(model, labels).labels.tolist() == [1]
    for label in (2**70, 2**63 + 1):
        with pytest.raises(UserError, match=f"label {label} is out of range"):
            plan.resolve(model, [label])


@pytest.mark.parametrize("shape", [(3, 5), (1, 10, 16), (1, 4, 3), (4, 16)])
def test_tokens_of_another_shape(model, shape):
    for look in (cspd_jax.to_images, cspd_jax.image.to_latents):
        with pytest.raises(UserError, match=r"the tokens have shape .*; .* makes numbers \[N, "):
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
        ({"prompts": []}, "there is no prompt; give at least one"),
        ({"prompts": [[float("nan")]]}, "prompts must be a list of lists of ids"),
        ({"prompts": [[1], [None]]}, "None in a prompt is no id"),
        ({"prompts": [[2**40]]}, "1099511627776 in a prompt is no id"),
        ({"max_new_tokens": 10**9}, "new ones are more than 16 times the 64 positions"),
        ({"gamma": "4"}, "gamma is '4'; it must be a"),
        ({"gamma": 2.5}, "gamma is 2.5; it must be a whole number"),
        ({"max_new_tokens": "2"}, "max_new_tokens is '2'; it must be a"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be a whole number"),
        ({"max_gamma": 1.5}, "max_gamma is 1.5; it must be a whole number"),
        ({"max_gamma": [2]}, "max_gamma is [2]; it must be a whole number"),
        ({"gamma": None}, "gamma is None; it must be given"),
        ({"gamma": [1, [2]]}, "gamma is [1, [2]]; it must be a whole number"),
        ({"max_new_tokens": None}, "max_new_tokens is None; it must be"),
        ({"temperature": 1e39}, "temperature is 1e+39; it must be 0 (greedy) to"),
        ({"temperature": 1j}, "temperature is 1j; it must be a number"),
        ({"prompts": ([[1.5]], [1])}, "the tokens of the prompts are no whole numbers"),
        ({"prompts": ([[1]], ["1"])}, "the lengths of the prompts are no whole numbers"),
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


@pytest.mark.parametrize("ids", ["x", [None], {1, 2}, [2**40], iter([1]), float("nan"), [[1]], [-1], 3])
def test_stop_ids_of_another_kind(ids):
    lm = text_models.model()
    given = KEY, (lm, text_models.params(lm)), [[1, 2]], text.PromptLookup()
    with pytest.raises(UserError, match=r"stop_ids is .*; it must be a list of ids, for example \[0, 2\]"):
        text.generate(*given, text.Options(max_new_tokens=2, stop_ids=ids))


def test_stop_ids_beyond_the_vocabulary():
    lm = text_models.model()
    options = text.Options(max_new_tokens=2, stop_ids=[0, lm.config.vocab_size])
    with pytest.raises(UserError, match="stop_ids go beyond the model's"):
        text.generate(KEY, (lm, text_models.params(lm)), [[1, 2]], None, options)


def test_drafters_of_other_models(model):
    """A network with another's parameters, none at all, one of images, and one that is not causal."""
    lm = text_models.model()
    target = (lm, text_models.params(lm))
    filling = (LM(LLADA, np.float32), params_of(LLADA, 0))
    drafting = lambda network, params: text.Drafting(text.ModelDrafter(network), params)
    for drafter, sentence in (
        (drafting(None, target[1]), "a ModelDrafter needs a network and parameters"),
        (drafting(model.network, model.params), "the network of a model must be a language model's"),
        (drafting(*filling), "the draft model is not causal"),
        (text.draft_tree(filling, (2,)), "the draft model is not causal"),
    ):
        with pytest.raises(UserError, match=sentence):
            text.generate(KEY, target, [[1, 2]], drafter, text.Options(max_new_tokens=2))


def test_prompts_that_are_none_are_not_measured():
    lm = text_models.model()
    for drafter in (None, text.PromptLookup()):
        with pytest.raises(UserError, match="there is no prompt"):
            text.fastest(None, (lm, text_models.params(lm)), [], drafter)


@pytest.mark.parametrize("stream", [text.stream, masked.stream, text.continuous])
def test_rounds_are_not_traced(stream):
    lm = text_models.model()
    pair = (lm, text_models.params(lm))
    if stream is masked.stream:
        pair = (LM(LLADA, np.float32), params_of(LLADA, 0))
    with pytest.raises(UserError, match="looks at each round, so it cannot be traced"):
        jax.jit(lambda prompts: stream(None, pair, prompts))(text.pad_prompts([[1]]))


def test_jobs_of_another_kind(model):
    known = cspd_jax.Known(np.zeros((0, 16, 16), np.float32), np.zeros((0, 16), bool))
    for given, sentence in (
        ({"known": 3}, "known"),
        ({"options": None}, "options"),
        ({"options": text.Options()}, "options"),
        ({"known": known}, "of at least one picture"),
    ):
        with pytest.raises(UserError, match=sentence):
            bulk.Job(model, [0], 2, **given)


def test_services_of_other_models(model):
    lm, filling = text_models.model(), LM(LLADA, np.float32)
    causal, masking = TextModel("a", lm, text_models.params(lm)), TextModel("b", filling, {})
    for given, sentence in (
        ({"image": "default"}, "image"),
        ({"text": model}, "text"),
        ({"text": masking}, "b is a masked-diffusion model"),
        ({"masked": causal}, "a has no mask"),
        ({"drafter": "lookup"}, "the drafter"),
        ({"image": model, "vae": model}, "vae"),
        ({"method": Plain()}, "method"),
    ):
        with pytest.raises(UserError, match=sentence):
            ServiceConfig(**given)


def test_a_model_without_a_network(model):
    lm = text_models.model()
    nothing = TextModel("empty", None, text_models.params(lm))
    with pytest.raises(UserError, match="a model must be a TextModel"):
        text.generate(None, nothing, [[1]])
    for wrong in ("text-default", model):
        with pytest.raises(UserError, match="a tokenizer is a language model's"):
            load_tokenizer(wrong)


@pytest.mark.parametrize("text", [5, None, b"a", ["a"]])
def test_what_is_no_text(text):
    with pytest.raises(UserError, match="a tokenizer encodes one text, not "):
        ByteTokenizer().encode(text)


@pytest.mark.parametrize("ids", [5, None, "abc", [1.5], [[1], [1, 2]], KEY, deleted(2)])
def test_what_are_no_ids(ids):
    with pytest.raises(UserError, match="a tokenizer decodes a list of ids, not "):
        ByteTokenizer().decode(ids)


def test_what_is_of_another_kind(model):
    """Values that are no number, text or list where one is meant."""
    config, page = WordsConfig(), np.zeros((1, 64, 64, 1), np.uint8)
    reader = Reader(None, config, letters(config))
    job = lambda: bulk.Job(model, [0], 2, options=Options(num_iter=1))
    for call, sentence in (
        (lambda: DraftScheduler(3), "gammas is 3; it must be a list of whole numbers"),
        (lambda: DraftScheduler([10**30]), "it must be at most 1024"),
        (lambda: DraftScheduler(None), "gammas is None"),
        (lambda: WordsConfig(lines="8"), "lines is '8'; it must be a whole number"),
        (lambda: WordsConfig(lines=8.0), "lines is 8.0; it must be a whole number"),
        (lambda: WordsConfig(fonts="DejaVuSans"), "fonts is 'DejaVuSans'; it must be a tuple of strings"),
        (lambda: WordsConfig(extent="6"), "extent is '6'; it must be a finite number"),
        (lambda: Words(config).batch(0, 0), "size is 0; it must be at least 1"),
        (lambda: Words(config).batch(0, 1, split="test"), "split is 'test'; it must be train or held-out"),
        (lambda: Words(config).batch(-1, 1), "the seed or the number of a batch is -1"),
        (lambda: reader(page[:, :32], [0]), "this reader reads uint8 ones of shape (1, 64, 64, 1)"),
        (lambda: reader(page, [8]), "labels must be numbers of topics, from 0 to 7"),
        (lambda: ClassifierConfig(steps=0), "steps is 0; it must be at least 1"),
        (lambda: TrainConfig(None, config), "model is None; it must be a MARConfig"),
        (lambda: TrainConfig(tiny.PIXELS, 3), "data is 3; it must be a GlyphConfig or a WordsConfig"),
        (lambda: TrainConfig(tiny.PIXELS, config, clip="3"), "clip is '3'; it must be a finite number"),
        (lambda: preset([]), "preset [] is unknown"),
        (lambda: with_settings(preset("words"), None), "settings are None; they must be a list"),
        (lambda: with_settings(preset("words"), "steps=1"), "settings are 'steps=1'; they must be a list"),
        (lambda: with_settings(preset("words"), ["steps=1_0"]), "steps is a whole number, not '1_0'"),
        (lambda: bulk.run(job(), "nowhere", start="x"), "start is 'x'; it must be a whole number"),
        (lambda: bulk.run(job(), "nowhere", npz=3), "npz is 3; it must be named by a string or a path"),
        (lambda: bulk.run(job(), "nowhere", tell=3), "tell is 3; it must be a function"),
        (lambda: bulk.run(job(), "nowhere", png="yes"), "png is 'yes'; it must be True or False"),
        (lambda: bulk.run(None, "nowhere"), "job is None; it must be a Job(...)"),
        (lambda: make_mesh("data=1", devices=3), "devices is 3; it must be a list of devices"),
        (lambda: make_mesh({1: 1}), "mesh is {1: 1}"),
        (lambda: make_mesh("data=2", devices=jax.devices()[:1] * 2), "devices names one device twice"),
        (lambda: parse_mesh(None), "mesh is None; it names devices per axis"),
        (lambda: place(None, {}), "mesh is None; make one with cspd_jax.parallel.make_mesh"),
        (lambda: even(None, KEY, 2), "mesh is None; make one"),
        (lambda: replicate(make_mesh("data=1", jax.devices()[:1]), "x"), "is not all arrays"),
        (lambda: list(bulk.read(None)), "the folder is None; it must be named by a string or a path"),
        (lambda: list(bulk.read("a\0b")), "it must be named by a string or a path"),
        (lambda: with_settings(None, ["steps=1"]), "config is None; it must be the settings of a run"),
        (lambda: dataclasses.replace(tiny.PIXELS, respacing=None), "respacing is None; it must be a string"),
        (lambda: cspd_jax.load(""), "the name of a model is empty"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            call()


def test_too_little_memory_is_one_sentence(model, monkeypatch):
    def run(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(generation, "run", run)
    with pytest.raises(UserError, match="the device has too little memory"):
        generate(KEY, model, [0])


def test_measurements_and_continuous_texts_of_another_kind():
    lm = text_models.model()
    given = KEY, (lm, text_models.params(lm)), [[1, 2]], text.PromptLookup()
    filled = KEY, (LM(LLADA, np.float32), params_of(LLADA, 0)), [[1, 2]]
    how = text.Options(max_new_tokens=2)
    for call, sentence in (
        (lambda: text.continuous(*given, how, rows=True), "rows is True; it must be a whole number"),
        (lambda: text.continuous(*given, how, scheduler="auto"), "scheduler is 'auto'; it must be a Draft"),
        (lambda: text.continuous(*given, how, on_text=3), "on_text is 3; it must be a function"),
        (lambda: text.continuous(*given, masked.Options()), "it must be a text.Options(...)"),
        (lambda: text.fastest(*given, how, pilot=0), "pilot is 0; it must be at least 1"),
        (lambda: masked.fastest(*filled, pilot="x"), "pilot is 'x'; it must be a whole number"),
        (lambda: masked.fastest(*filled, gammas=3), "gammas is 3; it must list numbers of drafts"),
        (lambda: masked.generate(*filled, options=masked.Options(block=None)), "block is None; it must be"),
        (lambda: masked.generate(*filled, options=masked.Options(block=[2])), "block is [2]; it must be"),
        (lambda: masked.generate(*filled, options=masked.Options(cached="yes")), "cached is 'yes'; it must"),
        (lambda: masked.generate(*filled, masked.Schedule([2])), "steps is [2]; it must be a whole number"),
        (lambda: masked.generate(*filled, options=masked.Options(temperature=None)), "temperature is None"),
        (lambda: masked.generate(*filled, options=masked.Options(guidance=1e39)), "guidance is 1e+39"),
        (lambda: text.generate(*given, text.Options(max_new_tokens=2, top_k=3)), "top_k has no effect at"),
        (lambda: text.generate(*given[:3], "lookup", how), "the drafter: a model must be a TextModel"),
        (lambda: text.PromptLookup(2, 3), "shortest is 3; it must be at most 2"),
        (lambda: text.fastest(*given, how, gammas=()), "gammas is ()"),
        (lambda: masked.fastest(*filled, gammas=()), "gammas is (); it must list numbers of drafts"),
        (lambda: text.generate(*given[:3], filled[1], how), "the draft model is not causal"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            call()


def test_drafts_without_bounds():
    lm = text_models.model()
    given = KEY, (lm, text_models.params(lm)), [[1, 2]]
    how = text.Options(max_new_tokens=2, gamma=1, max_gamma=10**9)
    expected = text.generate(*given, text.PromptLookup(), dataclasses.replace(how, max_gamma=1)).tokens
    np.testing.assert_array_equal(text.generate(*given, text.PromptLookup(), how).tokens, expected)
    with pytest.raises(UserError, match="a tree may have 4096 drafts; this one has more"):
        text.draft_tree((lm, text_models.params(lm)), (2,) * 40)
    with pytest.raises(
        UserError, match=r"widths is \(2, 0\); it must be a tuple of whole numbers of at least 1"
    ):
        text.draft_tree((lm, text_models.params(lm)), (2, 0))
    with pytest.raises(UserError, match="longest is 1000000000; it must be at most 256"):
        text.PromptLookup(10**9, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite(temperature):
    """Of one row: its text ends there, with -1, and its neighbour's is as without it."""
    lm = text_models.model()
    params = text_models.params(lm)
    params["embed"]["embedding"][3] = np.nan
    how = text.Options(max_new_tokens=2, temperature=temperature, gamma=1, stop_ids=())
    of = lambda *prompts: text.generate(KEY, (lm, params), list(prompts), text.PromptLookup(), how)
    tokens, info = of([1, 2], [1, 3])
    assert tokens[1].tolist() == [1, 3, text.NO_TOKEN, 0] and info.stopped.tolist() == [False, True]
    np.testing.assert_array_equal(tokens[0], of([1, 2], [1, 2])[0][0])


def test_logits_of_masked_text_that_are_not_finite():
    broken = jax.tree.map(lambda a: a * np.nan, params_of(LLADA, 0))
    how = masked.Options(max_new_tokens=1)
    found = masked.generate(KEY, (LM(LLADA, np.float32), broken), [[1]], masked.Stepwise(), how)
    assert found.tokens.tolist() == [[text.NO_TOKEN]]


def test_numbers_of_sampling():
    lm = text_models.model()
    model = lm, text_models.params(lm)
    for options, sentence in (
        (0.7, r"options is 0.7; it must be a text.Options\(...\)"),
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


@pytest.mark.parametrize("wrong", [None, {}, [1], {"backbone": {}, "head": {}}])
def test_the_parameters_of_a_draft(model, wrong):
    draft = dataclasses.replace(model, params=wrong)
    with pytest.raises(UserError, match=f"the parameters of {re.escape(model.name)}"):
        generate(KEY, model, [0], DraftSpeculation(draft, gamma=2), Options(num_iter=3, respacing="4"))


@pytest.mark.parametrize("wrong", [None, {"a": np.ones(1, np.float32)}, "int"])
def test_the_parameters_of_an_autoencoder(tmp_path, wrong):
    latents = cspd_jax.load(tiny.save_mar(tmp_path / "latents", tiny.LATENTS))
    vae = cspd_jax.load_vae(tiny.save_kl16(tmp_path / "vae"))
    params = jax.tree.map(lambda a: a.astype(int), vae.params) if wrong == "int" else wrong
    tokens = np.zeros((1, latents.network.seq_len, latents.network.token_dim), np.float32)
    with pytest.raises(UserError, match=r"the parameters of .*vae"):
        cspd_jax.to_images(latents, tokens, dataclasses.replace(vae, params=params))


@pytest.mark.parametrize("temperature", [np.inf, np.nan, 3e38])
def test_a_traced_temperature_that_no_number_can_be_ends(temperature):
    """Not finite, the confidence of no place was above another's, and places were filled again for ever."""
    lm = LM(LLADA)
    params, prompts = params_of(LLADA, 0), masked.Prompts(jnp.ones((1, 2), jnp.int32), jnp.full(1, 2))

    @jax.jit
    def run(temperature):
        options = masked.Options(max_new_tokens=4, block=4, temperature=temperature)
        return masked.generate(KEY, (lm, params), prompts, options=options)[0]

    assert run(jnp.float32(temperature)).shape[0] == 1


def test_what_text_fastest_is_given():
    lm = text_models.model(dtype=jnp.float32)
    of = lambda prompts=[[1, 2]], **options: text.fastest(
        None, (lm, text_models.params(lm)), prompts, text.PromptLookup(), text.Options(**options)
    )
    for options, sentence in (
        ({"gamma": "x"}, "gamma is 'x'"),
        ({"gamma": np.nan}, "gamma"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
    ):
        with pytest.raises(UserError, match=sentence):
            of(**options)
    with pytest.raises(UserError, match="options"):
        text.fastest(None, (lm, text_models.params(lm)), [[1, 2]], text.PromptLookup(), {})
    with pytest.raises(UserError, match="it cannot be traced"):
        jax.jit(lambda tokens: of((tokens, jnp.full(1, 2))))(jnp.ones((1, 2), jnp.int32))
    assert of([[1, 2], [3]], max_new_tokens=[3, 2], gamma=[1, 2]).way


@pytest.mark.parametrize(
    "call, sentence",
    [
        (
            lambda: text.pad_prompts([[1]] * 65000 + [[1] * 10**5]),
            "padded to the longest, are 6500100000 ids",
        ),
        (lambda: frozen(steps=-1, dim=16), "steps is -1"),
        (lambda: frozen(steps=4, dim=10**9), "dim is 1000000000"),
        (lambda: jax.jit(lambda n: cspd_jax.row_keys(KEY, 3, n))(jnp.arange(2)), "one whole number"),
        (lambda: jax.jit(lambda n: cspd_jax.row_keys(KEY, 3, n))(3.5), "one whole number"),
        (lambda: masked.MoveSets([[(0, 0)]]), "a tuple of tuples"),
        (
            lambda: text.generate(None, (LM(text_models.CONFIG), {}), [[1]], text.Drafting("x", None)),
            "the drafter is 'x'; it must have the functions",
        ),
    ],
)
def test_smaller_ones(call, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        call()
