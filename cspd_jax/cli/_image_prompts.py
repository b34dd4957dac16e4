"""Prompts of image models on the command line: bound to the model, they are its classes."""

from __future__ import annotations

import argparse
import re

from cspd_jax.cli._arguments import shown, whole_numbers
from cspd_jax.errors import UserError


def add_image_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts, for a target that makes images from text (NextStep-1)")
    group.add_argument("--prompt", action="append", metavar="TEXT", help="what to show; may be repeated")
    group.add_argument(
        "--prompt-ids",
        action="append",
        metavar="I,J,...",
        help="a prompt as token ids, with all that comes before the image; may be repeated",
    )
    group.add_argument(
        "--negative", metavar="TEXT", help="the unconditional prompt of --cfg (default: no text)"
    )
    group.add_argument("--negative-ids", metavar="I,J,...", help="the same as token ids")
    group.add_argument(
        "--grid", type=_grid, metavar="ROWSxCOLUMNS", help="tokens of an image (default: the model's)"
    )
    group.add_argument(
        "--normalise", action="store_true", help="normalise each token, as the published use_norm does"
    )


def _grid(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not understood; write for example 16x16")
    return int(found[1]), int(found[2])


def with_prompts(args: argparse.Namespace, model):
    """The model with the prompts bound to it; a model of classes as it is."""
    from cspd_jax.image import prompts
    from cspd_jax.networks.nextstep_config import NextStepConfig
    from cspd_jax.weights.tokenizers import read_tokenizer

    given = [name for name in ("prompt", "prompt_ids", "negative", "negative_ids", "grid", "normalise")
             if getattr(args, name)]  # fmt: skip
    if not isinstance(model.config, NextStepConfig):
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise UserError(f"{flag} is for models that make images from text; {model.name} takes --labels")
        return model
    texts, rows = (
        list(args.prompt or ()),
        [whole_numbers("--prompt-ids", text) for text in args.prompt_ids or ()],
    )
    if not texts and not rows:
        raise UserError(f"{model.name} makes images from text; say which with --prompt")
    if args.negative is not None and args.negative_ids is not None:
        raise UserError("--negative and --negative-ids both say the unconditional prompt; give one of them")
    cfg = model.sampling.get("cfg", 1) if args.cfg is None else args.cfg
    if cfg == 1 and (args.negative is not None or args.negative_ids is not None):
        raise UserError("--negative and --negative-ids are for guidance; give a --cfg other than 1, too")
    by_text = args.negative_ids is None and (args.negative is not None or args.cfg not in (None, 1))
    tokenizer = read_tokenizer(model.folder, model.config.lm.known_ids)
    if tokenizer is None and (texts or by_text):
        raise UserError(
            "the model has no tokenizer.json; give --prompt-ids, and with --cfg --negative-ids, as 1,2,3"
        )

    def ids(text: str) -> list[int]:
        assert tokenizer is not None
        return prompts.ids_of(text, tokenizer, model, args.grid)

    captions = (*texts, *(args.prompt_ids or ()))
    rows = [ids(text) for text in texts] + rows
    negative = rows[0] if args.negative_ids is None else whole_numbers("--negative-ids", args.negative_ids)
    if by_text:
        negative = ids(args.negative or "")
    normalise = True if args.normalise else None
    return prompts.bind(model, rows, negative, grid=args.grid, normalise=normalise, texts=captions)
