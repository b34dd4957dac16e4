"""The parts that the commands `text` and `masked` share: they load the model, read the
prompts, run a method and its reference, and print the results of both."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from cspd_jax import hub
from cspd_jax._utils import compilation
from cspd_jax._utils.options import reported
from cspd_jax.check import UserError
from cspd_jax.cli._flags import add_common, progress
from cspd_jax.comparison import Request, side_by_side
from cspd_jax.info import Info
from cspd_jax.models import TextModel
from cspd_jax.reports import report
from cspd_jax.sampling import NO_TOKEN
from cspd_jax.tokenizers import load_tokenizer

_DEFAULT = "Return a list of"
# (tokens, info) -> the new ids of each text
Rows = Callable[[np.ndarray, Info], list[list[int]]]


def add_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the flags for the model, whose default is the name `default`, for its
    prompts, and for every generating verb."""
    parser.add_argument(
        "--target",
        "--model",
        default=default,
        metavar="MODEL",
        help=f"{', '.join(hub.TEXT_DEFAULTS)}, a checkpoint folder (ours or Hugging"
        f" Face's), or OWNER/NAME on the hub (default: {default})",
    )
    add_common(parser, "float64")
    add = functools.partial(parser.add_argument, action="append", default=[])
    add("--prompt", metavar="TEXT", help="text to continue; may be repeated")
    add(
        "--prompt-ids",
        type="integers",
        metavar="I,J,...",
        help="a prompt as token ids; may be repeated",
    )


def open_model(
    args: argparse.Namespace, mesh: Any, causal: bool
) -> tuple[TextModel, Any, list[list[int]]]:
    """Returns the model, its tokenizer or None, and the prompts as ids. If no prompt is
    given, a default prompt is used.

    causal: whether the command is for causal models.
    """
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
        raise UserError(
            "the model has no tokenizer.json; give the prompt as --prompt-ids 1,2,3"
        )
    return (
        model,
        tokenizer,
        [*(tokenizer.encode(text) for text in texts), *map(list, args.prompt_ids)],
    )


def run(
    args: argparse.Namespace,
    tokenizer: Any,
    ways: Mapping[str, Request],
    rows: Rows,
    **told: object,
) -> None:
    """Runs the first request, and the second one if there is one, which is its
    reference. Prints the texts of the first request, and what happened in both; with
    --json, everything as one JSON object.

    ways: one or two requests by the names of their methods.
    rows: a function of (tokens, info) that returns the new ids of each text.
    told: further entries of the report.
    """
    request, *others = ways.values()
    made = side_by_side(ways, 3 if others else 1)
    infos = {way: found.info for way, found in made.items()}
    tokens, *reference = (np.asarray(found.tokens) for found in made.values())
    info = next(iter(infos.values()))
    if lost := int(np.sum(np.any(tokens == NO_TOKEN, axis=1))):
        progress(
            f"warning: {lost} texts end early, where the model's logits came out as NaN"
        )
    if reference:
        same = int(np.sum(np.all(tokens == reference[0], axis=1)))
        told[f"compared_to_{list(ways)[1]}"] = {
            **report.beside(infos),
            "identical_rows": same,
        }
    ids = rows(tokens, info)
    decode = str if tokenizer is None else tokenizer.decode
    if args.json:
        texts = [None if tokenizer is None else decode(row) for row in ids]
        options = reported(request.options)
        told = report.make_report(request.model, info, options, **told, seed=args.seed)
        print(json.dumps({"text": texts, "ids": ids, **told}))
        return
    for prompt, row in zip(request.what, ids):
        print(decode([*prompt, *row]))
    progress(str(info))
    if reference:
        gain = report.in_words(report.beside(infos))
        progress(
            f"beside {list(ways)[1]} decoding: {gain}; {same} of {len(tokens)} rows are"
            " identical"
        )
