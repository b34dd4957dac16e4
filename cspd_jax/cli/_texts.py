"""What the commands `text` and `masked` share: prompts, the run beside its reference, and coloured output."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cspd_jax import reports
from cspd_jax.check import UserError
from cspd_jax.cli._flags import numbers, progress
from cspd_jax.info import Info
from cspd_jax.measure import timed
from cspd_jax.sampling import NO_TOKEN

_DEFAULT = "Return a list of"


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Adds --prompt, --prompt-file and --prompt-ids, and how texts are shown."""
    add = functools.partial(parser.add_argument_group("prompts, a row each").add_argument, action="append")
    add("--prompt", metavar="TEXT", help="text to continue; may be repeated")
    add("--prompt-file", type=Path, metavar="FILE", help="a file whose content is a prompt; may be repeated")
    add("--prompt-ids", type=numbers, metavar="I,J,...", help="a prompt as token ids; may be repeated")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")


def read_prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Returns the prompts as ids; one of our own if the command line has none."""
    rows = [list(ids) for ids in args.prompt_ids or ()]
    files = [path.read_text(encoding="utf-8-sig") for path in args.prompt_file or ()]
    texts = [*(args.prompt or ()), *files] or ([] if rows else [_DEFAULT])
    if texts and tokenizer is None:
        raise UserError("the model has no tokenizer.json; give the prompt as --prompt-ids 1,2,3")
    return [tokenizer.encode(text) for text in texts] + rows


class Ran(NamedTuple):
    """What a request has made.

    tokens: [B, G].
    info: what happened, with its seconds.
    beside: what it gained beside the reference; None if that was not run.
    """

    tokens: np.ndarray
    info: Info
    beside: dict[str, Any] | None


def run_beside(ways: Mapping[str, Any], generate: Callable, repeats: int = 1) -> Ran:
    """Runs the first of one or two requests; the second is its reference. UserError if all texts are lost."""
    made = timed({way: functools.partial(generate, *asked) for way, asked in ways.items()}, repeats)
    infos = {way: dataclasses.replace(info, seconds=seconds) for way, ((_, info), seconds) in made.items()}
    texts = [np.asarray(generated.tokens) for generated, _ in made.values()]
    lost = int(np.sum(np.any(texts[0] == NO_TOKEN, axis=1)))
    if lost == len(texts[0]):
        raise UserError(
            "the model's logits came out as NaN, so there is no text: its weights are damaged, or too large"
            " for the dtype (--dtype float32)"
        )
    if lost:
        progress(f"warning: {lost} texts end early, where the model's logits came out as NaN")
    beside = None
    if len(ways) > 1:
        same = int(np.sum(np.all(texts[0] == texts[1], axis=1)))
        beside = {**reports.beside(infos), "identical_rows": same}
    return Ran(texts[0], next(iter(infos.values())), beside)


def say(ran: Ran, reference: str, equal: bool) -> None:
    """Says what happened. equal: whether the texts are those of the reference, up to rounding."""
    progress(str(ran.info))
    if ran.beside is None:
        return
    progress(f"beside {reference} decoding: {reports.in_words(ran.beside)}")
    if equal:
        same, rows = ran.beside["identical_rows"], len(ran.tokens)
        progress(f"identical to {reference} decoding: {same} of {rows} rows")
        if same < rows:
            progress(
                "passes of different shapes round differently, so where two tokens are almost equally"
                " probable either may be taken; --dtype float64 rules this out in practice"
            )


def paint(text: str, colour: int | None, args: argparse.Namespace) -> str:
    """Paints text in one of the terminal's own colours, where --color says so; empty lines are left alone."""
    if colour is None or not (args.color == "always" or (args.color == "auto" and sys.stdout.isatty())):
        return text
    lines = text.splitlines(keepends=True)
    return "".join(f"\x1b[{colour}m{line}\x1b[0m" if line.strip("\n") else line for line in lines)
