"""Prompts from a file, one per line, as a chat model reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cspd_jax._utils.json_files import read_json
from cspd_jax.errors import UserError
from cspd_jax.weights.models import TextModel
from cspd_jax.weights.tokenizers import load_tokenizer

_PLACES = (
    "tokenizer/tokenizer_config.json",
    "tokenizer_config.json",
)  # ours, and the hub's
_LARGEST = 2**24  # bytes of a file with prompts


def read_lines(path: Path) -> list[str]:
    """The lines of a file that are not blank; UserError if there are none."""
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        lines = content.decode("utf-8").splitlines()
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
    begins = model.config.bos_ids
    rows = [tokenizer.encode(template(text)) for text in texts]
    # A template writes the beginning of a text, and some tokenizers add another.
    return [row[1:] if row[:1] == row[1:2] and row[0] in begins else row for row in rows]


def chat_template(folder: Path | None) -> Callable[[str], str] | None:
    """What turns a question into the text that a chat model continues with its answer; None without one."""
    found = [folder / place for place in _PLACES if (folder / place).is_file()] if folder else []
    settings = read_json(found[0]) if found else None
    if not isinstance(settings, dict) or not isinstance(settings.get("chat_template"), str):
        return None
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError(
            f"the chat template of {folder} needs the package jinja2; install it with: pip install jinja2"
        ) from None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    tokens = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token")}

    def question(text: str) -> str:
        try:
            template = environment.from_string(settings["chat_template"])
            messages = [{"role": "user", "content": text}]
            return template.render(messages=messages, add_generation_prompt=True, **tokens)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"the chat template in {found[0]} cannot be filled in ({error})") from None

    return question


def _content(token: object) -> str:
    """A special token, which is stored as a text or as an object with a `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
