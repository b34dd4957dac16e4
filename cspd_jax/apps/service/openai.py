"""Requests and answers in the form of OpenAI's completions and chat completions.

A request becomes one text request for each choice; what comes of them becomes the objects that OpenAI's
clients read. What such a request may say and this service does not do is refused, not ignored.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cspd_jax.apps.service.config import MOST_NEW, ServiceConfig
from cspd_jax.apps.service.streams import MOST_LOGPROBS, TextProgress, TextRequest
from cspd_jax.errors import UserError, check_whole, shown
from cspd_jax.text import NO_TOKEN
from cspd_jax.weights.chat import chat_ids
from cspd_jax.weights.tokenizers import Tokenizer

_MOST_CHOICES = 16  # of all prompts of a request
_MOST_STOPS, _LONGEST_STOP = 4, 200
_NEW = 16  # of a completion that does not say how many
_BOTH = ("model", "n", "seed", "stream", "stream_options", "stop", "temperature", "top_p", "max_tokens",
         "user", "logprobs", "drafts")  # fmt: skip
_FIELDS = {False: ("prompt", "echo"), True: ("messages", "max_completion_tokens", "top_logprobs")}
_ROLES = ("system", "developer", "user", "assistant", "tool")
# What clients send to ask for nothing, by field; null always is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0), "logit_bias": ({},), "best_of": (1,),
    "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "response_format": ({"type": "text"},), "store": (False,), "metadata": ({},), "service_tier": ("auto",),
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "echo": (False,), "top_logprobs": (0,),
}  # fmt: skip


class NoSuchModel(UserError):
    """The request names a model that the service does not have."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request of a client.

    requests: one for each choice, prompt by prompt.
    tokenizer: of the model.
    model: its name.
    chat: whether the answer is a message.
    stream: whether it is sent as it is made.
    usage: whether a stream ends with the numbers of tokens.
    stops: a text ends before the first of these.
    echoes: what each choice begins with: its prompt, if that was asked for.
    n: choices of each prompt.
    """

    requests: tuple[TextRequest, ...]
    tokenizer: Tokenizer
    model: str
    chat: bool
    stream: bool
    usage: bool
    stops: tuple[str, ...]
    echoes: tuple[str, ...]
    n: int
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


def read(offer: ServiceConfig, body: Mapping[str, Any], chat: bool) -> Asked:
    """The request that a body asks for; UserError for any that cannot be served."""
    model, tokenizer = offer.text, offer.tokenizer
    if model is None or tokenizer is None:
        raise UserError("this service has no language model that reads text")
    if (name := body.get("model")) not in (None, model.name):
        raise NoSuchModel(f"there is no model {shown(name)}; this service has {model.name}")
    own = (*_BOTH, *_FIELDS[chat])
    if unknown := [key for key in body if key not in own and not _is_nothing(key, body[key])]:
        raise UserError(f"{shown(unknown[0])} is not supported here; a request may have {', '.join(own)}")
    n, seed = _whole(body, "n", 1), _whole(body, "seed", 0)
    check_whole("n", n, 1, _MOST_CHOICES)
    check_whole("seed + n - 1, the last choice's seed,", seed + n - 1, 0, 2**32 - 1)
    prompts: list[Any] = [_of_messages(offer, tokenizer, body)] if chat else _prompts(body)
    if len(prompts) * n > _MOST_CHOICES:
        raise UserError(f"{len(prompts)} prompts with {n} choices each are more than {_MOST_CHOICES} texts")
    said = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    for name in said:
        check_whole(name, body[name], 1, MOST_NEW)
    if len(said) == 2:
        raise UserError("max_completion_tokens and max_tokens say the same; give one of them")
    new = int(body[said[0]]) if said else MOST_NEW if chat else _NEW
    temperature, top_p = (1.0 if body.get(key) is None else body[key] for key in ("temperature", "top_p"))
    stream, more = _flag(body, "stream"), body.get("stream_options")
    if more is not None and (not isinstance(more, Mapping) or more.keys() - {"include_usage"}):
        raise UserError(f"stream_options is {shown(more)}; it must be an object with include_usage")
    if more and not stream:
        raise UserError("stream_options is for stream: true")
    if not isinstance(body.get("user", ""), str | None):
        raise UserError(f"user is {shown(body['user'])}; it must be a text")
    logprobs = _logprobs(body, chat)
    if logprobs is not None and stream:
        raise UserError("logprobs are known when a text is complete; leave out stream, or logprobs")
    if logprobs is not None and not chat and _flag(body, "echo"):
        raise UserError("logprobs are of what is made, not of the prompt; leave out echo, or logprobs")
    drafting = body.get("drafts") is None or _flag(body, "drafts")
    fresh = body.get("seed") is None
    seeds = [secrets.randbelow(2**32 - n) if fresh else seed for _ in prompts]
    requests = tuple(
        offer.text_request(tokenizer, prompt, new, temperature, first + choice, drafting, top_p, logprobs)
        for prompt, first in zip(prompts, seeds)
        for choice in range(n)
    )
    usage = stream and _flag(more or {}, "include_usage")
    echoes: tuple[str, ...] = ("",) * len(requests)
    if not chat and _flag(body, "echo"):
        given = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]
        echoes = tuple(prompt for prompt in given for _ in range(n))
    return Asked(requests, tokenizer, model.name, chat, stream, usage, _stops(body), echoes, n)


def _is_nothing(name: str, value: Any) -> bool:
    same = (value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(name, ()))
    return value is None or any(same)


def _whole(body: Mapping[str, Any], name: str, default: int) -> int:
    value = default if body.get(name) is None else body[name]
    check_whole(name, value, 0, 2**32 - 1)
    return int(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and value is not True and value is not False:
        raise UserError(f"{name} is {shown(value)}; it must be true or false")
    return bool(value)


def _prompts(body: Mapping[str, Any]) -> list[Any]:
    """Texts or lists of ids: one, or several."""
    prompt = body.get("prompt")
    ids = lambda one: isinstance(one, list) and bool(one) and all(type(i) is int for i in one)
    if isinstance(prompt, str) or ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or ids(one) for one in prompt):
        return prompt
    raise UserError(f"prompt is {shown(prompt)}; it must be a text, a list of ids, or a list of these")


def _of_messages(offer: ServiceConfig, tokenizer: Tokenizer, body: Mapping[str, Any]) -> list[int]:
    assert offer.text is not None
    template = offer.template
    if template is None:
        raise UserError(
            f"{offer.text.name} has no chat template, so it takes no messages; use /v1/completions"
        )
    said = body.get("messages")
    if not isinstance(said, list) or not said:
        raise UserError(f"messages is {shown(said)}; it must be a list of objects with role and content")
    return chat_ids(tokenizer, template, [_message(one) for one in said])


def _message(one: Any) -> dict[str, str]:
    parts = one.items() if isinstance(one, Mapping) else ()
    said = {key: value for key, value in parts if value not in (None, []) or key == "content"}
    content = said.get("content")
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(part["text"] for part in content)
    if said.keys() != {"role", "content"} or said["role"] not in _ROLES or not isinstance(content, str):
        raise UserError(
            f"a message is {shown(one)}; it must have a content, which is text, and a role, one of"
            f" {', '.join(_ROLES)}, and nothing else"
        )
    return {"role": said["role"], "content": content}


def _is_text(part: Any) -> bool:
    """Whether a part of a content is {"type": "text", "text": ...}."""
    fits = isinstance(part, Mapping) and part.keys() == {"type", "text"} and part["type"] == "text"
    return fits and isinstance(part["text"], str)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    fits = isinstance(stops, list) and len(stops) <= _MOST_STOPS
    if not fits or not all(isinstance(s, str) and 0 < len(s) <= _LONGEST_STOP for s in stops):
        raise UserError(f"stop is {shown(stop)}; it must be a text or up to {_MOST_STOPS} texts")
    return tuple(stops)


def _logprobs(body: Mapping[str, Any], chat: bool) -> int | None:
    """How many alternatives to each token are told; None for no numbers at all."""
    if not chat:
        if body.get("logprobs") is None:
            return None
        return check_top("logprobs", body["logprobs"])
    top = 0 if body.get("top_logprobs") is None else check_top("top_logprobs", body["top_logprobs"])
    if not _flag(body, "logprobs"):
        if top:
            raise UserError("top_logprobs is for logprobs: true")
        return None
    return top


def check_top(name: str, value: Any) -> int:
    check_whole(name, value, 0, MOST_LOGPROBS)
    return int(value)


@dataclasses.dataclass(frozen=True)
class Choice:
    """How far a choice has come.

    text: of it, as far as it can be told: not what may become a stop, nor half a character.
    finish: "stop" or "length" when it has ended, else None.
    ids: of its tokens.
    """

    text: str
    finish: str | None
    ids: tuple[int, ...]


def choice_of(
    asked: Asked, request: TextRequest, progress: TextProgress | None, eos: Sequence[int]
) -> Choice:
    """What there is of a choice after some round."""
    if progress is None:
        return Choice("", None, ())
    ids, complete = tuple(progress.ids), progress.complete
    ended = bool(ids) and ids[-1] in eos
    shown_ids = ids[:-1] if ended else ids
    before = asked.tokenizer.decode(request.prompt)
    text = asked.tokenizer.decode([*request.prompt, *shown_ids])[len(before) :]
    found = [place for stop in asked.stops if (place := text.find(stop)) >= 0]
    if found:
        waits = request.logprobs is not None and not complete  # they are told of a complete text
        return Choice(text[: min(found)], None if waits else "stop", ids)
    if ids and ids[-1] == NO_TOKEN:
        raise UserError("the model's numbers are not finite here, so the text cannot go on")
    if complete:
        return Choice(text, "stop" if ended else "length", ids)
    text = text.rstrip("�")
    held = max((_overlap(text, stop) for stop in asked.stops), default=0)
    return Choice(text[: len(text) - held], None, ids)


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text a stop may begin with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def answer(asked: Asked, choices: Sequence[Choice], jobs: Sequence[Any]) -> dict[str, Any]:
    """The object of a whole answer."""
    made = []
    for index, (choice, job) in enumerate(zip(choices, jobs)):
        logprobs, before = None, asked.echoes[index]
        if job.request.logprobs is not None:
            logprobs = _told_logprobs(asked, choice, job.request, job.progress, len(before))
        text = before + choice.text
        said = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
        made.append({"index": index, **said, "logprobs": logprobs, "finish_reason": choice.finish})
    return {**_head(asked, False), "choices": made, "usage": usage(asked, choices)}


def chunk(asked: Asked, index: int, text: str, finish: str | None, first: bool) -> dict[str, Any]:
    """The object of a piece of a streamed answer."""
    if asked.chat:
        role = {"role": "assistant"} if first else {}
        said: dict[str, Any] = {"delta": {**role, **({"content": text} if text or first else {})}}
    else:
        said = {"text": text}
    return {
        **_head(asked, True),
        "choices": [{"index": index, **said, "logprobs": None, "finish_reason": finish}],
        **({"usage": None} if asked.usage else {}),
    }


def last_chunk(asked: Asked, choices: Sequence[Choice]) -> dict[str, Any]:
    """The object that ends a stream whose usage was asked for."""
    return {**_head(asked, True), "choices": [], "usage": usage(asked, choices)}


def _head(asked: Asked, piece: bool) -> dict[str, Any]:
    kind = ("chat.completion" + ".chunk" * piece) if asked.chat else "text_completion"
    prefix = "chatcmpl" if asked.chat else "cmpl"
    return {"id": f"{prefix}-{asked.id}", "object": kind, "created": asked.created, "model": asked.model}


def usage(asked: Asked, choices: Sequence[Choice]) -> dict[str, int]:
    """Tokens of the prompts, each counted once however many choices it has, and of what was made."""
    prompts = sum(len(request.prompt) for request in asked.requests[:: asked.n])
    made = sum(len(choice.ids) for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


def _told_logprobs(
    asked: Asked, choice: Choice, request: TextRequest, progress: TextProgress, offset: int
) -> dict[str, Any]:
    """The log probabilities of a choice's tokens at temperature 1, and of the most probable ones; as far as
    its text goes. offset: of the text in what is told."""
    piece, top = asked.tokenizer.decode, request.logprobs or 0
    # Texts are read after the prompt: some tokenizers drop the space that one begins with.
    given = piece(request.prompt)
    after = lambda ids: len(piece([*request.prompt, *ids])) - len(given)
    rows: list[tuple[str, int, float, list[tuple[str, float]]]] = []
    begins = 0
    for number, (token, score) in enumerate(zip(choice.ids, progress.scores), start=1):
        if begins >= len(choice.text):
            break
        others = [(piece([i]), value) for i, value in score.best[:top]]
        rows.append((piece([token]), offset + begins, score.logprob, others))
        begins = after(choice.ids[:number])
    if not asked.chat:
        best: list[dict[str, float]] = []
        for *_, others in rows:
            best.append({})
            for text, value in others:
                best[-1].setdefault(text, value)  # of equal texts the most probable one
        return {
            "tokens": [text for text, *_ in rows],
            "token_logprobs": [value for _, _, value, _ in rows],
            "top_logprobs": best if top else None,
            "text_offset": [place for _, place, _, _ in rows],
        }

    def entry(text: str, value: float) -> dict[str, Any]:
        whole = "\ufffd" not in text  # a part of a character has no text of its own
        return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}

    content = [
        {**entry(text, value), "top_logprobs": [entry(*other) for other in others]}
        for text, _, value, others in rows
    ]
    return {"content": content, "refusal": None}
