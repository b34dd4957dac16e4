"""What the commands `text` and `masked` share: models and prompts, the run beside its reference, and what is
printed of both."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax import hub, reports
from cspd_jax._utils import compilation
from cspd_jax.check import UserError
from cspd_jax.cli._flags import add_common, numbers, progress
from cspd_jax.info import Info
from cspd_jax.measure import Choice, timed
from cspd_jax.models import TextModel
from cspd_jax.sampling import NO_TOKEN
from cspd_jax.tokenizers import load_tokenizer, pieces

_DEFAULT = "Return a list of"


def add_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the model (default: of this name), its prompts, and what every generation has."""
    parser.add_argument(
        "--target",
        "--model",
        default=default,
        metavar="MODEL",
        help=f"{default}, a checkpoint folder (ours or Hugging Face's), or OWNER/NAME on the hub",
    )
    add_common(parser, "float64")
    add = functools.partial(parser.add_argument, action="append", default=[])
    add("--prompt", metavar="TEXT", help="text to continue; may be repeated")
    add("--prompt-ids", type=numbers, metavar="I,J,...", help="a prompt as token ids; may be repeated")


class Opened(NamedTuple):
    """A model, its tokenizer, or None, and the prompts as ids."""

    model: TextModel
    tokenizer: Any
    prompts: list[list[int]]


def open_model(args: argparse.Namespace, mesh: Any, causal: bool) -> Opened:
    """Loads what the flags name; a prompt of our own stands in for none."""
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    compilation.use_cache()
    model = hub.load(args.target, args.dtype, mesh, of=TextModel)
    if model.config.causal != causal:
        kind, verb = ("masked-diffusion", "masked") if causal else ("causal", "text")
        raise UserError(f"{args.target} is a {kind} model; use cspd-jax {verb}")
    tokenizer: Any = load_tokenizer(model)
    texts = args.prompt or ([] if args.prompt_ids else [_DEFAULT])
    if texts and tokenizer is None:
        raise UserError("the model has no tokenizer.json; give the prompt as --prompt-ids 1,2,3")
    prompts = [tokenizer.encode(text) for text in texts]
    return Opened(model, tokenizer, [*prompts, *map(list, args.prompt_ids)])


def chosen(choice: Choice) -> Any:
    """Says how long each way took, and returns the request of the fastest."""
    progress("; ".join(f"{way} {seconds:.3f} s" for way, seconds in choice.seconds.items()))
    return choice.request


class Ran(NamedTuple):
    """What a request has made: tokens [B, G], what happened, and what it gained beside its reference."""

    tokens: np.ndarray
    info: Info
    beside: dict[str, Any] | None


def run_beside(ways: Mapping[str, Any], generate: Callable) -> Ran:
    """Runs the first of one or two requests; the second is its reference."""
    runs = {way: functools.partial(generate, *request) for way, request in ways.items()}
    made = timed(runs, 1 if len(ways) == 1 else 3)
    infos = {way: dataclasses.replace(info, seconds=seconds) for way, ((_, info), seconds) in made.items()}
    texts = [np.asarray(generated.tokens) for generated, _ in made.values()]
    if lost := int(np.sum(np.any(texts[0] == NO_TOKEN, axis=1))):
        progress(f"warning: {lost} texts end early, where the model's logits came out as NaN")
    beside = None
    if len(ways) > 1:
        same = int(np.sum(np.all(texts[0] == texts[1], axis=1)))
        beside = {**reports.beside(infos), "identical_rows": same}
    return Ran(texts[0], next(iter(infos.values())), beside)


def tell(
    args: argparse.Namespace,
    opened: Opened,
    ids: Sequence[list[int]],
    colours: Sequence[Sequence[int | None]],
    ran: Ran,
    report: Mapping[str, Any],
) -> None:
    """Prints the texts, each token in its colour on a terminal, and what happened; or all of it as JSON."""
    tokenizer = opened.tokenizer
    if args.json:
        texts = [None if tokenizer is None else tokenizer.decode(row) for row in ids]
        print(json.dumps({"text": texts, "ids": ids, **report}))
        return
    for prompt, row, of_row in zip(opened.prompts, ids, colours):
        if tokenizer is None:
            print(",".join(map(str, row)))
            continue
        parts = zip(pieces(tokenizer, [*prompt, *row])[len(prompt) :], of_row)
        groups = itertools.groupby(parts, lambda part: part[1])
        painted = (_paint("".join(piece for piece, _ in group), colour) for colour, group in groups)
        print(tokenizer.decode(prompt) + "".join(painted))
    progress(str(ran.info))
    if ran.beside is not None:
        same = f"{ran.beside['identical_rows']} of {len(ids)} rows are identical"
        progress(f"beside the reference: {reports.in_words(ran.beside)}; {same}")


def _paint(text: str, colour: int | None) -> str:
    return text if colour is None or not sys.stdout.isatty() else f"\x1b[{colour}m{text}\x1b[0m"
