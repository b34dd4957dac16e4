"""The routes of OpenAI's completions and chat completions: whole answers, and streams. Needs the extra
`demo`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from cspd_jax.apps.service import openai
from cspd_jax.apps.service.config import ServiceConfig
from cspd_jax.apps.service.engine import Engine
from cspd_jax.apps.service.jobs import FINISHED, Busy, Job, TimedOut
from cspd_jax.errors import UserError, one_line

PATHS = {"/v1/completions": False, "/v1/chat/completions": True}  # and whether they take messages
GONE = 499  # the status of what nobody reads
_LOOK = 0.03  # seconds between looks at what is new


def add_routes(app: FastAPI, offer: ServiceConfig, engine: Engine, refused: Any) -> None:
    """refused: maps a request to the answer for users who may not ask, or None."""

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if (answer := refused(request)) is not None:
            return answer
        names = [] if offer.text is None else [offer.text.name]
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "cspd-jax"} for name in names]
        return JSONResponse({"object": "list", "data": listed})

    def add(path: str, chat: bool) -> None:
        @app.post(path)
        async def complete(request: Request) -> Response:
            if (answer := refused(request)) is not None:
                return answer
            return await _complete(offer, engine, request, chat)

    for path, chat in PATHS.items():
        add(path, chat)


def is_json(request: Request) -> bool:
    """Whether the body is said to be JSON, which a form of a stranger's page cannot say."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


async def _complete(offer: ServiceConfig, engine: Engine, request: Request, chat: bool) -> Response:
    if not is_json(request):
        return _error(415, "the body must be JSON, of content type application/json")
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError):
        return _error(400, "the body is not JSON")
    jobs: list[Job] = []
    try:
        if not isinstance(body, dict):
            raise UserError("the body must be a JSON object")
        asked = await asyncio.to_thread(openai.read, offer, body, chat)
        if len(asked.requests) > engine.queue:
            raise UserError(
                f"{len(asked.requests)} texts are more than the {engine.queue} that may wait here"
            )
        for one in asked.requests:
            jobs.append(engine.submit(one))
    except Busy as busy:
        _cancel(jobs)
        return _error(503, busy)
    except openai.NoSuchModel as wrong:
        return _error(404, wrong, "model_not_found")
    except UserError as wrong:
        return _error(400, wrong)
    assert offer.text is not None
    following = _follow(asked, jobs, offer.text.config.eos_ids, request)
    if asked.stream:
        return _Stream(_events(asked, following), jobs)
    choices: Sequence[openai.Choice] = ()
    try:
        async for newest in following:
            choices = newest
    except UserError as wrong:
        return _error(504 if isinstance(wrong, TimedOut) else 500, wrong)
    finally:
        _cancel(jobs)
    if any(choice.finish is None for choice in choices) or not choices:
        return Response(status_code=GONE)  # nobody reads it
    return JSONResponse(await asyncio.to_thread(openai.answer, asked, choices, jobs))


class _Stream(StreamingResponse):
    """Whose jobs end with it, however that comes about."""

    def __init__(self, events: AsyncIterator[str], jobs: Sequence[Job]):
        super().__init__(events, media_type="text/event-stream")
        self._jobs = jobs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._jobs)


async def _follow(
    asked: openai.Asked, jobs: Sequence[Job], eos: Sequence[int], request: Request
) -> AsyncIterator[list[openai.Choice]]:
    """The choices whenever there is news of one, until all have ended or nobody reads any more; UserError for
    a job that failed."""
    seen: list[Any] = [None] * len(jobs)
    choices = [openai.Choice("", None, ()) for _ in jobs]
    while any(choice.finish is None for choice in choices):
        news = False
        for i, (job, choice) in enumerate(zip(jobs, choices)):
            job.expire()
            over, progress = job.over, job.progress
            if choice.finish is None and progress is not seen[i]:
                seen[i], news = progress, True
                choices[i] = await asyncio.to_thread(openai.choice_of, asked, job.request, progress, eos)
                if choices[i].finish is not None and not progress.complete:
                    job.end(FINISHED)  # at a stop, which the engine knows nothing of
            elif choice.finish is None and over:
                raise job.error or UserError("the service stopped before this text was finished")
        if news:
            yield list(choices)
        if await request.is_disconnected():
            return
        if not news:
            await asyncio.sleep(_LOOK)


async def _events(asked: openai.Asked, following: AsyncIterator[list[openai.Choice]]) -> AsyncIterator[str]:
    """Server-sent events: what each choice has become longer by, then [DONE]."""
    told = [""] * len(asked.requests)
    begun, ended = set(), set()
    choices: list[openai.Choice] = []
    try:
        async for choices in following:
            for i, choice in enumerate(choices):
                news = choice.text[len(told[i]) :]
                if i in ended or not (news or choice.finish or i not in begun):
                    continue
                before = "" if i in begun else asked.echoes[i]
                yield _event(openai.chunk(asked, i, before + news, choice.finish, i not in begun))
                told[i] = choice.text
                begun.add(i)
                if choice.finish:
                    ended.add(i)
        if asked.usage:
            yield _event(openai.last_chunk(asked, choices))
        yield "data: [DONE]\n\n"
    except UserError as wrong:
        yield _event(problem(wrong, None))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _cancel(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.cancel()


def problem(sentence: object, code: str | None) -> dict[str, Any]:
    """What is wrong, as OpenAI's clients expect it."""
    told = {"message": one_line(str(sentence)), "type": "invalid_request_error", "param": None, "code": code}
    return {"error": told}


def _error(status: int, sentence: object, code: str | None = None) -> Response:
    retry = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse(problem(sentence, code), status, retry)
