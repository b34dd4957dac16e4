"""The command line. Each verb is a module with the functions `add_flags(parser)` and
`run(args)`. The module's docstring is the description of the verb in its --help. The
module is imported when the verb is used."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax

from cspd_jax import __version__
from cspd_jax._utils.compilation import device_loops
from cspd_jax.check import UserError, is_out_of_memory
from cspd_jax.cli._flags import Parser

VERBS = {
    "generate": "generate images",
    "text": "generate text with a causal language model",
    "masked": "generate text with a masked-diffusion language model",
    "convert": "make a checkpoint folder from a published checkpoint, without PyTorch",
    "info": "say kind, sizes, number of parameters, dtype and SHA-256 of a checkpoint",
    "train": "train a model",
    "distill": "train a draft for a target",
    "calibrate": "fit the drafter of an image model, or the moves of a masked language"
    " model",
    "sample": "generate many images, for an evaluation",
    "evaluate": "measure how good images on disk are (FID)",
    "demo": "serve a page that shows plain and exact speculative generation side by"
    " side",
}
# The modules of the verbs that are not in this folder.
_TOOLS = {
    "sample": "tools.sample",
    "evaluate": "tools.evaluation.evaluate",
    "demo": "tools.demo",
}
# Packages that a verb may import, and the extras that install them.
_EXTRAS = {
    "gradio": "demo",
    "matplotlib": "train",
    "scipy": "train",
}


def make_parser() -> Parser:
    """Makes the parser of the arguments up to the verb. It passes the verb's own
    arguments through."""
    told = "".join(f"  {verb:10} {help}\n" for verb, help in VERBS.items())
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
        " TPU, Kubernetes), or HOST:PORT,I,N for process I of N",
    )
    parser.add_argument("command", choices=VERBS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parser_of(verb: str) -> tuple[Any, Parser]:
    """Returns the module of a verb, and the parser of the verb's arguments."""
    place = _TOOLS.get(verb, f"cli.{verb}")
    module = importlib.import_module(f"cspd_jax.{place}")
    parser = Parser(prog=f"cspd-jax {verb}", description=module.__doc__)
    module.add_flags(parser)
    return module, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, or 2 if the caller can correct the
    error, which is then printed as one sentence on standard error; 130 after Ctrl-C,
    and 143 after SIGTERM."""
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
    except KeyboardInterrupt as signalled:
        print("cspd-jax: interrupted", file=sys.stderr)
        return 128 + (*signalled.args, signal.SIGINT)[0]
    except Exception as error:
        print(f"cspd-jax: error: {_sentence(error)}", file=sys.stderr)
        return 2
    return 0


def _sentence(error: Exception) -> str:
    """Returns the sentence for an error that the caller can correct. Raises any other
    error again, because it is a bug of the program."""
    if isinstance(error, UserError | OSError):
        return re.sub(r"^\[Errno \d+\] ", "", str(error))
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return (
            f"{error.name} is missing; this needs pip install"
            f' ".[{_EXTRAS[error.name]}]"'
        )
    if is_out_of_memory(error):
        return (
            "there is too little memory for this; give a smaller --batch or fewer"
            " prompts"
        )
    raise error


def _join(where: str) -> None:
    """Makes this process one of several. Only the first process prints results."""
    told: Any = ()
    if where != "auto":
        try:
            address, index, count = where.split(",")
            told = address, int(count), int(index)
        except ValueError:
            raise UserError(
                f"--distributed {where} is neither auto nor HOST:PORT,I,N"
            ) from None
    jax.distributed.initialize(*told, heartbeat_timeout_seconds=10)  # type: ignore[misc]
    first = jax.process_index() == 0
    if first:
        sys.stdout = os.fdopen(os.dup(1), "w")
    # The runtime may print to the standard output. Its lines are sent elsewhere,
    # because they do not belong to the results.
    os.dup2(2 if first else os.open(os.devnull, os.O_WRONLY), 1)
