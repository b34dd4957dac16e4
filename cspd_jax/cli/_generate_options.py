"""The options of `cspd-jax generate`, and the request they make."""

from __future__ import annotations

import argparse
import re

from cspd_jax.cli._arguments import parse_labels, positive, seed
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

_CLASSES = 10  # generated without --labels


def add_options(parser: argparse.ArgumentParser, prefix: str) -> None:
    what = parser.add_argument_group("what")
    what.add_argument(
        "--target",
        default="default",
        metavar="MODEL",
        help="default, default-draft, mar-base, mar-large, mar-huge, or a checkpoint folder (default)",
    )
    what.add_argument(
        "--labels",
        metavar="LIST",
        help=f"classes: 0-9, or 3,5,7, or names; none is no class (the first {_CLASSES} classes)",
    )
    what.add_argument("--n", type=positive, default=4, help="images of each label (4)")
    what.add_argument(
        "--seed",
        type=seed,
        default=0,
        help="with the same options, image i depends on the seed and i only (0)",
    )
    what.add_argument("--vae", metavar="MODEL", help="kl16 or a folder: turns latents into pictures")
    what.add_argument("--out", metavar="DIR", help=f"a new or empty folder (the next free {prefix}-0001)")
    what.add_argument("--json", action="store_true", help="print the report as one JSON object")
    what.add_argument(
        "--compare",
        action="store_true",
        help="run the plain sampler (and the draft) beside the method, for the same images",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--method",
        choices=("plain", "cspd", "self"),
        help="one AR step after the other; or several drafted by a smaller model (cspd) or by the target"
        " itself (self) and verified together (the fastest exact one here, beside the plain one)",
    )
    how.add_argument("--batch", type=positive, default=64, help="images generated side by side (64)")
    how.add_argument("--num-iter", type=positive, help="AR steps (one per token)")
    how.add_argument("--steps", help='denoising steps, for example "100" or "ddim50" (the model\'s own)')
    how.add_argument("--cfg", type=float, default=1.0, help="guidance scale; 1 is none (1)")
    how.add_argument("--cfg-schedule", choices=("linear", "constant"), default="linear", help="(linear)")
    how.add_argument("--temperature", type=float, default=1.0, help="of the denoising noise (1)")
    how.add_argument(
        "--final-noise",
        choices=("on", "off"),
        help="noise in the last denoising step (on for the criteria path and paper, which need it; else off)",
    )
    how.add_argument(
        "--denoise",
        choices=("plain", "speculative", "auto"),
        help="denoising steps one by one, or drafted and verified together (the same law), or what a short"
        " measurement finds faster (plain; auto without --method)",
    )
    how.add_argument(
        "--window",
        type=_windows,
        metavar="M",
        help="denoising steps per head call with --denoise speculative: 16, or 4x32,8 for four calls of 32,"
        " then 8 (16)",
    )
    how.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(float32)")
    ahead = parser.add_argument_group("speculation over AR steps: --method cspd or self")
    ahead.add_argument("--draft", metavar="MODEL", help="the smaller model of cspd")
    ahead.add_argument(
        "--criterion",
        choices=("path", "paper", "official"),
        help="path: exact. paper: Algorithm 1 as printed, lossy (exact with --sigma off). official: the"
        " released runner, lossy (path)",
    )
    ahead.add_argument("--gamma", type=positive, help="AR steps drafted ahead (8)")
    ahead.add_argument(
        "--adapt",
        type=float,
        metavar="C",
        help="draft fewer where acceptance is low; C is the time of a drafted step as a share of a target's",
    )
    ahead.add_argument(
        "--prefill",
        type=float,
        metavar="SHARE",
        help="above 0: the first 1 + SHARE x AR steps come from the target alone (0; official .15)",
    )
    ahead.add_argument("--proposals", type=positive, help="draws from the residual per round, of path (16)")
    ahead.add_argument(
        "--verify",
        choices=("each", "joint"),
        help="each group in its own context, or all in one that shows the drafts (lossy) (each)",
    )
    ahead.add_argument("--sigma", choices=("on", "off"), help="the factor of Eq. 5, lossy, of paper (on)")
    ahead.add_argument("--align", choices=("on", "off"), help="draft and target share noise, of paper (on)")
    ahead.add_argument(
        "--inner-temperature",
        type=float,
        help="widens the test of paper and official: lossy unless 1, and 1 alone does not make official, or"
        " paper with its Sigma, exact (1; official 42)",
    )


def _windows(text: str) -> tuple[int, ...]:
    windows: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(?:([1-9][0-9]{0,2})x)?([1-9][0-9]{0,2})", part)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not understood; write for example 16 or 4x32,8")
        windows += [int(found[2])] * int(found[1] or 1)
    return tuple(windows)


def labels_of(args: argparse.Namespace, model) -> list[int]:
    """One turn of the labels; images take turns: 0, 1, 2, 0, 1, 2, ..."""
    classes = model.config.num_classes
    text = args.labels if args.labels is not None else f"0-{min(classes, _CLASSES) - 1}"
    return parse_labels(text, classes, model.class_names)


def request_of(args: argparse.Namespace, model, labels: list[int], **instead):
    """What is asked for, checked before anything is loaded. `instead`: options in place of the arguments'."""
    from cspd_jax import models
    from cspd_jax.image.plan import make_request

    draft = None if args.draft is None else models.describe(args.draft)
    method = args.method or "plain"
    if draft is not None and method != "cspd":
        models.check_draft(model.config, draft.config)
        progress(f"the method {method} does not use the draft")
        draft = None
    if args.vae is not None and model.config.vae_stride == 1:
        raise UserError(f"--vae does not apply to {args.target}, which makes pixels; leave it out")
    options = {
        "num_iter": args.num_iter,
        "steps": args.steps,
        "cfg": args.cfg,
        "cfg_schedule": args.cfg_schedule,
        "temperature": args.temperature,
        "final_noise": _switch(args.final_noise),
        "denoise": args.denoise or ("plain" if args.method or args.window else "auto"),
        "windows": args.window,
        "method": method,
        "draft": draft,
        "criterion": args.criterion,
        "gamma": args.gamma,
        "prefill": args.prefill,
        "adapt": args.adapt,
        "proposals": args.proposals,
        "verify": args.verify,
        "sigma": _switch(args.sigma),
        "align": _switch(args.align),
        "inner_temperature": args.inner_temperature,
    }
    return make_request(model, labels, **(options | instead))


def _switch(text: str | None) -> bool | None:
    return None if text is None else text == "on"
