"""The flags of image models, and the request that they stand for. The commands
`generate` and `sample` share them."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from cspd_jax import hub, image
from cspd_jax._utils.files import files_in
from cspd_jax.check import UserError
from cspd_jax.cli._flags import (
    add_common,
    add_fields,
    from_flags,
    labels,
    refuse_unread,
)
from cspd_jax.comparison import Request
from cspd_jax.image import pixels, prompts
from cspd_jax.image.generation import as_labels
from cspd_jax.image.lossy import Annealing, Checkerboard
from cspd_jax.image.options import FIELDS
from cspd_jax.image.regions import NAMES, size_of
from cspd_jax.keys import seed_key
from cspd_jax.models import VAE, ImageModel
from cspd_jax.parallel import default_mesh

BATCH = 64
_SUFFIXES = (".png", ".jpg", ".jpeg")


def add_flags(parser: argparse.ArgumentParser, classes: str) -> None:
    """Adds the flags for the model, for the images to generate, and for the sampler.

    classes: the text that describes the default of --labels.
    """
    parser.register("type", "FIRST:LAST", annealing)
    parser.register("type", "ROWSxCOLUMNS", grid)
    what = parser.add_argument_group("what to generate")
    add = what.add_argument
    add(
        "--target",
        default="words-causal",
        metavar="MODEL",
        help="words-causal, words, words-draft (pages of words), default-causal,"
        " default, default-draft (glyphs of digits), mar-base, mar-large, mar-huge, or"
        " a checkpoint folder (default: words-causal)",
    )
    add(
        "--vae",
        metavar="MODEL",
        help="autoencoder that decodes latents: kl16 or a folder",
    )
    add(
        "--labels",
        metavar="LIST",
        help=f"numbers, as 0-2,5, or names (default: {classes})",
    )
    add(
        "--batch",
        type="count",
        help=f"images generated together (default: {BATCH})",
    )
    add_common(what)
    add = parser.add_argument_group(
        "prompts, for a target that makes images from text (NextStep-1)"
    ).add_argument
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what to show; may be repeated",
    )
    add(
        "--negative",
        default="",
        metavar="TEXT",
        help="the unconditional prompt of --cfg",
    )
    add(
        "--grid",
        type="ROWSxCOLUMNS",
        metavar="ROWSxCOLUMNS",
        help="tokens of an image (the model's)",
    )
    add = parser.add_argument_group("from a picture (inpainting)").add_argument
    add(
        "--image",
        metavar="FILE",
        help="a PNG or JPEG to start from, which is cut and scaled to the model's size;"
        " or a folder of them,"
        " or the samples.npz of a run, whose images are taken in turn",
    )
    add(
        "--keep",
        metavar="REGION",
        help="the part of the picture that stays; the rest is generated to fit it:"
        f" {', '.join(NAMES)}, a box x0,y0,x1,y1 in"
        " pixels, a share of the tokens such as 50%%, or a black and white picture"
        " (white stays). A token"
        " stays if all of its pixels do",
    )
    _add_sampling(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how to sample")
    how.add_argument(
        "--method",
        choices=("plain", "draft", "self"),
        help="plain: one AR step at a time; draft: a smaller model drafts several;"
        " self: the target drafts them itself",
    )
    add_fields(how, image.Options)
    add_fields(how, image.ChainSpeculation, of="--denoise speculative")
    order, anneal = (FIELDS[name].metadata["help"] for name in ("order", "anneal"))
    how.add_argument("--anneal", type="FIRST:LAST", metavar="FIRST:LAST", help=anneal)
    orders = how.add_mutually_exclusive_group()
    orders.add_argument("--order", choices=("spread",), help=order)
    orders.add_argument(
        "--gtr",
        type="count",
        metavar="K",
        help="lossy: a checkerboard, completed in K AR steps",
    )
    ahead = parser.add_argument_group(
        "speculation over AR steps (--method draft or self)"
    )
    ahead.add_argument(
        "--draft",
        metavar="MODEL",
        help="the smaller model that drafts; the method is then draft",
    )
    ahead.add_argument(
        "--criterion",
        choices=("path", "paper", "released"),
        help="path: exact; paper: Algorithm 1 as printed, lossy (exact with --sigma"
        " off); released: the released runner, lossy (default: path)",
    )
    names = [field.name for field in dataclasses.fields(image.SelfSpeculation)]
    drafts = [field.name for field in dataclasses.fields(image.DraftSpeculation)]
    both = [name for name in names if name in drafts]
    own = [name for name in names if name not in drafts]
    add_fields(ahead, image.SelfSpeculation, *both, of="--method self or draft")
    add_fields(ahead, image.SelfSpeculation, *own, of="--method self")
    paper = parser.add_argument_group("--criterion paper")
    add_fields(paper, image.PaperCriterion, of="--criterion paper")


def annealing(text: str) -> Annealing:
    first, last = text.split(":")
    return Annealing(int(first), int(last))


def grid(text: str) -> tuple[int, int]:
    rows, columns = text.split("x")
    return int(rows), int(columns)


def models_of(
    args: argparse.Namespace, devices: Any = None
) -> tuple[ImageModel, VAE | None]:
    """Loads the target model, with the prompts if there are any, and the autoencoder
    that decodes its latents, or None."""
    model = hub.load(
        args.target, args.dtype, default_mesh(args.mesh, devices), of=ImageModel
    )
    if args.prompt or args.negative or args.grid:
        model = prompts.ask(model, args.prompt or (), args.negative, grid=args.grid)
    where = args.vae or hub.own_vae(model)
    vae = None if where is None else hub.load(where, args.dtype, of=VAE)
    if vae is not None:
        pixels.check_vae(model, vae)
    return model, vae


def read_labels(
    args: argparse.Namespace, model: ImageModel, most: int | None = None
) -> np.ndarray:
    """Returns the labels of --labels, each once; without the flag, the first `most`
    classes."""
    classes = model.config.num_classes
    every = range(min(classes, most or classes))
    return as_labels(
        model,
        every
        if args.labels is None
        else labels(args.labels, classes, model.class_names),
    )


def request_of(
    args: argparse.Namespace, model: ImageModel, vae: VAE | None, turn: np.ndarray
) -> Request:
    """Returns the request that the flags stand for.

    turn: [N] the label of each image.
    """
    method = _method_of(args, model)
    # The released runner adds no final noise.
    noise = {"final_noise": False} if method.needs_final_noise is False else {}
    options = from_flags(
        image.Options,
        args,
        {**noise, **model.sampling},
        denoise=from_flags(image.ChainSpeculation, args)
        if args.denoise == "speculative"
        or (args.window is not None and not args.denoise)
        else "plain",
        order=image.Spread()
        if args.order
        else Checkerboard(args.gtr)
        if args.gtr
        else None,
        known=_known_of(args, model, vae, len(turn)),
    )
    refuse_unread(args)
    return Request(seed_key(args.seed), model, turn, method, options)


def _method_of(args: argparse.Namespace, model: ImageModel) -> image.Method:
    """Returns the method that the flags stand for, with its draft model loaded."""
    name = args.method or ("draft" if args.draft else "plain")
    if (name == "draft") != bool(args.draft) or (args.criterion and name != "draft"):
        raise UserError(
            "--method draft needs --draft MODEL; --draft and --criterion go with no"
            " other method"
        )
    if name != "draft":
        return (
            image.Plain()
            if name == "plain"
            else from_flags(image.SelfSpeculation, args)
        )
    draft = hub.load(args.draft, args.dtype, model.mesh, of=ImageModel)
    if args.criterion == "released":
        return from_flags(image.Released, args, draft=draft)
    paper = args.criterion == "paper"
    criterion: Any = (
        from_flags(image.PaperCriterion, args) if paper else image.PathCriterion()
    )
    return from_flags(image.DraftSpeculation, args, draft=draft, criterion=criterion)


def _known_of(
    args: argparse.Namespace, model: ImageModel, vae: VAE | None, images: int
) -> Any:
    """Returns the known tokens of N = `images` images, which take the pictures of
    --image in turn; None without that flag."""
    if not args.image and not args.keep:
        return None
    if not args.image or not args.keep:
        raise UserError(
            "--image says what to start from, and --keep what of it stays; give both"
        )
    region: Any = args.keep
    if args.keep not in NAMES and os.path.isfile(args.keep):
        region = _read(args.keep, model, "L")[..., 0] >= 128  # white pixels stay
    if args.image.endswith(".npz"):
        tokens = np.load(args.image)["tokens"]
    else:
        grey = model.config.vae_stride == 1 and model.config.latent_channels == 1
        files = (
            files_in(args.image, _SUFFIXES)
            if os.path.isdir(args.image)
            else [Path(args.image)]
        )
        pictures = np.stack(
            [_read(file, model, "L" if grey else "RGB") for file in files]
        )
        tokens = pixels.to_tokens(model, pictures, vae)
    return image.Known(
        tokens[np.arange(images) % len(tokens)], image.keep(region, model, args.seed)
    )


def _read(file: str | Path, model: ImageModel, mode: str) -> np.ndarray:
    """Reads a picture, cut and scaled to the model's size, as uint8 [H, W, C]."""
    height, width = size_of(model)
    with Image.open(file, formats=("PNG", "JPEG")) as opened:
        # The picture is turned by the orientation that the camera stored.
        picture = ImageOps.exif_transpose(opened).convert(mode)
    fitted = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
    return np.asarray(fitted, np.uint8).reshape(height, width, -1)
