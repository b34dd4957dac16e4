"""Chat templates: what turns messages into the text that a chat model continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from cspd_jax._utils.json_files import read_json
from cspd_jax.converters.hf import CHAT_TEMPLATE
from cspd_jax.errors import UserError
from cspd_jax.weights.tokenizers import Tokenizer

_FAILURES = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
_FOLDERS = ("tokenizer", "")  # ours, and the hub's
Template: TypeAlias = Callable[[Sequence[Mapping[str, str]]], str]  # of messages with a role and a content


def chat_template(folder: Path | None) -> Template | None:
    """The chat template in a model's folder, in a file of its own or among the tokenizer's settings; None
    without one."""
    for place in (folder / name for name in _FOLDERS) if folder else ():
        settings = read_json(file) if (file := place / "tokenizer_config.json").is_file() else {}
        settings = settings if isinstance(settings, dict) else {}
        source = (
            alone.read_text(encoding="utf-8")
            if (alone := place / CHAT_TEMPLATE).is_file()
            else settings.get("chat_template")
        )
        if isinstance(source, list):  # several by name
            named = [one for one in source if isinstance(one, dict) and one.get("name") == "default"]
            source = named[0].get("template") if named else None
        if isinstance(source, str):
            tokens = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token")}
            return _compiled(source, tokens, alone if alone.is_file() else file)
    return None


def _compiled(source: str, tokens: Mapping[str, str], where: Path) -> Template:
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError(
            f"the chat template {where} needs the package jinja2; install it with: pip install jinja2"
        ) from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json

    def refuse(sentence: object) -> None:
        raise TemplateError(str(sentence))

    def filled_in(messages: Sequence[Mapping[str, str]]) -> str:
        try:
            template = environment.from_string(source, globals={"raise_exception": refuse})
            given = {"messages": list(messages), "add_generation_prompt": True, **tokens}
            return template.render(**given)
        except (*_FAILURES, TemplateError) as error:
            raise UserError(f"the chat template in {where} cannot be filled in ({error})") from None

    return filled_in


def _to_json(value: object, indent: int | None = None) -> str:
    """As transformers has it; Jinja's own is for pages of HTML, whose characters it escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def chat_ids(tokenizer: Tokenizer, template: Template, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Messages as the ids that a model continues with its answer: those that the template writes, alone."""
    if not (row := tokenizer.encode(template(messages), begin=False)):
        raise UserError(
            "the chat template makes no tokens of these messages; the model needs one to begin with"
        )
    return row


def _content(token: object) -> str:
    """A special token, which is stored as a text or as an object with a `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
