"""The command line. Each subcommand is a module with `add_parser(subparsers)`, which sets `func(args)`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from cspd_jax import __version__
from cspd_jax.cli import (
    _failures,
    calibrate,
    convert,
    demo,
    distill,
    evaluate,
    generate,
    info,
    masked,
    sample,
    text,
    train,
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cspd-jax", description="Speculative decoding that does not change what comes out."
    )
    parser.add_argument("--version", action="version", version=f"cspd-jax {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (generate, sample, text, masked, convert, info, train, distill, calibrate, evaluate, demo):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 2 with one sentence on standard error for what the caller can mend."""
    _failures.forgiving_streams()
    complaints = _failures.Complaints()
    try:
        with complaints.held(), _failures.terminable():
            args = make_parser().parse_args(argv)
            args.func(args)
            sys.stdout.flush()
    except Exception as error:
        sentence = _failures.sentence(error, next(iter(sys.argv[1:] if argv is None else argv), ""))
        if sentence is None:
            complaints.tell()
            raise
        if isinstance(error, BrokenPipeError):
            _failures.silence_output()
        print(f"cspd-jax: error: {sentence}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interruption:
        terminated = isinstance(interruption, _failures.Terminated)
        print(f"cspd-jax: {'terminated' if terminated else 'interrupted'}", file=sys.stderr)
        return 143 if terminated else 130
    complaints.tell()
    return 0


def command() -> None:
    """The program. Where it did not end well it ends at once: threads in the middle of something only add to
    what has been said."""
    code = main()
    if code:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
