"""`cspd-jax calibrate`: fits what speculation with a model needs, and keeps it with the checkpoint: of image
models the drafter of denoising chains, of masked-diffusion language models the tables of texts."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from cspd_jax.cli._arguments import positive
from cspd_jax.cli._generate_options import add_fields, options_of, take_own
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

_PROMPTS = 128
_BEGINNING = 48  # characters of a text that is a prompt


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help="fit the drafter of denoising chains, or the texts of masked speculation",
        description="Of an image model: run a few hundred plain denoising chains, fit the drafter that"
        " generate --denoise speculative uses, and store it in the checkpoint folder. A fit belongs to one"
        " choice of denoising steps, guidance and temperature. Where it is missing, generate makes it and"
        " keeps it in the user's cache. Of a masked-diffusion language model: record what stepwise decoding"
        " does after some prompts, and store in moves.json which sets of moves masked --texts is to try.",
    )
    parser.add_argument("target", metavar="MODEL", help="a checkpoint folder")
    add_fields(parser, "respacing", "cfg", "cfg_schedule", "temperature")
    texts = parser.add_argument_group("masked-diffusion language models")
    texts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt per line, in the model's chat template (default: beginnings of the documentation of"
        " Python's standard library)",
    )
    texts.add_argument(
        "--n", type=positive, default=_PROMPTS, help=f"how many of the prompts (default: {_PROMPTS})"
    )
    texts.add_argument("--new-tokens", type=positive, default=64, help="places after each (default: 64)")
    texts.add_argument(
        "--block", type=positive, default=8, help="places to fill before later ones (default: 8)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    from cspd_jax._utils import compilation
    from cspd_jax.converters import hf
    from cspd_jax.weights import models

    compilation.use_cache()
    named = args.target in models.TEXT_DEFAULTS or hf.is_model_folder(args.target)
    of_text = named or models.kind_of(args.target) == "lm"
    (_texts if of_text else _chains)(args)


def _texts(args: argparse.Namespace) -> None:
    from cspd_jax import masked
    from cspd_jax.masked import calibration, sets
    from cspd_jax.text.prompts import check_length
    from cspd_jax.training.data import text
    from cspd_jax.training.data.prompts import prompt_ids, read_lines
    from cspd_jax.weights import models

    model = models.load_text(args.target)
    if not model.config.mask_ids:
        raise UserError(f"{args.target} has no mask id, so it is not a masked-diffusion model")
    folder = _writable(args.target, args.target in models.TEXT_DEFAULTS, model.folder)
    if args.prompts is None:
        passages = [document.text for document in text.documents() if not document.held_out]
        begun = [passage[:_BEGINNING] for passage in passages if len(passage) > _BEGINNING]
        prompts = prompt_ids(model, begun[:: max(1, len(begun) // args.n)][: args.n])
    else:
        prompts = prompt_ids(model, read_lines(args.prompts)[: args.n])
    options = masked.Options(max_new_tokens=args.new_tokens, block=args.block)
    check_length(model.config, max(map(len, prompts)), options.max_new_tokens)
    tables = calibration.fitted(model, prompts, options, progress=True)
    sets.write(folder / sets.FILE, tables)
    found = {"prompts": len(prompts), "texts": sorted(tables)}
    print(json.dumps({"out": str(folder / sets.FILE), **found}) if args.json else folder / sets.FILE)


def _writable(name: str, shipped: bool, folder: Path | None) -> Path:
    """Returns the checkpoint's folder; UserError if nothing can be kept there."""
    if shipped or folder is None or not os.access(folder, os.W_OK):
        raise UserError(f"{name} is not a checkpoint folder that can be written to; convert or copy it first")
    return folder


def _chains(args: argparse.Namespace) -> None:
    from cspd_jax.image import plan
    from cspd_jax.image.chain import calibration
    from cspd_jax.weights import models

    model = models.load(args.target)
    folder = _writable(args.target, args.target in models.DEFAULTS, model.folder)
    take_own(args, model)
    options = plan.check(model, [0], options=options_of(args)).options
    progress("calibrating")
    fitted = calibration.measure(model, options)
    path = folder / calibration.FOLDER / calibration.file_name(options)
    calibration.write(path, fitted)
    found = {"gains": fitted.drafter.gain.tolist(), "gains_by_f": fitted.drafter.gain_f.tolist()}
    print(json.dumps({"out": str(path), **found}) if args.json else path)
