"""What the programs are given: lists on the command line, files of earlier results; and one sentence where
they are wrong."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cspd_jax.cli._arguments import real
from cspd_jax.cli._failures import user_message
from cspd_jax.errors import LARGEST, UserError


def say_why(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """One sentence and code 2 for what is wrong with files and arguments."""
    sentence = user_message(error)
    if isinstance(error, ModuleNotFoundError):
        sentence = f"{error.name} is not installed; docs/benchmarks.md says what each program needs"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        sentence = f"a file of results is none, or is damaged: {error}"
    if sentence is None:
        return sys.__excepthook__(kind, error, trace)
    print(f"{Path(sys.argv[0]).name}: error: {sentence}", file=sys.stderr)
    sys.exit(2)


def several(kind: Callable[[str], Any], mark: str = ",") -> Callable[[str], list[Any]]:
    """The type of an argument that lists numbers, or texts, between marks."""

    def read(text: str) -> list[Any]:
        return [kind(part.strip()) for part in text.split(mark)]

    read.__name__ = f"list of values ({mark})"
    return read


def between(least: float, most: float = LARGEST) -> Callable[[str], float]:
    """The type of an argument that is a number within bounds."""

    def read(text: str) -> float:
        if not least <= (value := real(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:g}")
        return value

    return read


def expression(text: str) -> str:
    """The type of an argument that is a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression ({error})") from None
    return text


def among(names: Iterable[str], mark: str = ";") -> Callable[[str], list[str]]:
    """The type of an argument that lists some of these names, between marks."""
    known = list(names)

    def read(text: str) -> list[str]:
        given = [part.strip() for part in text.split(mark)]
        if unknown := [part for part in given if part not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; there are {f'{mark} '.join(known)}")
        return given

    return read


def kept_cells(file: Path, needed: bool) -> dict[str, Any]:
    """What a program found before, which must be something where it is `needed`."""
    found = kept(file, "cells")
    if needed and not found["cells"]:
        raise UserError(f"{file} holds no results yet; run the program without options that only show them")
    return found


def kept(file: Path, what: str) -> dict[str, Any]:
    """The object in a file, with a list of that name; one with an empty list if there is no file."""
    found = json.loads(file.read_text()) if file.exists() else {what: []}
    if not isinstance(found, dict) or not isinstance(found.get(what), list):
        raise UserError(f"{file} does not hold {what}, as this program writes them")
    return found
