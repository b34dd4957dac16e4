"""What the commands `text` and `masked` share: prompts from the command line, and coloured output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cspd_jax.cli._arguments import whole_numbers
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

_LONGEST = 2**24  # bytes of a file with a prompt


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Adds --prompt, --prompt-file and --prompt-ids."""
    group = parser.add_argument_group(
        "prompts", "A row each: first every --prompt, then every --prompt-file, then every --prompt-ids."
    )
    group.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue; repeat it for more rows"
    )
    group.add_argument(
        "--prompt-file",
        action="append",
        type=Path,
        metavar="FILE",
        help="a file whose content is one more prompt; may be repeated",
    )
    group.add_argument(
        "--prompt-ids", action="append", metavar="I,J,...", help="a prompt as token ids; may be repeated"
    )


def read_prompts(
    args: argparse.Namespace, tokenizer, config, max_new_tokens: int, default: Sequence[str]
) -> list[list[int]]:
    """Returns prompts as ids, checked against the model; `default` if the command line has none."""
    from cspd_jax.text.prompts import as_prompts, check_length, check_prompts
    from cspd_jax.weights.tokenizers import check_unicode

    texts = [*(args.prompt or ()), *map(_read, args.prompt_file or ())]
    rows = [whole_numbers("--prompt-ids", text) for text in args.prompt_ids or ()]
    if not texts and not rows:
        if tokenizer is None:
            raise UserError("the model has no tokenizer.json; give the prompt as --prompt-ids 1,2,3")
        texts = list(default)
    if texts and tokenizer is None:
        raise UserError("the model has no tokenizer.json; give the prompt as --prompt-ids 1,2,3")
    if "" in texts:
        raise UserError("a prompt is empty; it needs at least one character to begin with")
    for text in texts:
        check_unicode(text)
    rows = [tokenizer.encode(text) for text in texts] + rows
    check_prompts(config, as_prompts(rows))
    check_length(config, max(map(len, rows)), max_new_tokens)
    return rows


def _read(path: Path) -> str:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise UserError(f"{path} has more than {_LONGEST // 2**20} MiB, which is no prompt")
        if not content:
            raise UserError(f"{path} is empty; a prompt needs at least one character to begin with")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error})") from None


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe that nobody writes to, too, which then is empty."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def check_lost(rows: Sequence[Sequence[int]]) -> None:
    """Says how many texts hold `NO_TOKEN`; UserError if all do."""
    from cspd_jax.text.sampling import NO_TOKEN

    lost = sum(NO_TOKEN in row for row in rows)
    if lost == len(rows):
        raise UserError(
            "the model's logits came out as NaN, so there is no text: its weights are damaged, or too large"
            " for the dtype (--dtype float32)"
        )
    if lost:
        progress(f"warning: {lost} of {len(rows)} texts end early, where the model's logits came out as NaN")


def colourful(when: str) -> bool:
    """Returns whether to colour standard output, for --color `when`."""
    return when == "always" or (when == "auto" and sys.stdout.isatty())


def paint(text: str, colour: int) -> str:
    """Paints text in one of the terminal's own colours; empty lines are left alone."""
    return "".join(
        f"\x1b[{colour}m{line}\x1b[0m" if line.strip("\n") else line
        for line in text.splitlines(keepends=True)
    )
