"""The page, on Gradio: images, text and masked text while they are made. Needs the extra `demo`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr
from fastapi import FastAPI
from starlette.routing import Mount

from cspd_jax.apps.service import brush, render
from cspd_jax.apps.service.config import MOST_CHARACTERS, MOST_NEW, MOST_SEED, PLACES, ServiceConfig
from cspd_jax.apps.service.engine import Engine
from cspd_jax.apps.service.jobs import Job
from cspd_jax.errors import UserError
from cspd_jax.weights.tokenizers import load_tokenizer

_LOOK = 0.1  # seconds between pictures
_VISITORS = 32  # whose requests are followed at once; the engine has its own, stricter bounds
_REMEMBERED = 128  # visitors; of each Gradio keeps some 100 kB for ever, by default of 10,000
_NO_MODEL = "This service was started without such a model."


def mount_page(
    app: FastAPI, offer: ServiceConfig, engine: Engine, login: tuple[str, str] | None = None
) -> FastAPI:
    """Puts the page at the root of an application, and returns the page's own."""
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    gr.mount_gradio_app(
        app,
        make_page(offer, engine),
        path="/",
        auth=login,
        theme=theme,
        css=render.CSS,
        head=brush.script(),
        footer_links=[],
        max_file_size=1024,
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
    )
    page: Any = next(route.app for route in reversed(app.routes) if isinstance(route, Mount))
    return page


def end_streams(app: FastAPI) -> None:
    """Ends the connections that open pages hold, from the thread of the server."""
    for route in app.routes:
        if isinstance(page := getattr(route, "app", None), gr.routes.App):
            page.stop_event.set()


def make_page(offer: ServiceConfig, engine: Engine) -> gr.Blocks:
    with gr.Blocks(title="cspd-jax", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown("# cspd-jax\nExact speculative decoding: fewer steps in sequence, the same distribution.")
        with gr.Tab("Images"):
            _images(offer, engine)
        with gr.Tab("Text"):
            _text(offer, engine)
        with gr.Tab("Masked text"):
            _masked(offer, engine)
    page.state_session_capacity = _REMEMBERED
    return page.queue(max_size=2 * _VISITORS, default_concurrency_limit=_VISITORS)


def _images(offer: ServiceConfig, engine: Engine) -> None:
    model = offer.image
    if model is None:
        gr.Markdown(_NO_MODEL)
        return
    classes = [(model.class_name(label), label) for label in range(model.config.num_classes)]
    by_prompt = offer.takes_prompts
    first = min(0, len(classes) - 1)
    prompt = gr.Textbox(
        "a red bicycle", lines=2, label="Prompt", max_length=MOST_CHARACTERS, visible=by_prompt
    )
    with gr.Row():
        label = gr.Dropdown([*classes, ("no class", -1)], value=first, label="Class", visible=not by_prompt)
        seed = _seed()
        cfg = gr.Slider(0, 10, value=offer.cfg, step=0.1, label="Guidance (1 is none)")
    beside = gr.Checkbox(True, label="Plain sampling beside it")
    if not offer.is_causal:
        with gr.Accordion("Begin with a picture: paint over what is to be made anew", open=False):
            gr.HTML(brush.board(model))
    drawn = gr.Textbox(visible=False)

    def generate(what: Any, seed: float, cfg: float, beside: bool, drawn: str) -> Iterator[str]:
        known = brush.from_page(model, offer.vae, drawn)
        methods = ("self", "plain") if beside else ("self",)
        named = {"prompt" if by_prompt else "label": what, "seed": _whole(seed), "cfg": cfg}
        asked = [offer.image_request(**named, method=method, known=known) for method in methods]
        yield from follow(engine, asked, lambda jobs: render.images(offer, jobs))

    what = prompt if by_prompt else label
    _buttons(generate, [what, seed, cfg, beside, drawn], None if offer.is_causal else brush.READ)


def _text(offer: ServiceConfig, engine: Engine) -> None:
    tokenizer = offer.tokenizer
    if tokenizer is None:
        gr.Markdown(_NO_MODEL)
        return
    prompt = gr.Textbox("Return a list of", lines=3, label="Prompt", max_length=4000)
    with gr.Row():
        new = gr.Slider(1, MOST_NEW, value=128, step=1, label="New tokens")
        temperature, seed = _temperature(), _seed()
    drafting = gr.Checkbox(True, label="Speculative")

    def generate(prompt: str, new: float, temperature: float, seed: float, drafting: bool) -> Iterator[str]:
        asked = offer.text_request(tokenizer, prompt, _whole(new), temperature, _whole(seed), drafting)

        def shown(jobs: Sequence[Job]) -> str:
            progress = jobs[0].progress
            if progress is None:
                return render.waiting(jobs[0])
            return render.text(tokenizer, asked.prompt, progress, jobs[0])

        yield from follow(engine, [asked], shown)

    _buttons(generate, [prompt, new, temperature, seed, drafting])


def _masked(offer: ServiceConfig, engine: Engine) -> None:
    model = offer.masked
    tokenizer = None if model is None else load_tokenizer(model)
    if model is None or tokenizer is None:
        gr.Markdown(_NO_MODEL)
        return
    mask_id = model.config.mask_ids[0]
    prompt = gr.Textbox("Return a list of", lines=3, label="Prompt", max_length=4000)
    with gr.Row():
        places = gr.Dropdown(list(PLACES), value=PLACES[-1], label="Places")
        temperature, seed = _temperature(), _seed()
    drafting = gr.Checkbox(True, label="Speculative")

    def generate(prompt: str, places: int, temperature: float, seed: float, drafting: bool) -> Iterator[str]:
        asked = offer.masked_request(tokenizer, prompt, places, temperature, _whole(seed), drafting)

        def shown(jobs: Sequence[Job]) -> str:
            progress = jobs[0].progress
            if progress is None:
                return render.waiting(jobs[0])
            return render.masked(tokenizer, asked.prompt, mask_id, progress, jobs[0])

        yield from follow(engine, [asked], shown)

    _buttons(generate, [prompt, places, temperature, seed, drafting])


def follow(engine: Engine, asked: Sequence[Any], shown: Callable[[Sequence[Job]], str]) -> Iterator[str]:
    """Submits the requests and yields what is to be seen of them until all have ended. Whoever stops reading
    cancels them."""
    jobs: list[Job] = []
    try:
        for request in asked:
            jobs.append(engine.submit(request))
        over = False
        while not over:
            for job in jobs:
                job.expire()
            over = all(job.over for job in jobs)
            content = shown(jobs)
            errors = "".join(render.error(job.error) for job in jobs if job.error is not None)
            yield content if len(jobs) > 1 else content + errors * ("cspd-error" not in content)
            if not over:
                time.sleep(_LOOK)
    finally:
        for job in jobs:
            job.cancel()


def _buttons(generate: Callable[..., Iterator[str]], inputs: list[Any], read: str | None = None) -> None:
    """Generate and cancel, and the place for what comes. read: JavaScript that the inputs go through."""

    def told(*values: Any) -> Iterator[str]:
        try:
            yield from generate(*values)
        except UserError as wrong:
            yield render.error(wrong)

    with gr.Row():
        start = gr.Button("Generate", variant="primary")
        stop = gr.Button("Cancel")
    shown = gr.HTML()
    running = start.click(told, inputs, shown, show_progress="hidden", api_visibility="private", js=read)
    stop.click(None, cancels=[running], api_visibility="private")


def _seed() -> gr.Number:
    return gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MOST_SEED)


def _temperature() -> gr.Slider:
    return gr.Slider(0, 2, value=0, step=0.05, label="Temperature")


def _whole(value: Any) -> Any:
    """A whole number as an int; anything else is left to the checks."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
