"""Prompts from a file, one per line, as a chat model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cspd_jax.check import UserError
from cspd_jax.models import TextModel
from cspd_jax.tokenizers import chat_ids, chat_template, load_tokenizer


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a file that are not blank."""
    return [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]


def prompt_ids(model: TextModel, texts: Sequence[str]) -> list[list[int]]:
    """Returns each text as the ids of a question to the model: in its chat template, if it has one, or as it
    is."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise UserError(f"{model.name} has no tokenizer.json, so it cannot read prompts")
    template = chat_template(model.folder)
    if template is None:
        return [tokenizer.encode(text) for text in texts]
    return [chat_ids(tokenizer, template, [{"role": "user", "content": text}]) for text in texts]
