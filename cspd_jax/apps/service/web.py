"""The HTTP side: images as JSON, health, numbers for Prometheus, and the page. Needs the extra `demo`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cspd_jax.apps.service import render, repaint
from cspd_jax.apps.service.completions import GONE, PATHS, add_routes, is_json, problem
from cspd_jax.apps.service.config import ServiceConfig
from cspd_jax.apps.service.engine import Engine
from cspd_jax.apps.service.hosts import refusal as host_refusal
from cspd_jax.apps.service.jobs import Busy, Cancelled, Job, TimedOut
from cspd_jax.apps.service.rows import ImageRequest
from cspd_jax.errors import UserError, one_line
from cspd_jax.image import pixels

LARGEST_BODY = 64 * 1024
SLOWEST_BODY = 10.0  # seconds
_FIELDS = ("label", "prompt", "seed", "cfg", "method", *repaint.FIELDS)
_WITH_PICTURES = ("/v1/images", "/gradio_api/queue/join")
_METHODS = {"/v1/images": "POST", "/healthz": "GET", "/metrics": "GET", "/v1/models": "GET"}
_METHODS |= dict.fromkeys(PATHS, "POST")
_OF_OPENAI = ("/v1/models", *PATHS)
_LOOK = 0.25  # seconds between looks at whether the client is still there
_OWN = (
    b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; base-uri 'self'; form-action 'self';"
    b" object-src 'none'"
)


def make_app(
    offer: ServiceConfig,
    engine: Engine,
    *,
    login: tuple[str, str] | None = None,
    hosts: Sequence[str] = (),
) -> FastAPI:
    """The application. The engine must be started by the caller, who also stops it.

    login: user and password, for everything but the health.
    hosts: names by which it is reached, besides addresses and localhost.
    """
    from cspd_jax.apps.service.page import mount_page

    app = FastAPI(title="cspd-jax", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        status = 200 if engine.state == "ready" else 503
        return JSONResponse({"status": engine.state, "waiting": engine.waiting, "busy": engine.busy}, status)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if not allowed(request, login):
            return _unknown_user()
        told = engine.metrics.text(waiting=engine.waiting, busy=engine.busy)
        return PlainTextResponse(told, media_type="text/plain; version=0.0.4")

    @app.post("/v1/images")
    async def images(request: Request) -> Response:
        if not allowed(request, login):
            return _unknown_user()
        if not is_json(request):
            return _error(415, "the body must be JSON, of content type application/json")
        try:
            asked = _fields(await request.body())
            job = engine.submit(await asyncio.to_thread(_request, offer, asked))
        except Busy as busy:
            return _error(503, busy, {"Retry-After": "1"})
        except UserError as wrong:
            return _error(422, wrong)
        await _ended(job, request)
        if job.error is not None:
            statuses = {TimedOut: 504, Cancelled: GONE}
            return _error(statuses.get(type(job.error), 500), job.error)
        return JSONResponse(await asyncio.to_thread(_answer, offer, job))

    add_routes(app, offer, engine, lambda request: None if allowed(request, login) else _unknown_user())
    page = mount_page(app, offer, engine, login)
    for part in (app, page):  # the page is asked for whatever has no route here
        for status in (404, 405):
            part.add_exception_handler(status, _nothing_there)
    app.add_middleware(_Guard, hosts=tuple(hosts))  # type: ignore[arg-type]
    return app


async def _ended(job: Job, request: Request) -> None:
    """Waits for the end of a job, which comes early if the client goes away."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def tell(_: Job) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    job.when_ended(tell)
    try:
        while not job.over:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _LOOK)
            job.expire()
            if not job.over and await request.is_disconnected():
                job.cancel()
    finally:
        job.cancel()  # without effect, unless the server is stopping


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a request; UserError for what is none."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise UserError("the body is not JSON") from None
    if not isinstance(asked, dict):
        raise UserError('the body must be a JSON object, for example {"label": 3, "seed": 0}')
    unknown = [name for name in asked if name not in _FIELDS]
    if unknown:
        raise UserError(f"{unknown[0]!r:.80} is no field of a request; it has {', '.join(_FIELDS)}")
    return {name: value for name, value in asked.items() if value is not None}


def _request(offer: ServiceConfig, asked: dict[str, Any]) -> ImageRequest:
    """The request of these fields, whose picture is encoded."""
    plain = {name: value for name, value in asked.items() if name not in repaint.FIELDS}
    request = offer.image_request(**plain)
    assert offer.image is not None
    if (known := repaint.from_fields(offer.image, offer.vae, asked)) is None:
        return request
    return offer.image_request(**plain, known=known)


def _answer(offer: ServiceConfig, job: Job) -> dict[str, Any]:
    assert offer.image is not None
    found: dict[str, Any] = {}
    if offer.image.config.vae_stride == 1 or offer.vae is not None:
        image = pixels.to_images(offer.image, job.progress.tokens[None], offer.vae)[0]
        found["png"] = base64.b64encode(render.png(image)).decode()
    else:
        found["tokens"] = job.progress.tokens.tolist()
    return {**found, "report": report(offer, job)}


def report(offer: ServiceConfig, job: Job) -> dict[str, Any]:
    """What a finished image has cost."""
    assert offer.image is not None
    request, progress = job.request, job.progress
    tested, accepted = progress.drafts
    if request.prompt is None:
        asked = {"label": request.label, "class": offer.image.class_name(request.label)}
    else:
        asked = {"prompt": request.prompt.text}
    return {
        **asked,
        "seed": request.seed,
        "cfg": request.cfg,
        "method": request.method,
        "tokens": len(progress.tokens),
        "known": 0 if request.known is None else int(request.known.count),
        "rounds": progress.rounds,
        "tested": tested,
        "accepted": accepted,
        "acceptance": accepted / tested if tested else None,
        "lossless": progress.truncated == 0,
        "queue_seconds": round(job.queue_seconds, 4),
        "seconds": round(job.seconds, 4),
    }


def allowed(request: Request, login: tuple[str, str] | None) -> bool:
    """Whether a request carries the user and the password."""
    if login is None:
        return True
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    expected = base64.b64encode(":".join(login).encode())
    return kind.lower() == "basic" and secrets.compare_digest(given.strip().encode(), expected)


async def _nothing_there(request: Request, _: Exception) -> Response:
    method, path = request.method, f"{request.url.path!r:.80}"
    if (allowed := _METHODS.get(request.url.path)) is not None:
        return _error(405, f"{path} takes {allowed}, not {method}", {"Allow": allowed})
    nothing = f"there is nothing at {path} for {method}"
    if request.url.path.startswith(_OF_OPENAI):
        return JSONResponse(problem(nothing, None), 404)
    return _error(404, nothing)


def _unknown_user() -> Response:
    return _error(401, "this service asks for a user and a password", {"WWW-Authenticate": "Basic"})


def _error(status: int, sentence: object, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": one_line(str(sentence))}, status, headers)


class _Guard:
    """Before everything: requests name a known host, bodies are small and come quickly, and pages load
    nothing from elsewhere."""

    def __init__(self, app: Any, hosts: tuple[str, ...]):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":  # which pages of any origin may open, and nothing here uses
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = (b"content-security-policy", _OWN), (b"x-content-type-options", b"nosniff")
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        refusal, body = None, bytearray()
        largest = repaint.LARGEST if scope["path"] in _WITH_PICTURES else LARGEST_BODY
        if (unknown := host_refusal(dict(scope["headers"]), self._hosts)) is not None:
            refusal = _error(421, unknown)
        try:
            async with asyncio.timeout(SLOWEST_BODY):
                more = scope["method"] not in ("GET", "HEAD")
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > largest:
                        refusal = _error(413, f"the body of a request may have {largest // 1024} KiB")
                        break
        except TimeoutError:
            refusal = _error(408, f"the body of a request must come within {SLOWEST_BODY:g} seconds")
        except asyncio.CancelledError:  # by the server, which ends
            refusal = _error(503, "the service is stopping; try again later")
        if refusal is not None:
            await refusal(scope, receive, send_guarded)
            return
        whole = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_whole() -> Any:
            return whole.pop() if whole else await receive()

        await self._app(scope, receive_whole, send_guarded)
