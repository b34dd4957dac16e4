"""`cspd-jax calibrate`: fits what speculation with a model needs, and keeps it with the checkpoint: of image
models the drafter of denoising chains, of masked-diffusion language models the tables of texts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from cspd_jax import hub, masked
from cspd_jax._utils import compilation
from cspd_jax.check import UserError
from cspd_jax.cli._flags import add_fields, progress, result
from cspd_jax.image import Options, Plain, calibration
from cspd_jax.image.generation import settle
from cspd_jax.masked import sets
from cspd_jax.masked.calibration import fitted
from cspd_jax.models import ImageModel, TextModel
from cspd_jax.training.data import text
from cspd_jax.training.data.prompts import prompt_ids, read_lines

DESCRIPTION = (
    "Of an image model: runs a few hundred plain denoising chains, fits the drafter that generate --denoise"
    " speculative uses, and stores it in the checkpoint folder. A fit belongs to one choice of denoising"
    " steps, guidance and temperature; where it is missing, generate makes it. Of a masked-diffusion language"
    " model: records what stepwise decoding does after some prompts, and stores in moves.json which sets of"
    " moves masked --texts is to try."
)
_SAMPLING = ("respacing", "cfg", "cfg_schedule", "temperature")
_BEGINNING = 48  # characters of a text that is a prompt


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument("target", metavar="MODEL", help="a checkpoint folder")
    add_fields(parser, Options, *_SAMPLING, default=None)
    texts = parser.add_argument_group("masked-diffusion language models")
    texts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt per line, in the model's chat template (default: beginnings of the documentation of"
        " Python's standard library)",
    )
    texts.add_argument("--n", type=int, default=128, help="how many of the prompts (default: 128)")
    texts.add_argument("--new-tokens", type=int, default=64, help="places after each (default: 64)")
    texts.add_argument("--block", type=int, default=8, help="places to fill before later ones (default: 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    compilation.use_cache()
    model = hub.load(args.target)
    if hub.shipped_folder(args.target) or model.folder is None or not os.access(model.folder, os.W_OK):
        raise UserError(f"{args.target} is not a checkpoint folder that can be written to; copy it first")
    result(_texts(args, model) if isinstance(model, TextModel) else _chains(args, model), args.json)


def _texts(args: argparse.Namespace, model: TextModel) -> dict[str, object]:
    if not model.config.mask_ids:
        raise UserError(f"{args.target} has no mask id, so it is not a masked-diffusion model")
    if args.prompts is None:
        passages = [document.text for document in text.documents() if not document.held_out]
        lines = [passage[:_BEGINNING] for passage in passages if len(passage) > _BEGINNING]
        lines = lines[:: max(1, len(lines) // args.n)]
    else:
        lines = read_lines(args.prompts)
    prompts = prompt_ids(model, lines[: args.n])
    options = masked.Options(max_new_tokens=args.new_tokens, block=args.block)
    tables, out = fitted(model, prompts, options, progress=True), Path(str(model.folder), sets.FILE)
    sets.write(out, tables)
    return {"out": str(out), "prompts": len(prompts), "texts": sorted(tables)}


def _chains(args: argparse.Namespace, model: ImageModel) -> dict[str, object]:
    given = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    options = settle(model, Plain(), Options(**{**model.sampling, **given}))
    progress("calibrating")
    drafter, out = calibration.measure(model, options), calibration.file_of(model, options)
    assert out is not None
    calibration.write(out, drafter)
    return {"out": str(out), "gains": drafter.gain.tolist(), "gains_by_f": drafter.gain_f.tolist()}
