"""The program `cspd-jax`, which is `python -m cspd_jax` too: the verbs of the library and of its tools."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cspd_jax import cli
from cspd_jax.tools import demo, sample
from cspd_jax.tools.evaluation import evaluate

VERBS = (*cli.VERBS, sample, evaluate, demo)


def make_parser() -> argparse.ArgumentParser:
    return cli.make_parser(VERBS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 2 with one sentence on standard error for what the caller can mend."""
    return cli.main(argv, VERBS)


def command() -> None:
    """Runs the command of this process and ends it."""
    cli.end(main())


if __name__ == "__main__":
    command()
