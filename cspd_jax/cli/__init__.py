"""The command line. A verb is a module whose docstring is its description, with
`add_flags(parser)` and `run(args)`, imported when it is used."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from cspd_jax import __version__
from cspd_jax._utils.compilation import device_loops
from cspd_jax.check import UserError, is_out_of_memory
from cspd_jax.cli._flags import Parser

VERBS = {  # where each is, and what it does
    "generate": ("cli.generate", "generate images"),
    "text": ("cli.text", "generate text with a causal language model"),
    "masked": ("cli.masked", "generate text with a masked-diffusion language model"),
    "convert": (
        "cli.convert",
        "make a checkpoint folder from a published checkpoint, without PyTorch",
    ),
    "info": (
        "cli.info",
        "say kind, sizes, number of parameters, dtype and SHA-256 of a checkpoint",
    ),
    "train": ("cli.train", "train a model"),
    "distill": ("cli.distill", "train a draft for a target"),
    "calibrate": (
        "cli.calibrate",
        "fit what drafts denoising steps, or moves of masked text",
    ),
    "sample": ("tools.sample", "generate many images, for an evaluation"),
    "evaluate": (
        "tools.evaluation.evaluate",
        "measure how good images on disk are (FID)",
    ),
    "demo": (
        "tools.demo",
        "serve a page that shows plain and exact speculative generation side by side",
    ),
}
_EXTRAS = {"gradio": "demo", "matplotlib": "train", "scipy": "train"}  # imported late


def make_parser() -> Parser:
    """Makes the parser of what stands before the arguments of a verb."""
    told = "".join(f"  {verb:10} {help}\n" for verb, (_, help) in VERBS.items())
    parser = Parser(
        prog="cspd-jax",
        description="Speculative decoding that does not change what comes out.",
        epilog=f"commands, each with a --help of its own:\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"cspd-jax {__version__}"
    )
    parser.add_argument(
        "--distributed",
        metavar="WHERE",
        help="this is one of several processes: auto (found from SLURM, Open MPI, Cloud"
        " TPU, Kubernetes), or"
        " HOST:PORT,I,N for process I of N",
    )
    parser.add_argument("command", choices=VERBS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parser_of(verb: str) -> tuple[Any, Parser]:
    """Returns the module of a verb, and its parser."""
    module = importlib.import_module(f"cspd_jax.{VERBS[verb][0]}")
    parser = Parser(prog=f"cspd-jax {verb}", description=module.__doc__)
    module.add_flags(parser)
    return module, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 2 with one sentence on standard error for what the
    caller can mend."""
    try:
        first = make_parser().parse_args(argv)
        module, parser = parser_of(first.command)
        args = parser.parse_args(first.arguments)
        if getattr(args, "device_loops", False):
            device_loops(True)
        if first.distributed is not None:
            _join(first.distributed)
        module.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("cspd-jax: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        print(f"cspd-jax: error: {_sentence(error)}", file=sys.stderr)
        return 2
    return 0


def _sentence(error: Exception) -> str:
    """Returns what the caller can mend; raises the error again if it is a mistake of
    the program."""
    if isinstance(error, UserError | OSError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return (
            f"{error.name} is missing; this needs pip install"
            f' "cspd-jax[{_EXTRAS[error.name]}]"'
        )
    if is_out_of_memory(error):
        return "there is too little memory for this; fewer rows side by side take less"
    raise error


def _join(where: str) -> None:
    """Makes this one of several processes, of which the first speaks and writes."""
    told: dict[str, Any] = {}
    if where != "auto":
        try:
            address, index, count = where.split(",")
            told = {
                "process_id": int(index),
                "num_processes": int(count),
                "coordinator_address": address,
            }
        except ValueError:
            raise UserError(
                f"--distributed {where} is neither auto nor HOST:PORT,I,N"
            ) from None
    jax.distributed.initialize(**told, heartbeat_timeout_seconds=10)
    first = jax.process_index() == 0
    if first:
        sys.stdout = os.fdopen(os.dup(1), "w")
    # What the runtime itself prints to the standard output does not belong to the
    # results.
    os.dup2(2 if first else os.open(os.devnull, os.O_WRONLY), 1)
