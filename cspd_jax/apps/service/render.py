"""What the page shows, as HTML: images and texts while they are made, and what became of their drafts."""

from __future__ import annotations

import base64
import html
import io
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from cspd_jax.apps.service.causal_rows import CausalProgress
from cspd_jax.apps.service.config import ServiceConfig
from cspd_jax.apps.service.jobs import Job
from cspd_jax.apps.service.rows import ImageProgress
from cspd_jax.apps.service.streams import TextProgress
from cspd_jax.image import pixels
from cspd_jax.masked.pool import Text as MaskedText
from cspd_jax.text import ACCEPTED, BONUS, CORRECTED
from cspd_jax.weights.tokenizers import Tokenizer, pieces

_BLUE, _ORANGE, _GREY = "#3465a4", "#e08214", "#b8b8b8"
_UNKNOWN = 225  # of a pixel that is not there yet
_SIDE = 256  # pixels on the screen
_FREE = "·"

CSS = """
.cspd { display: flex; flex-wrap: wrap; gap: 24px; }
.cspd figure { margin: 0; }
.cspd figcaption { padding: 4px 0; font-weight: 600; }
.cspd img { image-rendering: pixelated; border-radius: 4px; display: block; }
.cspd-report { border-collapse: collapse; margin-top: 12px; }
.cspd-report, .cspd-report tr, .cspd-report td, .cspd-report th { border: none !important; }
.cspd-report td, .cspd-report th { padding: 2px 20px 2px 0 !important; text-align: left; font-size: 90%; }
.cspd-legend { margin-top: 8px; font-size: 90%; }
.cspd-legend span { margin-right: 14px; }
.cspd-legend i { display: inline-block; width: 12px; height: 12px; margin-right: 4px; border-radius: 2px; }
.cspd-text { white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; line-height: 1.6; }
.cspd-text span { color: #fff; border-radius: 2px; }
.cspd-note { opacity: 0.75; }
.cspd-error { color: #c0392b; font-weight: 600; }
"""
_LEGENDS = {
    "image": ((_BLUE, "draft accepted"), (_ORANGE, "draft rejected, drawn anew"), (_GREY, "not drafted")),
    "text": ((_BLUE, "draft accepted"), (_ORANGE, "corrected"), ("#4e9a06", "gained after a whole draft")),
    "masked": ((_BLUE, "filled in the newest round"),),
}


def error(sentence: object) -> str:
    return f'<p class="cspd-error">{html.escape(str(sentence))}</p>'


def waiting(job: Job) -> str:
    return f'<p class="cspd-note">{html.escape(job.status)}, {job.seconds:.0f} s</p>'


def images(offer: ServiceConfig, jobs: Sequence[Job]) -> str:
    """The jobs side by side: picture, map of drafts, and below both the report."""
    figures = []
    for job in jobs:
        name = {"self": "speculative", "plain": "plain"}[job.request.method]
        if job.progress is None:
            figures.append(f"<figure><figcaption>{name}</figcaption>{waiting(job)}</figure>")
            continue
        tokens = f"{job.progress.known} of {len(job.progress.final)} tokens"
        figures.append(_figure(f"{name}: {tokens}", picture(offer, job.progress)))
        if job.request.method == "self" and isinstance(job.progress, ImageProgress):
            figures.append(f"<figure><figcaption>drafts</figcaption>{draft_map(job.progress)}</figure>")
    shown = f'<div class="cspd">{"".join(figures)}</div>{_legend("image") * (not offer.is_causal)}'
    return shown + _table(jobs)


def picture(offer: ServiceConfig, progress: ImageProgress | CausalProgress) -> str:
    """A data URI. Models of latents show a picture only when it is complete."""
    model = offer.image
    assert model is not None
    if model.config.vae_stride > 1 and not (progress.complete and offer.vae is not None):
        return _uri(np.full((1, 1, 1), _UNKNOWN, np.uint8))
    image = pixels.to_images(model, progress.tokens[None], offer.vae)[0]
    if not progress.complete:
        patch, side = model.config.patch_size, round(len(progress.final) ** 0.5)
        known = progress.final.reshape(side, side).repeat(patch, 0).repeat(patch, 1)
        image = np.where(known[..., None], image, _UNKNOWN).astype(np.uint8)
    return _uri(image)


def draft_map(progress: ImageProgress) -> str:
    """The token grid as SVG, coloured by what became of the drafts."""
    side = round(len(progress.final) ** 0.5)
    cells = []
    for i, (final, tested, accepted) in enumerate(zip(progress.final, progress.tested, progress.accepted)):
        colour = "none" if not final else _BLUE if accepted else _ORANGE if tested else _GREY
        cells.append(
            f'<rect x="{i % side + 0.04}" y="{i // side + 0.04}" width="0.92" height="0.92" fill="{colour}"'
            f' stroke="{_GREY}" stroke-width="0.03"/>'
        )
    size = f'width="{_SIDE}" height="{_SIDE}" viewBox="0 0 {side} {side}"'
    return f'<svg {size} role="img" aria-label="what became of the drafts">{"".join(cells)}</svg>'


def text(tokenizer: Tokenizer, prompt: Sequence[int], progress: TextProgress, job: Job) -> str:
    """The prompt, and the text after it coloured by who wrote each token."""
    colours = {ACCEPTED: _BLUE, CORRECTED: _ORANGE, BONUS: "#4e9a06"}
    new = pieces(tokenizer, [*prompt, *progress.ids])[len(prompt) :]
    parts = itertools.groupby(zip(new, progress.marks), lambda part: colours.get(part[1]))
    painted = "".join(_painted("".join(piece for piece, _ in group), colour) for colour, group in parts)
    before = html.escape(tokenizer.decode(prompt))
    return f'<div class="cspd-text">{before}{painted}</div>{_legend("text")}' + _text_report(
        job, len(progress.ids), progress.rounds, "rounds", progress.drafts
    )


def masked(tokenizer: Tokenizer, prompt: Sequence[int], mask_id: int, progress: MaskedText, job: Job) -> str:
    """The prompt, and the places after it: dots where they are free."""
    newest = max((r for r, i in zip(progress.rounds, progress.ids) if i != mask_id), default=0)

    def kind(place: tuple[int, int]) -> str:
        if place[0] == mask_id:
            return "free"
        return "new" if place[1] == newest and not progress.complete else "old"

    parts = []
    for of, group in itertools.groupby(zip(progress.ids, progress.rounds), kind):
        ids = [i for i, _ in group]
        content = _FREE * len(ids) if of == "free" else tokenizer.decode(ids)
        parts.append(_painted(content, _BLUE if of == "new" else None))
    filled = sum(i != mask_id for i in progress.ids)
    before = html.escape(tokenizer.decode(prompt))
    return f'<div class="cspd-text">{before}{"".join(parts)}</div>{_legend("masked")}' + _text_report(
        job, filled, progress.passes, "passes", progress.drafts
    )


def _text_report(job: Job, count: int, rounds: int, called: str, drafts: tuple[int, int]) -> str:
    tested, accepted = drafts
    rows: dict[str, Any] = {"tokens": count, called: rounds}
    rows |= {"drafts tested": tested, "drafts accepted": accepted}
    rows["tokens per " + {"rounds": "round", "passes": "pass"}[called]] = f"{count / max(1, rounds):.2f}"
    rows["seconds"] = f"{job.seconds:.1f}"
    cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
    return f'<table class="cspd-report">{cells}</table>'


def _table(jobs: Sequence[Job]) -> str:
    names = ("", "state", "rounds", "drafts tested", "accepted", "queue", "seconds")
    rows = []
    for job in jobs:
        tested, accepted = (0, 0) if job.progress is None else job.progress.drafts
        share = f"{accepted} ({accepted / tested:.0%})" if tested else "–"
        rounds = 0 if job.progress is None else job.progress.rounds
        name = {"self": "speculative", "plain": "plain"}[job.request.method]
        times = f"{job.queue_seconds:.2f} s", f"{job.seconds:.2f} s"
        cells = (name, job.status, rounds, tested or "–", share, *times)
        rows.append("".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    errors = "".join(error(job.error) for job in jobs if job.error is not None)
    return f'<table class="cspd-report"><tr>{head}</tr>{body}</table>{errors}'


def _figure(caption: str, source: str) -> str:
    size = f'width="{_SIDE}" height="{_SIDE}"'
    caption = html.escape(caption)
    return f'<figure><figcaption>{caption}</figcaption><img {size} alt="{caption}" src="{source}"></figure>'


def _painted(content: str, colour: str | None) -> str:
    content = html.escape(content)
    return content if colour is None else f'<span style="background:{colour}">{content}</span>'


def _legend(of: str) -> str:
    parts = (f'<span><i style="background:{colour}"></i>{meaning}</span>' for colour, meaning in _LEGENDS[of])
    return f'<div class="cspd-legend">{"".join(parts)}</div>'


def _uri(image: Any) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def png(image: Any) -> bytes:
    """A file from pixels, uint8 [H, W, C]."""
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "PNG")
    return file.getvalue()
