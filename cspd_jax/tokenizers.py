"""Turns text into the ids of a language model and back, by the model's tokenizer.json,
or as bytes.

The language models that come with the package read bytes. The ids 0..255 are the bytes
of UTF-8, and `END_OF_TEXT` begins and ends a text. Masked-diffusion models also have
`MASK`, which stands for a byte to be filled in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from cspd_jax._utils.files import read_object
from cspd_jax.check import UserError
from cspd_jax.models import TextModel

END_OF_TEXT = 256
MASK = 257
CAUSAL_SIZE = 257
MASKED_SIZE = 258

CHAT_TEMPLATE = "chat_template.jinja"
_FOLDERS = ("tokenizer", "")  # in this package's checkpoints, and in Hugging Face's
# Turns messages, which have a role and a content, into one text.
Template: TypeAlias = Callable[[Sequence[Mapping[str, str]]], str]


class Tokenizer(Protocol):
    """Encodes and decodes whole texts.

    The argument `begin` of `encode` says whether the tokens that mark the beginning of
    a text are added. Some tokenizers then also add the tokens that mark its end.
    """

    def encode(self, text: str, begin: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Reads text as the bytes of UTF-8."""

    def encode(self, text: str, begin: bool = True) -> list[int]:
        """Returns the bytes of a text. They follow END_OF_TEXT unless `begin` is
        false."""
        return [END_OF_TEXT] * begin + list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids. Invalid UTF-8 becomes replacement characters, and
        ids that are not bytes are left out."""
        return bytes(int(i) for i in ids if 0 <= i < END_OF_TEXT).decode(
            errors="replace"
        )


class FileTokenizer:
    """Reads text by a tokenizer.json and the `tokenizers` package."""

    def __init__(self, path: Path, known_ids: int):
        import tokenizers

        self._path = path
        self._known_ids = known_ids
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # Texts are neither cut nor padded, whatever the file says.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, begin: bool = True) -> list[int]:
        """Returns the ids of a text. Raises UserError if the model does not have one of
        them."""
        ids = self._tokenizer.encode(text, add_special_tokens=begin).ids
        if ids and max(ids) >= self._known_ids:
            raise UserError(
                f"{self._path} gives id {max(ids)}, but the model has {self._known_ids}"
                " ids: this tokenizer is not the model's"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids. Ids below 0, which stand for no token, are left
        out."""
        return self._tokenizer.decode(
            [int(i) for i in ids if i >= 0], skip_special_tokens=False
        )


def load_tokenizer(model: TextModel) -> Tokenizer | None:
    """Returns the model's tokenizer; None if it has none, in which case the model takes
    only ids."""
    if (found := read_tokenizer(model.folder, model.config.known_ids)) is not None:
        return found
    reads_bytes = model.config.vocab_size in (CAUSAL_SIZE, MASKED_SIZE)
    return (
        ByteTokenizer()
        if reads_bytes and model.config.eos_ids == (END_OF_TEXT,)
        else None
    )


def read_tokenizer(folder: Path | None, known_ids: int) -> FileTokenizer | None:
    """Reads the tokenizer.json in a model's folder; returns None if there is none."""
    path = _file(folder, "tokenizer.json")
    return FileTokenizer(path, known_ids) if path else None


def _file(folder: Path | None, name: str) -> Path | None:
    """Returns the path of a tokenizer's file in a model's folder; None if there is
    none."""
    paths = [folder / place / name for place in _FOLDERS] if folder else []
    return next((path for path in paths if path.is_file()), None)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns for each id the piece that it adds to the text. The joined pieces are the
    text. A piece is "" while a character is incomplete."""
    whole = ""
    found = []
    start = 0
    for i in range(len(ids)):
        text = tokenizer.decode(ids[start : i + 1])
        complete = not text.endswith("�") or i == len(ids) - 1
        found.append(text[len(whole) :] if complete else "")
        if complete:
            whole = text
            # Ids far back no longer change the text of later ids.
            if not text[-1:].isspace() and i - start >= 64:
                start = i
                whole = tokenizer.decode(ids[i : i + 1])
    return found


def chat_template(folder: Path | None) -> Template | None:
    """Reads the chat template in a model's folder. It is a file of its own, or an entry
    of the tokenizer's settings. Returns None if there is none."""
    alone = _file(folder, CHAT_TEMPLATE)
    settings_file = _file(folder, "tokenizer_config.json")
    settings = read_object(settings_file) if settings_file else {}
    source = (
        alone.read_text(encoding="utf-8") if alone else settings.get("chat_template")
    )
    if isinstance(source, list):  # several templates, each with a name
        source = next(
            (one["template"] for one in source if one["name"] == "default"), None
        )
    if source is None:
        return None
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(sentence: str) -> None:
        raise TemplateError(sentence)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own filter is for HTML and escapes some characters. This one is the same
    # as in transformers.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    template = environment.from_string(source, globals={"raise_exception": refuse})
    tokens = {name: settings.get(name) or "" for name in ("bos_token", "eos_token")}
    texts = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in tokens.items()
    }

    def filled_in(messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return template.render(
                messages=list(messages), add_generation_prompt=True, **texts
            )
        except TemplateError as error:
            raise UserError(
                f"the chat template of {folder} cannot be filled in ({error})"
            ) from None

    return filled_in


def chat_ids(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Mapping[str, str]]
) -> list[int]:
    """Returns the ids of the text that the template makes of the messages. The model
    continues them with its answer."""
    if not (row := tokenizer.encode(template(messages), begin=False)):
        raise UserError(
            "the chat template makes no tokens of these messages; the model needs one"
            " to begin with"
        )
    return row
