"""Completions and chat completions, asked for as OpenAI's clients do."""

import asyncio
import dataclasses
import time

import fastapi
import jax
import numpy as np
import openai
import pytest
import text_models
import word_models

import cspd_jax
from cspd_jax import text
from cspd_jax.apps.service import openai as form
from cspd_jax.apps.service.config import ServiceConfig
from cspd_jax.apps.service.streams import TextProgress, TextRows
from cspd_jax.errors import UserError

try:  # whichever the installed openai needs
    import httpx2 as httpx
except ImportError:
    import httpx


@pytest.fixture(scope="module")
def offer(tmp_path_factory):
    params = text_models.params(word_models.TARGET, scale=0.5)
    folder = word_models.save(tmp_path_factory.mktemp("model"), params, word_models.TEMPLATE)
    return ServiceConfig(text=cspd_jax.load_text(folder), drafter=text.PromptLookup())


@pytest.fixture(scope="module")
def app(offer):
    from cspd_jax.apps.service.completions import add_routes

    made = fastapi.FastAPI()
    with offer.engine(2, queue=8) as engine:
        add_routes(made, offer, engine, lambda request: None)
        made.state.engine = engine
        yield made


def ask(app, call):
    """What `call(client)` comes to."""

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(
                base_url="http://here/v1", api_key="none", http_client=http, max_retries=0
            )
            return await call(client)

    return asyncio.run(run())


async def streamed(answer):
    return [chunk async for chunk in await answer]


def generated(offer, prompt, seed=None, **options):
    """Text of the library."""
    key = None if seed is None else jax.random.key(seed)
    model, tokenizer = offer.text, offer.tokenizer
    tokens, info = text.generate(key, model, [prompt], None, text.Options(**options))
    ids = np.asarray(tokens)[0, len(prompt) : int(info.lengths[0])].tolist()
    ended = ids[-1:] == [2]
    before = tokenizer.decode(prompt)
    return ids, tokenizer.decode([*prompt, *(ids[:-1] if ended else ids)])[len(before) :], ended


def test_a_completion_is_the_text_of_the_library(offer, app):
    name, prompt = offer.text.name, [1, 7, 9]
    ids, said, ended = generated(offer, prompt, max_new_tokens=12)
    asked = {"model": name, "max_tokens": 12, "temperature": 0}
    for given in ("w1 w7 w9", prompt):
        found = ask(app, lambda c, given=given: c.completions.create(**asked, prompt=given))
        choice = found.choices[0]
        assert choice.text == said and choice.finish_reason == ("stop" if ended else "length")
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, len(ids))
        assert found.object == "text_completion" and found.model == name
    listed = ask(app, lambda c: c.models.list())
    assert [model.id for model in listed.data] == [name]


def test_several_prompts_and_choices(offer, app):
    """Choice i of a prompt has the seed and i more."""
    name, prompts = offer.text.name, [[1, 7], [1, 9, 3]]
    found = ask(
        app,
        lambda c: c.completions.create(
            model=name, prompt=prompts, n=2, max_tokens=6, temperature=0.8, seed=5, echo=True,
            extra_body={"drafts": False},
        ),
    )  # fmt: skip
    expected = [
        "w1 " + " ".join(f"w{i}" for i in prompt[1:])
        + generated(offer, prompt, seed, max_new_tokens=6, temperature=0.8)[1]
        for prompt in prompts for seed in (5, 6)
    ]  # fmt: skip
    assert [choice.text for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens == 5


def test_messages_are_answered_in_a_stream_as_at_once(offer, app, monkeypatch):
    advance = TextRows.advance
    monkeypatch.setattr(TextRows, "advance", lambda rows: (time.sleep(0.05), advance(rows))[1])
    said = [
        {"role": "system", "content": "w8"},
        {"role": "user", "content": [{"type": "text", "text": "w7"}]},
    ]
    asked = {"model": offer.text.name, "messages": said, "temperature": 0, "max_completion_tokens": 10}
    whole = ask(app, lambda c: c.chat.completions.create(**asked))
    ids, expected, _ = generated(offer, [1, 8, 7, 5], max_new_tokens=10)
    assert whole.choices[0].message.content == expected and whole.choices[0].message.role == "assistant"
    assert whole.usage.total_tokens == 4 + len(ids)
    usage = {"include_usage": True}
    chunks = ask(
        app, lambda c: streamed(c.chat.completions.create(**asked, stream=True, stream_options=usage))
    )
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == expected and len(pieces) > 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1


def test_log_probabilities_are_the_model_s(offer, app):
    prompt = [1, 7, 9]
    found = ask(
        app,
        lambda c: c.completions.create(
            model=offer.text.name, prompt=prompt, max_tokens=5, temperature=0, logprobs=3
        ),
    )
    told = found.choices[0].logprobs
    ids = generated(offer, prompt, max_new_tokens=5)[0]
    logits = text_models.logits(offer.text.network, offer.text.params, np.array([[*prompt, *ids]]))[0]
    log_p = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    rows = log_p[len(prompt) - 1 : -1]
    np.testing.assert_allclose(told.token_logprobs, rows[np.arange(len(ids)), ids], atol=1e-4)
    assert told.tokens == [f"w{i}" for i in ids]
    best = [[f"w{i}" for i in np.argsort(-row)[:3]] for row in rows]
    assert [list(others) for others in told.top_logprobs] == best
    chat = ask(
        app,
        lambda c: c.chat.completions.create(
            model=offer.text.name, messages=[{"role": "user", "content": "w7"}], max_tokens=4, temperature=0,
            logprobs=True, top_logprobs=2, stop="w99",
        ),
    )  # fmt: skip
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    for entry in content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-5)
        assert len(entry.top_logprobs) == 2 and entry.bytes == list(entry.token.encode())


def test_log_probabilities_are_of_the_text_that_is_told(offer, app):
    """Also where the tokenizer drops the space before a text's first word."""
    asked = {"prompt": "w1 w7", "max_tokens": 6, "temperature": 0, "logprobs": 1, "model": offer.text.name}
    choice = ask(app, lambda c: c.completions.create(**asked)).choices[0]
    told = choice.logprobs
    for token, place in zip(told.tokens, told.text_offset):
        assert choice.text[place:].strip().startswith(token)
    stop = choice.text[told.text_offset[2] :]
    ended = ask(app, lambda c: c.completions.create(**asked, stop=stop)).choices[0]
    assert len(ended.logprobs.tokens) == 2 == len(ended.text.split())


def test_a_text_ends_before_its_stop(offer, app):
    whole = generated(offer, [1, 7, 9], max_new_tokens=12)[1]
    stop = whole.split()[4]
    asked = {"model": offer.text.name, "prompt": "w1 w7 w9", "max_tokens": 12, "temperature": 0}
    found = ask(app, lambda c: c.completions.create(**asked, stop=[stop]))
    expected = whole[: whole.index(stop)]
    assert (found.choices[0].text, found.choices[0].finish_reason) == (expected, "stop")
    chunks = ask(app, lambda c: streamed(c.completions.create(**asked, stop=[stop], stream=True)))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    engine = app.state.engine
    assert engine.waiting == 0


def test_top_p_is_that_of_the_library(offer, app):
    asked = {"model": offer.text.name, "prompt": [1, 7], "max_tokens": 8, "temperature": 1.0, "seed": 3}
    found = ask(app, lambda c: c.completions.create(**asked, top_p=0.4, extra_body={"drafts": False}))
    expected = generated(offer, [1, 7], 3, max_new_tokens=8, temperature=1.0, top_p=0.4)
    assert found.choices[0].text == expected[1]
    assert expected[1] != generated(offer, [1, 7], 3, max_new_tokens=8, temperature=1.0)[1]


@pytest.mark.parametrize(
    "changed, error, sentence",
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "there is no model 'gpt-4'"),
        ({"prompt": 3}, openai.BadRequestError, "prompt is 3; it must be a text"),
        ({"prompt": [70]}, openai.BadRequestError, "the prompt has id 70"),
        ({"n": 17}, openai.BadRequestError, "n is 17"),
        ({"n": 9, "prompt": ["w1", "w2"]}, openai.BadRequestError, "more than 16 texts"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens is 1000000"),
        ({"temperature": -1}, openai.BadRequestError, "temperature is -1"),
        ({"top_p": 0}, openai.BadRequestError, "top_p is 0"),
        ({"stop": 3}, openai.BadRequestError, "stop is 3"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs is 21"),
        ({"logprobs": 2, "stream": True}, openai.BadRequestError, "leave out stream"),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "'presence_penalty' is not supported"),
        ({"seed": -1}, openai.BadRequestError, "seed is -1"),
        ({"seed": 2**32 - 1, "n": 2}, openai.BadRequestError, "the last choice's seed, is 4294967296"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "is for stream: true"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens is 0; it must be at least 1"),
        ({"suffix": "w3"}, openai.BadRequestError, "'suffix' is not supported"),
        ({"prompt": "   "}, openai.BadRequestError, "the prompt has no tokens"),
        ({"logprobs": 2, "echo": True}, openai.BadRequestError, "leave out echo"),
        ({"stream": True, "stream_options": {"usage": True}}, openai.BadRequestError, "with include_usage"),
        ({"stream_options": []}, openai.BadRequestError, "stream_options is []"),
        ({"extra_body": {"drafts": 0}}, openai.BadRequestError, "drafts is 0; it must be true or false"),
        ({"extra_body": {"user": 0}}, openai.BadRequestError, "user is 0; it must be a text"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(offer, app, changed, error, sentence):
    asked = {"model": offer.text.name, "prompt": "w1", "max_tokens": 4} | changed
    with pytest.raises(error) as caught:
        ask(app, lambda c: c.completions.create(**asked))
    assert sentence in caught.value.body["message"] and "\n" not in caught.value.body["message"]


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"messages": []}, "messages is"),
        ({"messages": [{"role": "user"}]}, "it must have a content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "which is text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "w7"}]}]}, "which is text"),
        ({"messages": [{"role": "banana", "content": "w7"}]}, "one of system, developer, user"),
        ({"messages": [{"role": "user", "content": "w7", "name": "Ann"}]}, "and nothing else"),
        ({"max_completion_tokens": 2, "max_tokens": -5}, "max_tokens is -5"),
        ({"max_completion_tokens": 2, "max_tokens": 3}, "say the same; give one of them"),
        ({"top_logprobs": 2}, "top_logprobs is for logprobs: true"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'tools' is not supported"),
        ({"response_format": {"type": "json_object"}}, "'response_format' is not supported"),
    ],
)
def test_messages_that_cannot_be_answered(offer, app, changed, sentence):
    asked = {"model": offer.text.name, "messages": [{"role": "user", "content": "w7"}]} | changed
    with pytest.raises(openai.BadRequestError) as caught:
        ask(app, lambda c: c.chat.completions.create(**asked))
    assert sentence in caught.value.body["message"]


def test_a_model_without_a_template_takes_no_messages(offer):
    bare = dataclasses.replace(offer, text=cspd_jax.load_text("text-default"))
    with pytest.raises(UserError, match="no chat template, so it takes no messages; use /v1/completions"):
        form.read(bare, {"messages": [{"role": "user", "content": "x"}]}, True)


def test_without_a_seed_every_prompt_is_a_new_draw(offer):
    asked = [form.read(offer, {"prompt": ["w1", [1]], "n": 2}, False) for _ in range(2)]
    seeds = [request.seed for one in asked for request in one.requests]
    assert len(set(seeds)) == 8 and [b - a for a, b in zip(seeds[::2], seeds[1::2])] == [1] * 4
    same = form.read(offer, {"prompt": ["w1", [1]], "n": 2, "seed": 5}, False)
    assert [request.seed for request in same.requests] == [5, 6, 5, 6]


def test_a_prompt_that_is_no_text(offer):
    with pytest.raises(UserError, match="is no text: character 1 is not Unicode"):
        form.read(offer, {"prompt": "w\udcff"}, False)


def test_a_body_of_another_type(app):
    """As a form sends it, which pages of strangers may. The names of types have no case."""

    async def run(kind):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http:
            return await http.post("/v1/completions", content=b"{}", headers={"content-type": kind})

    answer = asyncio.run(run("text/plain"))
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    assert asyncio.run(run("Application/JSON; charset=utf-8")).status_code == 400


def test_what_may_become_a_stop_is_held_back(offer):
    asked = form.read(offer, {"prompt": "w1", "stop": ["w7 w9"]}, False)
    progress = TextProgress([3, 7], [1, 1], 1, (0, 0), False)
    choice = form.choice_of(asked, asked.requests[0], progress, (2,))
    assert choice == form.Choice(" w3 ", None, (3, 7))
    more = progress._replace(ids=[3, 7, 8])
    assert form.choice_of(asked, asked.requests[0], more, (2,)).text == " w3 w7 w8"
    ended = progress._replace(ids=[3, 7, 9], complete=False)
    assert form.choice_of(asked, asked.requests[0], ended, (2,)) == form.Choice(" w3 ", "stop", (3, 7, 9))
