"""The program `cspd-jax`: the verbs of the core, and one for each app."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cspd_jax import cli
from cspd_jax.apps.cli import evaluate, reproduce, sample
from cspd_jax.tools import demo

VERBS = (*cli.VERBS, sample, evaluate, reproduce, demo)
cli.info.OTHERS.append(sample.described)


def make_parser() -> argparse.ArgumentParser:
    return cli.make_parser(VERBS)


def main(argv: Sequence[str] | None = None) -> int:
    """As `cspd_jax.cli.main`, with the verbs of the apps."""
    return cli.main(argv, VERBS)


def command() -> None:
    cli.end(main())
