"""Serves a page on which plain and exact speculative generation are seen side by side."""

from __future__ import annotations

import argparse
import base64
import functools
import html
import io
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cspd_jax
from cspd_jax.check import UserError
from cspd_jax.cli._flags import progress
from cspd_jax.models import VAE, ImageModel, TextModel
from cspd_jax.networks.config import NextStepConfig

PLAIN = "plain"
RULES = {"block verification": "block", "token by token": "google", "the very tokens of plain": "match"}
MOVES = {f"self-speculation, {moves} moves ahead": moves for moves in (4, 8, 16)}
_EVERY = 0.05  # seconds between two looks at what is being made
_COLOURS = {2: "#3465a4", 3: "#c17d11", 4: "#4e9a06"}  # by `text.Trace.marks`: accepted, corrected, gained
_LEGEND = "<br>blue: accepted drafts; orange: drawn in place of a rejected one; green: gained after all"
_CSS = """.sides {display: flex; flex-wrap: wrap; gap: 32px} .sides > div {flex: 1 1 320px; max-width: 600px}
.sides img {image-rendering: pixelated; width: 320px} .sides span {color: #fff} .wrong {color: #c0392b}
.sides pre {white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6}"""


class Models(NamedTuple):
    """What the page generates with; `reads` has the tokenizers of the two language models."""

    image: Any
    vae: Any
    text: Any
    drafter: Any
    masked: Any
    reads: tuple[Any, Any]


class Side(NamedTuple):
    """How far a side has come: its newest output, its steps, and their seconds without compilation."""

    made: Any = None
    steps: int = 0
    seconds: float = 0.0
    complete: bool = False


HTML = Iterator[str]  # what is shown, again and again while it is made
Show = Callable[[str, Side], tuple[str, str]]  # the content as HTML, and what was made in how many calls


def write(streams: dict[str, Iterator[Any]], show: Show) -> HTML:
    """Takes a step of each stream in turn until all have ended, and writes them side by side meanwhile."""
    import jax

    from cspd_jax._utils.compilation import compile_seconds

    sides, written = {name: Side() for name in streams}, 0.0
    while not all(side.complete for side in sides.values()):
        for name, side in sides.items():
            if not side.complete:
                compiled, start = compile_seconds(), time.perf_counter()
                made = jax.block_until_ready(next(streams[name], None))
                took = time.perf_counter() - start - (compile_seconds() - compiled)
                ended = side._replace(seconds=side.seconds + max(0.0, took), complete=True)
                sides[name] = ended if made is None else Side(made, side.steps + 1, ended.seconds)
        if all(side.complete for side in sides.values()) or time.perf_counter() - written > _EVERY:
            columns = ""
            for name, side in sides.items():
                content, counts = show(name, side)
                counts += f"<br>{side.steps} steps, {side.seconds:.2f} s" + ", complete" * side.complete
                columns += f"<div><b>{html.escape(name)}</b><br>{content}<p>{counts}</p></div>"
            yield f'<div class="sides">{columns}</div>'
            written = time.perf_counter()


def image_methods(model: Any) -> dict[str, tuple[Any, str]]:
    """Returns the exact methods of a model, with how they denoise; a causal one drafts along chains only."""
    along = {"speculation along denoising steps": (cspd_jax.Plain(), "speculative")}
    if isinstance(model.network, cspd_jax.image.CausalTokenModel):
        return along
    return {"speculation over tokens": (cspd_jax.SelfSpeculation(), "plain")} | along


def make_image(models: Models, method: str, key: Any, wanted: Any, cfg: float) -> HTML:
    """Makes an image of a class or prompt, plainly and by a method."""
    import jax.numpy as jnp
    import numpy as np

    from cspd_jax.image import prompts

    keys, model, label = cspd_jax.row_keys(key, 1), models.image, wanted
    if isinstance(model.config, NextStepConfig):
        model, label = prompts.ask(model, [wanted]), 0
    steps, ways = {}, {PLAIN: (cspd_jax.Plain(), "plain"), method: image_methods(model)[method]}
    for name, (way, denoise) in ways.items():
        asked = cspd_jax.Options(**{**model.sampling, "cfg": cfg, "denoise": denoise})
        options = cspd_jax.image.resolve(model, way, asked)
        steps[name] = way.steps(model.network, model.params, keys, jnp.array([label]), options)

    def show(name: str, side: Side) -> tuple[str, str]:
        (known, out), content = side.made, ""
        counts = f"{np.mean(known):.0f} of {model.network.seq_len} tokens"
        if side.complete:
            calls = [made.sequential for made in out.counts.target[:2]]
            counts += f", {calls[0]} calls of the backbone and {calls[1]} of the head"
        if side.complete or models.vae is None:  # latents become a picture at the end
            file = io.BytesIO()
            cspd_jax.picture(cspd_jax.to_images(model, out.tokens, models.vae)).save(file, "PNG")
            source = base64.b64encode(file.getvalue()).decode()
            content = f'<img alt="{html.escape(name)}" src="data:image/png;base64,{source}">'
        return content, counts

    # The steps of `image.stream`, with what they count.
    return write(steps, show)


def make_text(models: Models, method: str, key: Any, prompt: str, new: int, temperature: float) -> HTML:
    """Continues a prompt, plainly and with drafts, coloured by where each token came from."""
    from cspd_jax.tokenizers import pieces

    tokenizer, streams = models.reads[0], {}
    ids = tokenizer.encode(prompt)
    for name, drafter, rule in ((PLAIN, None, None), (method, models.drafter, RULES[method])):
        options = cspd_jax.text.Options(max_new_tokens=int(new), temperature=temperature, rule=rule)
        streams[name] = cspd_jax.text.stream(key, models.text, [ids], drafter, options)

    def show(name: str, side: Side) -> tuple[str, str]:
        tokens, info = side.made
        row, marks = (a[0, : int(info.trace.lengths[0])].tolist() for a in (tokens, info.trace.marks))
        parts = list(zip(pieces(tokenizer, row), map(_COLOURS.get, marks)))[len(ids) :]
        painted = html.escape(tokenizer.decode(ids))
        for colour, group in itertools.groupby(parts, lambda part: part[1]):
            passage = html.escape("".join(piece for piece, _ in group))
            painted += passage if colour is None else f'<span style="background:{colour}">{passage}</span>'
        target, draft = (info.calls[name].sequential for name in ("target", "draft"))
        counts = f"{target} passes of the target and {draft} of the draft"
        return f"<pre>{painted}</pre>", f"{len(parts)} tokens, {counts}{_LEGEND * (name != PLAIN)}"

    return write(streams, show)


def make_masked(models: Models, method: str, key: Any, prompt: str, new: int, temperature: float) -> HTML:
    """Fills places after a prompt, step by step and by self-speculation; free ones are dots."""
    masked, model, tokenizer = cspd_jax.masked, models.masked, models.reads[1]
    asked = key, model, [tokenizer.encode(prompt)]
    options = masked.Options(max_new_tokens=int(new), temperature=temperature)
    ways: dict[str, Any] = {PLAIN: masked.Stepwise(), method: masked.SelfSpeculation(MOVES[method])}

    def show(name: str, side: Side) -> tuple[str, str]:
        free, ids = model.config.mask_ids[0], side.made.tokens[0].tolist()
        parts = ((is_free, list(group)) for is_free, group in itertools.groupby(ids, lambda i: i == free))
        text = "".join("·" * len(some) if is_free else tokenizer.decode(some) for is_free, some in parts)
        counts = f"{sum(i != free for i in ids)} of {len(ids)} tokens, {side.made.info.sequential} passes"
        return f"<pre>{html.escape(prompt + text)}</pre>", counts

    return write({name: masked.stream(*asked, way, options) for name, way in ways.items()}, show)


def told(make: Callable[..., HTML], models: Models, method: str, seed: float, *asked: Any) -> HTML:
    """Yields what a button shows: what is made, or in one sentence why not."""
    from cspd_jax.keys import seed_key

    try:
        yield from make(models, method, seed_key(int(seed or 0)), *asked)
    except UserError as wrong:
        yield f'<p class="wrong">{html.escape(str(wrong))}</p>'


def make_page(models: Models) -> Any:
    """Lays out the page, as Gradio's `Blocks`."""
    import gradio as gr

    def add_tab(name: str, make: Callable[..., HTML], methods: Any, fields: Callable[[], list[Any]]) -> None:
        """Adds the fields of a family, its buttons, and the place for what is made."""
        with gr.Tab(name):
            with gr.Row():
                own, method = fields(), gr.Dropdown(list(methods), label="Exact method, beside plain")
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1)
            with gr.Row():
                start, stop = gr.Button("Generate", variant="primary"), gr.Button("Stop")
            press = functools.partial(told, make, models)
            asked = press, [method, seed, *own], gr.HTML()
            running = start.click(*asked, show_progress="hidden", concurrency_id="one at a time")
            stop.click(None, cancels=[running])

    def image_fields() -> list[Any]:
        model = models.image
        classes = [(model.class_name(i), i) for i in range(model.config.num_classes)]
        takes = isinstance(model.config, NextStepConfig)
        what = gr.Textbox("a red bicycle", label="Prompt") if takes else gr.Dropdown(classes, label="Class")
        return [what, gr.Slider(0, 10, model.sampling.get("cfg", 1.0), label="Guidance (1 is none)")]

    def text_fields() -> list[Any]:
        prompt = gr.Textbox("Return a list of", label="Prompt")
        new = gr.Slider(1, 256, 64, step=1, label="New tokens")
        return [prompt, new, gr.Slider(0, 2, 0, label="Temperature")]

    with gr.Blocks(title="cspd-jax", analytics_enabled=False) as page:
        gr.Markdown("# cspd-jax\nThe same distribution, in fewer network calls one after the other.")
        add_tab("Images", make_image, image_methods(models.image), image_fields)
        add_tab("Text", make_text, RULES, text_fields)
        add_tab("Masked text", make_masked, MOVES, text_fields)
    return page


def load(args: argparse.Namespace) -> Models:
    """Loads the models that the flags name."""
    from cspd_jax import hub, tokenizers
    from cspd_jax.cli.text import default_draft, load_drafter

    image, target = cspd_jax.load(args.target, of=ImageModel), cspd_jax.load(args.text_target, of=TextModel)
    masked = cspd_jax.load(args.masked_model, of=TextModel)
    vae = args.vae or hub.own_vae(image) or ("kl16" if image.config.vae_stride > 1 else None)
    drafter = load_drafter(args.text_draft or default_draft(target), target, "float32")
    reads = tokenizers.load_tokenizer(target), tokenizers.load_tokenizer(masked)
    return Models(image, vae and cspd_jax.load(vae, of=VAE), target, drafter, masked, reads)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    for flag, default, meaning in (
        ("--target", "words", "image model (default: words)"),
        ("--vae", None, "autoencoder of a model of latents"),
        ("--text-target", "text-default", "causal language model (default: text-default)"),
        ("--text-draft", None, "its draft, as for cspd-jax text --draft"),
        ("--masked-model", "masked-default", "masked-diffusion language model (default: masked-default)"),
    ):
        parser.add_argument(flag, default=default, metavar="MODEL", help=meaning)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=7860, help="0 takes a free one (default: 7860)")


def run(args: argparse.Namespace) -> None:
    """Serves the page until Ctrl-C."""
    import gradio  # noqa: F401, before models are loaded

    from cspd_jax._utils import compilation

    compilation.use_cache()
    page = make_page(load(args))
    where = {"server_name": args.host, "server_port": args.port or None}
    _, url, _ = page.launch(**where, css=_CSS, footer_links=[], quiet=True, prevent_thread_lock=True)
    print(url, flush=True)
    progress("Ctrl-C stops it; what is asked for the first time is compiled first")
    page.block_thread()
