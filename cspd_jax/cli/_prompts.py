"""What `text` and `masked` share: prompts from the command line, and printing what was written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cspd_jax.errors import UserError


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompt", action="append", metavar="TEXT", help="what is continued; again for more rows"
    )
    group.add_argument("--prompt-file", type=Path, metavar="FILE", help="one prompt: the content of a file")
    group.add_argument(
        "--prompt-ids",
        action="append",
        metavar="I,J,...",
        help="a prompt as ids",
    )


def read_prompts(args: argparse.Namespace, tokenizer, config, new_tokens: int, default: list[str]):
    """Lists of ids, checked against the model."""
    texts = list(args.prompt or ())
    if args.prompt_file is not None:
        try:
            texts.append(args.prompt_file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{args.prompt_file} is not a readable text ({error})") from None
    rows = [_ids(text) for text in args.prompt_ids or ()]
    if not texts and not rows:
        if tokenizer is None:
            raise UserError("the model has no tokenizer; give the prompt as --prompt-ids 1,2,3")
        texts = default
    if texts and tokenizer is None:
        raise UserError("the model has no tokenizer.json; give the prompt as --prompt-ids 1,2,3")
    if "" in texts:
        raise UserError("a prompt is empty; it needs at least one character to begin with")
    rows = [tokenizer.encode(text) for text in texts] + rows
    for row in rows:
        if not row:
            raise UserError("a prompt is empty; it needs at least one token to begin with")
        if wrong := [i for i in row if not 0 <= i < config.known_ids]:
            raise UserError(f"id {wrong[0]} in a prompt is none of the model's {config.known_ids} ids")
        if len(row) + new_tokens > config.max_positions:
            raise UserError(
                f"a prompt of {len(row)} tokens and {new_tokens} new ones are more than the"
                f" {config.max_positions} positions that the model was made for; shorten the prompt, or lower"
                " --new-tokens"
            )
    return rows


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--prompt-ids {text!r} is not a list of whole numbers such as 1,2,3") from None


def colourful(when: str) -> bool:
    """Whether to colour standard output."""
    return when == "always" or (when == "auto" and sys.stdout.isatty())


def paint(text: str, colour: int) -> str:
    """Text in a colour of the terminal's own palette."""
    return "".join(f"\x1b[{colour}m{line}\x1b[0m" if line.strip("\n") else line
                   for line in text.splitlines(keepends=True))  # fmt: skip
