"""Serves a page that shows plain and exact speculative generation side by side."""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import cspd_jax
from cspd_jax import hub, tokenizers
from cspd_jax._utils.compilation import compile_seconds, use_cache
from cspd_jax.check import UserError
from cspd_jax.cli._flags import progress
from cspd_jax.cli.text import default_draft, load_drafter
from cspd_jax.info import Generated
from cspd_jax.keys import seed_key
from cspd_jax.models import VAE, ImageModel, TextModel
from cspd_jax.networks.nextstep import NextStepConfig

Array = jax.Array
RULES = {
    "block verification": "block",
    "token by token": "google",
    "the very tokens of plain": "match",
}
MOVES = {f"self-speculation, {moves} moves ahead": moves for moves in (4, 8, 16)}
# The meaning of each value of `Trace.marks`.
MARKS = {
    2: "accepted draft",
    3: "in place of a rejected draft",
    4: "gained after all",
}
_COLOURS = dict(zip(MARKS.values(), ("blue", "orange", "green")))
_WIDTH = 320  # the width of a picture, in pixels


class Models(NamedTuple):
    """The models of the page. `reads` has the tokenizers of the two language
    models."""

    image: ImageModel
    vae: Any
    text: TextModel
    drafter: Any
    masked: TextModel
    reads: tuple[Any, Any]


class Side(NamedTuple):
    """The progress of one side of the page.

    made: the newest output.
    steps: the number of steps taken.
    seconds: the seconds of these steps without compilation.
    complete: whether the side is finished.
    """

    made: Any = None
    steps: int = 0
    seconds: float = 0.0
    complete: bool = False


# Yields, after every step, the content and the cost of the plain and of the exact side.
Shown = Iterator[list[object]]
Show = Callable[[Side], tuple[object, str]]


def side_by_side(streams: list[Iterator[Generated]], show: Show) -> Shown:
    """Takes steps of all streams in turn until all have ended. Yields what is to be
    shown after each turn."""
    sides = [Side() for _ in streams]
    while not all(side.complete for side in sides):
        for i, side in enumerate(sides):
            if not side.complete:
                compiled = compile_seconds()
                start = time.perf_counter()
                made = jax.block_until_ready(next(streams[i], None))
                took = time.perf_counter() - start - (compile_seconds() - compiled)
                ended = side._replace(
                    seconds=side.seconds + max(0.0, took), complete=True
                )
                sides[i] = (
                    ended if made is None else Side(made, side.steps + 1, ended.seconds)
                )
        shown: list[object] = []
        for side in sides:
            content, counts = show(side)
            counts += (
                f"<br>{side.steps} steps, {side.seconds:.2f} s"
                + ", complete" * side.complete
            )
            shown += [content, counts]
        yield shown


def image_methods(model: ImageModel) -> dict[str, tuple[Any, str]]:
    """Returns the exact methods of an image model by name, each with its way to
    denoise. A causal model drafts along chains only."""
    along = {"speculation along denoising steps": (cspd_jax.Plain(), "speculative")}
    if isinstance(model.network, cspd_jax.image.CausalTokenModel):
        return along
    return {"speculation over tokens": (cspd_jax.SelfSpeculation(), "plain")} | along


def make_image(
    models: Models, method: str, key: Array, wanted: Any, cfg: float
) -> Shown:
    """Generates an image of a class or prompt by the plain sampler and by a method. If
    the model makes latents, the picture appears at the end."""
    model = models.image
    label = wanted
    if isinstance(model.config, NextStepConfig):
        model = cspd_jax.image.prompts.ask(model, [wanted])
        label = 0
    streams = []
    for way, denoise in ((cspd_jax.Plain(), "plain"), image_methods(model)[method]):
        options = cspd_jax.Options(**{**model.sampling, "cfg": cfg, "denoise": denoise})
        streams.append(cspd_jax.stream(key, model, [label], way, options))

    def show(side: Side) -> tuple[object, str]:
        tokens, info = side.made
        content = None
        counts = f"{info.made[0]} of {model.network.seq_len} tokens"
        if side.complete:
            backbone, head = (
                info.calls[name].sequential for name in ("backbone", "head")
            )
            counts += f", {backbone} calls of the backbone and {head} of the head"
        if side.complete or models.vae is None:
            content = cspd_jax.to_images(model, tokens, models.vae)[0]
            content = content.repeat(
                zoom := max(1, _WIDTH // len(content)), axis=0
            ).repeat(zoom, axis=1)
            content = np.broadcast_to(content, (*content.shape[:2], 3))
        return content, counts

    return side_by_side(streams, show)


def make_text(
    models: Models,
    method: str,
    key: Array,
    prompt: str,
    new: int,
    temperature: float,
) -> Shown:
    """Continues a prompt by plain decoding and by speculation. The colour of a token
    shows whether it was a draft."""
    tokenizer = models.reads[0]
    streams = []
    ids = tokenizer.encode(prompt)
    options = cspd_jax.text.Options(max_new_tokens=int(new), temperature=temperature)
    fast = cspd_jax.text.Speculation(models.drafter, rule=RULES[method])
    for way in (cspd_jax.text.Plain(), fast):
        streams.append(cspd_jax.text.stream(key, models.text, [ids], way, options))

    def show(side: Side) -> tuple[object, str]:
        tokens, info = side.made
        row, marks = (
            a[0, : int(info.trace.lengths[0])].tolist()
            for a in (tokens, info.trace.marks)
        )
        parts = list(zip(tokenizers.pieces(tokenizer, row), map(MARKS.get, marks)))[
            len(ids) :
        ]
        target, draft = (info.calls[name].sequential for name in ("target", "draft"))
        counts = (
            f"{len(parts)} tokens, {target} passes of the target and {draft} of the"
            " draft"
        )
        return [(tokenizer.decode(ids), None), *parts], counts

    return side_by_side(streams, show)


def make_masked(
    models: Models,
    method: str,
    key: Array,
    prompt: str,
    new: int,
    temperature: float,
) -> Shown:
    """Fills the places after a prompt, step by step and by self-speculation. A dot
    stands for a place that is not filled yet."""
    masked = cspd_jax.masked
    model = models.masked
    tokenizer = models.reads[1]
    asked = key, model, [tokenizer.encode(prompt)]
    options = masked.Options(max_new_tokens=int(new), temperature=temperature)
    ways: tuple[Any, ...] = masked.Stepwise(), masked.SelfSpeculation(MOVES[method])

    def show(side: Side) -> tuple[object, str]:
        free = model.config.mask_ids[0]
        ids = side.made.tokens[0].tolist()
        parts = (
            (is_free, list(group))
            for is_free, group in itertools.groupby(ids, lambda i: i == free)
        )
        text = "".join(
            "·" * len(some) if is_free else tokenizer.decode(some)
            for is_free, some in parts
        )
        counts = (
            f"{sum(i != free for i in ids)} of {len(ids)} tokens,"
            f" {side.made.info.sequential} passes"
        )
        return [(prompt + text, None)], counts

    return side_by_side([masked.stream(*asked, way, options) for way in ways], show)


def told(
    make: Callable[..., Shown], models: Models, method: str, seed: float, *asked: object
) -> Shown:
    """Yields what the page shows after a click on Generate. If the input is wrong,
    raises an error that Gradio shows."""
    try:
        yield from make(models, method, seed_key(int(seed or 0)), *asked)
    except UserError as wrong:
        import gradio as gr

        raise gr.Error(str(wrong)) from None


def make_page(models: Models) -> Any:
    """Lays out the page, as Gradio's `Blocks`."""
    import gradio as gr

    texts = functools.partial(
        gr.HighlightedText,
        color_map=_COLOURS,
        combine_adjacent=True,
        show_inline_category=False,
        show_legend=True,
    )
    image = functools.partial(gr.Image, format="png", interactive=False)

    def add_tab(
        name: str,
        make: Callable[..., Shown],
        methods: Any,
        content: Any,
        fields: Callable[[], list[object]],
    ) -> None:
        """Adds the tab of a family of models, with its fields, its buttons, and the
        places for its outputs."""
        with gr.Tab(name):
            with gr.Row():
                own = fields()
                method = gr.Dropdown(list(methods), label="Exact method, beside plain")
                seed = gr.Number(
                    0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1
                )
            with gr.Row():
                start = gr.Button("Generate", variant="primary")
                stop = gr.Button("Stop")
            shown = []
            with gr.Row():
                for side in ("Plain", "Exact"):
                    with gr.Column():
                        shown += [content(label=side), gr.Markdown()]
            asked = functools.partial(told, make, models), [method, seed, *own], shown
            running = start.click(
                *asked, show_progress="hidden", concurrency_id="one at a time"
            )
            stop.click(None, cancels=[running])

    def image_fields() -> list[object]:
        model = models.image
        classes = [(model.class_name(i), i) for i in range(model.config.num_classes)]
        takes = isinstance(model.config, NextStepConfig)
        what = (
            gr.Textbox("a red bicycle", label="Prompt")
            if takes
            else gr.Dropdown(classes, label="Class")
        )
        return [
            what,
            gr.Slider(
                0, 10, model.sampling.get("cfg", 1.0), label="Guidance (1 is none)"
            ),
        ]

    def text_fields() -> list[object]:
        prompt = gr.Textbox("Return a list of", label="Prompt")
        new = gr.Slider(1, 256, 64, step=1, label="New tokens")
        return [prompt, new, gr.Slider(0, 2, 0, label="Temperature")]

    with gr.Blocks(
        title="cspd-jax", analytics_enabled=False, delete_cache=(600, 600)
    ) as page:
        gr.Markdown(
            "# cspd-jax\nThe same distribution, in fewer network calls one after the"
            " other."
        )
        add_tab("Images", make_image, image_methods(models.image), image, image_fields)
        add_tab("Text", make_text, RULES, texts, text_fields)
        add_tab("Masked text", make_masked, MOVES, texts, text_fields)
    return page


def load(args: argparse.Namespace) -> Models:
    """Loads the models that the flags name."""
    image = cspd_jax.load(args.target, of=ImageModel)
    target = cspd_jax.load(args.text_target, of=TextModel)
    masked = cspd_jax.load(args.masked_model, of=TextModel)
    vae = (
        args.vae
        or hub.own_vae(image)
        or ("kl16" if image.config.vae_stride > 1 else None)
    )
    drafter = load_drafter(args.text_draft or default_draft(target), target, "float32")
    reads = tokenizers.load_tokenizer(target), tokenizers.load_tokenizer(masked)
    return Models(
        image, vae and cspd_jax.load(vae, of=VAE), target, drafter, masked, reads
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    for flag, default, meaning in (
        ("--target", "words", "image model (default: words)"),
        ("--vae", None, "autoencoder of a model of latents"),
        (
            "--text-target",
            "text-default",
            "causal language model (default: text-default)",
        ),
        ("--text-draft", None, "its draft, as for cspd-jax text --draft"),
        (
            "--masked-model",
            "masked-default",
            "masked-diffusion language model (default: masked-default)",
        ),
    ):
        parser.add_argument(flag, default=default, metavar="MODEL", help=meaning)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=7860, help="0 takes a free one (default: 7860)"
    )


def run(args: argparse.Namespace) -> None:
    """Serves the page until Ctrl-C."""
    import gradio  # noqa: F401, so that it is missed before models are loaded

    use_cache()
    page = make_page(load(args))
    where = {"server_name": args.host, "server_port": args.port or None}
    _, url, _ = page.launch(
        **where, footer_links=[], quiet=True, prevent_thread_lock=True
    )
    print(url, flush=True)
    progress("Ctrl-C stops it; what is asked for the first time is compiled first")
    page.block_thread()
