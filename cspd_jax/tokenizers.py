"""From text to the ids of a language model and back: by a tokenizer.json of its own, or
as bytes.

The models that come with the package read bytes: ids 0..255 are the bytes of UTF-8,
`END_OF_TEXT` begins and ends a text, and `MASK` stands for a byte to be found, in
masked-diffusion models only.
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
_FOLDERS = ("tokenizer", "")  # in our checkpoint folders, and in Hugging Face's
# Of messages with a role and a content.
Template: TypeAlias = Callable[[Sequence[Mapping[str, str]]], str]


class Tokenizer(Protocol):
    """Encodes and decodes whole texts. begin: whether what begins a text (and ends it,
    of some tokenizers) is added."""

    def encode(self, text: str, begin: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Reads text as the bytes of UTF-8."""

    def encode(self, text: str, begin: bool = True) -> list[int]:
        """Returns the bytes of a text, preceded by END_OF_TEXT unless `begin` is
        false."""
        return [END_OF_TEXT] * begin + list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Invalid UTF-8 becomes replacement characters, and ids that are not bytes are
        left out."""
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
        # What is encoded here is neither cut nor filled up.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, begin: bool = True) -> list[int]:
        """Returns the ids of a text; UserError for ids that the model does not have."""
        ids = self._tokenizer.encode(text, add_special_tokens=begin).ids
        if ids and max(ids) >= self._known_ids:
            raise UserError(
                f"{self._path} gives id {max(ids)}, but the model has {self._known_ids}"
                " ids: this tokenizer is not the model's"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids; what is below 0 stands for no token."""
        return self._tokenizer.decode(
            [int(i) for i in ids if i >= 0], skip_special_tokens=False
        )


def load_tokenizer(model: TextModel) -> Tokenizer | None:
    """Returns the model's own tokenizer; None if it has none, so that it only takes
    ids."""
    if (found := read_tokenizer(model.folder, model.config.known_ids)) is not None:
        return found
    reads_bytes = model.config.vocab_size in (CAUSAL_SIZE, MASKED_SIZE)
    return (
        ByteTokenizer()
        if reads_bytes and model.config.eos_ids == (END_OF_TEXT,)
        else None
    )


def read_tokenizer(folder: Path | None, known_ids: int) -> FileTokenizer | None:
    """Reads the tokenizer.json in a model's folder; None without."""
    path = _file(folder, "tokenizer.json")
    return FileTokenizer(path, known_ids) if path else None


def _file(folder: Path | None, name: str) -> Path | None:
    """Returns where a model's folder has a file of its tokenizer; None without."""
    paths = [folder / place / name for place in _FOLDERS] if folder else []
    return next((path for path in paths if path.is_file()), None)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns what each id adds to the text, "" while a character is incomplete;
    joined, they are it."""
    whole = ""
    found = []
    start = 0
    for i in range(len(ids)):
        text = tokenizer.decode(ids[start : i + 1])
        complete = not text.endswith("�") or i == len(ids) - 1
        found.append(text[len(whole) :] if complete else "")
        if complete:
            whole = text
            # Ids far back no longer matter.
            if not text[-1:].isspace() and i - start >= 64:
                start = i
                whole = tokenizer.decode(ids[i : i + 1])
    return found


def chat_template(folder: Path | None) -> Template | None:
    """Reads the chat template in a model's folder, a file of its own or among the
    tokenizer's settings."""
    alone = _file(folder, CHAT_TEMPLATE)
    settings_file = _file(folder, "tokenizer_config.json")
    settings = read_object(settings_file) if settings_file else {}
    source = (
        alone.read_text(encoding="utf-8") if alone else settings.get("chat_template")
    )
    if isinstance(source, list):  # several by name
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
    # As transformers has it; Jinja's own is for pages of HTML, whose characters it
    # escapes.
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
    """Returns messages as the ids that a model continues with its answer: those that
    the template writes."""
    if not (row := tokenizer.encode(template(messages), begin=False)):
        raise UserError(
            "the chat template makes no tokens of these messages; the model needs one"
            " to begin with"
        )
    return row
