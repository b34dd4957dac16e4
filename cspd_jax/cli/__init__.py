"""The command line. Each subcommand is a module with `add_parser(subparsers)`, which sets `func(args)`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cspd_jax import __version__
from cspd_jax.cli import calibrate, convert, distill, evaluate, generate, info, masked, text, train
from cspd_jax.errors import UserError, is_out_of_memory


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cspd-jax", description="Speculative decoding that does not change what comes out."
    )
    parser.add_argument("--version", action="version", version=f"cspd-jax {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (generate, text, masked, convert, info, train, distill, calibrate, evaluate):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 2 with one sentence on standard error for the caller's mistakes."""
    args = make_parser().parse_args(argv)
    try:
        args.func(args)
    except UserError as error:
        print(f"cspd-jax: error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(
            "cspd-jax: error: the device has too little memory for this; fewer side by side take less"
            " (--batch, and where drafts are made --gamma and --proposals)",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("cspd-jax: interrupted", file=sys.stderr)
        return 130
    return 0
