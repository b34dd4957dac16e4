"""The command line of the core. A verb is a module with `add_parser(subparsers)`, which sets `func(args)`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from cspd_jax import __version__
from cspd_jax.cli import _failures, calibrate, convert, distill, generate, info, masked, text, train
from cspd_jax.cli._parser import Parser

VERBS = (generate, text, masked, convert, info, train, distill, calibrate)


def make_parser(verbs: Sequence[ModuleType] = VERBS) -> argparse.ArgumentParser:
    parser = Parser(prog="cspd-jax", description="Speculative decoding that does not change what comes out.")
    parser.add_argument("--version", action="version", version=f"cspd-jax {__version__}")
    parser.add_argument(
        "--distributed",
        metavar="WHERE",
        help="this is one of several processes: auto (found from SLURM, Open MPI, Cloud TPU, Kubernetes), or"
        " HOST:PORT,I,N for process I of N. generate, text, masked, train, distill and sample share the work;"
        " of other commands the first process does all",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    parser.set_defaults(shares_work=False)
    for verb in verbs:
        verb.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None, verbs: Sequence[ModuleType] = VERBS) -> int:
    """Runs a command; returns 0, or 2 with one sentence on standard error for what the caller can mend."""
    try:
        with _failures.terminable():
            args = make_parser(verbs).parse_args(argv)
            if args.distributed is None:
                args.func(args)
            else:
                _run_with_others(args)
            sys.stdout.flush()
    except Exception as error:
        sentence = _failures.user_message(error)
        if sentence is None:
            raise
        if isinstance(error, BrokenPipeError):
            _failures.silence_output()
        print(f"cspd-jax: error: {sentence}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interruption:
        terminated = isinstance(interruption, _failures.Terminated)
        sentence, code = ("terminated", 143) if terminated else ("interrupted", 130)
        print(f"cspd-jax: {sentence}", file=sys.stderr)
        return code
    return 0


def _run_with_others(args: argparse.Namespace) -> None:
    """Runs the command in one of several processes."""
    from cspd_jax.parallel import processes

    processes.initialize(args.distributed)
    if processes.is_first() or args.shares_work:
        args.func(args)
    processes.meet("the end")


def end(code: int) -> None:
    """Ends the program. Where it did not end well it ends at once: threads in the middle of something only
    add to what has been said."""
    if code:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
