"""`cspd-jax calibrate`: fits the free drafter of a model and keeps its gains with the checkpoint."""

from __future__ import annotations

import argparse
import json
import os

from cspd_jax.cli._generate_options import add_fields, options_of, take_own
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help="fit the drafter of the denoising chains",
        description="Run a few hundred plain denoising chains of a model, fit the drafter that generate"
        " --denoise speculative uses, and store it in the checkpoint folder. A fit belongs to one choice of"
        " denoising steps, guidance and temperature. Where it is missing, generate makes it and"
        " keeps it in the"
        " user's cache.",
    )
    parser.add_argument("target", metavar="MODEL", help="a checkpoint folder")
    add_fields(parser, "respacing", "cfg", "cfg_schedule", "temperature")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    from cspd_jax._utils import compilation
    from cspd_jax.image import plan
    from cspd_jax.image.chain import calibration
    from cspd_jax.weights import models

    compilation.use_cache()
    if args.target in models.DEFAULTS:
        raise UserError(
            f"{args.target} comes with the package, which is not written to; copy its folder first"
        )
    outline = models.describe(args.target)
    take_own(args, outline)
    options = plan.check(outline, [0], options=options_of(args)).options
    model = models.load(args.target)
    if model.folder is None or not os.access(model.folder, os.W_OK):
        raise UserError(f"{args.target} is not a checkpoint folder that can be written to; convert it first")
    progress("calibrating")
    fitted = calibration.measure(model, options)
    path = model.folder / calibration.FOLDER / calibration.file_name(options)
    calibration.write(path, fitted)
    found = {"gains": fitted.drafter.gain.tolist(), "gains_by_f": fitted.drafter.gain_f.tolist()}
    print(json.dumps({"out": str(path), **found}) if args.json else path)
