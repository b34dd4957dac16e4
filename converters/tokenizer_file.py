"""Refuses a tokenizer.json that asks for more than a tokenizer does, before a library obeys it.

The `tokenizers` package does what a file says: it repeats, replaces and pads, and where memory ends it ends
the process. What a text can grow to is a product over the steps of the file, and is bounded here. Not bounded
is a `Precompiled` normalizer, whose table is opaque; and patterns, which are searched with a limit of steps
from every start, can take time quadratic in the length of a text: whoever encodes has to limit the time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from cspd_jax._utils import limits
from cspd_jax._utils.json_files import read_object
from cspd_jax.errors import UserError

_STEPS = 64  # of normalizing, splitting, ...
_GROWTH = 64  # of a text
_PATTERN = 2**14  # characters
_WORD = 2**12  # characters of a word, all pieces of which are looked up


def check_tokenizer(file: str | os.PathLike) -> None:
    """UserError unless the file describes a tokenizer of ordinary demands."""
    values = read_object(file, limits.TOKENIZER_BYTES)
    _check_model(values.get("model"), file)
    encoding = [*_steps(values.get("normalizer")), *_steps(values.get("pre_tokenizer"))]
    after, decoding = list(_steps(values.get("post_processor"))), list(_steps(values.get("decoder")))
    for steps in (encoding, after, decoding):
        if len(steps) > _STEPS:
            raise UserError(f"{file} has {len(steps)} steps for a text; no tokenizer has more than {_STEPS}")
        growth = 1.0
        for step in steps:
            growth *= _growth(step, file)
        if growth > _GROWTH:
            raise UserError(f"{file} can make a text {growth:.3g} times as long; at most {_GROWTH} is done")


def _check_model(model: Any, file: str | os.PathLike) -> None:
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise UserError(f"{file} has no model with a vocabulary")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if isinstance(text := model.get(name), str) and len(text) > limits.NAME:
            raise UserError(f"{file}: {name} has {len(text)} characters")
    most = model.get("max_input_chars_per_word")
    if isinstance(most, int) and most > _WORD:
        raise UserError(f"{file}: max_input_chars_per_word is {most}; it must be at most {_WORD}")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part and, where it is a sequence, of what is in it."""
    if isinstance(part, list):
        for inner in part:
            yield from _steps(inner)
    elif isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part
        for inner in part.values():
            yield from _steps(inner)


def _growth(step: dict[str, Any], file: str | os.PathLike) -> float:
    """How many times as long a text can become."""
    pattern = step.get("pattern")
    searched = next(iter(pattern.values()), "") if isinstance(pattern, dict) else ""
    searched = searched if isinstance(searched, str) else ""
    if len(searched) > _PATTERN:
        raise UserError(f"{file} has a pattern of {len(searched)} characters")
    match step:
        case {"type": "Replace", "content": str(content)}:
            fixed = isinstance(pattern, dict) and "String" in pattern and searched
            return max(1, len(content) / len(searched)) if fixed else 1 + len(content)
        case {"type": "Prepend", "prepend": str(text)}:
            return 1 + len(text) / limits.NAME
        case {"type": "ByteLevel"}:
            return 2
        case {"type": "TemplateProcessing", "single": list(pieces)}:
            return _repeats(pieces, step.get("special_tokens"), file)
    return 1


def _repeats(pieces: list, known: Any, file: str | os.PathLike) -> int:
    """How often a template repeats the text; its special tokens are few, and known."""
    listed = [t.get("ids") for t in known.values() if isinstance(t, dict)] if isinstance(known, dict) else []
    counts = [len(ids) for ids in listed if isinstance(ids, list)]
    if len(pieces) > _STEPS or max(counts, default=0) > _STEPS:
        raise UserError(f"{file} adds more than {_STEPS} tokens to every text")
    names = [p["SpecialToken"].get("id") for p in pieces if isinstance(p, dict)
             and isinstance(p.get("SpecialToken"), dict)]  # fmt: skip
    if any(not isinstance(known, dict) or not isinstance(n, str) or n not in known for n in names):
        raise UserError(f"{file} adds a token to every text that its special_tokens do not hold")
    return sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces) or 1
