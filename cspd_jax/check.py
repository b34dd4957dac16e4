"""The one exception that means: the caller's input is wrong; and checks that several
rooms share, of methods, options and pairs of models."""

from __future__ import annotations

import contextlib
import dataclasses
import reprlib
from collections.abc import Iterator
from typing import Any

import numpy as np

_MOST_PADDING = 1024  # ids; published models of one tokenizer differ by some hundreds
_SHOWN = 80


class UserError(ValueError):
    """One sentence: what is wrong, where, and what would be right. The command line
    exits with 2."""

    def __init__(self, sentence: object = ""):
        super().__init__(printable(str(sentence)))


def printable(text: str) -> str:
    """Returns the text with what would steer a terminal, line ends too, escaped as in
    Python's strings."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


@contextlib.contextmanager
def naming(where: object) -> Iterator[None]:
    """Puts the name of a file before the sentence of a UserError within the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def shown(value: object) -> str:
    """Returns a value from a file as a sentence quotes it: like repr, but short."""
    return _QUOTE.repr(value)[:_SHOWN]


_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = _SHOWN
_QUOTE.maxlevel = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether XLA reports that the device has too little memory."""
    return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def check_draft(target: object, draft: object) -> None:
    """Raises UserError unless `draft` generates the same kind of token sequence as
    `target`."""
    for field, meaning in (
        ("token_dim", "tokens of dimension {}"),
        ("seq_len", "{} tokens per image"),
        ("num_classes", "{} classes"),
        ("patch_size", "patches of size {}"),
        ("vae_stride", "a stride of {} pixels per latent"),
    ):
        have = getattr(draft, field, None)
        want = getattr(target, field, None)
        if have != want:
            raise UserError(
                f"the draft does not fit the target: it has {meaning.format(have)}, the"
                f" target {meaning.format(want)}"
            )


def check_head_ids(where: str, config: Any, ids: Any) -> None:
    """Raises UserError unless the ids of a head are different ones of its target's."""
    ids = np.asarray(ids)
    most = config.target_ids
    whole = np.issubdtype(ids.dtype, np.integer)
    if (
        not whole
        or ids.min() < 0
        or ids.max() >= most
        or len(np.unique(ids)) < len(ids)
    ):
        raise UserError(
            f"the ids of {where} are not different ones of the target's {most}"
        )


def check_vocabularies(target: Any, draft: Any) -> None:
    """Raises UserError unless two language models can have the same ids, apart from
    padding."""
    t = target.config
    d = draft.config
    unknown = any(c.known_ids == c.vocab_size for c in (t, d))
    if t.known_ids == d.known_ids or (
        unknown and abs(t.known_ids - d.known_ids) <= _MOST_PADDING
    ):
        return
    raise UserError(
        f"the vocabularies differ: {target.name} has {t.known_ids} ids and {draft.name}"
        f" {d.known_ids}, which is more than padding; a draft needs the target's tokens"
    )


def check_method(method: object, methods: tuple[type, ...]) -> None:
    """Raises a UserError that says what to write unless this is one of the methods."""
    if isinstance(method, methods):
        return
    names = ", ".join(f"{one.__name__}(...)" for one in methods)
    what = f"the class {method.__name__}" if isinstance(method, type) else shown(method)
    raise UserError(f"the method is {what}; write one of {names}")


def check_options(options: object, kind: type) -> None:
    """Raises a UserError unless these are options of this kind, with names that are
    among their choices."""
    if not isinstance(options, kind):
        what = "the class" if isinstance(options, type) else shown(options)
        raise UserError(f"the options are {what}; write {kind.__name__}(...)")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        choices = field.metadata.get("of_flag", {}).get("choices")
        value = getattr(options, field.name)
        if choices and isinstance(value, str) and value not in choices:
            names = ", ".join(choices)
            raise UserError(
                f"{field.name} is {shown(value)}; it must be one of {names}"
            )
