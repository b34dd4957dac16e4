"""Fits the drafter of a model, and stores it in the checkpoint folder.

For an image model the command runs a few hundred plain denoising chains and fits the
drafter that generate --denoise speculative uses. A fit belongs to one choice of
denoising steps, guidance and temperature. If there is no fit, generate makes it. For a
masked-diffusion language model the command records the steps of stepwise decoding after
some prompts, and stores in moves.json the sets of moves that masked --texts tries.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from cspd_jax import hub, masked
from cspd_jax._utils import compilation
from cspd_jax.check import UserError
from cspd_jax.cli._flags import (
    add_fields,
    from_flags,
    progress,
    refuse_unread,
    result,
)
from cspd_jax.image import Options, Plain, calibration
from cspd_jax.image.generation import resolve
from cspd_jax.masked import sets
from cspd_jax.masked.calibration import fitted
from cspd_jax.models import ImageModel, TextModel
from cspd_jax.training.data import text

_BEGINNING = 48  # characters at the beginning of a text that are the prompt


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument("target", metavar="MODEL", help="a checkpoint folder")
    chains = ("respacing", "cfg", "cfg_schedule", "temperature")
    add_fields(parser, Options, *chains, of="image models")
    texts = parser.add_argument_group("masked-diffusion language models")
    texts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a file with one prompt per line (default: Python's documentation)",
    )
    texts.add_argument(
        "--n", type="count", default=128, help="how many prompts to use (default: 128)"
    )
    add_fields(
        texts, masked.Options, "max_new_tokens", "block", of="masked language models"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    compilation.use_cache()
    model = hub.load(args.target)
    if (
        hub.shipped_folder(args.target)
        or model.folder is None
        or not os.access(model.folder, os.W_OK)
    ):
        raise UserError(
            f"{args.target} is not a checkpoint folder that can be written to; copy it"
            " first"
        )
    result(
        _texts(args, model) if isinstance(model, TextModel) else _chains(args, model),
        args.json,
    )


def _texts(args: argparse.Namespace, model: TextModel) -> dict[str, object]:
    if args.prompts is not None:
        lines = text.read_lines(args.prompts)
    else:
        passages = [
            document.text for document in text.documents() if not document.held_out
        ]
        lines = [
            passage[:_BEGINNING] for passage in passages if len(passage) > _BEGINNING
        ]
        lines = lines[:: max(1, len(lines) // args.n)]
    prompts = text.prompt_ids(model, lines[: args.n])
    out = Path(str(model.folder), sets.FILE)
    options = from_flags(masked.Options, args)
    refuse_unread(args)
    tables = fitted(model, prompts, options, progress=True)
    sets.write(out, tables)
    return {"out": str(out), "prompts": len(prompts), "texts": sorted(tables)}


def _chains(args: argparse.Namespace, model: ImageModel) -> dict[str, object]:
    recipe = resolve(model, Plain(), from_flags(Options, args, model.sampling))
    refuse_unread(args)
    progress("calibrating")
    drafter = calibration.measure(model, recipe)
    out = calibration.file_of(model, recipe)
    assert out is not None
    calibration.write(out, drafter)
    return {
        "out": str(out),
        "gains": drafter.gain.tolist(),
        "gains_by_f": drafter.gain_f.tolist(),
    }
