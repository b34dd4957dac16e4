"""Images of causal models, from classes and prompts, as rows of the service."""

from __future__ import annotations

import dataclasses
import json

import jax
import nextstep_tiny
import numpy as np
import pytest
import tiny

import cspd_jax
from cspd_jax.apps.service import render, web
from cspd_jax.apps.service.causal_rows import CausalRows
from cspd_jax.apps.service.config import METHODS, ServiceConfig
from cspd_jax.apps.service.jobs import FINISHED, Job
from cspd_jax.errors import UserError
from cspd_jax.image import prompts, sampler
from cspd_jax.networks.config import SphereConfig
from cspd_jax.networks.sphere import SphereModel, abstract_params
from cspd_jax.weights.models import ImageModel

STEPS = "flow-calls4"


def few_steps(model):
    quick = nextstep_tiny.with_config(model, respacing=STEPS)
    return dataclasses.replace(quick, metadata={"extra": {"sampling": {"cfg": 2.0}}})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = nextstep_tiny.write(tmp_path_factory.mktemp("models") / "nextstep")
    model = cspd_jax.load(nextstep_tiny.with_tokenizer(folder))
    return few_steps(nextstep_tiny.with_config(model, rows=2, columns=2))


@pytest.fixture(scope="module")
def classed():
    config = SphereConfig(
        seq_len=4, token_dim=4, num_classes=3, class_tokens=1, width=16, depth=1, heads=2, head_width=16,
        head_depth=1, head_modulations=1,
    )  # fmt: skip
    params = tiny.params(abstract_params(config), scale=0.1)
    return few_steps(ImageModel("sphere", SphereModel(config), params))


def made(lane, requests):
    """Each request enters a round after the one before it."""
    waiting, done = dict(enumerate(requests)), {}
    while len(done) < len(requests):
        if waiting:
            row = min(waiting)
            lane.enter({row: waiting.pop(row)})
        done |= {row: progress for row, progress in lane.advance().items() if progress.complete}
    return [done[row] for row in sorted(done)]


def alone(model, request):
    denoise = {"self": "speculative", "plain": "plain"}[request.method]
    options = cspd_jax.Options(**{**model.sampling, "cfg": request.cfg, "denoise": denoise})
    key = jax.random.key(request.seed)
    if request.prompt is None:
        return cspd_jax.generate(key, model, [request.label], options=options)[0][0]
    return cspd_jax.generate(key, model, prompts=[request.prompt.text], options=options)[0][0]


@pytest.mark.parametrize("method", ["plain", pytest.param("self", marks=pytest.mark.slow)])
def test_prompts_that_come_one_after_another(written, method):
    """The image of each is that of the library, but for the rounding of padded prompts."""
    offer, asked = ServiceConfig(image=written), {"method": method, "cfg": 2.0}
    requests = [offer.image_request(prompt=p, seed=s, **asked) for p, s in (("red", 1), ("x", 2))]
    found = made(CausalRows(written, 2, method, guided=True), requests)
    for request, progress in zip(requests, found):
        np.testing.assert_allclose(progress.tokens, alone(written, request), rtol=1e-3, atol=1e-3)
        assert progress.rounds == progress.known == len(progress.tokens) and progress.final.all()
        assert (progress.drafts[0] > 0) == (method == "self") and progress.truncated == 0
    assert np.abs(found[0].tokens - found[1].tokens).max() > 0.1


@pytest.mark.slow
def test_prompts_of_two_lengths_are_one_program(written):
    offer, lane = ServiceConfig(image=written), CausalRows(written, 2, "plain", guided=True)
    short, long = (offer.image_request(prompt=p, cfg=2.0, method="plain") for p in ("red", "x red x"))
    made(lane, [short])
    before = sampler._ar_steps._cache_size()
    (progress,) = made(lane, [long])
    assert sampler._ar_steps._cache_size() == before
    np.testing.assert_allclose(progress.tokens, alone(written, long), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_an_engine(written):
    offer = ServiceConfig(image=written)
    requests = [offer.image_request(prompt="red", seed=s, method=m) for s in (0, 1) for m in METHODS]
    with offer.engine(rows=2, timeout=60).start(warm=True) as engine:
        for request, job in [(request, engine.submit(request)) for request in requests]:
            np.testing.assert_allclose(job.result().tokens, alone(written, request), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_prompt_on_the_page(written):
    make_page = pytest.importorskip("cspd_jax.apps.service.page", reason="needs the extra demo").make_page
    offer = ServiceConfig(image=written)
    with offer.engine(rows=2, timeout=60).start() as engine:
        generate, *_ = (event.fn for event in make_page(offer, engine).fns.values())
        *_, last = generate("red", 1, 2.0, True, "")
        assert last.count("finished") == 2 and "speculative: 4 of 4 tokens" in last
        *_, last = generate("red " * 999, 1, 2.0, True, "")
        assert "the prompt has 1002 tokens" in last


@pytest.mark.slow
def test_classes(classed):
    request = ServiceConfig(image=classed).image_request(label=1, seed=3, cfg=1.0, method="self")
    lane = CausalRows(classed, 1, "self", guided=False)
    lane.warm()
    (progress,) = made(lane, [request])
    np.testing.assert_allclose(progress.tokens, alone(classed, request), rtol=1e-4, atol=1e-5)


def test_a_row_that_is_left_is_free(written):
    offer = ServiceConfig(image=written)
    lane = CausalRows(written, 1, "plain", guided=True)
    red, other = (offer.image_request(prompt=p, cfg=2.0, method="plain") for p in ("red", "x"))
    lane.enter({0: other})
    assert lane.advance()[0].known == 1
    lane.leave([0])
    assert lane.advance() == {}
    (again,) = made(lane, [red])
    (first,) = made(CausalRows(written, 1, "plain", guided=True), [red])
    np.testing.assert_array_equal(again.tokens, first.tokens)


def test_what_is_sent_and_what_comes_back(written):
    offer = ServiceConfig(image=written)
    asked = web._fields(json.dumps({"prompt": "red <b>", "seed": 4, "method": "plain"}).encode())
    job = Job(web._request(offer, asked), 60)
    job.begin()
    job.publish(*made(CausalRows(written, 1, "plain", guided=True), [job.request]))
    job.end(FINISHED)
    answer = web._answer(offer, job)
    assert answer["report"]["prompt"] == "red <b>" and "label" not in answer["report"]
    assert answer["report"]["cfg"] == 2.0 and answer["report"]["lossless"]
    assert np.shape(answer["tokens"]) == (written.network.seq_len, written.network.token_dim)
    shown = render.images(offer, [job])
    assert "plain: " in shown and "draft accepted" not in shown


@pytest.mark.parametrize(
    "asked, sentence",
    [
        ({}, "send a prompt"),
        ({"label": 0}, "send a prompt"),
        ({"label": 0, "prompt": "red"}, "and no label"),
        ({"prompt": 3}, "prompt is 3; it must be a text"),
        ({"prompt": "\ud800"}, "Unicode"),
        ({"prompt": "red " * 999}, "the prompt has .* tokens; it may have"),
        ({"prompt": "r" * 5000}, "5000 characters"),
        ({"prompt": "red", "seed": -1}, "seed is -1"),
    ],
)
def test_prompts_have_limits(written, asked, sentence):
    with pytest.raises(UserError, match=sentence):
        ServiceConfig(image=written).image_request(**asked)


def test_what_goes_with_what(written, classed, tmp_path):
    with pytest.raises(UserError, match="makes images of classes, not from prompts; send a label"):
        ServiceConfig(image=classed).image_request(prompt="red")
    with pytest.raises(UserError, match="a request has a label"):
        ServiceConfig(image=classed).image_request()
    known = cspd_jax.Known(np.zeros((4, 4)), np.ones(4, bool))
    with pytest.raises(UserError, match="begins an image of a causal model with nothing"):
        ServiceConfig(image=classed).image_request(0, known=known)
    with pytest.raises(UserError, match=r"has no tokenizer\.json, which prompts are read with"):
        ServiceConfig(image=dataclasses.replace(written, folder=tmp_path))
    with pytest.raises(UserError, match="1024 tokens of an image leave no room for a prompt among its 256"):
        ServiceConfig(image=nextstep_tiny.with_config(written, rows=32, columns=32))


def test_prompts_of_one_room(written):
    """They are one shape, and the room is not taken for ids."""
    bound = [prompts.bind(written, [[86, 7, 92][:n]], [92], room=5) for n in (1, 3)]
    assert bound[0].network == bound[1].network
    assert {model.params["prompts"].shape for model in bound} == {(2, 5)}
    with pytest.raises(UserError, match="room is -1"):
        prompts.bind(written, [[1]], [1], room=-1)
