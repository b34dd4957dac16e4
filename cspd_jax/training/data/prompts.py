"""Prompts from a file, one per line, as a chat model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cspd_jax._utils import limits
from cspd_jax.errors import UserError
from cspd_jax.weights.chat import chat_ids, chat_template
from cspd_jax.weights.models import TextModel
from cspd_jax.weights.tokenizers import load_tokenizer

_LARGEST = 2**24  # bytes of a file with prompts


def read_lines(path: Path) -> list[str]:
    """The lines of a file that are not blank; UserError if there are none."""
    limits.file_size(path)  # nothing that never ends
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error})") from None
    if len(content) > _LARGEST:
        raise UserError(f"{path} has more than {_LARGEST // 2**20} MiB, which are no prompts")
    if not (found := [line.strip() for line in lines if line.strip()]):
        raise UserError(f"{path} is empty; it should hold one prompt per line")
    return found


def prompt_ids(model: TextModel, texts: Sequence[str]) -> list[list[int]]:
    """Each text as the ids of a question to the model: in its chat template, if it has one, or as it is."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise UserError(f"{model.name} has no tokenizer.json, so it cannot read prompts")
    template = chat_template(model.folder)
    if template is None:
        return [tokenizer.encode(text) for text in texts]
    return [chat_ids(tokenizer, template, [{"role": "user", "content": text}]) for text in texts]
