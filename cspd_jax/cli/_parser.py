"""The parser of every verb: numbers are read alike, and what is wrong is one line that names the verb."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable
from typing import Any, NoReturn

from cspd_jax.cli._arguments import real


class Parser(argparse.ArgumentParser):
    """Of a verb."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", float, real)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {shlex.join(unknown)}{self._meant(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _meant(self, unknown: Iterable[str]) -> str:
        flags = [flag for action in self._actions for flag in action.option_strings]
        near = [f for u in unknown for f in difflib.get_close_matches(u.partition("=")[0], flags, 1)]
        return f"; is {near[0]} meant?" if near else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, with a near verb or choice named."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), 1)
            if near:
                error.message = f"{error.message}; is {near[0]} meant?"
            raise
