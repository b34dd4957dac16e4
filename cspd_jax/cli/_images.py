"""What `generate` and `sample` share: the flags of image models, and the request that they stand for."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np

from cspd_jax import hub, image
from cspd_jax.check import UserError
from cspd_jax.cli._flags import add_common, add_fields, labels, numbers, progress, switch
from cspd_jax.cli._known import known_of
from cspd_jax.image import pixels, prompts
from cspd_jax.image.generation import Request, as_labels
from cspd_jax.image.lossy import Annealing, Checkerboard
from cspd_jax.image.options import DRAFTERS
from cspd_jax.keys import seed_key
from cspd_jax.models import VAE, ImageModel
from cspd_jax.networks.config import NextStepConfig
from cspd_jax.parallel import default_mesh
from cspd_jax.tokenizers import read_tokenizer

_SAMPLING = ("num_iter", "respacing", "cfg", "cfg_schedule", "temperature")
# Which options each way of speculating over AR steps has.
_OWN = {
    "plain": (),
    "self": ("gamma", "draft_cost", "prefill"),
    "path": ("gamma", "draft_cost", "prefill"),
    "paper": ("gamma", "draft_cost", "prefill", "proposals", "sigma", "align", "inner_temperature"),
    "official": ("gamma", "prefill", "inner_temperature"),
}


def add_target(group: Any, default: str) -> None:
    """Adds the model, what decodes it, and how it is run."""
    group.add_argument(
        "--target",
        default=default,
        metavar="MODEL",
        help="words, words-draft, words-causal (pages of words), default, default-draft, default-causal"
        f" (digits), mar-base, mar-large, mar-huge, or a checkpoint folder (default: {default})",
    )
    group.add_argument("--vae", metavar="MODEL", help="autoencoder that decodes latents: kl16 or a folder")
    group.add_argument("--batch", type=int, default=64, help="images generated together (default: 64)")
    add_common(group)


def add_sampling(parser: argparse.ArgumentParser, denoise: str) -> None:
    """Adds how images are sampled. denoise: what is done without --denoise."""
    how = parser.add_argument_group("how to sample")
    how.add_argument(
        "--method",
        choices=("plain", "draft", "cspd", "self"),  # cspd is draft's old name
        metavar="{plain,draft,self}",
        help="plain: one AR step at a time; draft: a smaller model drafts several; self: the"
        " target drafts them itself",
    )
    add_fields(how, image.Options, *_SAMPLING, default=None)
    how.add_argument("--final-noise", type=switch, metavar="on|off", help=_meaning("final_noise"))
    how.add_argument("--order", choices=("spread",), help=_meaning("order"))
    how.add_argument(
        "--denoise",
        choices=("plain", "speculative", "auto"),
        help=f"{_meaning('denoise')}; auto: whichever a short measurement finds faster ({denoise})",
    )
    how.add_argument(
        "--window",
        type=_window,
        metavar="M",
        help="denoising steps drafted per head call with --denoise speculative, for example 16, or 4x32,8 for"
        " four calls of 32 and then 8 (default: 16)",
    )
    how.add_argument(
        "--drafter",
        choices=DRAFTERS,
        help="what drafts denoising steps: gains fitted to the model's own chains, or jacobian, which also"
        " asks the head how x_0 moves with the state: fewer calls, of five times as many rows"
        " (default: gains)",
    )
    _add_speculation(parser.add_argument_group("speculation over AR steps (--method draft or self)"))
    lossy = parser.add_argument_group(
        "lossy shortcuts of the plain sampler (another distribution; docs/rivals.md has what they cost)"
    )
    lossy.add_argument("--anneal", type=_annealing, metavar="FIRST:LAST", help=_meaning("anneal"))
    lossy.add_argument(
        "--gtr",
        type=int,
        metavar="K",
        help="lossy: the tokens of one colour of a checkerboard come first, all others in the last K AR steps"
        " (GtR)",
    )


def _add_speculation(ahead: Any) -> None:
    ahead.add_argument("--draft", metavar="MODEL", help="the smaller model that drafts, for --method draft")
    ahead.add_argument(
        "--criterion",
        choices=("path", "paper", "official"),
        help="path: exact; paper: Algorithm 1 as printed, lossy (exact with --sigma off); official: the"
        " released runner, lossy (default: path)",
    )
    for flag, kind, meaning in (
        ("--gamma", int, "AR steps drafted ahead (default: 8)"),
        ("--prefill", float, "the first 1 + PREFILL x AR steps come from the target alone (default: 0)"),
        ("--proposals", int, "draws from the residual side by side, for paper (default: 16)"),
        ("--sigma", switch, "on or off: the factor Sigma of Eq. 5, for paper; lossy if on (default: on)"),
        ("--align", switch, "on or off: draft and target share noise, for paper (default: on)"),
        ("--inner-temperature", float, "widens the test of paper (default: 1) and official (42); lossy"),
    ):
        ahead.add_argument(flag, type=kind, help=meaning)
    ahead.add_argument(
        "--adapt",
        dest="draft_cost",
        type=float,
        metavar="C",
        help="draft fewer steps where acceptance is low; C is the cost of a drafted step as a share of a"
        " target step's",
    )


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Adds what a model that makes images from text is asked."""
    group = parser.add_argument_group("prompts, for a target that makes images from text (NextStep-1)")
    group.add_argument("--prompt", action="append", metavar="TEXT", help="what to show; may be repeated")
    group.add_argument(
        "--prompt-ids",
        action="append",
        type=numbers,
        metavar="I,J,...",
        help="a prompt as token ids, with all that comes before the image; may be repeated",
    )
    group.add_argument("--negative", metavar="TEXT", help="the unconditional prompt of --cfg (no text)")
    group.add_argument("--negative-ids", type=numbers, metavar="I,J,...", help="the same as token ids")
    group.add_argument("--grid", type=_grid, metavar="ROWSxCOLUMNS", help="tokens of an image (the model's)")


def _meaning(field: str) -> str:
    return next(f.metadata["help"] for f in dataclasses.fields(image.Options) if f.name == field)


def _annealing(text: str) -> Annealing:
    first, last, shape, *_ = [*text.split(":"), "linear"]
    return Annealing(int(first), int(last), shape)


def _window(text: str) -> tuple[int, ...]:
    parts = [part.split("x") for part in text.split(",")]
    return tuple(int(part[-1]) for part in parts for _ in range(int(part[0]) if len(part) == 2 else 1))


def _grid(text: str) -> tuple[int, int]:
    rows, columns = text.split("x")
    return int(rows), int(columns)


def read_labels(args: argparse.Namespace, model: ImageModel, most: int | None = None) -> np.ndarray:
    """Returns one turn of the labels: those of --labels, or the first `most` classes."""
    classes = model.config.num_classes
    if args.labels is None:
        return np.arange(min(classes, most or classes), dtype=np.int32)
    return as_labels(model, labels(args.labels, classes, model.class_names))


def models_of(args: argparse.Namespace, devices: Any = None) -> tuple[ImageModel, VAE | None]:
    """Loads the target with its prompts, and the autoencoder that its latents need."""
    model = hub.load(args.target, args.dtype, default_mesh(args.mesh, devices), of=ImageModel)
    model = with_prompts(args, model)
    where = args.vae or hub.own_vae(model)
    vae = None if where is None else hub.load(where, args.dtype, of=VAE)
    if vae is not None:
        pixels.check_vae(model, vae)
    return model, vae


def with_prompts(args: argparse.Namespace, model: ImageModel) -> ImageModel:
    """Returns the model with its prompts bound to it; a model of classes as it is."""
    texts, rows = getattr(args, "prompt", None) or [], getattr(args, "prompt_ids", None) or []
    if not isinstance(model.config, NextStepConfig):
        if texts or rows:
            raise UserError(f"--prompt is for models that make images from text; {model.name} takes --labels")
        return model
    if not texts and not rows:
        raise UserError(f"{model.name} makes images from text; say which with --prompt")
    tokenizer = read_tokenizer(model.folder, model.config.lm.known_ids) if model.folder else None

    def ids(text: str) -> list[int]:
        if tokenizer is None:
            raise UserError("the model has no tokenizer.json; give --prompt-ids and --negative-ids, as 1,2,3")
        return prompts.ids_of(text, tokenizer, model, args.grid)

    asked = [*map(ids, texts), *rows]
    guided = args.negative is not None or args.cfg not in (None, 1)
    negative = args.negative_ids or (ids(args.negative or "") if guided else asked[0])
    captions = (*texts, *(",".join(map(str, row)) for row in rows))
    return prompts.bind(model, asked, negative, grid=args.grid, texts=captions)


def request_of(args: argparse.Namespace, model: ImageModel, vae: VAE | None, turn: np.ndarray) -> Request:
    """Returns the request that the flags stand for. turn: the label of each image."""
    own = {name: value for name, value in model.sampling.items() if getattr(args, name, 0) is None}
    if own:
        told = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in own.items())
        progress(f"sampled as {model.name} is by default: {told}")
    method = method_of(args, model)
    given = {name: getattr(args, name) for name in (*_SAMPLING, "final_noise", "anneal")}
    if args.order and args.gtr:
        raise UserError("--order and --gtr are two orders of the tokens; give one of them")
    given["order"] = image.Spread() if args.order else Checkerboard(args.gtr) if args.gtr else None
    if method.needs_final_noise is False and args.final_noise is None:
        given["final_noise"] = False  # the released runner has none
    chain = {"draft_lengths": args.window, "drafter": args.drafter}
    chain = {name: value for name, value in chain.items() if value is not None}
    if chain and args.denoise != "speculative":
        raise UserError("--window and --drafter go with --denoise speculative")
    given["denoise"] = image.ChainSpeculation(**chain) if args.denoise == "speculative" else None
    given["known"] = known_of(args, model, vae, len(turn))
    chosen = {name: value for name, value in given.items() if value is not None}
    return Request(seed_key(args.seed), model, turn, method, image.Options(**{**own, **chosen}))


def method_of(args: argparse.Namespace, model: ImageModel) -> image.Method:
    """Returns the method that the flags stand for, with its draft model loaded."""
    name = {"cspd": "draft", None: "draft" if args.draft else "plain"}.get(args.method, args.method)
    if (name == "draft") != bool(args.draft):
        raise UserError("a smaller model of the same tokens (--draft MODEL) goes with --method draft")
    if args.criterion and name != "draft":
        raise UserError(f"--criterion goes with --method draft, not with {name}")
    way = (args.criterion or "path") if name == "draft" else name
    given = {option: getattr(args, option) for option in _OWN["paper"] if getattr(args, option) is not None}
    for option in given.keys() - set(_OWN[way]):
        flag = "--adapt" if option == "draft_cost" else f"--{option.replace('_', '-')}"
        raise UserError(f"{flag} has no effect with {way}; choose another --method or --criterion")
    if way == "plain":
        return image.Plain()
    if way == "self":
        return image.SelfSpeculation(**given)
    draft = hub.load(args.draft, args.dtype, model.mesh, of=ImageModel)
    if way == "official":
        return image.ReleasedRunner(draft, **given)
    shared = {option: given.pop(option) for option in _OWN["self"] if option in given}
    criterion: Any = image.PaperCriterion(**given) if way == "paper" else image.PathCriterion()
    return image.DraftSpeculation(draft, criterion, **shared)
